// The CUDA driver: found by dlopen on first use, never linked, so that the library loads and works on machines without
// it.
#pragma once
#include "runtime/runtime.h"
#include "runtime/driver_api.h"

typedef struct mg_driver {
#define CALL(name, version, args) int (*name) args;
  MG_DRIVER_CALLS(CALL)
#undef CALL
} mg_driver;

typedef struct mg_gpu {
  int device, major, minor, sms;
  int64_t l2_bytes;
  size_t shared_bytes;
  _Atomic(cu_context) context;    // the primary context, retained at the first launch for the life of the process; NULL
                                  // before
  char name[96];
} mg_gpu;

extern mg_driver mg_cu;           // valid once mg_driver_open has succeeded
// A failed attempt is made again at the next call; success is remembered. Refuses in a process forked after a success.
mg_status mg_driver_open(void);
int mg_driver_version(void);      // 1000 * major + 10 * minor of CUDA; 0 before success
mg_status mg_gpu_count(int *count);
// Properties of a device, whatever its architecture; costs it no memory.
mg_status mg_gpu_open(mg_gpu **gpu, int index);
// Make the device's primary context current for this thread, and undo that.
mg_status mg_gpu_enter(mg_gpu *gpu, bool *pushed);
mg_status mg_gpu_leave(bool pushed, mg_status status);   // returns `status`, or the failure to undo
// Fails with `what` and the driver's name and description of `error`.
__attribute__((format(printf, 2, 3))) mg_status mg_driver_fail(int error, const char *what, ...);
