// Parameters of the causal convolution's kernels. Plain C: filled by causal_conv1d.c.
#pragma once
#include <stdint.h>
#include "tile/gmap.h"

// What all of them know of the problem.
typedef struct causal_conv1d_problem {
  const void *weight, *bias;        // [channels, W], [channels] or NULL; fp32, or as x
  int weight_is_float, bias_is_float;
  const void *initial;              // [sequences, W - 1, channels] or NULL: zeros
  int64_t initial_sequence, initial_step;   // strides in elements
  const int *starts, *seq_idx;      // [sequences + 1], [batch, steps]; at most one of them
  int64_t seq_idx_batch;            // stride in elements
  int steps, channels, sequences, silu;
} causal_conv1d_problem;

// A task: 256 channels of one batch entry, and of its tiles of 16 steps a segment.
typedef struct causal_conv1d_cut { int tasks, col_blocks, segments, segment_steps, steps; } causal_conv1d_cut;

typedef struct causal_conv1d_states {       // [sequences, W - 1, channels] or NULL
  void *data;
  int64_t sequence, step;
} causal_conv1d_states;

typedef struct causal_conv1d_params {
  gmap x, out;
  causal_conv1d_problem problem;
  causal_conv1d_cut cut;
  const void *first;                // x again, whose last steps become the final states
  int64_t x_batch, x_step;
  causal_conv1d_states final;
  int states;                       // tasks: final states of 256 channels of a sequence
} causal_conv1d_params;

typedef struct causal_conv1d_bwd_params {
  gmap x, dout, dx;
  causal_conv1d_problem problem;
  causal_conv1d_cut cut;
  int writes_dx;
  float *partials;                  // [batch, segment, W + 1, channels]: dweight by taps, dbias
} causal_conv1d_bwd_params;

typedef struct causal_conv1d_bwd_post_params {
  causal_conv1d_problem problem;
  const float *partials;
  int parts, col_blocks;
  void *dweight, *dbias;            // fp32, or as x
  int dweight_is_float, dbias_is_float;
  const void *x, *dout;
  void *dx;
  int64_t x_batch, x_step, dout_batch, dout_step, dx_batch, dx_step;
  causal_conv1d_states dfinal, dinitial;
  int sums, edges;                  // tasks: 256 channels of one sum; of the steps at both ends of a sequence
} causal_conv1d_bwd_post_params;

typedef struct causal_conv1d_step_params {
  causal_conv1d_problem problem;    // its weights
  const void *x;
  void *out, *state;                // [batch, steps, channels], [states, length, channels]
  int64_t x_batch, x_step, out_batch, out_step, state_slot, state_step, state_channel;
  const int *used, *slots;          // [batch] or NULL: steps that a sequence has had; its place in state, or padding
  int steps, length, states, col_blocks;
} causal_conv1d_step_params;
