// A driver without a GPU: records every call as a line of text, keeps the state that the calls change, and fails the
// n-th call on request. Two devices are H100s (0 and 1), device 2 is an A100. Built by the tests as a shared library.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "runtime/driver_api.h"

enum { DEVICES = 3, MAX_STACK = 16, INVALID_VALUE = 1, NOT_FOUND = 500 };

struct cu_context_object { int device; };
static struct cu_context_object contexts[DEVICES] = {{0}, {1}, {2}};
static char log_text[1 << 16];
static size_t log_length;
static int calls, fail_at, fail_with, lookups_fail_with, version = 13000;
static cu_context stack[MAX_STACK];
static int depth, mode, capturing, libraries;

// ---- controls of the tests
const char *mock_log(void) { return log_text; }
void mock_clear(void) { log_length = 0, log_text[0] = 0, calls = 0; }
// the at-th call from now on, once; 0: none
void mock_fail(int at, int error) { fail_at = at, fail_with = error, calls = 0; }
void mock_refuse_lookups(int error) { lookups_fail_with = error; }
void mock_version(int v) { version = v; }
void mock_capturing(int on) { capturing = on; }
void mock_enter(int device) { stack[depth++] = &contexts[device]; }
int mock_calls(void) { return calls; }
int mock_depth(void) { return depth; }
int mock_mode(void) { return mode; }
int mock_libraries(void) { return libraries; }

__attribute__((format(printf, 1, 2))) static int record(const char *format, ...) {
  va_list args;
  va_start(args, format);
  int n = vsnprintf(log_text + log_length, sizeof log_text - log_length, format, args);
  va_end(args);
  log_length += n > 0 && log_length + (size_t)n < sizeof log_text ? (size_t)n : 0;
  return ++calls == fail_at ? fail_with : CU_OK;
}
// The call reports its failure before it has any effect.
#define RECORD(...) \
  do { \
    int error = record(__VA_ARGS__); \
    if (error) return error; \
  } while (0)

