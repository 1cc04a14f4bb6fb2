/* Streams, events, graphs and launches: everything is done at once, but for events when a test wants them late. */
#include "fake.h"
#include <driver_types.h>
#include <time.h>

static Ptr handle(void) { fake_context(fake_current); return calloc(1, 64); }

/* ---- events ----
 * FAKE_CUDA_EVENTS=manual: an event is done only after fake_cuda_complete_events(), or once somebody waits for the device.
 * So a block that a second stream has used stays pending after its free, as it does while a real kernel runs. */
struct event {
  struct timespec at;
  u64 number;
};
static u64 recorded, completed;

void fake_cuda_complete_events(void) { completed = recorded; }

static int is_done(const struct event *event) { return !fake_settings()->manual_events || event->number <= completed; }
static int wait_for_all(void) {
  fake_context(fake_current);
  fake_cuda_complete_events();
  return fake_sticky;
}

int cudaEventCreateWithFlags(Ptr *event, unsigned flags) { *event = handle(); return fake_sticky; }
int cudaEventCreate(Ptr *event) { *event = handle(); return fake_sticky; }
int cudaEventDestroy(Ptr event) { free(event); return OK; }
int cudaEventRecord(struct event *event, Ptr stream) {
  clock_gettime(CLOCK_MONOTONIC, &event->at);
  event->number = __atomic_add_fetch(&recorded, 1, __ATOMIC_RELAXED);
  return fake_sticky;
}
static Ptr capturing; /* the stream that a graph is recorded from */
static u64 captures;
static int is_strict = 1;
static int is_invalidated; /* a call that a capture forbids has ended it, as in CUDA: only its end tells */

static int forbidden(void) {
  is_invalidated = 1;
  return CAPTURING;
}
int cudaEventRecordWithFlags(struct event *event, Ptr stream, unsigned flags) { return cudaEventRecord(event, stream); }
int cudaEventQuery(struct event *event) {
  if (capturing && is_strict) return forbidden(); /* of a thread that records, as CUDA's default mode has it */
  return fake_sticky ? fake_sticky : is_done(event) ? OK : NOT_READY;
}
int cudaEventSynchronize(struct event *event) {
  if (event->number > completed) completed = event->number;
  return fake_sticky;
}
int cudaEventElapsedTime(float *ms, struct event *from, struct event *to) {
  *ms = (to->at.tv_sec - from->at.tv_sec) * 1e3 + (to->at.tv_nsec - from->at.tv_nsec) / 1e6;
  return OK;
}

/* ---- streams ---- */
int cudaDeviceGetStreamPriorityRange(int *low, int *high) { *low = 0; *high = -5; return OK; }
int cudaStreamCreate(Ptr *stream) { *stream = handle(); return fake_sticky; }
int cudaStreamCreateWithFlags(Ptr *stream, unsigned flags) { return cudaStreamCreate(stream); }
int cudaStreamCreateWithPriority(Ptr *stream, unsigned flags, int priority) { return cudaStreamCreate(stream); }
int cudaStreamGetPriority(Ptr stream, int *priority) { *priority = 0; return OK; }
int cudaStreamSynchronize(Ptr stream) { return capturing && capturing == stream ? forbidden() : wait_for_all(); }
int cudaDeviceSynchronize(void) { return capturing && is_strict ? forbidden() : wait_for_all(); }
int cudaStreamQuery(Ptr stream) {
  return fake_sticky ? fake_sticky : fake_settings()->manual_events && completed < recorded ? NOT_READY : OK;
}
int cudaLaunchHostFunc(Ptr stream, void (*call)(Ptr), Ptr data) { call(data); return OK; }
int cudaStreamAddCallback(Ptr stream, void (*call)(Ptr, int, Ptr), Ptr data, unsigned flags) { call(stream, 0, data); return OK; }

/* ---- graphs: a capture records nothing, but PyTorch's allocator sees that it is on ---- */

int cudaStreamIsCapturing(Ptr stream, int *value) { *value = capturing && capturing == stream; return fake_sticky; }
int cudaStreamGetCaptureInfo(Ptr stream, int *status, u64 *id, Ptr *graph, Ptr *nodes, Ptr *edges, size_t *n) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = captures;
  if (graph) *graph = 0;
  if (nodes) *nodes = 0;
  if (edges) *edges = 0;
  if (n) *n = 0;
  return fake_sticky;
}
int cudaStreamGetCaptureInfo_v2(Ptr stream, int *status, u64 *id, Ptr *graph, Ptr *nodes, size_t *n) { /* CUDA 12's */
  return cudaStreamGetCaptureInfo(stream, status, id, graph, nodes, 0, n);
}
int cudaStreamBeginCapture(Ptr stream, int mode) {
  capturing = stream;
  captures++;
  is_invalidated = 0;
  return OK;
}
int cudaStreamEndCapture(Ptr stream, Ptr *graph) {
  capturing = 0;
  *graph = is_invalidated ? 0 : handle();
  return is_invalidated ? INVALIDATED : OK;
}
int cudaGraphInstantiateWithFlags(Ptr *executable, Ptr graph, u64 flags) { *executable = handle(); return OK; }
int cudaGraphGetNodes(Ptr graph, Ptr *nodes, size_t *n) { *n = 0; return OK; }
int cudaGraphNodeGetDependencies(Ptr node, Ptr *nodes, Ptr *edges, size_t *n) { *n = 0; return OK; }
int cudaThreadExchangeStreamCaptureMode(int *mode) { /* 2: relaxed, as PyTorch's allocator asks for its own questions */
  int before = is_strict ? 0 : 2;
  is_strict = *mode != 2;
  *mode = before;
  return OK;
}

/* ---- launches ---- */
static uint64_t launches;

uint64_t fake_cuda_launches(void) { return launches; } /* for tests, through ctypes */

static int launch(void) {
  fake_context(fake_current);
  launches++;
  return fake_sticky;
}
int cudaLaunchKernel(void) { return launch(); }
int __cudaLaunchKernel(void) { return launch(); }
int cudaLaunchKernelExC(void) { return launch(); }
int cudaLaunchCooperativeKernel(void) { return launch(); }
int __cudaGetKernel(Ptr *kernel, Ptr function) { *kernel = function; return OK; }
int __cudaPushCallConfiguration(void) { return OK; }
int __cudaPopCallConfiguration(unsigned *grid, unsigned *block, size_t *shared, Ptr *stream) {
  for (int i = 0; i < 3; i++) grid[i] = block[i] = 1;
  *shared = 0;
  *stream = 0;
  return OK;
}
Ptr *__cudaRegisterFatBinary(Ptr binary) { static Ptr handle; return &handle; }
char __cudaInitModule(Ptr *module) { return 1; }
int cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->ptxVersion = out->binaryVersion = fake_settings()->major * 10 + fake_settings()->minor;
  out->maxDynamicSharedSizeBytes = fake_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  return OK;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, Ptr function, int threads, size_t shared) { *n = 2; return OK; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, Ptr function, int threads, size_t shared, unsigned flags) {
  *n = 2;
  return OK;
}
int cudaGetSymbolAddress(Ptr *at, const void *symbol) {
  static Ptr page;
  int error = page ? OK : fake_map(&page, 1, DEVICE, fake_current);
  *at = page;
  return error;
}
int cudaLibraryLoadData(Ptr *library) { *library = handle(); return OK; }
int cudaLibraryGetKernel(Ptr *kernel) { *kernel = handle(); return OK; }
