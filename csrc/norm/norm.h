// Parameters of the norms' kernels. Plain C: filled by norm.c.
#pragma once
#include <stdint.h>

// [rows, groups, dim], fp32 or as the kernel's element type; NULL: absent. Strides in elements.
typedef struct norm_stream {
  void *data;
  int64_t row, group;
  int is_float;
} norm_stream;

// What is read beside x: nothing; what is added to it; a gate z, whose silu multiplies what is normalised, or the
// normalised.
enum norm_extra { NORM_PLAIN, NORM_ADD, NORM_GATE_FIRST, NORM_GATE_LAST };

// What both directions know of a problem.
typedef struct norm_problem {
  int rows, groups, dim;
  uint32_t inverse_groups;     // 2^32 / groups, rounded down; at most 2^32 - 1
  // Each warpgroup of a block has `lines` lines at a time; or `span` warpgroups share one. slots: lines of a block
  int lines, span, slots;
  int eights;                  // everything lies at multiples of 16 bytes
  int rms;                     // no mean
  enum norm_extra extra;
  const void *weight, *bias;   // [groups, dim] or NULL
  int weight_is_float, bias_is_float;
  float weight_offset;         // added to the weight; 1 where there is none
  float inverse;               // 1 / dim
  const uint32_t *seed;        // two words; NULL: no dropout
  uint32_t drop_most;          // draws, in the upper 16 bits, up to this are dropped
  float keep_scale;            // 1 / (1 - p), 0 where all are
  float *mean, *rstd;          // [rows, groups]
} norm_problem;

typedef struct norm_fwd_params {
  norm_problem problem;
  norm_stream x, extra, out, sum;      // sum: x behind dropout, with what is added
  int rounds;                          // the sum is rounded to the kernel's element type, whether it is stored or not
  float root_eps, most_scale;          // sqrt(eps), 1e18 / sqrt(eps)
  float least_squares;                 // sums of squares that are not more are not precise enough beside eps
  // of results in e4m3: what they are to be multiplied by, one number (NULL: one for each row); and [rows], or NULL
  const float *out_scale;
  float *descale;
} norm_fwd_params;

typedef struct norm_bwd_params {
  norm_problem problem;
  norm_stream x, dout, extra;          // extra: the gradient of the sum, or the gate
  norm_stream dx, dextra;
  int tiles;
  float *partials;                     // [blocks / groups, slots, 2, groups, columns]: sums of dweight and dbias
  int64_t columns;                     // dim, to a multiple of 8
} norm_bwd_params;

typedef struct norm_bwd_post_params {
  const float *partials;               // [parts, 2, groups, columns]
  int parts, groups, dim, col_blocks;
  int64_t columns;
  void *dweight, *dbias;               // [groups, dim] or NULL
  int weight_is_float, bias_is_float;
} norm_bwd_post_params;
