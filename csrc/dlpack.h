// DLPack's binary interface (version 1.3), as far as a consumer of tensors needs it. See https://dmlc.github.io/dlpack.
#pragma once
#include <stdint.h>

enum { DL_MAJOR = 1, DL_MINOR = 3 };
enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_CUDA_MANAGED = 13 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_FLOAT8_E4M3FN = 10 };
enum { DL_READ_ONLY = 1, DL_COPIED = 2 };

typedef struct dl_tensor {
  void *data;
  struct { int32_t kind, index; } device;
  int32_t dims;
  struct { uint8_t code, bits; uint16_t lanes; } dtype;
  int64_t *shape, *strides;         // strides in elements; NULL: compact, row-major
  uint64_t byte_offset;
} dl_tensor;

typedef struct dl_version { uint32_t major, minor; } dl_version;

typedef struct dl_managed {         // capsule "dltensor", producers before 1.0
  dl_tensor tensor;
  void *context;
  void (*deleter)(struct dl_managed *);
} dl_managed;

typedef struct dl_managed_versioned {   // capsule "dltensor_versioned"
  dl_version version;
  void *context;
  void (*deleter)(struct dl_managed_versioned *);
  uint64_t flags;
  dl_tensor tensor;
} dl_managed_versioned;

// Capsule "dlpack_exchange_api", attribute __dlpack_c_exchange_api__ of a tensor type. Functions return 0, or -1 with
// an exception set.
typedef struct dl_exchange {
  dl_version version;
  const struct dl_exchange *previous;   // a table of an older major version
  int (*allocate)(dl_tensor *prototype, dl_managed_versioned **out, void *context,
                  void (*fail)(void *, const char *, const char *));
  int (*export_owned)(void *object, dl_managed_versioned **out);
  int (*import_owned)(dl_managed_versioned *tensor, void **out);
  int (*borrow)(void *object, dl_tensor *out);   // valid while the caller holds the object; may be NULL
  int (*current_stream)(int32_t kind, int32_t index, void **out);
} dl_exchange;
