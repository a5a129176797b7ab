// Mamba-2's state space scan (SSD), forward. Not public yet: a proof that scans are written in the same vocabulary.
#pragma once
#include "tile/gmap.h"

typedef struct ssd_fwd_params {
  gmap x, y, b, c, dt;
  const float *a, *d;       // [heads]
  float *state;             // [batch, heads, head_dim, state_dim], after the last step
  int chunks;               // of 64 steps
  int heads, group_heads;   // group_heads: heads that share b and c
  int head_dim, state_dim;
} ssd_fwd_params;
