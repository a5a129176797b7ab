// Parameters of the kernels of Kimi delta attention's backward. Plain C: filled by kda_bwd.c.
#pragma once
#include "delta/kda.h"

// Gradients of a segment's chunks, all at once, from what the sweeps have left of them.
typedef struct kda_grads_params {
  gmap q, k, dout, dv;      // [batch, step, head, dim]; dv: the gradient, which the sweep backwards has made
  gmap errors;              // [batch, step of the segment, value head, value_dim]: v - S^T k of the state that k sees
  gmap states, dstates;     // [batch value_heads, chunk of the segment, value_dim, key_dim]: in front of chunks, behind them
  kda_given g, beta;
  const float *a_log;       // as in kda_prepare_params
  const float *dt_bias;
  const int *starts;
  void *dq, *dk;            // strides of batch, step and head in elements
  int64_t dq_stride[3], dk_stride[3];
  // [group_heads, batch, 64 chunks, key heads, 2 key_dim]: dq and dk of each value head; NULL where group_heads is 1
  float *parts;
  float *dg, *dbeta;        // [batch, step, value head, key_dim], [batch, step, value head]
  // [batch, 3 all_chunks, key_dim value_heads] or NULL: shares of da_log, channels first, then of ddt_bias, heads first
  float *sums;
  float scale, lower_bound, beta_factor;
  int gate, norm;
  int first, chunks, all_chunks;
  int batches, steps, rows;
  int heads, group_heads, key_dim, value_dim;
} kda_grads_params;
