// What the host halves of steps of generation share: tensors as their kernels take them. Tensors of one step lack the
// dimension of steps.
#pragma once
#include "ssd/step.h"
#include "runtime/runtime.h"

static inline int mg_is_float(const mg_tensor *t) { return t && t->dtype == MG_FP32; }
// Of a dimension that the first does not move along: 0.
static inline int64_t mg_stride(const mg_tensor *t, int i) { return t->shape[i] > 1 ? t->stride[i] : 0; }
static inline step_vectors mg_vectors(const mg_tensor *t) {
  if (!t) return (step_vectors){0};
  const int last = t->dims - 1;
  return (step_vectors){t->data, mg_stride(t, 0), last == 3 ? mg_stride(t, 1) : 0, mg_stride(t, last - 1)};
}
static inline step_states mg_states(const mg_tensor *t, const mg_tensor *slots) {
  return (step_states){.data = t->data, .place = mg_stride(t, 0), .head = mg_stride(t, t->dims - 3),
                       .row = mg_stride(t, t->dims - 2), .slots = mg_data(slots), .places = (int)t->shape[0],
                       .rows = (int)t->shape[t->dims - 2], .cols = (int)t->shape[t->dims - 1],
                       .is_float = mg_is_float(t)};
}

// Four numbers of a row may be one access. On the CPU that is no question, unless a tool asks for what the GPU does.
static inline bool mg_in_fours(const mg_tensor *t) {
  if (!t || (t->device == MG_CPU && !mg_intercepted())) return true;
  bool fours = (uintptr_t)t->data % (4 * mg_dtype_size(t->dtype)) == 0 && t->shape[t->dims - 1] % 4 == 0;
  for (int i = 0; i < t->dims - 1; i++) fours &= mg_stride(t, i) % 4 == 0;
  return fours;
}
