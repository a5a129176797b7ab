// Compiled, never run: runtime/driver_api.h says of the driver what cuda.h says.
#include <stddef.h>
#include <cudaTypedefs.h>
#include "runtime/driver_api.h"

#define SAME(a, b) _Static_assert((long long)(a) == (long long)(b), #a)
#define FIELD(ours, field, theirs, their_field) \
  SAME(offsetof(ours, field), offsetof(theirs, their_field)); \
  SAME(sizeof((ours){0}.field), sizeof((theirs){0}.their_field))

SAME(CU_OK, CUDA_SUCCESS);
SAME(CU_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME(CU_STUB_LIBRARY, CUDA_ERROR_STUB_LIBRARY);
SAME(CU_FIRST_STICKY, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(CU_PROC_LEGACY_STREAM, CU_GET_PROC_ADDRESS_LEGACY_STREAM);
SAME(CU_CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(CU_CAPTURE_NONE, CU_STREAM_CAPTURE_STATUS_NONE);
SAME(CU_DEVICE_SMS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(CU_DEVICE_L2_BYTES, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
SAME(CU_DEVICE_CC_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(CU_DEVICE_CC_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(CU_DEVICE_SHARED_OPTIN, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME(CU_FUNC_MAX_DYNAMIC_SHARED, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(CU_FUNC_SHARED_CARVEOUT, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
SAME(CU_LAUNCH_CLUSTER, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(CU_LAUNCH_PROGRAMMATIC_SERIALIZATION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(CU_MAP_UINT8, CU_TENSOR_MAP_DATA_TYPE_UINT8);
SAME(CU_MAP_FP16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
SAME(CU_MAP_FP32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
SAME(CU_MAP_BF16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
SAME(CU_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_INTERLEAVE_NONE);
SAME(CU_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE);
SAME(CU_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_64B);
SAME(CU_MAP_SWIZZLE_128B, CU_TENSOR_MAP_SWIZZLE_128B);
SAME(CU_MAP_L2_256B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
SAME(CU_MAP_FILL_ZERO, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);

SAME(sizeof(gmap), sizeof(CUtensorMap));
SAME(_Alignof(gmap), 64);   // what the driver asks for; the type in newer headers has 128
SAME(sizeof(int), sizeof(CUdevice));
SAME(sizeof(uint64_t), sizeof(CUdeviceptr));

SAME(sizeof(cu_launch_attribute), sizeof(CUlaunchAttribute));
FIELD(cu_launch_attribute, id, CUlaunchAttribute, id);
SAME(offsetof(cu_launch_attribute, value), offsetof(CUlaunchAttribute, value));
SAME(offsetof(cu_launch_attribute, value.cluster.x), offsetof(CUlaunchAttribute, value.clusterDim.x));
SAME(offsetof(cu_launch_attribute, value.cluster.z), offsetof(CUlaunchAttribute, value.clusterDim.z));
SAME(offsetof(cu_launch_attribute, value.programmatic),
     offsetof(CUlaunchAttribute, value.programmaticStreamSerializationAllowed));

SAME(sizeof(cu_launch_config), sizeof(CUlaunchConfig));
SAME(offsetof(cu_launch_config, grid), offsetof(CUlaunchConfig, gridDimX));
SAME(offsetof(cu_launch_config, block), offsetof(CUlaunchConfig, blockDimX));
FIELD(cu_launch_config, shared_bytes, CUlaunchConfig, sharedMemBytes);
FIELD(cu_launch_config, stream, CUlaunchConfig, hStream);
FIELD(cu_launch_config, attributes, CUlaunchConfig, attrs);
FIELD(cu_launch_config, attribute_count, CUlaunchConfig, numAttrs);

// A signature of that name and version exists; its arguments are compared by eye.
#define CALL(name, version, args) SAME(sizeof(PFN_##name##_v##version), sizeof(void (*)(void)));
MG_DRIVER_CALLS(CALL)
