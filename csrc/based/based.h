// Parameters of the kernels of Based. Plain C: filled by the host halves.
#pragma once
#include "tile/gmap.h"

// Features are products of two entries of k, whose 32 columns are two blocks of 16. A part has those of blocks x and y:
// 0: 0 and 0, 1: 1 and 1, 2: 0 and 1, 3: 0 and 1 again. Up to 16 columns have part 0 alone.
enum { BASED_FEATURES = 160, BASED_PARTS = 4, BASED_SUM_ROWS = 34, BASED_SUM_COLS = 32 };

// The sequences: rows of `steps` steps each or, packed, of starts[row] .. starts[row + 1] - 1, of batch 0. Rows may be
// cut into segments, packed ones are not. cutting: of each segment but one only its own states are computed, in `cuts`.
typedef struct based_rows {
  const int *starts;        // or NULL
  int steps, heads;
  int segments, segment;    // of a row, steps of one: whole chunks, the last has the rest
  int cut_stride, cutting;
  int dim, dim_v;           // columns of q and k, of v
  int part, parts;
  float scale, eps;
} based_rows;

// States: of a row and head [parts, dim_v, 160] and [34, 32]: rows 0 to 31 the sum of k k^T, 32 the sum of k, 33 begins
// with the number of steps.
typedef struct based_state { float *features, *sums; } based_state;   // or NULL
// cuts: [rows, cut_stride, heads] of these: in front of segments 1, 2, ... or, of gradients, behind segments 0, 1, ...

typedef struct based_fwd_params {
  gmap q, k, v, out;
  based_rows rows;
  based_state initial, final, cuts;
  float *norm;              // [batch, heads, steps]: the sum of a row's weights and eps; NULL: not divided by
  float *partial;           // [batch, heads, steps, dim_v]: what the parts before have; NULL where there is one part
  void *out_data;           // out again, for the last chunks of packed rows: strides in elements
  int64_t out_step, out_head;
} based_fwd_params;

// The gradient of q, and delta: minus dout . out of each step.
typedef struct based_dq_params {
  gmap q, k, v, dout, out;
  based_rows rows;
  based_state initial, cuts;
  const float *norm;
  float *delta;             // [batch, heads, steps]
  float *partial;           // [batch, heads, steps, 32]
  void *dq;                 // strides in elements
  int64_t dq_batch, dq_step, dq_head;
} based_dq_params;

// The gradients of k and v, and of the initial state.
typedef struct based_dkv_params {
  gmap q, k, v, dout, dv;
  based_rows rows;
  based_state final, initial, cuts;   // gradients: of the final state, or NULL; of the initial one; behind segments
  const float *norm, *delta;
  float *partial, *partial_v;   // [batch, heads, steps, 32], [batch, heads, steps, dim_v]
  void *dk, *dv_data;       // strides in elements
  int64_t dk_batch, dk_step, dk_head, dv_step, dv_head;
} based_dkv_params;

// cuts[i] += cuts[i - 1], cuts[-1] the state in front of the first; or, backwards, cuts[i] += cuts[i + 1].
typedef struct based_join_params {
  float *cuts;              // [rows, cut_stride, size]
  const float *given;       // [rows, size] or NULL: 0
  int64_t size;             // a multiple of 32
  int cut, cut_stride, backwards;
} based_join_params;
