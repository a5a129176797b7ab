// Host half of attention: checks what the arguments have to agree on, picks the kernel, fills its parameters, launches it.
#include <math.h>
#include <string.h>
#include "kernels/attention.h"
#include "runtime/runtime.h"

#define LOG2E 1.4426950408889634
#define NO_DIAGONAL (1 << 30)   // sequences are shorter than 2^30

typedef struct shape {
  int64_t batch, q_heads, k_heads, q_rows, k_rows, d, dv;
} shape;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t at_least(int64_t low, int64_t x) { return x < low ? low : x; }
static int64_t at_most(int64_t high, int64_t x) { return x > high ? high : x; }

static mg_status check_shape(const char *op, const char *name, const mg_tensor *t, int dims, const int64_t *want) {
  for (int i = 0; i < dims; i++)
    if (t->shape[i] != want[i])
      return mg_fail(MG_VALUE, "%s: %s has size %lld in dimension %d, expected %lld", op, name, (long long)t->shape[i], i, (long long)want[i]);
  return MG_OK;
}
static mg_status check_out(const char *op, const char *name, const mg_tensor *t, const mg_tensor *like) {
  return check_shape(op, name, t, like->dims, like->shape);
}
static mg_status check_contiguous(const char *op, const char *name, const mg_tensor *t) {
  int64_t stride = 1;
  if (mg_is_empty(t)) return MG_OK;
  for (int i = t->dims - 1; i >= 0; i--) {
    if (t->shape[i] > 1 && t->stride[i] != stride)
      return mg_fail(MG_VALUE, "%s: %s must be contiguous, its stride in dimension %d is %lld, expected %lld", op, name, i,
                     (long long)t->stride[i], (long long)stride);
    stride *= t->shape[i];
  }
  return MG_OK;
}

static mg_status read_shape(shape *x, const char *op, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v) {
  *x = (shape){q->shape[0], q->shape[1], k->shape[1], q->shape[2], k->shape[2], q->shape[3], v->shape[3]};
  mg_status status = check_shape(op, "k", k, 4, (int64_t[]){x->batch, x->k_heads, x->k_rows, x->d});
  if (!status) status = check_shape(op, "v", v, 4, (int64_t[]){x->batch, x->k_heads, x->k_rows, x->dv});
  if (status) return status;
  if (x->k_heads == 0 ? x->q_heads != 0 : x->q_heads % x->k_heads != 0)
    return mg_fail(MG_VALUE, "%s: q has %lld heads and k has %lld, expected a multiple of k's", op, (long long)x->q_heads, (long long)x->k_heads);
  if (x->d < 1 || x->d > 256 || x->dv > 256)
    return mg_fail(MG_UNSUPPORTED, "%s: head dimension %lld (q, k) and %lld (v), accepted are 1 to 256", op, (long long)x->d, (long long)x->dv);
  if (x->q_rows > INT32_MAX / 2 || x->k_rows > INT32_MAX / 2 || x->batch * x->q_heads > INT32_MAX / 2)
    return mg_fail(MG_VALUE, "%s: sequences and batch * heads must stay below 2^30, found %lld, %lld and %lld", op, (long long)x->q_rows,
                   (long long)x->k_rows, (long long)(x->batch * x->q_heads));
  return MG_OK;
}
static mg_status read_scale(float *scale, const char *op, const mg_attention_options *options, const shape *x) {
  *scale = options->scale != 0 ? options->scale : (float)(1 / sqrt((double)x->d));
  if (!(*scale > 0) || isinf(*scale)) return mg_fail(MG_VALUE, "%s: scale must be positive and finite, found %g", op, (double)options->scale);
  return MG_OK;
}
static mg_problem problem_of(const shape *x, const mg_attention_options *options, const mg_tensor *q, int sms) {
  return (mg_problem){.dtype = q->dtype, .gpu = q->device == MG_CUDA, .causal = options->causal, .deterministic = options->deterministic,
                      .d = x->d > x->dv ? x->d : x->dv, .batch = x->batch, .heads_q = x->q_heads, .heads_k = x->k_heads, .nq = x->q_rows,
                      .nk = x->k_rows, .sms = sms};
}
// Grid of a persistent kernel. On the CPU the thread pool draws single tasks, in order.
static int64_t grid(const mg_context *c, const mg_kernel *row, int64_t tasks) {
  const mg_kernel_desc *d = mg_desc(row);   // a task is a cluster's
  return (c->persistent ? at_most(at_least(1, (int64_t)c->sms * d->blocks_per_sm / d->cluster), tasks) : tasks) * d->cluster;
}
// Heads whose `bytes` each fit two thirds of the L2 together.
static int l2_heads(const mg_context *c, int64_t bytes, int64_t heads) {
  return (int)at_most(heads, at_least(1, c->l2_bytes * 2 / 3 / at_least(1, bytes)));
}
static mg_status map(gmap *m, const mg_context *c, const char *name, const mg_tensor *t, int box_rows) {
  return mg_map(m, c, name, t->data, t->dtype, t->shape, t->stride, box_rows, 64);
}
// Rows of a tensor with contiguous last dimension.
static mg_status fill(const mg_context *c, const mg_tensor *t, uint32_t word) {
  size_t size = mg_dtype_size(t->dtype);
  int64_t n[4] = {1, 1, 1, t->shape[t->dims - 1]}, stride[4] = {0, 0, 0, 1};
  for (int i = 0; i + 1 < t->dims; i++) {
    n[4 - t->dims + i] = t->shape[i];
    stride[4 - t->dims + i] = t->stride[i];
  }
  int inner = 3;   // dimensions after `inner` form one run
  int64_t run = n[3];
  while (inner > 0 && (n[inner - 1] == 1 || stride[inner - 1] == run)) run *= n[--inner];
  for (int i = inner; i < 4; i++) n[i] = 1;
  for (int64_t a = 0; a < n[0]; a++)
    for (int64_t b = 0; b < n[1]; b++)
      for (int64_t r = 0; r < n[2]; r++) {
        mg_status status = mg_fill(c, (char *)t->data + (a * stride[0] + b * stride[1] + r * stride[2]) * (int64_t)size, word, size, run);
        if (status) return status;
      }
  return MG_OK;
}