// ---- the driver's calls
static int cuInit(unsigned flags) {
  RECORD("cuInit flags=%u\n", flags);
  return CU_OK;
}
static int cuDriverGetVersion(int *v) {
  RECORD("cuDriverGetVersion\n");
  *v = version;
  return CU_OK;
}
static int cuGetErrorName(int error, const char **text) {
  *text = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" :
          error == 2   ? "CUDA_ERROR_OUT_OF_MEMORY" :
          error == 999 ? NULL :
                         "CUDA_ERROR_MOCK";
  return *text ? CU_OK : INVALID_VALUE;
}
static int cuGetErrorString(int error, const char **text) {
  *text = error == 700 ? "an illegal memory access was encountered" : "injected by the mock driver";
  return CU_OK;
}
static int cuDeviceGetCount(int *count) {
  RECORD("cuDeviceGetCount\n");
  *count = DEVICES;
  return CU_OK;
}
static int cuDeviceGet(int *device, int ordinal) {
  RECORD("cuDeviceGet %d\n", ordinal);
  *device = ordinal;
  return CU_OK;
}
static int cuDeviceGetName(char *name, int n, int device) {
  RECORD("cuDeviceGetName %d\n", device);
  snprintf(name, (size_t)n, device == 2 ? "NVIDIA A100" : "NVIDIA H100");
  return CU_OK;
}
static int cuDeviceGetAttribute(int *value, int attribute, int device) {
  RECORD("cuDeviceGetAttribute %d of %d\n", attribute, device);
  switch (attribute) {
    case CU_DEVICE_SMS: *value = device == 2 ? 108 : 132; return CU_OK;
    case CU_DEVICE_L2_BYTES: *value = 50 << 20; return CU_OK;
    case CU_DEVICE_CC_MAJOR: *value = device == 2 ? 8 : 9; return CU_OK;
    case CU_DEVICE_CC_MINOR: *value = 0; return CU_OK;
    case CU_DEVICE_SHARED_OPTIN: *value = 232448; return CU_OK;
    default: return INVALID_VALUE;
  }
}
static int cuDevicePrimaryCtxRetain(cu_context *context, int device) {
  RECORD("cuDevicePrimaryCtxRetain %d\n", device);
  *context = &contexts[device];
  return CU_OK;
}
static int cuCtxGetCurrent(cu_context *context) {
  RECORD("cuCtxGetCurrent\n");
  *context = depth ? stack[depth - 1] : NULL;
  return CU_OK;
}
static int cuCtxPushCurrent(cu_context context) {
  RECORD("cuCtxPushCurrent device=%d\n", context->device);
  stack[depth++] = context;
  return CU_OK;
}
static int cuCtxPopCurrent(cu_context *context) {
  RECORD("cuCtxPopCurrent\n");
  *context = stack[--depth];
  return CU_OK;
}
static int cuThreadExchangeStreamCaptureMode(int *m) {
  RECORD("cuThreadExchangeStreamCaptureMode %d\n", *m);
  int old = mode;
  mode = *m;
  *m = old;
  return CU_OK;
}
static int cuStreamIsCapturing(mg_stream stream, int *status) {
  RECORD("cuStreamIsCapturing stream=%p\n", stream);
  *status = capturing;
  return CU_OK;
}
static int cuStreamSynchronize(mg_stream stream) {
  RECORD("cuStreamSynchronize stream=%p\n", stream);
  return CU_OK;
}
static int cuMemsetD16Async(uint64_t pointer, uint16_t word, size_t n, mg_stream stream) {
  RECORD("cuMemsetD16Async %llx word=%x n=%zu stream=%p\n", (unsigned long long)pointer, word, n, stream);
  return CU_OK;
}
static int cuMemsetD32Async(uint64_t pointer, unsigned word, size_t n, mg_stream stream) {
  RECORD("cuMemsetD32Async %llx word=%x n=%zu stream=%p\n", (unsigned long long)pointer, word, n, stream);
  return CU_OK;
}
static int cuLibraryLoadData(cu_library *library, const void *image, int *jit_options, void **jit_values,
                             unsigned jit_count, int *options, void **values, unsigned count) {
  (void)jit_options, (void)jit_values, (void)options, (void)values;
  RECORD("cuLibraryLoadData image=%s options=%u\n", (const char *)image, jit_count + count);
  libraries++;
  *library = (cu_library)(uintptr_t)image;
  return CU_OK;
}
static int cuLibraryUnload(cu_library library) {
  RECORD("cuLibraryUnload image=%s\n", (const char *)library);
  libraries--;
  return CU_OK;
}
static int cuLibraryGetKernel(cu_kernel *kernel, cu_library library, const char *name) {
  RECORD("cuLibraryGetKernel %s\n", name);
  *kernel = (cu_kernel)library;
  return strcmp(name, (const char *)library) ? NOT_FOUND : CU_OK;
}
static int cuKernelSetAttribute(int attribute, int value, cu_kernel kernel, int device) {
  RECORD("cuKernelSetAttribute %s %d=%d device=%d\n", (const char *)kernel, attribute, value, device);
  return CU_OK;
}
static int cuLaunchKernelEx(const cu_launch_config *c, cu_kernel kernel, void **params, void **extra) {
  (void)extra;
  unsigned cluster = 0;
  const char *dependent = "";
  for (unsigned i = 0; i < c->attribute_count; i++) {
    if (c->attributes[i].id == CU_LAUNCH_CLUSTER) cluster = c->attributes[i].value.cluster.x;
    else if (c->attributes[i].id == CU_LAUNCH_PROGRAMMATIC_SERIALIZATION && c->attributes[i].value.programmatic == 1)
      dependent = " dependent";
    else return INVALID_VALUE;
  }
  RECORD("cuLaunchKernelEx %s grid=%u,%u,%u block=%u,%u,%u shared=%u cluster=%u%s stream=%p params=%d context=%d\n",
         (const char *)kernel, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2],
         c->shared_bytes, cluster, dependent, c->stream, *(int *)params[0], depth ? stack[depth - 1]->device : -1);
  return CU_OK;
}
static int cuTensorMapEncodeTiled(gmap *map, int dtype, unsigned rank, void *data, const uint64_t *size,
                                  const uint64_t *stride, const uint32_t *box, const uint32_t *step, int interleave,
                                  int swizzle, int l2, int fill) {
  (void)l2;
  RECORD(
      "cuTensorMapEncodeTiled dtype=%d rank=%u data=%p size=%ju,%ju,%ju,%ju stride=%ju,%ju,%ju box=%u,%u,%u,%u step=%u "
      "interleave=%d swizzle=%d fill=%d\n",
      dtype, rank, data, (uintmax_t)size[0], (uintmax_t)size[1], (uintmax_t)size[2], (uintmax_t)size[3],
      (uintmax_t)stride[0], (uintmax_t)stride[1], (uintmax_t)stride[2], box[0], box[1], box[2], box[3], step[0],
      interleave, swizzle, fill);
  if ((uintptr_t)map % 64) return INVALID_VALUE;
  return CU_OK;
}

// ---- finding them
static const struct { const char *name; int since; } names[] = {
#define CALL(name, since, args) {#name, since},
  MG_DRIVER_CALLS(CALL)
#undef CALL
};

int cuGetProcAddress_v2(const char *name, void **function, int since, uint64_t flags, int *found) {
  (void)found;
  if (lookups_fail_with) return lookups_fail_with;
  if (flags != CU_PROC_LEGACY_STREAM) return INVALID_VALUE;
  int at = 0;
#define CALL(f, v, args) \
  if (!strcmp(name, #f) && since == names[at].since) { \
    int (*address) args = f; \
    memcpy(function, &address, sizeof address); \
    return CU_OK; \
  } \
  at++;
  MG_DRIVER_CALLS(CALL)
#undef CALL
  return NOT_FOUND;
}
