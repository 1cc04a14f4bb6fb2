/* The driver API: virtual memory (expandable segments), contexts, and how PyTorch finds both. */
#include "fake.h"
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

enum { MAX_HANDLES = 1 << 16, FABRIC = 8 };
struct property { int type, handle_types, location_type, location; }; /* how CUmemAllocationProp begins */
static struct { u64 handle; size_t n; int device; } handles[MAX_HANDLES];
static int handle_count;
static u64 next_handle = 1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int cuMemAddressReserve(Ptr *out, size_t n, size_t alignment, u64 wanted, u64 flags) { return fake_map(out, n, RESERVED, 0); }
int cuMemAddressFree(Ptr at, size_t n) { fake_unmap(at, 0); return OK; }

int cuMemCreate(u64 *out, size_t n, const struct property *property, u64 flags) {
  if (property->handle_types == FABRIC) return UNSUPPORTED; /* PyTorch falls back to what it needs */
  int device = fake_physical(property->location), error = fake_sticky ? fake_sticky : fake_take(device, n);
  if (error) return error;
  pthread_mutex_lock(&lock);
  if (handle_count == MAX_HANDLES) abort();
  *out = handles[handle_count].handle = next_handle++;
  handles[handle_count].device = device;
  handles[handle_count++].n = n;
  pthread_mutex_unlock(&lock);
  return OK;
}
int cuMemRelease(u64 handle) {
  size_t n = 0;
  int device = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < handle_count; i++)
    if (handles[i].handle == handle) {
      n = handles[i].n;
      device = handles[i].device;
      handles[i] = handles[--handle_count];
      break;
    }
  pthread_mutex_unlock(&lock);
  if (n) fake_give(device, n);
  return OK;
}
int cuMemMap(Ptr at, size_t n, size_t offset, u64 handle, u64 flags) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < handle_count; i++)
    if (handles[i].handle == handle) fake_mapped_on(at, handles[i].device);
  pthread_mutex_unlock(&lock);
  return OK;
}
int cuMemSetAccess(Ptr at, size_t n, const void *access, size_t count) {
  return mprotect(at, n, PROT_READ | PROT_WRITE) ? INVALID : OK;
}
int cuMemUnmap(Ptr at, size_t n) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(at, n, PROT_NONE, flags, -1, 0) == MAP_FAILED ? INVALID : OK;
}
int cuMemGetAllocationGranularity(size_t *out, const void *property, int flags) { *out = fake_pages(1); return OK; }
int cuMemGetAddressRange(Ptr *start, size_t *n, Ptr at) {
  struct range range;
  if (!fake_range(at, &range)) return INVALID;
  if (start) *start = range.at;
  if (n) *n = range.n;
  return OK;
}
UNSUPPORTED_CALL(cuMemExportToShareableHandle) UNSUPPORTED_CALL(cuMemImportFromShareableHandle)

extern const char *cudaGetErrorString(int error), *cudaGetErrorName(int error);
int cuGetErrorString(int error, const char **out) { *out = cudaGetErrorString(error); return OK; }
int cuGetErrorName(int error, const char **out) { *out = cudaGetErrorName(error); return OK; }

int cuDeviceGet(int *device, int index) { *device = index; return OK; }
int cuDeviceGetCount(int *n) { *n = fake_visible(); return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int index) { *value = fake_attribute(attribute); return OK; }
int cuDriverGetVersion(int *value) { *value = CUDA_VERSION_OF_HEADERS; return OK; }
int cuCtxGetCurrent(Ptr *context) { *context = fake_has_context(fake_current) ? (Ptr)1 : 0; return OK; }
int cuDevicePrimaryCtxGetState(int index, unsigned *flags, int *active) {
  *flags = 0;
  *active = fake_has_context(fake_physical(index));
  return OK;
}
int cuDevicePrimaryCtxRetain(Ptr *context, int index) { *context = (Ptr)1; fake_context(fake_physical(index)); return OK; }
int cuPointerGetAttribute(Ptr out, int attribute, Ptr at) { memset(out, 0, attribute == 9 ? 4 : 8); return OK; } /* 9: ordinal */

static int nothing(void) { return fake_sticky; }

int cudaGetDriverEntryPointByVersion(const char *symbol, Ptr *out, unsigned version, u64 flags, int *result) {
  static Ptr self;
  Dl_info info;
  if (!self && dladdr((Ptr)&nothing, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *out = self ? dlsym(self, symbol) : 0;
  if (!*out) {
    fake_stub(symbol);
    *out = (Ptr)nothing;
  }
  if (result) *result = 0;
  return OK;
}
int cudaGetDriverEntryPoint(const char *symbol, Ptr *out, u64 flags, int *result) {
  return cudaGetDriverEntryPointByVersion(symbol, out, 0, flags, result);
}
