/* cuBLAS, cuSOLVER, cuDNN and CUPTI: only the calls whose outputs PyTorch goes by. */
#include "fake.h"

int cublasGetMathMode(Ptr handle, int *mode) { *mode = 0; return OK; }
int cublasGetPointerMode_v2(Ptr handle, int *mode) { *mode = 0; return OK; }
size_t cublasLtGetVersion(void) { return 130101; }
int cublasLtMatmulAlgoGetHeuristic(Ptr h, Ptr d, Ptr a, Ptr b, Ptr c, Ptr e, Ptr preference, int wanted, Ptr result, int *n) {
  memset(result, 0, 96); /* one algorithm, no workspace */
  *n = wanted > 0;
  return OK;
}

int cusolverDnSgetrf_bufferSize(Ptr handle, int m, int n, Ptr a, int lda, int *size) { *size = 0; return OK; }
int cusolverDnDgetrf_bufferSize(Ptr handle, int m, int n, Ptr a, int lda, int *size) { *size = 0; return OK; }

size_t cudnnGetVersion(void) { return FAKE_CUDNN_VERSION; } /* PyTorch compares it with the one it was built for */
size_t cudnnGetCudartVersion(void) { return CUDA_VERSION_OF_HEADERS; }
int cudnnGetProperty(int which, int *value) {
  const int version[] = {FAKE_CUDNN_VERSION / 10000, FAKE_CUDNN_VERSION / 100 % 100, FAKE_CUDNN_VERSION % 100};
  *value = which >= 0 && which < 3 ? version[which] : 0;
  return OK;
}
int cudnnGetStream(Ptr handle, Ptr *stream) { *stream = 0; return OK; }
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(Ptr h, int m, int o, Ptr a, Ptr b, Ptr c, Ptr d, Ptr e, size_t *n) {
  *n = 0;
  return OK;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    Ptr h, int m, int o, Ptr a, Ptr b, Ptr c, Ptr d, Ptr e, Ptr f, Ptr g, size_t *n) {
  *n = 0;
  return OK;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(Ptr h, int m, int o, Ptr a, Ptr b, size_t *n) { *n = 0; return OK; }
int cudnnDropoutGetStatesSize(Ptr handle, size_t *n) { *n = 1 << 20; return OK; }
int cudnnGetRNNWeightSpaceSize(void) { return 3000; } /* not supported: PyTorch's own RNN runs with cudnn.enabled = False */
int cudnnBackendCreateDescriptor(int type, Ptr *out) { *out = calloc(1, 64); return OK; }
int cudnnBackendGetAttribute(Ptr descriptor, int name, int type, int64_t wanted, int64_t *got, Ptr out) {
  const int INT64 = 3, FIRST_NOTE = 1303, LAST_NOTE = 1305;
  if (got) *got = name < FIRST_NOTE || name > LAST_NOTE; /* one engine, one way to run it, no notes about it */
  if (type == INT64 && out && wanted) memset(out, 0, 8); /* no workspace */
  return OK;
}

int cuptiGetResultString(int error, const char **out) { *out = "fake"; return OK; }
int cuptiGetVersion(unsigned *version) { *version = CUDA_VERSION_OF_HEADERS * 10; return OK; }
int cuptiGetCallbackName(int domain, int callback, const char **out) { *out = "fake"; return OK; }
int cuptiActivityGetNextRecord(void) { return 21; } /* no more records */
int cuptiActivityGetNumDroppedRecords(Ptr context, uint32_t stream, size_t *n) { *n = 0; return OK; }
