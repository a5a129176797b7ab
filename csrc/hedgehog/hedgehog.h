// Parameters of Hedgehog's kernels. Plain C: filled by the host halves. A state has rows for the features and a column
// for each of v, and one more: the sum of the features.
#pragma once
#include <stdint.h>
#include "tile/gmap.h"

// Which steps of a batch a block works on, and which of them a step's window holds.
typedef struct hedgehog_steps {
  const int *starts;        // [rows + 1]: row i is steps starts[i] .. starts[i + 1] - 1 of batch 0; NULL: of batch i
  int count, rows, heads;   // steps of a batch
  int segments, segment;    // of a row, chunks of one; the last has the rest. Packed rows have one
  int window, sliding;      // steps; 1: each step's own window, 0: its block of `window` steps and the one before
} hedgehog_steps;

typedef struct hedgehog_fwd_params {
  gmap q, k, v, out;        // [batch, step, head, dim]
  gmap q_map, k_map;        // [head, key_dim, count]
  hedgehog_steps steps;
  const float *window_factor, *linear_factor;   // [heads]
  const float *initial;     // [rows, heads, 2 count, value_dim + 1], before the first step, or NULL: 0
  const float *cuts;        // [rows, cut_stride, the same]: in front of segments 1, 2, ...
  float *final;             // as initial: with all chunks but the last, or NULL
  float *den;               // [batch, heads, steps]: d over the factor of the window
  void *out_data;           // out again, for the last chunks of packed rows: strides in elements
  int64_t out_step, out_head;
  int cut_stride, count, value_dim;
  float scale;
} hedgehog_fwd_params;

// What each segment but the last adds to the state.
typedef struct hedgehog_cuts_params {
  gmap k, v, k_map;
  hedgehog_steps steps;
  float *cuts;
  int cut, cut_stride, count, value_dim;        // cut: how many segments
} hedgehog_cuts_params;

// cuts[i] += cuts[i - 1], cuts[-1] the initial state: the states in front of the segments.
typedef struct hedgehog_join_params {
  float *cuts;
  const float *initial;
  int cut, cut_stride, heads;
  int64_t size;             // floats of a state
} hedgehog_join_params;
