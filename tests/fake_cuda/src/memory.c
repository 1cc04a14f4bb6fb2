/* Device, pinned and reserved memory: a table of address ranges over anonymous host memory. */
#include "fake.h"
#include <driver_types.h>
#include <pthread.h>
#include <sys/mman.h>

enum { MAX_RANGES = 1 << 16, SCALARS = 4096 };
static const uintptr_t BASE[] = {[HOST] = 0x600000000000, [DEVICE] = 0x500000000000, [RESERVED] = 0x500000000000, [MANAGED] = 0x400000000000};

static struct range table[MAX_RANGES]; /* sorted by address */
static int ranges;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

size_t fake_pages(size_t n) {
  const size_t page = (size_t)2 << 20;
  return (n + page - 1) / page * page;
}

static struct range *find(const void *at) {
  int low = 0, high = ranges;
  while (low < high) {
    int middle = (low + high) / 2;
    if ((char *)at < table[middle].at) high = middle;
    else low = middle + 1;
  }
  struct range *r = table + low - 1;
  return low && (char *)at < r->at + r->n ? r : 0;
}

/* First fit from a fixed base, so that addresses are the same in every run. A real driver's order goes up and down. */
int fake_map(Ptr *out, size_t n, enum kind kind, int device) {
  size_t length = fake_pages(n ? n : 1);
  char *at = (char *)BASE[kind];
  int i = 0, error = OUT_OF_MEMORY;
  int access = kind == RESERVED ? PROT_NONE : PROT_READ | PROT_WRITE;
  pthread_mutex_lock(&lock);
  while (i < ranges && (table[i].at + table[i].n <= at || table[i].at < at + length)) {
    if (table[i].at + table[i].n > at) at = table[i].at + table[i].n;
    i++;
  }
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  if (ranges < MAX_RANGES && mmap(at, length, access, flags, -1, 0) == at) {
    memmove(table + i + 1, table + i, (ranges++ - i) * sizeof *table);
    table[i] = (struct range){at, length, kind, device};
    *out = at;
    error = OK;
  }
  pthread_mutex_unlock(&lock);
  return error;
}

size_t fake_unmap(Ptr at, int *device) {
  size_t n = 0;
  pthread_mutex_lock(&lock);
  struct range *r = find(at);
  if (r) {
    n = r->n;
    if (device) *device = r->device;
    munmap(r->at, r->n);
    memmove(r, r + 1, (table + --ranges - r) * sizeof *r);
  }
  pthread_mutex_unlock(&lock);
  return n;
}

enum kind fake_range(const void *at, struct range *out) {
  pthread_mutex_lock(&lock);
  struct range *r = find(at);
  *out = r ? *r : (struct range){0};
  pthread_mutex_unlock(&lock);
  return out->kind;
}

void fake_mapped_on(const void *at, int device) {
  pthread_mutex_lock(&lock);
  struct range *r = find(at);
  if (r) r->device = device;
  pthread_mutex_unlock(&lock);
}

/* ---- allocation ---- */

int cudaMalloc(Ptr *out, size_t n) {
  if (fake_sticky) return fake_sticky;
  int error = fake_take(fake_current, fake_pages(n));
  if (!error && (error = fake_map(out, n, DEVICE, fake_current))) fake_give(fake_current, fake_pages(n));
  return error;
}

int cudaFree(Ptr at) {
  int device;
  if (fake_sticky) return fake_sticky;
  fake_context(fake_current); /* cudaFree(0) is a usual way to open one */
  size_t n = at ? fake_unmap(at, &device) : 0;
  if (n) fake_give(device, n);
  return OK;
}

int cudaHostAlloc(Ptr *out, size_t n, unsigned flags) {
  if (fake_sticky) return fake_sticky;
  fake_context(fake_current);
  return fake_map(out, n, HOST, fake_current);
}
int cudaMallocHost(Ptr *out, size_t n) { return cudaHostAlloc(out, n, 0); }
int cudaFreeHost(Ptr at) { fake_unmap(at, 0); return OK; }

int cudaMemGetInfo(size_t *free, size_t *total) {
  if (fake_sticky) return fake_sticky;
  fake_context(fake_current);
  uint64_t used = fake_used(fake_current);
  *total = fake_shared()->total[fake_current];
  *free = used < *total ? *total - used : 0;
  return OK;
}

int cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *at) {
  struct range r;
  enum kind kind = fake_range(at, &r);
  memset(out, 0, sizeof *out);
  out->type = kind == NOTHING ? cudaMemoryTypeUnregistered : kind == HOST ? cudaMemoryTypeHost : kind == MANAGED ? cudaMemoryTypeManaged : cudaMemoryTypeDevice;
  out->device = kind == NOTHING ? -2 : fake_index(r.device);
  out->devicePointer = (Ptr)at;
  out->hostPointer = kind == HOST ? (Ptr)at : 0;
  return OK;
}

/* Managed memory, which stays with the host here: it takes nothing of the device. */
int cuMemAllocManaged(Ptr *out, size_t n, unsigned flags) {
  return fake_sticky ? fake_sticky : fake_map(out, n, MANAGED, fake_current);
}
int cuMemAdvise(Ptr at, size_t n, int advice, int device) {
  struct range r;
  return fake_range(at, &r) == MANAGED ? OK : INVALID;
}
int cuMemAlloc_v2(Ptr *out, size_t n) { return cudaMalloc(out, n); }
int cuMemFree_v2(Ptr at) {
  struct range r;
  if (fake_range(at, &r) != MANAGED) return cudaFree(at);
  fake_unmap(at, 0);
  return OK;
}

UNSUPPORTED_CALL(cudaMallocAsync) UNSUPPORTED_CALL(cudaFreeAsync) UNSUPPORTED_CALL(cudaDeviceGetDefaultMemPool)
UNSUPPORTED_CALL(cudaMemPoolGetAttribute) UNSUPPORTED_CALL(cudaMemPoolSetAttribute) UNSUPPORTED_CALL(cudaMemPoolTrimTo)
UNSUPPORTED_CALL(cudaIpcGetMemHandle) UNSUPPORTED_CALL(cudaIpcOpenMemHandle) UNSUPPORTED_CALL(cudaIpcGetEventHandle)
UNSUPPORTED_CALL(cudaIpcOpenEventHandle) UNSUPPORTED_CALL(cudaDeviceEnablePeerAccess)

/* ---- copies ---- */

/* Kernels write nothing, so a count read back after nonzero() or unique() would be whatever a recycled block last held, and
 * PyTorch would size a tensor by it (an out-of-memory error out of nothing). So reading <= 8 bytes from a device gives zero,
 * unless the host wrote exactly that scalar there. FAKE_CUDA_RAW_READS=1 turns this off. */
static struct { const void *at; size_t n; } scalars[SCALARS];
#define SCALAR(p) scalars[((uintptr_t)(p) >> 3) % SCALARS]

int cudaMemcpyAsync(Ptr to, const void *from, size_t n, int kind, Ptr stream) {
  if (fake_sticky || !n) return fake_sticky;
  fake_context(fake_current);
  int reads = kind == cudaMemcpyDeviceToHost;
  if (reads && n <= 8 && !fake_settings()->raw_reads && !(SCALAR(from).at == from && SCALAR(from).n == n)) {
    memset(to, 0, n);
    return OK;
  }
  memmove(to, from, n);
  if (!reads) {
    SCALAR(to).at = n <= 8 ? to : 0;
    SCALAR(to).n = n;
  }
  return OK;
}
int cudaMemcpy(Ptr to, const void *from, size_t n, int kind) { return cudaMemcpyAsync(to, from, n, kind, 0); }
int cudaMemcpyPeerAsync(Ptr to, int to_device, const void *from, int from_device, size_t n, Ptr stream) {
  return cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, stream);
}
int cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t pitch, size_t w, size_t h, int kind, Ptr stream) {
  for (size_t row = 0; row < h; row++) memmove(to + row * to_pitch, from + row * pitch, w);
  return fake_sticky;
}

int cudaMemsetAsync(Ptr at, int value, size_t n, Ptr stream) {
  const uintptr_t page = 4096;
  if (fake_sticky) return fake_sticky;
  char *first = (char *)(((uintptr_t)at + page - 1) & ~(page - 1)), *last = (char *)(((uintptr_t)at + n) & ~(page - 1));
  if (value || last < first + (1 << 16) || madvise(first, last - first, MADV_DONTNEED)) memset(at, value, n);
  else { /* zeroing much: its pages went back to the system, and come anew as zeros */
    memset(at, 0, first - (char *)at);
    memset(last, 0, (char *)at + n - last);
  }
  return OK;
}
int cudaMemset(Ptr at, int value, size_t n) { return cudaMemsetAsync(at, value, n, 0); }
