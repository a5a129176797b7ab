// The text of a thread's last failure, and the names that messages use.
#include <stdio.h>
#include "runtime/runtime.h"

static _Thread_local char message[8192];

mg_status mg_fail(mg_status status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(message, sizeof message, format, args);
  va_end(args);
  return status;
}

const char *mg_last_error(void) { return message; }

static const struct { const char *name; size_t size; } dtypes[MG_DTYPE_COUNT] = {
  [MG_BF16] = {"bfloat16", 2}, [MG_FP16] = {"float16", 2}, [MG_FP32] = {"float32", 4}, [MG_FP64] = {"float64", 8},
  [MG_INT32] = {"int32", 4}, [MG_INT64] = {"int64", 8}, [MG_UINT8] = {"uint8", 1}, [MG_E4M3] = {"float8_e4m3fn", 1},
};

const char *mg_dtype_name(mg_dtype t) { return t < MG_DTYPE_COUNT ? dtypes[t].name : "unknown"; }
size_t mg_dtype_size(mg_dtype t) { return t < MG_DTYPE_COUNT ? dtypes[t].size : 0; }
