// Finding the driver and its devices. State is written under `lock` and published with a release store; readers take no
// lock.
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "runtime/driver.h"

enum { MAX_GPUS = 64, MIN_VERSION = 12000 };
enum { CLOSED, OPENING, OPEN, FORKED };

mg_driver mg_cu;
static atomic_int state = CLOSED;
static int version;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { atomic_bool open; mg_gpu gpu; } gpus[MAX_GPUS];

mg_status mg_driver_fail(int error, const char *what, ...) {
  char text[512];
  va_list args;
  va_start(args, what);
  vsnprintf(text, sizeof text, what, args);
  va_end(args);
  const char *name = NULL, *description = NULL;
  if (!mg_cu.cuGetErrorName || mg_cu.cuGetErrorName(error, &name) || !name) name = "unknown error";
  if (!mg_cu.cuGetErrorString || mg_cu.cuGetErrorString(error, &description) || !description)
    description = "no description";
  const char *advice = error >= CU_FIRST_STICKY ?
                           "; this or an earlier kernel failed asynchronously, MARGAY_SYNC=1 finds the first" :
                       error == CU_NOT_INITIALIZED ?
                           "; in a forked process start workers with the 'spawn' method instead" :
                           "";
  return mg_fail(MG_RUNTIME, "%s: CUDA error %d, %s (%s)%s", text, error, name, description, advice);
}

static mg_status fail_connect(int error, const char *call) {
  if (error == CU_STUB_LIBRARY)
    return mg_fail(
        MG_RUNTIME,
        "libcuda.so.1 is the toolkit's link-time stub, not a driver; take its folder off the library search path");
  return mg_driver_fail(error, "the NVIDIA driver cannot be used, %s", call);
}

