// Parameters of kernels that compute one or a few steps of generation. Plain C: filled by the host halves.
#pragma once
#include "runtime/divisor.h"

// The states of all heads, [places, heads, rows, columns], columns contiguous; fp32, or as the inputs. They are updated
// in place.
typedef struct step_states {
  void *data;
  int64_t place, head, row;         // strides in elements
  const int *slots;                 // [batch]: a sample's place, of no state where there is no such; NULL: its number
  int places, rows, cols, is_float;
} step_states;

// [batch, steps, heads, columns], columns contiguous, as the inputs; absent where data is NULL.
typedef struct step_vectors {
  void *data;
  int64_t batch, step, head;        // strides in elements
} step_vectors;

// [batch, steps, heads], heads contiguous; fp32, or as the inputs; 0 where data is NULL.
typedef struct step_numbers {
  const void *data;
  int64_t batch, step;              // strides in elements
  int is_float;
} step_numbers;

typedef struct ssd_step_params {
  step_states states;               // rows: columns of x
  step_vectors x, z, y, b, c;
  step_numbers dt, a, bias, d;
  const void *d_wide;               // [heads, rows]; fp32, or as the inputs; or NULL
  int d_wide_is_float, softplus;
  float low, high;
  int steps;
  divisor heads, group_heads;       // group_heads: heads that share b and c
  divisor parts;                    // of a head's state, a block each
} ssd_step_params;

typedef struct linear_attention_step_params {
  step_states states;               // rows: of q and k; columns: of v
  step_vectors q, k, v, out;
  step_numbers g, g_head;           // log decays, of which the sum counts
  float scale;
  int steps;
  divisor heads, parts;
} linear_attention_step_params;
