// Parameters of the SSD kernels. Plain C: filled by the host halves.
#pragma once
#include "tile/gmap.h"

// A step's weight and its log decay. Of ssd these are dt, which is dt + bias of its head, through softplus, inside of
// the limits, and dt a. Of linear attention (gates) they are 1 and dt + a.
typedef struct ssd_dt {
  const float *dt;          // [batch, steps, heads]; gates: or NULL: 0
  const float *a, *bias;    // [heads]; bias NULL: 0; gates: a too
  int softplus, gates;      // 0 or 1
  float low, high;
} ssd_dt;

// How a caller's states lie: strides of a row, which head_dim counts, and of a column. Those of ssd are row-major, those
// of linear attention transposed.
typedef struct ssd_order { int row, col; } ssd_order;

typedef struct ssd_fwd_params {
  gmap x, y, b, c;
  ssd_dt dt;
  float scale, log_scale;   // y has this factor, which is positive; its logarithm in base 2
  const float *d;           // [heads] or NULL: 0
  const float *initial;     // [rows, heads, head_dim, state_dim], before the first step, or NULL: 0
  const float *cuts;        // [rows, cut_stride, heads, head_dim, state_dim]: in front of segments 1, 2, ...
  float *final;             // [rows, heads, head_dim, state_dim], after the last step, or NULL
  const int *starts;        // [rows + 1]: row i is steps starts[i] .. starts[i + 1] - 1 of batch 0; NULL: of batch i
  const int *seq_idx;       // [batch, steps] or NULL: where it changes, a sequence ends. `initial` is of sequence 0
  int64_t seq_stride;       // of batch
  void *y_data;             // y again, for the last chunks of packed rows: strides in elements
  int64_t y_step, y_head;
  int steps;                // of a batch
  int segments, segment;    // of a row, steps of one: whole chunks, the last has the rest. Packed rows have one
  int cut_stride;
  int rows, heads, group_heads;   // group_heads: heads that share b and c
  int head_dim, state_dim;
  ssd_order order;          // of `initial` and `final`
} ssd_fwd_params;

// States behind all segments but the last, each from 0, and by what each decays the state before it.
typedef struct ssd_cuts_params {
  gmap x, b;
  ssd_dt dt;
  const int *seq_idx;
  int64_t seq_stride;
  float *cuts, *decays;     // [rows, cut_stride, heads, head_dim, state_dim], [rows, cut_stride, heads]
  int steps, cut, segment;  // cut: how many segments
  int cut_stride, heads, group_heads, head_dim, state_dim;
} ssd_cuts_params;

// cuts[i] += decays[i] cuts[i - 1], cuts[-1] the initial state: the states in front of the segments.
typedef struct ssd_join_params {
  float *cuts;
  const float *initial;
  ssd_order order;          // of `initial`
  float factor;             // of `initial`
  const float *decays;
  int cut, cut_stride, heads, head_dim, state_dim;
} ssd_join_params;
