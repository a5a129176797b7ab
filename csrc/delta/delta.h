// Parameters of the delta rules' forward kernels. Plain C: filled by the host halves.
#pragma once
#include "runtime/divisor.h"
#include "ssd/ssd.h"

// Rows of steps in chunks of 64, and where a chunk has its place in scratch: a batch's chunks one behind the other. The
// chunks of packed rows begin at starts[row] / 64 + row; some places between rows are empty.
typedef struct delta_rows {
  const int *starts;          // [rows + 1]: row i is steps starts[i] .. starts[i + 1] - 1 of batch 0; NULL: of batch i
  int rows, steps;            // steps: of a batch
  int from, to;               // of dense rows: steps from .. to - 1 are worked on, whole chunks in front. from's chunk
                              // has place 0
  int places;                 // of chunks, of a batch
  int heads, group_heads;     // heads of v, and how many of them share q and k
  int key_heads;              // heads / group_heads
} delta_rows;

// What acts on a step and head: the log decay g, and beta. With a_log they are given as models have them:
// g = -e^a_log softplus(g + dt_bias).
typedef struct delta_gates {
  const float *g, *beta;      // [batch, steps, heads]; g NULL: 0
  const float *a_log, *dt_bias;   // [heads] or NULL
  const float *norm_q, *norm_k;   // [batch, key heads, steps]: the factors that make rows of q and k ones of length 1;
                              // NULL: 1
  int sigmoid;                // beta is the sigmoid of what is given,
  float most;                 // times this
} delta_gates;

// Kda's chunks that are prepared while the pass over the sequence is under way, one wave of heads after another: of
// each wave and place a counter of those that are in memory, 0 at first. NULL: all are there before the pass begins.

// delta_norms.cu: 1 / sqrt(x.x + 1e-6) of rows x of q and of k
typedef struct delta_norms_params {
  gmap q, k;                  // [batch, key head, step, key_dim]
  float *norm_q, *norm_k;     // as above
  int batches, heads, steps;  // heads: of q and k
} delta_norms_params;

// delta_prepare.cu: of each head and chunk M^T and P^T, 64 x 64 of 16 bits, fp16 whatever the type of the call; fp32
// where that is fp32.
//   M = (I + L diag(beta))^-1,  L_ij = e^(l_i - l_j) k_i . k_j for j < i
//   P_ij = scale e^(l_i - l_j) q_i . k_j for j <= i
typedef struct delta_prepare_params {
  gmap q, k;                  // [batch, key head, step, key_dim]
  gmap m, p;                  // [batch, head, 64 place + row, 64]
  delta_rows rows;
  delta_gates gates;
  float scale;
  int batches;
  const int *taken;           // two words. Not 0, then 0: another kernel has passed over all rows, made m and p, and
                              // was not found wrong. Or NULL
} delta_prepare_params;

// The line of all chunks, those of a row of a head behind each other and then the next head's, and ranges of it
// (range_begin).
typedef struct delta_line {
  divisor ranges;             // by 0: there are none
  divisor places, heads;      // chunks of a row of a head, heads of a row
  int chunks;
} delta_line;

// Where rows are cut into segments, or their line into ranges
typedef struct delta_cut {
  float *states;              // [row, stride, head, value_dim, key_dim]: those behind segments; EARLY: as the cuts of
                              // delta_meets_params
  const float *early;         // EARLY: of delta_fades.cu, `earlies` numbers
  int *takes;                 // EARLY: `taken` of the kernels behind, whose first word is written
  int earlies, stride;
  int segments, segment;      // of a row, 0: one; steps of one, whole chunks
  delta_line line;            // of ranges states are [ranges - 1, two halves of 64 values, parts of 16 columns]: what
                              // all but the first began with, in the order of store_acc()
  int *told;                  // [ranges - 1]: not 0 where that is there
} delta_cut;

