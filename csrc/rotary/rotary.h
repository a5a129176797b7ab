// Parameters of the rotary embedding's kernel. Plain C: filled by rotary.c, read by rotary.cu.
#pragma once
#include <stdint.h>
#include "tile/pairing.h"

typedef struct rotary_rows { void *data; int64_t stride[3]; } rotary_rows;   // [batch, step, head] of rows; elements

// A task is 2^(slots_log2 - heads_log2) steps (of all samples, one after another), a head of one of which is in each
// slot. The slots of a step walk over its heads together: those of q, then those of k.
typedef struct rotary_params {
  pairing columns;
  rotary_rows q, k, q_out, k_out;      // data of k NULL: none
  const void *cos, *sin;
  int64_t cos_stride[2], sin_stride[2];   // sample (0: the same for all), row
  const int *positions, *offsets;      // NULL: none
  int64_t positions_stride;
  int angles_are_float, angle_rows, offset;
  float sign;                          // of the angles
  int steps, tokens, q_heads, heads;   // tokens: steps of all samples; heads: of q and k
  int heads_log2, slots_log2;
} rotary_params;
