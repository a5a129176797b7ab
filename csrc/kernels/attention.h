// Parameters of the attention kernels. Plain C: filled by kernels/attention.c, read by attention_*.cu.
#pragma once
#include "tile/gmap.h"

// o = softmax(scale q k^T) v. Tasks are blocks of query rows of one (batch, head).
typedef struct attention_fwd_params {
  gmap q, k, v, o;
  float *lse;               // [batch, q_heads, q_rows], natural log; NULL where not wanted
  int *counter;             // dynamic task counter that starts at 0, or NULL: static order
  int tasks, q_blocks;      // q_blocks: blocks of query rows of one head
  int batch, q_heads, group;   // group: query heads per key head
  int q_rows, k_rows;
  int diagonal;             // query row i sees keys up to i + diagonal; 2^30 where not causal
  int l2_heads;             // heads in a section, inside which tasks run longest first; 1 without a mask
  float scale_log2;         // softmax scale * log2(e)
} attention_fwd_params;

// delta = rowsum(o * dout) - dlse and lse * log2(e), both padded to whole blocks (lse = inf, delta = 0); zeros in dq_acc and counters.
typedef struct attention_bwd_pre_params {
  gmap o, dout;
  const float *lse, *dlse;  // [batch, q_heads, q_rows]; dlse may be NULL
  float *lse2, *delta;      // [batch, q_heads, q_blocks * 64]
  float *dq_acc;            // [batch, q_heads, q_blocks, D / 64] accumulator tiles of 64 x 64
  int *counters;
  int counter_words;
  int tasks, q_blocks, q_heads, q_rows;   // blocks of 64 rows, padding included
} attention_bwd_pre_params;

typedef struct attention_bwd_params {
  gmap q, k, v, dout, dk, dv;
  const float *lse2, *delta;
  float *dq_acc;
  int *counter;             // dynamic task counter
  int *order;               // [batch, q_heads, q_blocks, 2]: key blocks that have added to this half of dq; NULL where not deterministic
  int tasks, k_blocks;
  int q_blocks, q_real;     // blocks of the kernel's tile of query rows of one head: allocated (at least q_real + 1), with rows in them
  int batch, q_heads, k_heads, group;
  int q_rows, k_rows;
  int diagonal;             // as above
  int l2_heads;             // key heads in a section whose q, dout and dq fit the L2
  float scale;              // softmax scale * log2(e)
} attention_bwd_params;

// dq = scale * accumulator, to 16 bit
typedef struct attention_bwd_post_params {
  gmap dq;
  const float *dq_acc;
  int tasks, q_blocks, acc_blocks, q_heads;   // blocks of 64 rows of one head: with rows in them, allocated
  float scale;
} attention_bwd_post_params;
