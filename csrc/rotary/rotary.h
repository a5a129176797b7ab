// Parameters of the rotary embedding's kernel. Plain C: filled by rotary.c, read by rotary.cu.
#pragma once
#include <stdint.h>
#include "tile/pairing.h"

typedef struct rotary_rows { void *data; int64_t stride[3]; } rotary_rows;   // [batch, step, head] of rows; elements
typedef struct rotary_side {           // q, or k
  rotary_rows in, out;
  int heads, heads_log2, blocks;       // a step has 2^heads_log2 slots, which walk over its heads together
} rotary_side;

// A block has 2^(slots_log2 - heads_log2) steps (of all samples, one after another) of q, or of k: those of q come
// first.
typedef struct rotary_params {
  pairing columns;
  rotary_side q, k;
  const void *cos, *sin;
  int64_t cos_stride[2], sin_stride[2];   // sample (0: the same for all), row
  const int *positions, *offsets;      // NULL: none
  int64_t positions_stride;
  int angles_are_float, angle_rows, offset;
  float sign;                          // of the angles
  int steps, tokens, slots_log2;       // tokens: steps of all samples
} rotary_params;
