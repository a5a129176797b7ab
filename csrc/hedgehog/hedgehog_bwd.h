// Parameters of the kernels of Hedgehog's backward. Plain C: filled by hedgehog_bwd.c.
#pragma once
#include "hedgehog/hedgehog.h"

// What all others read, of each step alone: features, dout and the product of dout and out, over the denominator.
typedef struct hedgehog_bwd_pre_params {
  gmap q, k, out, dout;     // [batch, step, head, dim]
  gmap q_map, k_map;        // [head, key_dim, count]
  gmap f, g, u;             // [batch, step, head, 128 or value_dim]
  const float *den;         // [batch, heads, steps]
  const float *window_factor, *linear_factor;
  float *e;                 // [batch, heads, steps]: less than 0 where dout goes along out
  int steps, heads, runs, run;      // chunks of a run, which a block has
  int count;
} hedgehog_bwd_pre_params;

// The window's share of dq, dk and dv.
typedef struct hedgehog_bwd_window_params {
  gmap q, k, v, u, dq, dk, dv;
  hedgehog_steps steps;
  const float *e;
  float *sums, *weights;    // [batch, heads, steps]: in the window, of what the weights' gradients are, and of these
  // again, for the last chunks of packed rows: strides of step and head in elements
  void *dq_data, *dk_data, *dv_data;
  int64_t dq_stride[2], dk_stride[2], dv_stride[2];
  int key_dim, value_dim;
  float scale;
} hedgehog_bwd_window_params;

// A pass over the sequence, forwards or backwards, for the linear part's gradients.
typedef struct hedgehog_bwd_scan_params {
  gmap a, b;                // what the state adds up: features, vectors
  gmap r, u;                // who reads it: features, vectors
  gmap dy, dv;              // results: of x map; of v, to which is added
  hedgehog_steps steps;     // segments count in the order of the pass
  const float *window_factor, *linear_factor, *e, *den;
  const float *window_sums, *window_weights;    // as in hedgehog_bwd_window_params; forwards
  const float *initial;     // [rows, heads, 2 count, value_dim + 1] or NULL: in front of the pass
  float *cuts;              // [rows, cut_stride, the same]: in front of segments 1, 2, ...; only_state: written
  float *final;             // behind the pass, or NULL
  float *sums;              // [rows, sum_stride, heads, 64]: shares of the gradient of the factors' ratio; forwards
  void *dy_data, *dv_data;  // as above
  int64_t dy_stride[2], dv_stride[2];
  int cut_stride, sum_stride, count, value_dim, only_state;
} hedgehog_bwd_scan_params;

// dx += dy map^T of q and of k, and shares of dmap = sum of x_t^T dy_t.
typedef struct hedgehog_bwd_maps_params {
  gmap x[2], dx[2], dy[2], map[2];
  float *parts;             // [2, batch runs, heads, key_dim, count]
  int steps, heads, batches, runs, run;
  int key_dim, count;
} hedgehog_bwd_maps_params;

// The gradients of maps and factors, from their shares.
typedef struct hedgehog_bwd_sums_params {
  const float *parts, *sums, *window_factor, *linear_factor;
  void *map[2];                     // [heads, key_dim, count]
  int64_t map_stride[2][2];         // of head and row
  float *dwindow_factor, *dlinear_factor;
  int shares, rows, segments, sum_stride;
  int heads, key_dim, count;
} hedgehog_bwd_sums_params;
