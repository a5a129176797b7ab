// What the host halves of attention share: what is asked, in one form for forward and backward, and what follows from
// it for the kernels.
#pragma once
#include <float.h>
#include <math.h>
#include "attention/attention.h"
#include "runtime/runtime.h"

#define NO_DIAGONAL (1 << 30)   // sequences are shorter than 2^30

// What a forward and a backward are asked alike, and what mg_check has seen of its sizes.
typedef struct attention_shape {
  bool causal, deterministic;
  int64_t left, right;
  float scale, softcap, dropout_p;
  uint64_t seed;
  const mg_tensor *sink, *slopes, *q_start, *k_start;
  int64_t max_q, max_k;
  int64_t batch, q_heads, k_heads, q_rows, k_rows, d, dv;   // rows of a sequence, at most
  int64_t q_total, k_total, rows_batch;                     // rows in memory of a (batch, head), and of how many
                                                            // batches; 1 where they are packed
} attention_shape;
// Of the arguments of attention_fwd or of attention_bwd.
#define ATTENTION_ASKED(a) \
  .causal = (a)->causal, .left = (a)->left, .right = (a)->right, .scale = (a)->scale, \
  .softcap = (a)->softcap, .dropout_p = (a)->dropout_p, \
  .seed = (a)->seed, .sink = (a)->sink, .slopes = (a)->alibi_slopes, .q_start = (a)->cu_seqlens_q, \
  .k_start = (a)->cu_seqlens_k, \
  .max_q = (a)->max_seqlen_q, .max_k = (a)->max_seqlen_k

static inline float attention_log2_scale(const attention_shape *x) { return (float)fmin(x->scale * MG_LOG2E, FLT_MAX); }
// As kernels take it: with a reciprocal in fp32, and room for log2 e. Scores below 2^-126 are 0 to a softmax, and none
// is above 2^125.
static inline float attention_softcap(float x) {
  return x == 0 ? 0 : x < 0x1p-126f ? 0x1p-126f : x > 0x1p125f ? 0x1p125f : x;
}

// The sizes of a call that mg_begin has opened, and its problem. False: a failure.
bool attention_read(mg_call *c, attention_shape *x);
// The starts of packed sequences begin with 0, do not fall and end with at most the rows that there are, and no
// sequence has more than max_q rows or max_k keys. Reads the CPU's tensors; what a GPU holds is not looked at.
void attention_check_starts(mg_call *c, const attention_shape *x);

attention_features attention_features_of(const attention_shape *x);
// The last key that row 0 sees; of packed sequences, before their lengths.
int attention_upper_diagonal(const attention_shape *x);

// Of the numbers of heads from `most` down to half of that, the one that leaves the fullest last section.
int attention_even_section(int64_t most, int64_t heads);
// Every element of a tensor with contiguous last dimension.
void attention_fill(mg_call *c, const mg_tensor *t, uint32_t word);
