// Parameters of the kernels of Kimi delta attention. Plain C: filled by kda.c.
#pragma once
#include "delta/delta.h"

// How log decays are made of what the caller gave, x, with rate = e^a_log of the head and b = dt_bias of the channel.
enum kda_gate {
  KDA_LOG,                    // x
  KDA_SOFTPLUS,               // -rate softplus(x + b)
  KDA_BOUNDED,                // lower_bound sigmoid(rate (x + b))
};

// A number of each step and head, or of each step, head and channel: floats or 16 bits; strides of batch, step and head
// in elements.
typedef struct kda_given {
  const void *data;
  int64_t batch, step, head;
  int is_float;
} kda_given;

typedef struct kda_gates {
  kda_given g, beta;
  const float *a_log;         // [heads]
  const float *dt_bias;       // [heads, key_dim] or NULL: 0
  float lower_bound;
  float most;                 // beta is `most` times the sigmoid of what is given; 0: it is what is given
  int gate;                   // enum kda_gate
  int norm;                   // rows of q and k become ones of length 1
} kda_gates;

// kda_decays.cu: of raw gates, and of betas that are not as they act, floats that are.
typedef struct kda_decays_params {
  kda_gates gates;
  float *decays;              // [batch, step - from, head, D], D the row's: log decays; or NULL
  int64_t batch;              // rows of D of a batch
  float *betas;               // [batch, steps, heads], or NULL
  delta_rows rows;
  int tasks, batches, key_dim;
  int eights;                 // eight channels of a head are one access
} kda_decays_params;

// kda_prepare.cu: what delta_prepare.cu makes, with a decay for each channel, and what delta_sweep.cu with CHANNELS
// reads in place of q, k and the decays.
typedef struct kda_prepare_params {
  gmap q, k;                  // [batch, key head, step, key_dim]
  gmap g;                     // [batch, head, step, key_dim]: what gates.g has, where it is `copied`
  gmap m, p;                  // [batch, head, 64 place + row, 64]
  gmap read_k, read_q;        // [batch, head, 64 place + row, D], D the row's: k e^l, scale q e^l
  gmap write_k;               // the same: k e^(l_e - l)
  float *ends;                // [batch, heads, places, D]: e^(l_e)
  delta_rows rows;
  kda_gates gates;            // KDA_LOG, and beta floats that act
  float scale;
  int batches, key_dim;
  int copied;                 // gates.g lies as copies want it, and is read by them where the kernel has room for that
  int *done;                  // as in delta.h, or NULL
  int wave;                   // heads of all batches that are worked on at a time, those of a batch side by side
  int ending;                 // the first so many blocks have no task
  const int *taken;           // as of delta_prepare_params
  int *next;                  // 0 at first: tasks are drawn from it, as some multiprocessors are faster; or NULL
} kda_prepare_params;

// Nanoseconds of packed rows on an H200, by which one kernel or two are chosen: in one, a chunk on its multiprocessor,
// at most; in two, of a chunk of the whole device, its preparation and at least the pass, and of a chunk of the longest
// row.
enum { KDA_ONE = 5500, KDA_MADE = 33, KDA_PASSED = 27, KDA_LONGEST = 2100 };

// kda_whole.cu
typedef struct kda_whole_params {
  gmap q, k, g;               // as above
  gmap m, p;                  // the same; written where the kernel KEEPS
  gmap v, o;                  // [batch, head, step, value_dim]
  const float *initial;       // as of delta_sweep_params
  float *final;
  ssd_order initial_order, final_order;
  delta_rows rows;
  kda_gates gates;            // as of kda_prepare_params, and so is `copied`
  float scale;
  int key_dim, value_dim;
  int copied;
  void *o_data;               // o again, for where packed rows end: strides in elements
  int64_t o_step, o_head;
  int *taken;                 // packed rows, EARLY: that of the kernels behind, whose first word is written, the second
                              // one where a comparison finds what is wrong; or NULL
  delta_cut cut;              // EARLY: of ranges
  int *marks;                 // EARLY: become 0
  int mark_count;
} kda_whole_params;
