// The smallest kernel: the one to copy when adding another.
#pragma once
#include "margay.h"
#include "tile/gmap.h"

typedef struct scaled_add_params {
  gmap a, b, out;
  int tasks, col_blocks;    // tiles of 64 x 64, col_blocks of them side by side
  float scale;
} scaled_add_params;

// out [M, N] = a + scale * b, all [M, N] of one type.
MG_API mg_status mg_scaled_add(const mg_tensor *out, const mg_tensor *a, const mg_tensor *b, float scale, mg_stream stream);
