// Parameters of the kernel of cross_entropy. Plain C: filled by cross_entropy.c, read by cross_entropy.cu.
#pragma once
#include <stdint.h>

typedef struct cross_entropy_params {
  void *logits;               // gradients take their place
  int64_t stride;             // of rows; elements
  const int *targets;
  const float *scale;         // of the gradients: one, or one for each row; NULL: no gradients are wanted
  float *loss, *lse;          // a row each
  int rows, columns, ignored; // ignored: the target of rows that do not count
  int logits_are_float, in_eights, scale_of_rows;
  float smoothing, softcap, z_loss;
} cross_entropy_params;