// delta_sweep.cu. Where heads are few, dense rows are cut into segments, each a row of its own. CUT makes what they
// begin with: the states behind all segments but the last, the first one's from `initial`, the others' from 0; and of
// these by what a segment multiplies the state before it, S <- turn S. delta_join.cu then adds up. CHANNELS: k, q and w
// have places, they are k e^l, scale q e^l and k e^(l_e - l), with the norms' factors.
typedef struct delta_sweep_params {
  gmap q, k, w;               // [batch, key head, step, key_dim]; CHANNELS: [batch, head, 64 place + row, D]
  gmap v, o;                  // [batch, head, step, value_dim]; CUT: o is absent
  gmap m, p;                  // as above, where the kernel has no prepare role; CUT: p is absent
  const int *done;            // as above, of dense rows that are not cut, or NULL
  int wave;                   // heads of all rows in one; the last may have less
  const int *taken;           // as of delta_prepare_params
  gmap turns;                 // CUT: [row heads, cut, 2 D, D], bf16, or fp32 as the call: turns, transposed; of
                              // each the leading 8 bits, then the rest
  gmap states;                // delta_keep.cu: [batch heads, place, value_dim, key_dim]: S^T in front of chunks
  gmap errors;                // delta_keep.cu: [batch, head, step - from (packed: step), value_dim]: R
  const float *ends;          // CHANNELS: [batch, heads, places, D]: e^(l_e) of each channel
  const float *initial;       // [row, head, ...], the state before step `from`, or NULL: 0
  float *final;               // the one behind step `to` - 1, or NULL
  ssd_order initial_order, final_order;   // a row of these is a column of v
  delta_rows rows;
  delta_gates gates;          // CHANNELS: beta only
  float scale;
  void *o_data;               // o, or the errors, again, for the last chunks of packed rows: strides in elements
  int64_t o_step, o_head;
  int key_dim, value_dim;
  delta_cut cut;
} delta_sweep_params;

// Where gates forget, a segment needs of the row before it the last few chunks alone. It begins there with a state of
// 0, so all segments are worked on at a time. That it was right is seen when all is over: delta_meets.cu, of ranges
// kda_whole.cu. Else the kernels behind it, whose `taken` it is, do all.
// delta_fades.cu
typedef struct delta_fades_params {
  const void *g;              // [batch, step, head, columns], strides in elements: floats or 16 bits. Log decays, or
                              // with a_log -e^a_log softplus(g + dt_bias) or, where lower_bound is not 0, lower_bound
                              // sigmoid(e^a_log (g + dt_bias))
  int64_t batch, step, head;
  int is_float;
  const float *a_log;         // [heads], or [columns] where columns are heads; or NULL
  const float *dt_bias;       // [heads, columns] or NULL
  float lower_bound;
  int columns_are_heads;      // and line.heads 1
  int columns, from, segment, most;       // most: chunks that a segment may begin early
  int back;                   // 1: those behind a segment, whose pass goes back
  delta_line line;            // where there are no ranges, a matrix has `places` ends of segments
  int *told;                  // of ranges: they become 0
  float *early;               // [batch, head, segments - 1] or [ranges - 1]: chunks by which they begin early; 0: the
                              // decays are slow. To where its head begins is always enough
  int *wrong;                 // becomes 0: the second word of `taken` of the kernels behind
} delta_fades_params;

// delta_meets.cu. cuts: [row, cut_stride, head, two halves of 64 values] states in the order of store_acc(): those
// behind all segments but the last, then what segments but the first began with.
typedef struct delta_meets_params {
  const float *cuts;
  int *taken;                 // as of delta_prepare_params: the first word is read, the second one counts blocks that
                              // found what is wrong
  int segments, cut_stride, heads, keys;      // keys: columns of states there, 64 or 128
} delta_meets_params;

// delta_join.cu: cuts[i] += turns[i] cuts[i - 1], for i from 1 to cut - 1
typedef struct delta_join_params {
  gmap turns;
  float *cuts;
  int cut, cut_stride, rows, heads, key_dim, value_dim;
  const int *taken;           // as of delta_prepare_params
} delta_join_params;
