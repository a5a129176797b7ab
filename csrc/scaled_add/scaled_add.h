// The smallest kernel: the one to copy when adding another.
#pragma once
#include "tile/gmap.h"

typedef struct scaled_add_params {
  gmap a, b, out;
  int tasks, col_blocks;    // tiles of 64 x 64, col_blocks of them side by side
  float scale;
} scaled_add_params;
