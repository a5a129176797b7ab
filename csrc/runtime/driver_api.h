// The part of the CUDA driver's binary interface that Margay uses, declared here so that the driver layer builds, and
// is tested against a mock driver, where no CUDA toolkit is installed. tests/mock/abi.c holds every size, offset and
// constant against cuda.h.
#pragma once
#include <stdint.h>
#include "margay.h"
#include "tile/gmap.h"

typedef struct cu_context_object *cu_context;
typedef struct cu_library_object *cu_library;
typedef struct cu_kernel_object *cu_kernel;   // the driver also takes it where it wants a CUfunction

enum {
  CU_OK = 0,
  CU_NOT_INITIALIZED = 3,
  CU_STUB_LIBRARY = 34,
  CU_FIRST_STICKY = 700,                      // from here on: errors of kernels, reported by whichever call comes next

  CU_PROC_LEGACY_STREAM = 1,
  CU_CAPTURE_RELAXED = 2,
  CU_CAPTURE_NONE = 0,

  CU_DEVICE_SMS = 16,
  CU_DEVICE_L2_BYTES = 38,
  CU_DEVICE_CC_MAJOR = 75,
  CU_DEVICE_CC_MINOR = 76,
  CU_DEVICE_SHARED_OPTIN = 97,

  CU_FUNC_MAX_DYNAMIC_SHARED = 8,
  CU_FUNC_SHARED_CARVEOUT = 9,
  CU_LAUNCH_CLUSTER = 4,
  CU_LAUNCH_PROGRAMMATIC_SERIALIZATION = 6,

  CU_MAP_UINT8 = 0,                           // of 8-bit floats
  CU_MAP_FP16 = 6,
  CU_MAP_FP32 = 7,
  CU_MAP_BF16 = 9,
  CU_MAP_INTERLEAVE_NONE = 0,
  CU_MAP_SWIZZLE_NONE = 0,
  CU_MAP_SWIZZLE_64B = 2,
  CU_MAP_SWIZZLE_128B = 3,
  CU_MAP_L2_128B = 2,
  CU_MAP_L2_256B = 3,
  CU_MAP_FILL_ZERO = 0
};

typedef struct cu_launch_attribute {
  int id;
  char pad[4];
  union { char bytes[64]; struct { unsigned x, y, z; } cluster; int programmatic; } value;
} cu_launch_attribute;

typedef struct cu_launch_config {
  unsigned grid[3], block[3], shared_bytes;
  mg_stream stream;
  cu_launch_attribute *attributes;
  unsigned attribute_count;
} cu_launch_config;

// CALL(name, CUDA version whose signature this is, arguments); every call returns a CUresult, an int here.
#define MG_DRIVER_CALLS(CALL) \
  CALL(cuInit, 2000, (unsigned flags)) \
  CALL(cuDriverGetVersion, 2020, (int *version)) \
  CALL(cuGetErrorName, 6000, (int error, const char **text)) \
  CALL(cuGetErrorString, 6000, (int error, const char **text)) \
  CALL(cuDeviceGetCount, 2000, (int *count)) \
  CALL(cuDeviceGet, 2000, (int *device, int ordinal)) \
  CALL(cuDeviceGetName, 2000, (char *name, int n, int device)) \
  CALL(cuDeviceGetAttribute, 2000, (int *value, int attribute, int device)) \
  CALL(cuDevicePrimaryCtxRetain, 7000, (cu_context *context, int device)) \
  CALL(cuCtxGetCurrent, 4000, (cu_context *context)) \
  CALL(cuCtxPushCurrent, 4000, (cu_context context)) \
  CALL(cuCtxPopCurrent, 4000, (cu_context *context)) \
  CALL(cuThreadExchangeStreamCaptureMode, 10010, (int *mode)) \
  CALL(cuStreamIsCapturing, 10000, (mg_stream stream, int *status)) \
  CALL(cuStreamSynchronize, 2000, (mg_stream stream)) \
  CALL(cuMemsetD16Async, 3020, (uint64_t pointer, uint16_t word, size_t n, mg_stream stream)) \
  CALL(cuMemsetD32Async, 3020, (uint64_t pointer, unsigned word, size_t n, mg_stream stream)) \
  CALL(cuLibraryLoadData, 12000, (cu_library *library, const void *image, int *jit_options, void **jit_values, \
                                  unsigned jit_count, int *options, void **values, unsigned count)) \
  CALL(cuLibraryUnload, 12000, (cu_library library)) \
  CALL(cuLibraryGetKernel, 12000, (cu_kernel *kernel, cu_library library, const char *name)) \
  CALL(cuKernelSetAttribute, 12000, (int attribute, int value, cu_kernel kernel, int device)) \
  CALL(cuLaunchKernelEx, 11060, (const cu_launch_config *config, cu_kernel kernel, void **params, void **extra)) \
  CALL(cuTensorMapEncodeTiled, 12000, (gmap *map, int dtype, unsigned rank, void *data, const uint64_t *size, \
                                       const uint64_t *stride, const uint32_t *box, const uint32_t *element_stride, \
                                       int interleave, int swizzle, int l2, int fill))
