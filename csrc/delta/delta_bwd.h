// Parameters of the kernels of the delta rules' backward. Plain C: filled by the host halves.
#pragma once
#include "delta/delta.h"

// delta_back.cu. CHANNELS: k, q and w as of delta_sweep_params.
typedef struct delta_back_params {
  gmap q, k, w;
  gmap dout, dv;              // [batch, head, step, value_dim]
  gmap m, p;                  // of delta_prepare.cu
  gmap dstates;               // [batch heads, place, value_dim, key_dim] of the call's type: dS^T behind chunks
  const float *ends;
  const float *initial;       // [row, head, ...], dS behind step `to` - 1, or NULL: 0
  float *final;               // dS in front of step `from`, or NULL; may be `initial`
  ssd_order initial_order, final_order;   // a row of these is a column of v
  delta_rows rows;
  delta_gates gates;          // CHANNELS: beta only
  float scale;
  const int *taken;           // as of delta_prepare_params
  delta_cut cut;              // EARLY
  void *dv_data;              // dv again, for the last chunks of packed rows: strides in elements
  int64_t dv_step, dv_head;
  int key_dim, value_dim;
} delta_back_params;

// delta_grads.cu
typedef struct delta_grads_params {
  gmap q, k, dout, dv;        // [batch, head, step, dim]
  gmap errors;                // of delta_sweep.cu
  gmap states, dstates;       // in front of the chunks, and behind
  gmap dq, dk;                // as q and k
  void *dq_data, *dk_data;    // again, for where packed rows end: strides of batch, step, head in elements
  int64_t dq_stride[3], dk_stride[3];
  float *dg, *dbeta;          // [batch, steps, head], of what was given, or NULL
  float *sums;                // [batch, 3 all_places, heads]: shares of da_log come first, of ddt_bias last; or NULL
  delta_rows rows;
  delta_gates gates;
  float scale;
  int tasks, chunks, key_heads, panels;   // chunks: of a batch; panels: 64 columns of v each
  int all_places, key_dim;
} delta_grads_params;
