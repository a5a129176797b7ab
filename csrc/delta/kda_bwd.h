// Parameters of the kernels of Kimi delta attention's backward. Plain C: filled by kda_bwd.c.
#pragma once
#include "delta/kda.h"

// kda_grads.cu
typedef struct kda_grads_params {
  gmap q, k, dout, dv;        // [batch, head, step, dim]; dv: the gradient, which the pass backwards has made
  gmap errors;                // of delta_sweep.cu
  gmap states, dstates;       // [batch heads, place, value_dim, key_dim]: in front of the chunks, and behind
  gmap to_q, to_k;            // dq and dk, 16 steps at a time
  void *dq, *dk;              // strides of batch, step, head in elements
  int64_t dq_stride[3], dk_stride[3];
  // [group_heads, batch, 64 places, key heads, 2 key_dim]: dq and dk of each head of v; NULL where each has its own
  float *parts;
  float *dg, *dbeta;          // [batch, steps, head, key_dim], [batch, steps, head], of what was given, or NULL
  // [batch, 3 all_places, heads key_dim] or NULL: shares of da_log, by channels and then heads, then of ddt_bias, by
  // heads and then channels
  float *sums;
  delta_rows rows;
  kda_gates gates;
  float scale;
  int places;                 // that have chunks
  int batches, all_places, key_dim, value_dim;
} kda_grads_params;
