// Parameters of the kernels of mg.ssd's backward. Plain C: filled by ssd_bwd.c.
#pragma once
#include <stdint.h>
#include "tile/gmap.h"

// The steps of every head: dt_t = clamp(softplus(dt + dt_bias), dt_min, dt_max), and the decay e^(dt_t a).
typedef struct ssd_steps {
  const float *dt;          // [B, T, H]
  const float *a, *dt_bias; // [H]; dt_bias may be NULL
  float dt_min, dt_max;
  int softplus;
  int count, heads;         // T, H
} ssd_steps;

// One pass over a segment of the sequence, forwards or backwards in time: the state in front of each chunk of 64 steps, or behind it.
typedef struct ssd_states_params {
  gmap a, b;                // [B, T, H, P], [B, T, G, N]
  gmap states;              // [B H, chunk of the segment, P, N]
  ssd_steps steps;
  const float *initial;     // [B, H, P, N] or NULL: zero
  float *final;             // the same, or NULL; may be `initial`
  float *starts;            // [segment, B, H, P, N] or NULL: the state in front of segments 1, 2, ... of `every` chunks
  int first, chunks, every; // the segment's first chunk and number of chunks
  int keep;                 // 1: write `states`
  int groups, group_heads, head_dim, state_dim;
  int backwards;
} ssd_states_params;

// Gradients of a segment's chunks, all at once, from the states in front of them and the gradients of those behind.
typedef struct ssd_bwd_params {
  gmap x, dy, dx;           // [B, T, H, P]
  gmap b, c;                // [B, T, G, N]
  gmap states, dstates;     // [B H, chunk of the segment, P, N]
  ssd_steps steps;
  const float *d;           // [H], or NULL
  float *ddt;               // [B, T, H]
  float *sums;              // [B, 3 all_chunks, H]: shares of da, then of dd, then of ddt_bias
  void *db, *dc;            // [B, T, G, N]; strides in elements
  int64_t db_stride[3], dc_stride[3];
  float *parts;             // [splits, B, 64 chunks, G, 2 N]: dc and db of a part of the heads each; NULL where splits is 1
  int first, chunks, all_chunks;
  int groups, group_heads, splits, head_dim, state_dim;
  int skips, biased;        // dd and ddt_bias are wanted
} ssd_bwd_params;

// db and dc from their parts.
typedef struct ssd_bwd_join_params {
  const float *parts;
  void *db, *dc;
  int64_t db_stride[3], dc_stride[3];
  int first, chunks, steps, batch, groups, splits, state_dim;   // steps: T
} ssd_bwd_join_params;

// da, dd and ddt_bias [H] from the chunks' shares.
typedef struct ssd_bwd_sums_params {
  const float *sums;
  float *out[3];            // NULL: not wanted
  int batch, chunks, heads;
} ssd_bwd_sums_params;
