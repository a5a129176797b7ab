// Contexts, kernels and launches. On the GPU nothing here synchronises (but under MARGAY_SYNC=1, outside graph capture)
// or allocates device memory; a row's image is loaded at its first launch, which may happen inside a graph capture.
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "runtime/cpu.h"
#include "runtime/driver.h"

enum {
#define KERNEL(name, ...) ROW_##name,
#include "kernel_rows.def"
#undef KERNEL
  ROWS
};

// ---- the device of a call

static mg_status open_gpu(mg_gpu **gpu, int index) {
  mg_status status = mg_gpu_open(gpu, index);
  if (!status && ((*gpu)->major != 9 || (*gpu)->minor != 0))
    return mg_fail(MG_UNSUPPORTED,
                   "cuda:%d is an %s of compute capability %d.%d; the GPU kernels need 9.0 (H100, H200, GH200)", index,
                   (*gpu)->name, (*gpu)->major, (*gpu)->minor);
  return status;
}

static _Thread_local struct { mg_launch_taker take; int sms; } interception;
void mg_intercept(mg_launch_taker take, int sms) {
  interception.take = take;
  interception.sms = sms;
}
bool mg_intercepted(void) { return interception.take; }

mg_status mg_context_open(mg_context *c, const mg_tensor *t, mg_stream stream) {
  *c = (mg_context){.device = t->device, .device_index = t->device_index, .stream = stream, .shared_bytes = SIZE_MAX,
                    .l2_bytes = 1 << 25};
  if (t->device == MG_CPU) {
    c->persistent = interception.take;
    c->sms = interception.take ? interception.sms : mg_num_threads();
    return mg_check_isa();
  }
  mg_gpu *gpu;
  mg_status status = open_gpu(&gpu, t->device_index);
  if (status) return status;
  c->gpu = gpu;
  c->persistent = true;
  c->sms = interception.take ? interception.sms : gpu->sms;
  c->l2_bytes = gpu->l2_bytes;
  c->shared_bytes = gpu->shared_bytes;
  return MG_OK;
}

// ---- loading

// Kernels belong to no context; their attributes are per device. Written under `load_lock`, published by the bit of
// `devices`.
static struct { cu_kernel kernel; _Atomic uint64_t devices; } loaded[ROWS];
static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;

static mg_status load_kernel(const mg_kernel *row, cu_kernel *kernel) {
  cu_library library;
  int error = mg_cu.cuLibraryLoadData(&library, row->image, NULL, NULL, 0, NULL, NULL, 0);
  int version = mg_driver_version();
  if (error)
    return mg_driver_fail(error, "%s: the kernel %s cannot be loaded, the driver supports CUDA %d.%d",
                          mg_op_name(row->op), row->name, version / 1000, version % 1000 / 10);
  if (!(error = mg_cu.cuLibraryGetKernel(kernel, library, row->name))) return MG_OK;
  mg_status status = mg_driver_fail(error, "%s: the kernel %s is not in its image", mg_op_name(row->op), row->name);
  mg_cu.cuLibraryUnload(library);
  *kernel = NULL;
  return status;
}

static mg_status load_on_device(const mg_kernel *row, const mg_gpu *gpu) {
  const int shared = (int)mg_desc(row)->shared_bytes;
  cu_kernel *kernel = &loaded[row - mg_kernels].kernel;
  mg_status status = *kernel ? MG_OK : load_kernel(row, kernel);
  if (status) return status;
  int error = mg_cu.cuKernelSetAttribute(CU_FUNC_MAX_DYNAMIC_SHARED, shared, *kernel, gpu->device);
  // Without, the next kernel was 12 us late: likely because a multiprocessor whose L1 is large has to be empty before
  // it takes blocks with much shared memory.
  if (!error && mg_desc(row)->followed)
    error = mg_cu.cuKernelSetAttribute(CU_FUNC_SHARED_CARVEOUT, 100, *kernel, gpu->device);
  if (!error) return MG_OK;
  return mg_driver_fail(error, "%s: the kernel %s cannot have %d bytes of shared memory", mg_op_name(row->op),
                        row->name, shared);
}

// Loading is forbidden to a thread whose stream is being captured in the strict modes, though it adds nothing to the
// graph.
static mg_status load_relaxed(const mg_kernel *row, const mg_gpu *gpu) {
  int mode = CU_CAPTURE_RELAXED;
  int error = mg_cu.cuThreadExchangeStreamCaptureMode(&mode);
  if (error) return mg_driver_fail(error, "%s: cannot leave the thread's capture mode", mg_op_name(row->op));
  mg_status status = load_on_device(row, gpu);
  error = mg_cu.cuThreadExchangeStreamCaptureMode(&mode);
  return error && !status ? mg_driver_fail(error, "%s: cannot restore the thread's capture mode", mg_op_name(row->op)) :
                            status;
}

// The device's context is current.
static mg_status ensure_loaded(const mg_kernel *row, const mg_gpu *gpu) {
  _Atomic uint64_t *devices = &loaded[row - mg_kernels].devices;
  const uint64_t bit = (uint64_t)1 << gpu->device % 64;
  if (atomic_load_explicit(devices, memory_order_acquire) & bit) return MG_OK;
  mg_status status = MG_OK;
  pthread_mutex_lock(&load_lock);
  if (!(atomic_load(devices) & bit) && !(status = load_relaxed(row, gpu)))
    atomic_fetch_or_explicit(devices, bit, memory_order_release);
  pthread_mutex_unlock(&load_lock);
  return status;
}

