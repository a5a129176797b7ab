// Parameters of the kernels of ssd's backward. Plain C: filled by ssd_bwd.c.
#pragma once
#include <stdint.h>
#include "ssd/ssd.h"

// The steps of all rows. Chunks of 64 steps begin where a row begins. Those of a batch are counted from 0; packed rows
// have their chunks one behind the other, row i from starts[i] / 64 + i on, and some places between them are empty.
typedef struct ssd_steps {
  ssd_dt dt;
  const int *starts;        // [rows + 1] or NULL, as in ssd_fwd_params
  const int *seq_idx;       // [batch, steps] or NULL, the same
  int64_t seq_stride;
  int count, rows, heads;   // count: of a batch
} ssd_steps;

// A pass over a segment of every row, forwards or backwards in time: the state in front of each chunk, or the gradient
// of the state behind it.
typedef struct ssd_pass {
  gmap a, b;                // [batch, step, head, head_dim], [batch, step, group, state_dim]
  gmap states;              // [batch heads, chunk of the segment, head_dim, state_dim]
  const float *initial;     // [rows, heads, head_dim, state_dim] or NULL: zero
  float *final;             // the same, or NULL; may be `initial`
  // [segment, rows, heads, head_dim, state_dim] or NULL: the state in front of segments 1, 2, ... of `every` chunks
  float *starts;
  // [rows, cut_stride, heads, head_dim, state_dim], [rows, cut_stride, heads], as of ssd_join_params, or NULL: the
  // state behind each part but the last, in the pass's order
  float *cuts, *decays;
  int backwards, keep;      // keep: write `states`
} ssd_pass;
typedef struct ssd_states_params {
  ssd_pass pass[2];
  ssd_steps steps;
  float scale;              // of y
  ssd_order order;          // of states in fp32
  int passes;               // at once
  int first, chunks, every; // the segment's first chunk and number of chunks; packed rows have one segment
  // Parts of `part` chunks are worked on at once, `parts` of them in the segment and all_parts in all. `local`: each
  // from 0, to `cuts` and `decays`; else each from where the one before it in the pass's order ended. cut_stride 0: one
  // part, from `initial` to `final`.
  int part, parts, all_parts, cut_stride, local;
  int groups, group_heads, head_dim, state_dim;
} ssd_states_params;

// Gradients of a segment's chunks, all at once, from the states in front of them and the gradients of those behind.
typedef struct ssd_bwd_params {
  gmap x, dy, dx;           // [batch, step, head, head_dim]
  gmap b, c;                // [batch, step, group, state_dim]
  gmap states, dstates;     // [batch heads, chunk of the segment, head_dim, state_dim]
  ssd_steps steps;
  float scale, log_scale;   // of y, as in ssd_fwd_params
  const float *d;           // [heads] or NULL
  float *ddt;               // [batch, step, head], or of gates NULL: not wanted
  float *sums;              // [batch, 3 all_chunks, heads]: shares of da, then dd, then ddt_bias; of gates or NULL
  // dx again, for the last chunks of packed rows; strides of batch, step, head or group in elements
  void *dx_data, *db, *dc;
  int64_t dx_stride[3], db_stride[3], dc_stride[3];
  // [splits, batch, 64 chunks, groups, 2 state_dim]: dc and db of a part of the heads each; NULL where splits is 1
  float *parts;
  int first, chunks, all_chunks, batches;
  int groups, group_heads, splits, head_dim, state_dim;
  int skips, biased;        // dd and ddt_bias are wanted
} ssd_bwd_params;

// db and dc from their parts.
typedef struct ssd_bwd_join_params {
  const float *parts;
  ssd_steps steps;
  void *db, *dc;
  int64_t db_stride[3], dc_stride[3];
  int first, chunks, batches, groups, splits, state_dim;
} ssd_bwd_join_params;

// da, dd and ddt_bias [heads] from the chunks' shares.
typedef struct ssd_bwd_sums_params {
  const float *sums;
  float *out[3];            // NULL: not wanted
  int batches, chunks, heads;
} ssd_bwd_sums_params;
