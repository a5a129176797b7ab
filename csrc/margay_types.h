// Plain types of Margay's C interface, for kernels too: a change of ops.def compiles none of them anew.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#define MG_MAX_DIMS 8

typedef enum mg_status {
  MG_OK = 0,
  MG_TYPE,          // wrong kind of argument: dtype, tensors on different kinds of device
  MG_VALUE,         // right kind, wrong shape, stride, alignment or range
  MG_UNSUPPORTED,   // valid, but no kernel computes it; the message lists why each refused
  MG_BUFFER,        // memory that may not be used this way: read-only, overlapping
  MG_MEMORY,
  MG_RUNTIME        // driver, device, threads
} mg_status;

typedef enum mg_dtype { MG_BF16, MG_FP16, MG_FP32, MG_FP64, MG_INT32, MG_INT64, MG_UINT8, MG_E4M3,
    MG_DTYPE_COUNT } mg_dtype;
typedef enum mg_device { MG_CPU, MG_CUDA } mg_device;
typedef enum mg_activation { MG_NONE, MG_RELU, MG_GELU, MG_GELU_TANH, MG_SILU } mg_activation;

// A view of memory somebody else owns. Strides in elements.
// On the GPU the address and all strides of a tensor are multiples of 16 bytes, and rows of an output are written in
// units of 16 bytes: where its last dimension is not a multiple of that, the elements behind each row, up to the next
// multiple, are overwritten too.
typedef struct mg_tensor {
  void *data;
  mg_dtype dtype;
  mg_device device;
  int device_index;
  int dims;
  bool read_only;
  int64_t shape[MG_MAX_DIMS], stride[MG_MAX_DIMS];
} mg_tensor;

typedef void *mg_stream;    // a CUstream; NULL is the legacy default stream; ignored on the CPU

