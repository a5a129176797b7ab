// Parameters of the kernel of linear attention's gradients. Plain C: filled by linear_attention.c.
#pragma once
#include "ssd/ssd.h"

// Rows of steps, cut into segments of whole chunks of 64 steps; a segment's state has its rows from x, its columns from
// b and c.
typedef struct linear_attention_sweep_params {
  gmap x, y, b, c;
  gmap z;                   // [batch, step, head, head_dim], which y's products with are summed over a step
  ssd_dt gates;
  float scale, log_scale;   // of y, as in ssd_fwd_params
  const float *initial;     // [rows, heads, ...] or NULL: 0. The state where the sweep begins, or its gradient
  const float *cuts;        // [rows, cut_stride, heads, ...]: the same of segments, as cut_of() counts them
  float *final;             // where it ends, or NULL
  const int *starts;        // [rows + 1] or NULL, as in ssd_fwd_params
  void *y_data;             // y again, for the last chunks of packed rows: strides in elements
  int64_t y_step, y_head;
  // [batch, head, steps + chunks]: of the sweep forwards, sums of q dq over a step, then over a chunk without its pairs
  float *products;
  float *ends;              // [rows, end_stride, heads, ...], as cuts: S behind segments; NULL where its gradient is 0
  float *dg;                // [batch, step, head] or NULL
  float *sums;              // [batch, 3 chunks, head] or NULL: shares of dg_head come first
  int rows, steps, segments, segment, cut_stride, end_stride, heads, head_dim, state_dim, chunks;
  ssd_order order, cut_order;   // of `initial` and `final`; of `cuts` and `ends`
} linear_attention_sweep_params;