static mg_status preload_rows(const mg_gpu *gpu, bool all, mg_op op) {
  mg_status status = MG_OK;
  for (int i = 0; i < mg_kernel_count && !status; i++)
    if (mg_kernels[i].image && (all || mg_kernels[i].op == op)) status = ensure_loaded(&mg_kernels[i], gpu);
  return status;
}

mg_status mg_preload(const char *op, int device_index) {
  mg_gpu *gpu;
  mg_op found = MG_OP_COUNT;
  bool pushed;
  mg_status status = op ? mg_op_find(&found, op) : MG_OK;
  if (status || (status = open_gpu(&gpu, device_index)) || (status = mg_gpu_enter(gpu, &pushed))) return status;
  return mg_gpu_leave(pushed, preload_rows(gpu, !op, found));
}

// ---- launching

static bool wants_sync(void) {
  static atomic_int known = -1;
  int sync = atomic_load_explicit(&known, memory_order_relaxed);
  if (sync < 0) {
    const char *wish = getenv("MARGAY_SYNC");
    atomic_store_explicit(&known, sync = wish && !strcmp(wish, "1"), memory_order_relaxed);
  }
  return sync;
}

static mg_status sync_check(mg_stream stream, const char *op, const char *name) {
  int capture = CU_CAPTURE_NONE;
  if (!wants_sync()) return MG_OK;
  int error = mg_cu.cuStreamIsCapturing(stream, &capture);
  if (!error && capture == CU_CAPTURE_NONE) error = mg_cu.cuStreamSynchronize(stream);
  return error ? mg_driver_fail(error, "%s: %s failed", op, name) : MG_OK;
}

static mg_status enqueue(const mg_context *c, const mg_gpu *gpu, const mg_kernel *row, const void *params,
                         unsigned blocks) {
  mg_status status = ensure_loaded(row, gpu);
  if (status) return status;
  const mg_kernel_desc *d = mg_desc(row);
  cu_launch_attribute attributes[2];
  unsigned count = 0;
  if (d->cluster > 1) attributes[count++] = (cu_launch_attribute){.id = CU_LAUNCH_CLUSTER,
                                                                  .value.cluster = {d->cluster, 1, 1}};
  if (d->dependent || c->beside) attributes[count++] = (cu_launch_attribute){.id = CU_LAUNCH_PROGRAMMATIC_SERIALIZATION,
                                                                .value.programmatic = 1};
  const cu_launch_config config = {.grid = {blocks, 1, 1}, .block = {d->threads, 1, 1}, .shared_bytes = d->shared_bytes,
                                   .stream = c->stream, .attributes = attributes, .attribute_count = count};
  void *arguments[] = {(void *)params};
  int error = mg_cu.cuLaunchKernelEx(&config, loaded[row - mg_kernels].kernel, arguments, NULL);
  if (error)
    return mg_driver_fail(error, "%s: launch of %s with %u blocks of %u threads and %u bytes of shared memory failed",
                          mg_op_name(row->op), row->name, blocks, d->threads, d->shared_bytes);
  return sync_check(c->stream, mg_op_name(row->op), row->name);
}

mg_status mg_launch(const mg_context *c, const mg_kernel *row, const void *params, int64_t blocks) {
  if (blocks > INT32_MAX)
    return mg_fail(MG_VALUE, "%s: %lld blocks, expected at most 2^31 - 1", mg_op_name(row->op), (long long)blocks);
  if (blocks < 1) return MG_OK;
  if (interception.take && interception.take(row->name, params, blocks)) return MG_OK;
  if (c->device == MG_CPU) return mg_cpu_run(row, params, (int)blocks);
  bool pushed;
  mg_status status = mg_gpu_enter(c->gpu, &pushed);
  return status ? status : mg_gpu_leave(pushed, enqueue(c, c->gpu, row, params, (unsigned)blocks));
}

static void fill_cpu(void *data, uint32_t word, size_t word_bytes, int64_t n) {
  uint16_t *half = data;
  uint32_t *full = data;
  if (word == 0) memset(data, 0, (size_t)n * word_bytes);
  else if (word_bytes == sizeof *half) for (int64_t i = 0; i < n; i++) half[i] = (uint16_t)word;
  else for (int64_t i = 0; i < n; i++) full[i] = word;
}

mg_status mg_fill(const mg_context *c, void *data, uint32_t word, size_t word_bytes, int64_t n) {
  if (n < 1) return MG_OK;
  if (c->device == MG_CPU) {
    fill_cpu(data, word, word_bytes, n);
    return MG_OK;
  }
  bool pushed;
  mg_status status = mg_gpu_enter(c->gpu, &pushed);
  if (status) return status;
  uint64_t at = (uint64_t)(uintptr_t)data;
  int error = word_bytes == 2 ? mg_cu.cuMemsetD16Async(at, (uint16_t)word, (size_t)n, c->stream)
                              : mg_cu.cuMemsetD32Async(at, word, (size_t)n, c->stream);
  status = error ? mg_driver_fail(error, "filling %lld words failed", (long long)n) :
                   sync_check(c->stream, "fill", "it");
  return mg_gpu_leave(pushed, status);
}
