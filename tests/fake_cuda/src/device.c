/* What the devices are, and which one is in use. */
#include "fake.h"
#include <driver_types.h>

const char *FAKE_BUS = "00000000:%02x:00.0";

void fake_uuid(int device, unsigned char uuid[16]) {
  memset(uuid, 0, 16);
  uuid[0] = 0xfa;
  uuid[1] = 0xce;
  uuid[15] = device;
}

/* Whoever reads the name must not take it for a real device; every fixture asserts that it is this one. */
void fake_name(char *out, size_t n) { snprintf(out, n, "Fake CUDA GPU%s", fake_settings()->mig ? " MIG 1g" : ""); }

int fake_attribute(int attribute) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX:
    case cudaDevAttrMaxPitch: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess: return 1;
    case cudaDevAttrWarpSize:
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrClockRate: return 1500000;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrMultiProcessorCount: return 108;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrL2CacheSize: return 40 << 20;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 167936;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 166912;
    case cudaDevAttrComputeCapabilityMajor: return fake_settings()->major;
    case cudaDevAttrComputeCapabilityMinor: return fake_settings()->minor;
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch:
    case 102: return 1; /* virtual memory management: expandable segments ask the driver for it */
  }
  return 0;
}

/* The field names are the header's, so the layout is right for whichever CUDA the installed PyTorch was built for. */
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int index) {
  int device = fake_physical(index);
  memset(p, 0, sizeof *p);
  fake_name(p->name, sizeof p->name);
  fake_uuid(device, (unsigned char *)&p->uuid);
  p->totalGlobalMem = fake_shared()->total[device];
  p->sharedMemPerBlock = fake_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p->regsPerBlock = fake_attribute(cudaDevAttrMaxRegistersPerBlock);
  p->warpSize = fake_attribute(cudaDevAttrWarpSize);
  p->memPitch = fake_attribute(cudaDevAttrMaxPitch);
  p->maxThreadsPerBlock = fake_attribute(cudaDevAttrMaxThreadsPerBlock);
  for (int i = 0; i < 3; i++) {
    p->maxThreadsDim[i] = fake_attribute(cudaDevAttrMaxBlockDimX + i);
    p->maxGridSize[i] = fake_attribute(cudaDevAttrMaxGridDimX + i);
  }
  p->totalConstMem = fake_attribute(cudaDevAttrTotalConstantMemory);
  p->major = fake_settings()->major;
  p->minor = fake_settings()->minor;
  p->textureAlignment = fake_attribute(cudaDevAttrTextureAlignment);
  p->multiProcessorCount = fake_attribute(cudaDevAttrMultiProcessorCount);
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->cooperativeLaunch = 1;
  p->pciBusID = device + 1;
  p->asyncEngineCount = 3;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = fake_attribute(cudaDevAttrL2CacheSize);
  p->maxThreadsPerMultiProcessor = fake_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->sharedMemPerMultiprocessor = fake_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->regsPerMultiprocessor = fake_attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  p->sharedMemPerBlockOptin = fake_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->maxBlocksPerMultiProcessor = fake_attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  p->reservedSharedMemPerBlock = 1024;
  p->hostRegisterSupported = 1;
  return OK;
}
/* CUDA 12's name of it, which its headers put in the place of the other. */
int cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int index) { return cudaGetDeviceProperties(p, index); }

int cudaGetDeviceCount(int *n) { *n = fake_visible(); return *n ? OK : NO_DEVICE; }
int cudaGetDevice(int *index) { *index = fake_chosen; return fake_sticky; }
int cudaSetDevice(int index) {
  if (index < 0 || index >= fake_visible()) return BAD_DEVICE;
  fake_chosen = index;
  fake_context(fake_current); /* since CUDA 12 */
  return fake_sticky;
}
int cudaDeviceGetAttribute(int *value, int attribute, int index) { *value = fake_attribute(attribute); return OK; }
int cudaDeviceGetPCIBusId(char *out, int n, int index) {
  char bus[32];
  snprintf(bus, sizeof bus, FAKE_BUS, fake_physical(index) + 1);
  snprintf(out, n, "%s", bus + 4);
  return OK;
}
int cudaDeviceCanAccessPeer(int *value, int a, int b) { *value = 0; return OK; }
int cudaDriverGetVersion(int *value) { *value = CUDA_VERSION_OF_HEADERS; return OK; }
int cudaRuntimeGetVersion(int *value) { *value = CUDA_VERSION_OF_HEADERS; return OK; }
int cudaGetLastError(void) { return fake_sticky; }
int cudaPeekAtLastError(void) { return fake_sticky; }

const char *cudaGetErrorString(int error) {
  switch (error) {
    case OK: return "no error";
    case OUT_OF_MEMORY: return "out of memory";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case BAD_DEVICE: return "invalid device ordinal";
    case NOT_READY: return "device not ready";
    case cudaErrorAssert: return "device-side assert triggered";
    case UNSUPPORTED: return "operation not supported";
  }
  return "fake CUDA error";
}
const char *cudaGetErrorName(int error) {
  switch (error) {
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case cudaErrorAssert: return "cudaErrorAssert";
  }
  return "cudaErrorFake";
}
