// Parameters of the kernels of qk_norm_rotary. Plain C: filled by qk_norm_rotary.c, read by qk_norm_rotary.cu and
// qk_norm_rotary_bwd.cu.
#pragma once
#include "rotary/rotary.h"

typedef struct qk_side {
  rotary_side rows;                    // stride[0] and [1] of rows.out in a cache: cache or page, row in it
  const void *weight;                  // NULL: no norm
  int weight_is_float, turned, cached; // turned: norm and rotation; else the rows stay as they are
} qk_side;

// Blocks of q come first, then those of k, then those of v, which is copied into its cache.
typedef struct qk_norm_rotary_params {
  pairing columns;
  qk_side side[3];
  const void *cos, *sin;
  int64_t cos_stride[2], sin_stride[2];   // sample (0: the same for all), row
  const int *positions, *offsets;      // NULL: none
  int64_t positions_stride;
  const int *lengths, *page_table, *cache_index;    // NULL: none
  int64_t page_stride;
  int length, keys, caches, page_size; // of a cache: what it holds already, room, how many, rows of a page
  int angles_are_float, angle_rows, offset;
  int steps, tokens, slots_log2;       // tokens: steps of all samples
  float eps, per_column;               // per_column: 1 / columns
} qk_norm_rotary_params;

typedef struct qk_bwd_side {
  rotary_side rows;                    // in: gradients of the results; out: of q or k, whose data may be NULL
  rotary_rows x;                       // q, or k
  const void *weight;                  // NULL: no norm
  int weight_is_float;
} qk_bwd_side;

typedef struct qk_norm_rotary_bwd_params {
  pairing columns;
  qk_bwd_side side[2];
  const void *cos, *sin;
  int64_t cos_stride[2], sin_stride[2];
  const int *positions, *offsets;      // NULL: none
  int64_t positions_stride;
  int angles_are_float, angle_rows, offset;
  int steps, tokens, slots_log2;
  float eps, per_column;
  float *partials;                     // [blocks, 2, padded]: sums of both weights' gradients; NULL: none is wanted
  int64_t padded;
} qk_norm_rotary_bwd_params;