static mg_status connect_driver(void) {
  typedef int get_proc(const char *name, void **function, int version, uint64_t flags, int *found);
  const char *file = getenv("MARGAY_DRIVER");   // another library in its place, for tests
  void *library = dlopen(file && *file ? file : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return mg_fail(MG_RUNTIME, "no NVIDIA driver: %s", dlerror());
  void *symbol = dlsym(library, "cuGetProcAddress_v2");
  if (!symbol)
    return mg_fail(MG_RUNTIME, "the NVIDIA driver is older than CUDA 12.0 (R525): it has no cuGetProcAddress_v2");
  get_proc *get;
  memcpy(&get, &symbol, sizeof get);            // ISO C has no cast from an object pointer to a function pointer

  int error;
#define CALL(name, since, args) \
  symbol = NULL; \
  error = get(#name, &symbol, since, CU_PROC_LEGACY_STREAM, NULL); \
  if (error == CU_STUB_LIBRARY) return fail_connect(error, #name); \
  if (error || !symbol) \
    return mg_fail(MG_RUNTIME, "the NVIDIA driver lacks %s of CUDA %d.%d", #name, since / 1000, since % 1000 / 10); \
  memcpy(&mg_cu.name, &symbol, sizeof symbol);
  MG_DRIVER_CALLS(CALL)
#undef CALL
  if ((error = mg_cu.cuInit(0))) return fail_connect(error, "cuInit");
  if ((error = mg_cu.cuDriverGetVersion(&version))) return fail_connect(error, "cuDriverGetVersion");
  if (version < MIN_VERSION)
    return mg_fail(MG_RUNTIME, "the NVIDIA driver supports CUDA %d.%d, at least 12.0 (R525) is needed", version / 1000,
                   version % 1000 / 10);
  return MG_OK;
}

// In the child of a fork: the driver's state there is invalid, and another thread may have held the lock.
static void after_fork(void) {
  if (atomic_load(&state) != CLOSED) atomic_store(&state, FORKED);
  lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

static void watch_fork(void) { pthread_atfork(NULL, NULL, after_fork); }

static mg_status open_slow(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, watch_fork);
  if (atomic_load(&state) == FORKED)
    return mg_fail(
        MG_RUNTIME,
        "CUDA cannot be used in a process that was forked after CUDA's first use; start workers with the 'spawn' "
        "method (multiprocessing.set_start_method('spawn')) or fork before the first GPU call");
  mg_status status = MG_OK;
  pthread_mutex_lock(&lock);
  if (atomic_load(&state) != OPEN) {
    atomic_store(&state, OPENING);
    status = connect_driver();
    atomic_store(&state, status ? CLOSED : OPEN);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

mg_status mg_driver_open(void) {
  return atomic_load_explicit(&state, memory_order_acquire) == OPEN ? MG_OK : open_slow();
}
int mg_driver_version(void) { return atomic_load_explicit(&state, memory_order_acquire) == OPEN ? version : 0; }

mg_status mg_gpu_count(int *count) {
  mg_status status = mg_driver_open();
  if (status) return status;
  int error = mg_cu.cuDeviceGetCount(count);
  return error ? mg_driver_fail(error, "cannot count GPUs") : MG_OK;
}

static mg_status read_gpu(mg_gpu *g, int index) {
  int error, l2, shared, count;
  mg_status status = mg_gpu_count(&count);
  if (status) return status;
  if (index >= count) return mg_fail(MG_VALUE, "there is no device cuda:%d; this process sees %d", index, count);
  if ((error = mg_cu.cuDeviceGet(&g->device, index)) ||
      (error = mg_cu.cuDeviceGetName(g->name, sizeof g->name, g->device)) ||
      (error = mg_cu.cuDeviceGetAttribute(&g->major, CU_DEVICE_CC_MAJOR, g->device)) ||
      (error = mg_cu.cuDeviceGetAttribute(&g->minor, CU_DEVICE_CC_MINOR, g->device)) ||
      (error = mg_cu.cuDeviceGetAttribute(&g->sms, CU_DEVICE_SMS, g->device)) ||
      (error = mg_cu.cuDeviceGetAttribute(&l2, CU_DEVICE_L2_BYTES, g->device)) ||
      (error = mg_cu.cuDeviceGetAttribute(&shared, CU_DEVICE_SHARED_OPTIN, g->device)))
    return mg_driver_fail(error, "cannot open device cuda:%d", index);
  g->l2_bytes = l2;
  g->shared_bytes = (size_t)shared;
  return MG_OK;
}

mg_status mg_gpu_open(mg_gpu **gpu, int index) {
  mg_status status = mg_driver_open();
  if (status) return status;
  if (index < 0 || index >= MAX_GPUS)
    return mg_fail(MG_VALUE, "device index %d is out of range, expected 0 to %d", index, MAX_GPUS - 1);
  if (!atomic_load_explicit(&gpus[index].open, memory_order_acquire)) {
    pthread_mutex_lock(&lock);
    if (!atomic_load(&gpus[index].open) && !(status = read_gpu(&gpus[index].gpu, index)))
      atomic_store_explicit(&gpus[index].open, true, memory_order_release);
    pthread_mutex_unlock(&lock);
  }
  *gpu = &gpus[index].gpu;
  return status;
}

static mg_status retain_context(mg_gpu *gpu) {
  cu_context context = NULL;
  int error = CU_OK;
  pthread_mutex_lock(&lock);
  if (!atomic_load(&gpu->context) && !(error = mg_cu.cuDevicePrimaryCtxRetain(&context, gpu->device)))
    atomic_store_explicit(&gpu->context, context, memory_order_release);
  pthread_mutex_unlock(&lock);
  return error ? mg_driver_fail(error, "cannot open the context of %s", gpu->name) : MG_OK;
}

mg_status mg_gpu_enter(mg_gpu *gpu, bool *pushed) {
  *pushed = false;
  mg_status status = atomic_load_explicit(&gpu->context, memory_order_acquire) ? MG_OK : retain_context(gpu);
  if (status) return status;
  cu_context wanted = atomic_load_explicit(&gpu->context, memory_order_acquire), current = NULL;
  int error = mg_cu.cuCtxGetCurrent(&current);
  if (!error && current != wanted && !(error = mg_cu.cuCtxPushCurrent(wanted))) *pushed = true;
  return error ? mg_driver_fail(error, "cannot switch to the context of %s", gpu->name) : MG_OK;
}

mg_status mg_gpu_leave(bool pushed, mg_status status) {
  cu_context old;
  int error = pushed ? mg_cu.cuCtxPopCurrent(&old) : CU_OK;
  return error && !status ? mg_driver_fail(error, "cannot restore the caller's context") : status;
}
