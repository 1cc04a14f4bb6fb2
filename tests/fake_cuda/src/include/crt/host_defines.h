/* CUDA's own file of this name is in a package that PyTorch does not install. Plain C needs these of its words, all empty. */
#define __host__
#define __device__
#define __device_builtin__
#define __cudart_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define CUDART_DEVICE
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
