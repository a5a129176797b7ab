// Parameters of the attention kernels. Plain C: filled by attention/attention.c and attention_bwd.c, read by
// attention_*.cu.
#pragma once
#include "tile/gmap.h"

// FEATURES of a row in kernels.def: the set of features that its kernel has. Of a problem (mg_problem.features): the
// least set that it needs. Each set contains those in front of it.
enum {
  FEATURES_NONE,            // causal or not
  FEATURES_WINDOWS,         // windows: each row sees some of the keys in front of it and behind
  FEATURES_PACKED,          // packed sequences; in the forward sinks too, which the backward finds in the lse
  FEATURES_ALL,             // softcap, ALiBi and dropout
  FEATURES_ANY_SOFTCAP      // of problems only: a softcap that no model has, which few
                            // backward kernels take
};

// What the kernels of rows with FEATURES compute besides; 0 and NULL where not wanted. Rows and keys count within a
// sequence.
typedef struct attention_features {
  const int *q_start, *k_start;   // [batch + 1]: where the sequences begin in packed q (o, dq, lse) and k, v, whose
                                  // maps have batch 1; NULL: dense
  const float *sink;              // [q_heads]: a logit of each head that only the denominator sees
  const float *slopes;            // ALiBi: scores fall by slopes[batch * slope_batch + head] for each step between row
                                  // and key
  int slope_batch;
  int lower;                      // query row i sees keys from i + lower on; -2^30: from the first on. Packed: before
                                  // keys - rows of the sequence is added, as for `diagonal`
  float softcap;                  // scores x become softcap tanh(x / softcap)
  uint32_t drop_below;            // probabilities are dropped where their random 16 bits are below
  float keep_scale;               // 1 / (1 - dropout probability)
  uint32_t seed[2];
} attention_features;

// Where the blocks of packed sequences lie in the backward's workspace. `start` NULL: dense, each (batch, head) has
// q_padded of them. A sequence has room for its rows, rounded up to blocks, and for at least one block of padding.
typedef struct packed_rows {
  const int *start;         // [batch + 1]
  int tile;                 // blocks of 64 rows in the main kernel's block of query rows
  int head_blocks;          // blocks of 64 rows of a head, all sequences
} packed_rows;

// Rows of a packed tensor behind its last sequence, *end to rows - 1, which become 0. Strides are in elements. `end`
// NULL: there are none.
typedef struct rows_behind {
  void *data;
  int64_t row, head;
  int columns, heads, rows;
  const int *end;
} rows_behind;

// o = softmax(scale q k^T) v. Tasks are blocks of query rows of one (batch, head).
typedef struct attention_fwd_params {
  gmap q, k, v, o;
  attention_features features;
  void *out;                // o again, for blocks of rows that end inside the packed tensor: strides in elements
  int64_t out_row, out_head;
  int out_columns;
  float *lse;               // [batch, q_heads, q_total], natural log; NULL where not wanted
  int *counter;             // the workspace's first word, from which tasks are drawn: starts at 0. NULL: static order
  int tasks, q_blocks;      // q_blocks: blocks of query rows of one head
  int batch, q_heads, group;   // group: query heads per key head
  int q_total, k_rows;      // q_total: rows of q in memory; k_rows: keys of a sequence, of the longest where packed
  int diagonal;             // query row i sees keys up to i + diagonal; 2^30 where not masked. Packed: before keys -
                            // rows of the sequence is added
  int l2_heads;             // heads in a section, inside which tasks run longest first; 1 without a mask
  float scale_log2;         // softmax scale * log2(e)
} attention_fwd_params;

// The same for q, k and v of 8 bits, each to be multiplied by its factor of [batch, k_heads]; NULL: 1.
typedef struct attention_fp8_params {
  attention_fwd_params fwd;
  const float *q_descale, *k_descale, *v_descale;
  int k_heads;
} attention_fp8_params;

// delta = ds_scale (rowsum(o * dout) - dlse) and lse * log2(e), both padded to whole blocks (lse = inf, delta = 0);
// zeros in dq_acc and counters.
typedef struct attention_bwd_pre_params {
  gmap o, dout;
  const float *lse, *dlse;  // [batch, q_heads, q_total]; dlse may be NULL
  float *lse2, *delta;      // [batch, q_heads, q_padded * 64]
  float *dq_acc;            // [batch, q_heads, q_padded, D / 64] accumulator tiles of 64 x 64
  int64_t zero_blocks;      // blocks of 64 rows, from the first on, that become zeros here; the main kernel writes the
                            // others
  int *counters;
  int counter_words;
  int tasks, q_padded, q_heads;   // q_padded: blocks of 64 rows of one head, padding included
  int q_total;              // rows of q in memory, as in the forward
  packed_rows packed;
  float ds_scale;           // as in attention_bwd_params
} attention_bwd_pre_params;

// dk or dv
typedef struct attention_grad {
  gmap map;
  void *data;               // again, for blocks of keys that end inside the packed tensor: strides in elements
  int64_t row, head;
  int columns;
  float *acc;               // [batch, key heads, acc_blocks, D / 64] tiles as in dq_acc, where the query heads of a
                            // group are split in parts; else NULL
} attention_grad;

typedef struct attention_bwd_params {
  gmap q, k, v, dout;
  attention_grad dk, dv;
  attention_features features;
  const float *lse2, *delta;
  float *dq_acc;
  int lag;                  // each task writes its share of the zeros of dq_acc for the head (or part) this many heads
                            // after its own; 0: all zeros were written before
  int *zeroed;              // [batch * k_heads], from 0: blocks of the grid that have done so for a head
  int acc_blocks;           // of dk and dv: blocks of 64 keys of a head; packed sequences: of all of them
  int *counter;             // in the workspace: tasks are drawn from it
  int *order;               // [batch, q_heads, q_padded, 2; of 256 columns 4]: key blocks that have added to this half
                            // or quarter of a block of dq; NULL where not deterministic
  int tasks, k_blocks;
  int q_padded, q_blocks;   // blocks of the kernel's tile of query rows of one head: allocated, at least q_blocks + 1
                            // (packed sequences: for all of them together); with rows in them
  int batch, q_heads, k_heads, group;   // k_heads: parts of all key heads; group: query heads of a part
  int parts;                // of a key head: a task walks over one part, a share of the head's query heads. 1: over all
  int q_rows, k_rows;       // rows and keys of a sequence, of the longest one where they are packed
  int diagonal;             // as above
  int l2_heads;             // parts of key heads in a section, inside which the blocks seen by most queries come first
  float scale_log2;         // softmax scale * log2(e)
  float ds_scale, out_scale;   // two factors of the softmax scale: ds and delta carry ds_scale; dq and dk are
                               // multiplied by out_scale at the end
} attention_bwd_params;

// dq = scale * accumulator, rounded to 16 bits. Likewise dk and dv of groups in parts, with keys for q's rows.
typedef struct attention_bwd_post_params {
  gmap dq;
  packed_rows packed;
  void *out;                // dq again, as in the forward
  int64_t out_row, out_head;
  int columns;
  const float *dq_acc;
  int tasks, q_blocks, acc_blocks, q_heads;   // blocks of 64 rows of one head: with rows in them, allocated
  float scale;              // out_scale of attention_bwd_params; 1 for accumulators of dk, which have it, and of dv
  rows_behind behind[3];    // of dq, dk, dv
} attention_bwd_post_params;
