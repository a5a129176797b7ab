// Parameters of cross_entropy's kernels. Plain C: filled by cross_entropy.c, read by the .cu files.
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

typedef struct cross_entropy_scaled_params {
  void *out;
  const float *sums;          // NULL: out is scaled in place
  const float *scale;
  int64_t columns, stride;    // of out's rows; elements
  int parts, tasks;           // parts of a row
  int in_eights;
} cross_entropy_scaled_params;
