// What the host halves of attention's forward and backward share: reading the arguments, what follows from them for the
// kernels.
#pragma once
#include <float.h>
#include <math.h>
#include "attention/attention.h"
#include "runtime/runtime.h"

#define LOG2E 1.4426950408889634
#define NO_DIAGONAL (1 << 30)   // sequences are shorter than 2^30

typedef struct attention_shape {
  int64_t batch, q_heads, k_heads, q_rows, k_rows, d, dv;   // rows of a sequence, at most
  int64_t q_total, k_total;                                 // rows in memory of a (batch, head)
  int64_t out[4];                                           // of the output's tensor
  float scale;
} attention_shape;

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t at_least(int64_t low, int64_t x) { return x < low ? low : x; }
static inline int64_t at_most(int64_t high, int64_t x) { return x > high ? high : x; }

static inline float attention_log2_scale(const attention_shape *x) { return (float)fmin(x->scale * LOG2E, FLT_MAX); }

// Shape, features and scale. Fails where the arguments do not agree, and names the one.
mg_status attention_read(attention_shape *x, const char *op, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v,
                         const mg_attention_options *options);
// Starts of packed sequences, on the CPU; on the GPU they are not read.
mg_status attention_check_starts(const attention_shape *x, const char *op, const mg_attention_features *f);
mg_status attention_check_shape(const char *op, const char *name, const mg_tensor *t, int dims, const int64_t *want);
mg_status attention_check_contiguous(const char *op, const char *name, const mg_tensor *t);

mg_problem attention_problem_of(const attention_shape *x, const mg_attention_options *options, const mg_tensor *q,
                                int sms);
attention_features attention_features_of(const attention_shape *x, const mg_attention_features *f);
// The last key that row 0 sees; of packed sequences, before their lengths.
int attention_upper_diagonal(const attention_shape *x, const mg_attention_options *options);

// Grid of a persistent kernel. On the CPU the thread pool draws single tasks, in order.
int64_t attention_grid(const mg_context *c, const mg_kernel *row, int64_t tasks);
// Of the numbers of heads from `most` down to half of that, the one that leaves the fullest last section.
int attention_even_section(int64_t most, int64_t heads);
mg_status attention_map(gmap *m, const mg_context *c, const char *name, const mg_tensor *t, int box_rows, int box_cols);
// Every element of a tensor with contiguous last dimension.
mg_status attention_fill(const mg_context *c, const mg_tensor *t, uint32_t word);
