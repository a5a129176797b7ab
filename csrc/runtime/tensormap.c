// Views of 4 dimensions as gmaps: the GPU's tensor maps, or plain sizes and strides for the CPU.
#include <string.h>
#include "runtime/driver.h"

_Static_assert(sizeof(gmap_cpu) <= sizeof(gmap), "a CPU view fits where a tensor map does");
enum { DIMS = 4, ALIGNMENT = 16, MAX_BOX = 256, SWIZZLE_BYTES = 128 };

static void map_cpu(gmap *m, void *data, int64_t size, const int64_t *shape, const int64_t *stride) {
  gmap_cpu view = {.data = data};
  for (int i = 0; i < DIMS; i++) {
    view.size[i] = shape[DIMS - 1 - i];
    view.stride[i] = i ? stride[DIMS - 1 - i] * size : size;
  }
  memset(m, 0, sizeof *m);
  memcpy(m, &view, sizeof view);
}

// The driver only says "invalid value"; this says which of its rules a view or a box breaks.
static mg_status check_map(const char *name, const void *data, int64_t size, const int64_t *shape,
                           const int64_t *stride, int rows, int cols, bool swizzled) {
  static const char *const dims[] = {"batch", "head", "row"};
  if ((uintptr_t)data % ALIGNMENT)
    return mg_fail(MG_VALUE, "%s is at address %p, expected a multiple of %d bytes", name, data, ALIGNMENT);
  for (int i = 0; i < DIMS; i++)
    if (shape[i] < 1 || shape[i] > INT32_MAX)
      return mg_fail(MG_VALUE, "%s has %lld elements in dimension %d, expected 1 to 2^31 - 1", name,
                     (long long)shape[i], i);
  for (int i = 0; i < DIMS - 1; i++) {
    int64_t bytes;
    if (shape[i] == 1) continue;
    if (__builtin_mul_overflow(stride[i], size, &bytes) || bytes < 0 || bytes >= (int64_t)1 << 40 || bytes % ALIGNMENT)
      return mg_fail(MG_VALUE,
                     "%s has a %s stride of %lld elements of %lld bytes, expected a multiple of %d bytes below 2^40",
                     name, dims[i], (long long)stride[i], (long long)size, ALIGNMENT);
  }
  if (shape[DIMS - 1] > 1 && stride[DIMS - 1] != 1)
    return mg_fail(MG_VALUE, "%s has a column stride of %lld, expected 1", name, (long long)stride[DIMS - 1]);
  if (rows < 1 || rows > MAX_BOX || cols < 1 || cols > MAX_BOX || cols * size % ALIGNMENT ||
      (swizzled && cols * size > SWIZZLE_BYTES))
    return mg_fail(
        MG_VALUE,
        "%s has a box of %d x %d elements of %lld bytes, expected at most 256 x 256, rows of a multiple of 16 bytes%s",
        name, rows, cols, (long long)size, swizzled ? ", at most 128" : "");
  return MG_OK;
}

static mg_status map(gmap *m, const mg_context *c, const char *name, void *data, mg_dtype dtype, const int64_t shape[4],
                     const int64_t stride[4], int box_rows, int box_cols, int l2) {
  static const int types[MG_DTYPE_COUNT] = {
      [MG_BF16] = CU_MAP_BF16, [MG_FP16] = CU_MAP_FP16, [MG_FP32] = CU_MAP_FP32, [MG_E4M3] = CU_MAP_UINT8};
  int64_t size = (int64_t)mg_dtype_size(dtype);
  if (c->device == MG_CPU) {
    map_cpu(m, data, size, shape, stride);
    return MG_OK;
  }
  if (!types[dtype] && dtype != MG_E4M3)
    return mg_fail(MG_TYPE, "%s has dtype %s, which has no tensor map", name, mg_dtype_name(dtype));
  bool swizzled = size <= 2;
  int swizzle = !swizzled                            ? CU_MAP_SWIZZLE_NONE :
                box_cols * size == SWIZZLE_BYTES / 2 ? CU_MAP_SWIZZLE_64B :
                                                       CU_MAP_SWIZZLE_128B;
  mg_status status = check_map(name, data, size, shape, stride, box_rows, box_cols, swizzled);
  if (status) return status;
  uint64_t sizes[DIMS], strides[DIMS - 1];
  for (int i = 0; i < DIMS; i++) sizes[i] = (uint64_t)shape[DIMS - 1 - i];
  for (int i = 0; i < DIMS - 1; i++) {   // a dimension of one element may have any stride; the driver wants a legal one
    int64_t bytes = shape[DIMS - 2 - i] == 1 ? ALIGNMENT : stride[DIMS - 2 - i] * size;
    strides[i] = (uint64_t)bytes;
  }
  const uint32_t box[DIMS] = {(uint32_t)box_cols, (uint32_t)box_rows, 1, 1}, steps[DIMS] = {1, 1, 1, 1};
  bool pushed;   // the driver wants a context, and a thread of autograd has none
  if ((status = mg_gpu_enter(c->gpu, &pushed))) return status;
  int error = mg_cu.cuTensorMapEncodeTiled(m, types[dtype], DIMS, data, sizes,
                                           strides, box, steps, CU_MAP_INTERLEAVE_NONE,
                                           swizzle, l2, CU_MAP_FILL_ZERO);
  return mg_gpu_leave(pushed, error ? mg_driver_fail(error, "%s cannot be mapped for the GPU", name) : MG_OK);
}

mg_status mg_map(gmap *m, const mg_context *c, const char *name, void *data, mg_dtype dtype, const int64_t shape[4],
                 const int64_t stride[4], int box_rows, int box_cols) {
  return map(m, c, name, data, dtype, shape, stride, box_rows, box_cols, CU_MAP_L2_256B);
}
mg_status mg_map_once(gmap *m, const mg_context *c, const char *name, void *data, mg_dtype dtype,
                      const int64_t shape[4], const int64_t stride[4], int box_rows, int box_cols) {
  return map(m, c, name, data, dtype, shape, stride, box_rows, box_cols, CU_MAP_L2_128B);
}
