// Parameters of the kernels of Kimi delta attention. Plain C: filled by kda.c.
#pragma once
#include <stdint.h>
#include "tile/gmap.h"

// How log decays are made of what the caller gave, x, with rate = e^a_log of the head and b = dt_bias of the channel.
enum kda_gate {
  KDA_LOG,                  // x
  KDA_SOFTPLUS,             // -rate softplus(x + b)
  KDA_BOUNDED,              // lower_bound sigmoid(rate (x + b))
};

// A number of each step and head, or of each step, head and channel: elements of floats or of 16 bits; strides of batch,
// step and head in elements. data NULL: absent.
typedef struct kda_given {
  const void *data;
  int64_t batch, step, head;
  int is_float;
} kda_given;

// Chunks of 64 steps begin where a row begins. Those of a batch are counted from 0; packed rows have their chunks one
// behind the other, row i from starts[i] / 64 + i on, and some places between them are empty.
typedef struct kda_prepare_params {
  gmap q, k;                // [batch, step, head, key_dim]
  // What a chunk's place has for each value head: T^T and P^T, two matrices of 64 x 64; k e^l, scale q e^l and
  // k e^(l_e - l), three of 64 x key_dim; e^(l_e) [key_dim]. [batch value_heads, chunk of the segment, ...]
  gmap pairs, scaled;
  float *decays;
  kda_given g, beta;
  const float *a_log;       // [value_heads]
  const float *dt_bias;     // [value_heads, key_dim] or NULL: 0
  const int *starts;        // [rows + 1]: row i is steps starts[i] .. starts[i + 1] - 1 of batch 0; NULL: of batch i
  float scale;              // of q
  float lower_bound;
  float beta_factor;        // of sigmoid(beta); 0: beta is taken as it is
  int gate;                 // enum kda_gate
  int norm;                 // q and k of l2 norm 1
  int first, chunks;        // the segment's first chunk and number of chunks
  int batches, steps, rows; // steps: of a batch
  int heads, group_heads;   // value heads, and how many share q and k
  int key_dim;
} kda_prepare_params;