mg_status mg_attention_fwd(const mg_tensor *out, const mg_tensor *lse, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v,
                           const mg_tensor *workspace, const mg_attention_options *options, mg_stream stream) {
  static const char op[] = "attention";
  shape x;
  float scale;
  mg_status status = mg_check(MG_OP_attention_fwd, (const mg_tensor *[]){out, lse, q, k, v, workspace});
  if (!status) status = read_shape(&x, op, q, k, v);
  if (!status) status = read_scale(&scale, op, options, &x);
  if (!status) status = check_shape(op, "out", out, 4, (int64_t[]){x.batch, x.q_heads, x.q_rows, x.dv});
  if (!status && lse) status = check_shape(op, "lse", lse, 3, (int64_t[]){x.batch, x.q_heads, x.q_rows});
  if (!status && lse) status = check_contiguous(op, "lse", lse);
  if (!status && workspace && (workspace->shape[0] < 16 || ((uintptr_t)workspace->data & 15)))
    status = mg_fail(MG_VALUE, "%s: workspace has %lld bytes at %p, expected 16 bytes, 16-byte aligned", op, (long long)workspace->shape[0],
                     workspace->data);
  if (status) return status;
  mg_context c;
  const mg_kernel *row;
  if ((status = mg_context_open(&c, q, stream))) return status;
  mg_problem problem = problem_of(&x, options, q, c.sms);
  if ((status = mg_select(&row, MG_OP_attention_fwd, &problem, &c))) return status;
  if (x.batch * x.q_heads * x.q_rows == 0) return MG_OK;
  if (x.k_rows == 0) {
    status = mg_is_empty(out) ? MG_OK : fill(&c, out, 0);
    return status || !lse ? status : fill(&c, lse, 0xff800000u);   // -inf
  }
  if (x.dv == 0) return mg_fail(MG_UNSUPPORTED, "%s: v has head dimension 0, accepted are 1 to 256", op);
  const mg_kernel_desc *desc = mg_desc(row);
  attention_fwd_params p = {
    .lse = lse ? lse->data : NULL, .q_blocks = (int)ceil_div(x.q_rows, desc->tile_m), .batch = (int)x.batch, .q_heads = (int)x.q_heads,
    .group = (int)(x.q_heads / x.k_heads), .q_rows = (int)x.q_rows, .k_rows = (int)x.k_rows,
    .diagonal = options->causal ? (int)(x.k_rows - x.q_rows) : NO_DIAGONAL, .scale_log2 = (float)(scale * LOG2E)};
  int64_t tasks = (int64_t)p.q_blocks * x.batch * x.q_heads;
  if (tasks > INT32_MAX / 2) return mg_fail(MG_VALUE, "%s: %lld row blocks, at most 2^30 are accepted", op, (long long)tasks);
  p.tasks = (int)tasks;
  p.l2_heads = options->causal ? l2_heads(&c, x.k_rows * (x.d + x.dv) * 2 / p.group, x.batch * x.q_heads) : 1;
  if ((status = map(&p.q, &c, "attention: q", q, 64)) || (status = map(&p.k, &c, "attention: k", k, desc->tile_n)) ||
      (status = map(&p.v, &c, "attention: v", v, desc->tile_n)) || (status = map(&p.o, &c, "attention: out", out, 64)))
    return status;
  int64_t blocks = grid(&c, row, tasks);
  if (workspace && c.persistent && tasks > blocks) {
    p.counter = workspace->data;
    if ((status = mg_fill(&c, p.counter, 0, sizeof(int), 1))) return status;
  }
  return mg_launch(&c, row, &p, blocks);
}

