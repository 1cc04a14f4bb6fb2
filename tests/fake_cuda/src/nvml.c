/* NVML: the driver's view of all processes. FAKE_CUDA_NVML shows the views that containers and Windows have:
 *   absent    no NVML at all             no-pids   no processes listed
 *   host-pids pids of another namespace  no-bytes  processes listed without their bytes
 * FAKE_CUDA_MIG=1 makes CUDA's device a slice of a GPU of twice the size, half of whose rest is in use by other slices. */
#include "fake.h"
#include <fcntl.h>
#include <unistd.h>

enum { NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7, NO_LIBRARY = 12, HOST_PID_OFFSET = 1000000 };
enum { GPU = 0x100, SLICE = 0x200 }; /* a handle is one of these plus the device's number */
#define DEVICE_OF(handle) ((int)((uintptr_t)(handle) & 0xff))
#define IS_SLICE(handle) ((uintptr_t)(handle) >= SLICE)
typedef uintptr_t Handle;

static int start(void) { return fake_settings()->nvml == NVML_ABSENT ? NO_LIBRARY : OK; }
int nvmlInit(void) { return start(); }
int nvmlInit_v2(void) { return start(); }
int nvmlInitWithFlags(unsigned flags) { return start(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) { return error ? "fake NVML error" : "Success"; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { snprintf(out, n, "580.00"); return OK; }
int nvmlSystemGetNVMLVersion(char *out, unsigned n) { snprintf(out, n, "13.580.00"); return OK; }
int nvmlSystemGetCudaDriverVersion(int *value) { *value = CUDA_VERSION_OF_HEADERS; return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *value) { return nvmlSystemGetCudaDriverVersion(value); }

/* ---- which device ---- */

static void uuid_text(Handle handle, char *out, size_t n) {
  unsigned char u[16];
  fake_uuid(DEVICE_OF(handle), u);
  int whole = fake_settings()->mig && !IS_SLICE(handle); /* CUDA knows the slice's uuid, not the whole GPU's */
  snprintf(out, n, "%s-%02x%02x0000-0000-0000-0000-0000000000%02x", IS_SLICE(handle) ? "MIG" : "GPU", u[0], u[1] + whole, u[15]);
}

int nvmlDeviceGetCount(unsigned *n) { *n = fake_settings()->devices; return OK; }
int nvmlDeviceGetCount_v2(unsigned *n) { return nvmlDeviceGetCount(n); }
int nvmlDeviceGetHandleByIndex_v2(unsigned device, Handle *out) {
  *out = GPU + device;
  return device < (unsigned)fake_settings()->devices ? OK : 2;
}
int nvmlDeviceGetHandleByUUID(const char *wanted, Handle *out) {
  char text[64];
  for (int device = 0; device < fake_settings()->devices; device++)
    for (*out = GPU + device; *out <= (Handle)SLICE + device; *out += SLICE - GPU) {
      uuid_text(*out, text, sizeof text);
      if (!strcmp(text, wanted) && (!IS_SLICE(*out) || fake_settings()->mig)) return OK;
    }
  return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Handle *out) {
  unsigned domain, number;
  *out = GPU;
  if (sscanf(bus, "%x:%x", &domain, &number) == 2 && number) *out += number - 1;
  return OK;
}
int nvmlDeviceGetIndex(Handle handle, unsigned *out) { *out = DEVICE_OF(handle); return OK; }
int nvmlDeviceGetMinorNumber(Handle handle, unsigned *out) { *out = DEVICE_OF(handle); return OK; }
int nvmlDeviceGetName(Handle handle, char *out, unsigned n) { snprintf(out, n, "Fake CUDA GPU"); return OK; }
int nvmlDeviceGetCudaComputeCapability(Handle handle, int *major, int *minor) {
  *major = fake_settings()->major;
  *minor = fake_settings()->minor;
  return OK;
}
int nvmlDeviceGetUUID(Handle handle, char *out, unsigned n) { uuid_text(handle, out, n); return OK; }
int nvmlDeviceGetPciInfo_v3(Handle handle, char *out) { /* short bus id, four ints, then the long bus id */
  memset(out, 0, 68);
  snprintf(out + 36, 32, FAKE_BUS, DEVICE_OF(handle) + 1);
  strcpy(out, out + 36 + 4);
  *(unsigned *)(out + 20) = DEVICE_OF(handle) + 1;
  return OK;
}
int nvmlDeviceGetMigMode(Handle handle, unsigned *now, unsigned *pending) { *now = *pending = fake_settings()->mig; return OK; }
int nvmlDeviceIsMigDeviceHandle(Handle handle, unsigned *out) { *out = IS_SLICE(handle); return OK; }

/* ---- memory and processes ---- */

static void memory(Handle handle, u64 *total, u64 *used) {
  *total = fake_shared()->total[DEVICE_OF(handle)];
  *used = fake_used(DEVICE_OF(handle));
  if (fake_settings()->mig && !IS_SLICE(handle)) {
    *used += *total / 2;
    *total *= 2;
  }
}
int nvmlDeviceGetMemoryInfo(Handle handle, u64 *out) { /* total, free, used */
  memory(handle, &out[0], &out[2]);
  out[1] = out[0] - out[2];
  return OK;
}
int nvmlDeviceGetMemoryInfo_v2(Handle handle, u64 *out) { /* version, total, reserved, free, used */
  memory(handle, &out[1], &out[4]);
  out[2] = 0;
  out[3] = out[1] - out[4];
  return OK;
}

struct process_v1 { unsigned pid; u64 bytes; };
struct process_v2 { unsigned pid; u64 bytes; int gpu_instance, compute_instance; };

static int processes(Handle handle, unsigned *n, char *out, size_t step) {
  const struct settings *s = fake_settings();
  unsigned found = 0, room = *n;
  fake_used(0); /* drops the dead */
  for (struct process *p = fake_shared()->process; p < fake_shared()->process + MAX_PROCESSES; p++) {
    if (!p->pid || !p->has_context[DEVICE_OF(handle)] || s->nvml == NVML_NO_PIDS) continue;
    if (out && found < room) {
      struct process_v2 it = {p->pid, p->bytes[DEVICE_OF(handle)], s->mig ? 1 : -1, s->mig ? 0 : -1};
      if (s->nvml == NVML_HOST_PIDS) it.pid += HOST_PID_OFFSET;
      if (s->nvml == NVML_NO_BYTES) it.bytes = ~0ull; /* NVML_VALUE_NOT_AVAILABLE */
      memcpy(out + found * step, &it, step);
    }
    found++;
  }
  *n = found;
  return found > room || (found && !out) ? TOO_SMALL : OK;
}
int nvmlDeviceGetComputeRunningProcesses(Handle h, unsigned *n, Ptr out) { return processes(h, n, out, sizeof(struct process_v1)); }
int nvmlDeviceGetComputeRunningProcesses_v2(Handle h, unsigned *n, Ptr out) { return processes(h, n, out, sizeof(struct process_v2)); }
int nvmlDeviceGetComputeRunningProcesses_v3(Handle h, unsigned *n, Ptr out) { return processes(h, n, out, sizeof(struct process_v2)); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle handle, unsigned *n, Ptr out) { *n = 0; return OK; }
int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned n) {
  char path[32];
  snprintf(path, sizeof path, "/proc/%u/comm", pid);
  int fd = open(path, O_RDONLY);
  ssize_t got = fd < 0 ? -1 : read(fd, out, n - 1);
  if (fd >= 0) close(fd);
  if (got <= 0) return NOT_FOUND;
  out[got - (out[got - 1] == '\n')] = 0;
  return OK;
}

/* ---- gauges ---- */
int nvmlDeviceGetUtilizationRates(Handle handle, unsigned *out) {
  out[0] = 7;
  out[1] = 3;
  return fake_settings()->mig ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetTemperature(Handle handle, int sensor, unsigned *out) { *out = 42; return OK; }
int nvmlDeviceGetPowerUsage(Handle handle, unsigned *out) { *out = 50000; return OK; }
int nvmlDeviceGetClockInfo(Handle handle, int clock, unsigned *out) { *out = 1500; return OK; }
int nvmlDeviceGetGpuFabricInfoV(Handle handle, char *out) { /* no fabric; expandable segments insist on an answer */
  memset(out + 4, 0, 28);
  return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetProcessUtilization(void) { return NOT_SUPPORTED; }
