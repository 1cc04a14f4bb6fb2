/* fakecuda: CUDA's libraries with no device behind them. What the files share.
 *
 * "Device" memory is anonymous host memory whose pages come into being when touched, kernels do nothing, and work is done
 * at once. Every call is here only as far as PyTorch needs its outcome; build.py adds a stub that returns 0 for each other
 * symbol that the installed PyTorch wants. Settings are environment variables: see the README. */
#ifndef FAKE_H
#define FAKE_H
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *Ptr;
typedef unsigned long long u64;

enum { MAX_DEVICES = 8, MAX_PROCESSES = 64 };
enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, BAD_DEVICE = 101, NOT_READY = 600, UNSUPPORTED = 801, CAPTURING = 900, INVALIDATED = 901 };

/* ---- state.c: settings, devices, and the processes that share them ---- */

enum nvml_mode { NVML_SEES_ALL, NVML_ABSENT, NVML_NO_PIDS, NVML_HOST_PIDS, NVML_NO_BYTES };

struct settings {
  int devices, major, minor; /* FAKE_CUDA_DEVICES, FAKE_CUDA_ARCH */
  int manual_events;         /* FAKE_CUDA_EVENTS=manual */
  int mig;                   /* FAKE_CUDA_MIG */
  enum nvml_mode nvml;       /* FAKE_CUDA_NVML */
  int trace, raw_reads;      /* FAKE_CUDA_TRACE, FAKE_CUDA_RAW_READS */
  uint64_t context_bytes;    /* FAKE_CUDA_CONTEXT_BYTES */
};
struct process {
  int pid;
  int has_context[MAX_DEVICES];
  uint64_t bytes[MAX_DEVICES];
};
struct shared { /* one for all processes that name the same FAKE_CUDA_STATE file */
  uint64_t total[MAX_DEVICES]; /* FAKE_CUDA_BYTES, of the first process that came */
  struct process process[MAX_PROCESSES];
};

extern int fake_sticky;            /* an error that every call returns from now on, as after a device-side assert */
extern __thread int fake_chosen;   /* the calling thread's device, as CUDA counts */
#define fake_current fake_physical(fake_chosen)
const struct settings *fake_settings(void);
struct shared *fake_shared(void);
void fake_context(int device);     /* what opens a context on a real device opens one here */
int fake_has_context(int device);
uint64_t fake_used(int device);    /* bytes of all living processes */
int fake_take(int device, size_t n);
void fake_give(int device, size_t n);
int fake_visible(void);            /* how many devices CUDA_VISIBLE_DEVICES leaves */
int fake_physical(int index);      /* CUDA counts the visible devices, NVML all of them: from CUDA's number to NVML's */
int fake_index(int device);        /* and back */
long fake_stub(const char *name);  /* called by every generated stub */

/* ---- memory.c: which addresses are whose ---- */

enum kind { NOTHING, HOST, DEVICE, RESERVED, MANAGED };
struct range {
  char *at;
  size_t n;
  enum kind kind;
  int device;
};
int fake_map(Ptr *out, size_t n, enum kind kind, int device);
size_t fake_unmap(Ptr at, int *device);
enum kind fake_range(const void *at, struct range *out);
void fake_mapped_on(const void *at, int device); /* a reserved range got memory of that device */
size_t fake_pages(size_t n);                     /* n rounded up to the driver's 2 MiB */

/* ---- device.c ---- */
extern const char *FAKE_BUS; /* format of a PCI bus id */
void fake_uuid(int device, unsigned char uuid[16]);
int fake_attribute(int attribute);

#define UNSUPPORTED_CALL(name) int name(void) { return UNSUPPORTED; }
#endif
