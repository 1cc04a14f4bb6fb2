/* Settings, devices, and the processes that share them. */
#include "fake.h"
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

int fake_sticky;
__thread int fake_chosen;

static struct settings settings;
static struct shared *shared;
static struct process *mine;
static int set_up_in; /* the process that read the environment: a fork reads it again, so that its parent can be prepared */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t number(const char *name, uint64_t otherwise) {
  char *text = getenv(name);
  return text && *text ? strtoull(text, 0, 0) : otherwise;
}

static enum nvml_mode nvml_mode(void) {
  static const char *const names[] = {"", "absent", "no-pids", "host-pids", "no-bytes"};
  char *text = getenv("FAKE_CUDA_NVML");
  for (int i = 1; text && i < 5; i++)
    if (!strcmp(text, names[i])) return i;
  return NVML_SEES_ALL;
}

static void read_settings(void) {
  char *arch = getenv("FAKE_CUDA_ARCH"), *events = getenv("FAKE_CUDA_EVENTS");
  settings = (struct settings){.devices = number("FAKE_CUDA_DEVICES", 1), .major = 8};
  if (settings.devices > MAX_DEVICES) settings.devices = MAX_DEVICES;
  if (arch) sscanf(arch, "%d.%d", &settings.major, &settings.minor);
  settings.manual_events = events && !strcmp(events, "manual");
  settings.mig = number("FAKE_CUDA_MIG", 0);
  settings.nvml = nvml_mode();
  settings.trace = number("FAKE_CUDA_TRACE", 0);
  settings.raw_reads = number("FAKE_CUDA_RAW_READS", 0);
  settings.context_bytes = number("FAKE_CUDA_CONTEXT_BYTES", 0);
}

/* FAKE_CUDA_BYTES is one number for every device or a list, whose last number is for all further devices. */
static void read_capacities(uint64_t total[]) {
  char *text = getenv("FAKE_CUDA_BYTES");
  uint64_t bytes = 8ull << 30;
  for (int device = 0; device < MAX_DEVICES; device++) {
    if (text && *text) {
      bytes = strtoull(text, &text, 0);
      text += *text == ',';
    }
    total[device] = bytes;
  }
}

static void set_up(void) {
  char *file = getenv("FAKE_CUDA_STATE");
  read_settings();
  int fd = file && *file ? open(file, O_RDWR | O_CREAT, 0600) : -1;
  if (fd >= 0 && ftruncate(fd, sizeof *shared)) abort();
  int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (shared == MAP_FAILED) abort();
  if (fd >= 0) close(fd);
  if (!shared->total[0]) read_capacities(shared->total);
  mine = 0;
}

static void ready(void) {
  if (__atomic_load_n(&set_up_in, __ATOMIC_ACQUIRE) == getpid()) return;
  pthread_mutex_lock(&lock);
  if (set_up_in != getpid()) {
    set_up();
    __atomic_store_n(&set_up_in, getpid(), __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&lock);
}

const struct settings *fake_settings(void) { ready(); return &settings; }
struct shared *fake_shared(void) { ready(); return shared; }

/* ---- processes ---- */

static int is_alive(int pid) { /* it exists, and is no zombie */
  char path[32], text[256];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int fd = open(path, O_RDONLY);
  if (fd < 0) return 0;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  char *end = strrchr(text, ')');
  return end && end[1] && end[2] != 'Z' && end[2] != 'X';
}

static void forget(struct process *process) {
  memset(process->bytes, 0, sizeof process->bytes);
  memset(process->has_context, 0, sizeof process->has_context);
  __atomic_store_n(&process->pid, 0, __ATOMIC_RELEASE);
}

uint64_t fake_used(int device) {
  uint64_t used = 0;
  ready();
  for (struct process *p = shared->process; p < shared->process + MAX_PROCESSES; p++) {
    if (!p->pid) continue;
    if (p->pid == getpid() || is_alive(p->pid)) used += p->bytes[device];
    else forget(p);
  }
  return used;
}

static void claim_slot(void) {
  fake_used(0); /* drops the dead */
  for (struct process *p = shared->process; p < shared->process + MAX_PROCESSES; p++)
    if (__sync_bool_compare_and_swap(&p->pid, 0, getpid())) {
      mine = p;
      return;
    }
  fputs("fakecuda: more processes than the table holds\n", stderr);
  abort();
}

void fake_context(int device) {
  ready();
  if (mine && mine->has_context[device]) return;
  pthread_mutex_lock(&lock);
  if (!mine) claim_slot();
  if (!mine->has_context[device]) {
    mine->has_context[device] = 1;
    mine->bytes[device] += settings.context_bytes;
  }
  pthread_mutex_unlock(&lock);
}

int fake_has_context(int device) { ready(); return mine && mine->has_context[device]; }

int fake_take(int device, size_t n) {
  fake_context(device);
  __atomic_fetch_add(&mine->bytes[device], n, __ATOMIC_RELAXED);
  if (fake_used(device) <= shared->total[device]) return OK;
  fake_give(device, n);
  return OUT_OF_MEMORY;
}

void fake_give(int device, size_t n) {
  fake_context(device);
  __atomic_fetch_sub(&mine->bytes[device], n, __ATOMIC_RELAXED);
}

__attribute__((destructor)) static void leave(void) {
  if (set_up_in == getpid() && mine) forget(mine);
}

/* CUDA_VISIBLE_DEVICES lists NVML's numbers; a number that does not exist ends the list, as it does for CUDA. */
static int visible(int index, int *device) {
  char *list = getenv("CUDA_VISIBLE_DEVICES");
  int all = fake_settings()->devices;
  if (!list) return (*device = index) < all;
  for (int i = 0; *list; i++) {
    char *end;
    long found = strtol(list, &end, 10);
    if (end == list || found < 0 || found >= all) return 0;
    if (i == index) {
      *device = found;
      return 1;
    }
    list = *end == ',' ? end + 1 : end + strlen(end);
  }
  return 0;
}

int fake_visible(void) {
  int n = 0, device;
  while (visible(n, &device)) n++;
  return n;
}

int fake_physical(int index) {
  int device;
  return visible(index, &device) ? device : 0;
}

int fake_index(int device) {
  int found;
  for (int index = 0; visible(index, &found); index++)
    if (found == device) return index;
  return -1;
}

/* ---- for tests, through ctypes ---- */

void fake_cuda_set_error(int error) { fake_sticky = error; } /* 710: a device-side assert */

long fake_stub(const char *name) {
  if (fake_settings()->trace) fprintf(stderr, "fakecuda stub %s\n", name);
  return OK;
}
