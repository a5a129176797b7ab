// Mamba-2's state space scan (SSD), forward. Not public yet: a proof that scans are written in the same vocabulary.
#pragma once
#include "margay.h"
#include "tile/gmap.h"

typedef struct ssd_fwd_params {
  gmap x, y, b, c, dt;
  const float *a, *d;       // [heads]
  float *state;             // [batch, heads, head_dim, state_dim], after the last step
  int chunks;               // of 64 steps
  int heads, group_heads;   // group_heads: heads that share b and c
  int head_dim, state_dim;
} ssd_fwd_params;

// For every batch and head, S_0 = 0:  S_t = e^(dt_t a) S_(t-1) + dt_t x_t b_t^T,  y_t = S_t c_t + d x_t
// x, y [B, T, H, P], P <= 64; b, c [B, T, G, N], N <= 128, H a multiple of G;
// fp32: dt [B, T, H] >= 0, a <= 0 and d [H], state [B, H, P, N].
// On the GPU H must be a multiple of 4.
MG_API mg_status mg_ssd_fwd(const mg_tensor *y, const mg_tensor *state, const mg_tensor *x, const mg_tensor *dt, const mg_tensor *b,
                            const mg_tensor *c, const mg_tensor *a, const mg_tensor *d, mg_stream stream);
