// Parameters of the linear attention kernels. Plain C: filled by linear_attention.c.
#pragma once
#include <stdint.h>
#include "tile/gmap.h"

// One pass over the sequence, forwards or backwards in time: the state in front of each chunk of 64 steps, and behind
// the last one.
typedef struct linear_attention_states_params {
  gmap a, b;                // [B, H, T, K], [B, H, T, V]: S grows by scale a_t b_t^T
  gmap states;              // [B H, chunk, K, V]
  const float *initial;     // [B, H, K, V] or NULL: zero
  float *final;             // the same, or NULL
  int chunks, heads;
  int a_dim, b_dim;         // K, V
  int backwards;            // 1: from the last chunk to the first
  float scale;
} linear_attention_states_params;

typedef struct linear_attention_params {
  gmap q, k, v, states, out;
  int chunks, heads;
  float scale;
} linear_attention_params;

typedef struct linear_attention_bwd_params {
  gmap q, k, v, dout, states, dstates, dq, dk, dv;
  int chunks, heads;
  float scale;
} linear_attention_bwd_params;