// ---- backward: workspace is  dq accumulator | lse2 | delta | counter | order
typedef struct plan {
  const mg_kernel *pre, *main, *post;
  int64_t tile, q_blocks, q_real, blocks64;   // blocks of the main kernel's tile rows; allocated blocks of 64 rows
  int64_t width;                              // columns of an accumulator row: the main kernel's head dimension
  size_t lse2, delta, counters, counter_words, bytes;   // offsets in bytes
} plan;

static size_t round_up(size_t n) { return (n + 255) & ~(size_t)255; }

static mg_status make_plan(plan *w, const shape *x, const mg_problem *problem, const mg_context *c) {
  mg_status status = mg_select(&w->main, MG_OP_attention_bwd, problem, c);
  if (!status) status = mg_select(&w->pre, MG_OP_attention_bwd_pre, problem, c);
  if (!status) status = mg_select(&w->post, MG_OP_attention_bwd_post, problem, c);
  if (status) return status;
  int64_t heads = x->batch * x->q_heads;
  w->tile = mg_desc(w->main)->tile_m;
  w->width = mg_desc(w->pre)->tile_n;
  w->q_real = ceil_div(x->q_rows, w->tile);
  w->q_blocks = w->q_real + 1;
  w->blocks64 = w->q_blocks * (w->tile / 64);
  size_t rows = (size_t)(heads * w->blocks64 * 64);
  w->lse2 = round_up(rows * (size_t)w->width * sizeof(float));
  w->delta = w->lse2 + round_up(rows * sizeof(float));
  w->counters = w->delta + round_up(rows * sizeof(float));
  w->counter_words = 4 + (problem->deterministic ? (size_t)(heads * w->q_blocks * 4) : 0);
  w->bytes = w->counters + round_up(w->counter_words * sizeof(int));
  if (heads * w->blocks64 > INT32_MAX / 8) return mg_fail(MG_VALUE, "attention_backward: %lld row blocks, too many", (long long)(heads * w->blocks64));
  return MG_OK;
}

mg_status mg_attention_bwd_workspace(size_t *bytes, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v, const mg_attention_options *options) {
  shape x;
  plan w;
  mg_context c;
  mg_status status = q && k && v ? MG_OK : mg_fail(MG_TYPE, "attention_backward: q, k or v is missing, expected tensors");
  if (!status && (q->dims != 4 || k->dims != 4 || v->dims != 4)) status = mg_fail(MG_VALUE, "attention_backward: q, k, v must have 4 dimensions");
  if (!status) status = read_shape(&x, "attention_backward", q, k, v);
  if (!status) status = mg_context_open(&c, q, NULL);
  if (status) return status;
  mg_problem problem = problem_of(&x, options, q, c.sms);
  if ((status = make_plan(&w, &x, &problem, &c))) return status;
  *bytes = x.batch * x.q_heads * x.q_rows * x.k_rows == 0 ? 0 : w.bytes;
  return MG_OK;
}

mg_status mg_attention_bwd(const mg_tensor *dq, const mg_tensor *dk, const mg_tensor *dv, const mg_tensor *dout, const mg_tensor *q,
                           const mg_tensor *k, const mg_tensor *v, const mg_tensor *out, const mg_tensor *lse, const mg_tensor *dlse,
                           const mg_tensor *workspace, const mg_attention_options *options, mg_stream stream) {
  static const char op[] = "attention_backward";
  shape x;
  float scale;
  mg_status status = mg_check(MG_OP_attention_bwd, (const mg_tensor *[]){dq, dk, dv, dout, q, k, v, out, lse, dlse, workspace});
  if (!status) status = read_shape(&x, op, q, k, v);
  if (!status) status = read_scale(&scale, op, options, &x);
  const int64_t o_shape[4] = {x.batch, x.q_heads, x.q_rows, x.dv};
  if (!status) status = check_shape(op, "out", out, 4, o_shape);
  if (!status) status = check_shape(op, "dout", dout, 4, o_shape);
  if (!status) status = check_shape(op, "lse", lse, 3, o_shape);
  if (!status) status = check_contiguous(op, "lse", lse);
  if (!status && dlse) status = check_shape(op, "dlse", dlse, 3, o_shape);
  if (!status && dlse) status = check_contiguous(op, "dlse", dlse);
  if (!status) status = check_out(op, "dq", dq, q);
  if (!status) status = check_out(op, "dk", dk, k);
  if (!status) status = check_out(op, "dv", dv, v);
  if (status) return status;
  mg_context c;
  if ((status = mg_context_open(&c, q, stream))) return status;
  mg_problem problem = problem_of(&x, options, q, c.sms);
  plan w;
  if ((status = make_plan(&w, &x, &problem, &c))) return status;
  if (x.batch * x.q_heads * x.q_rows * x.k_rows == 0) {
    const mg_tensor *all[] = {dq, dk, dv};
    for (int i = 0; i < 3; i++)
      if (!mg_is_empty(all[i]) && (status = fill(&c, all[i], 0))) return status;
    return MG_OK;
  }
  if (workspace->shape[0] < (int64_t)w.bytes || ((uintptr_t)workspace->data & 15))
    return mg_fail(MG_VALUE, "%s: workspace has %lld bytes at %p, expected %zu bytes, 16-byte aligned", op, (long long)workspace->shape[0],
                   workspace->data, w.bytes);
  char *base = workspace->data;
  float *acc = (float *)base, *lse2 = (float *)(base + w.lse2), *delta = (float *)(base + w.delta);
  int *counters = (int *)(base + w.counters);
  int64_t heads = x.batch * x.q_heads;

  attention_bwd_pre_params pre = {.lse = lse->data, .dlse = dlse ? dlse->data : NULL, .lse2 = lse2, .delta = delta, .dq_acc = acc,
                                  .counters = counters, .counter_words = (int)w.counter_words, .tasks = (int)(heads * w.blocks64),
                                  .q_blocks = (int)w.blocks64, .q_heads = (int)x.q_heads, .q_rows = (int)x.q_rows};
  if ((status = map(&pre.o, &c, "attention_backward: out", out, 64)) || (status = map(&pre.dout, &c, "attention_backward: dout", dout, 64)) ||
      (status = mg_launch(&c, w.pre, &pre, grid(&c, w.pre, pre.tasks))))
    return status;

  const mg_kernel_desc *desc = mg_desc(w.main);
  attention_bwd_params p = {
    .lse2 = lse2, .delta = delta, .dq_acc = acc, .counter = counters, .order = options->deterministic ? counters + 4 : NULL,
    .k_blocks = (int)ceil_div(x.k_rows, desc->tile_n), .q_blocks = (int)w.q_blocks, .q_real = (int)w.q_real, .batch = (int)x.batch,
    .q_heads = (int)x.q_heads, .k_heads = (int)x.k_heads, .group = (int)(x.q_heads / x.k_heads), .q_rows = (int)x.q_rows,
    .k_rows = (int)x.k_rows, .diagonal = options->causal ? (int)(x.k_rows - x.q_rows) : NO_DIAGONAL, .scale = (float)(scale * LOG2E)};
  p.tasks = (int)(x.batch * x.k_heads * p.k_blocks);
  p.l2_heads = l2_heads(&c, x.q_rows * p.group * (4 * w.width + 2 * (x.d + x.dv)), x.batch * x.k_heads);
  int rows = (int)at_most(64, desc->tile_n);
  if ((status = map(&p.q, &c, "attention_backward: q", q, desc->tile_m)) || (status = map(&p.dout, &c, "attention_backward: dout", dout, desc->tile_m)) ||
      (status = map(&p.k, &c, "attention_backward: k", k, rows)) || (status = map(&p.v, &c, "attention_backward: v", v, rows)) ||
      (status = map(&p.dk, &c, "attention_backward: dk", dk, rows)) || (status = map(&p.dv, &c, "attention_backward: dv", dv, rows)) ||
      (status = mg_launch(&c, w.main, &p, grid(&c, w.main, p.tasks))))
    return status;

  attention_bwd_post_params post = {.dq_acc = acc, .q_blocks = (int)ceil_div(x.q_rows, 64), .acc_blocks = (int)w.blocks64,
                                    .q_heads = (int)x.q_heads, .scale = scale};
  post.tasks = (int)(heads * post.q_blocks);
  if ((status = map(&post.dq, &c, "attention_backward: dq", dq, 64))) return status;
  return mg_launch(&c, w.post, &post, grid(&c, w.post, post.tasks));
}
