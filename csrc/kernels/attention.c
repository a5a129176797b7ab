// Host half of attention: checks what the arguments have to agree on, picks the kernel, fills its parameters, launches it.
#include <math.h>
#include <string.h>
#include "kernels/attention.h"
#include "runtime/runtime.h"

#define LOG2E 1.4426950408889634
#define NO_DIAGONAL (1 << 30)   // sequences are shorter than 2^30

typedef struct shape {
  int64_t batch, q_heads, k_heads, q_rows, k_rows, d, dv;   // rows of a sequence, at most
  int64_t q_total, k_total;                                 // rows in memory of a (batch, head)
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
  *x = (shape){q->shape[0], q->shape[1], k->shape[1], q->shape[2], k->shape[2], q->shape[3], v->shape[3], q->shape[2], k->shape[2]};
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
// What the features' arguments have to agree on; packed sequences become the shape's batch and rows.
static mg_status read_features(shape *x, const char *op, const mg_attention_features *f) {
  static const mg_attention_features none;
  if (!f) f = &none;
  if (f->sink && f->sink->shape[0] != x->q_heads)
    return mg_fail(MG_VALUE, "%s: sink has size %lld, expected %lld (heads of q)", op, (long long)f->sink->shape[0], (long long)x->q_heads);
  if (!(f->softcap >= 0) || isinf(f->softcap)) return mg_fail(MG_VALUE, "%s: softcap is %g, expected 0 (none) or a positive number", op, (double)f->softcap);
  if (!(f->dropout >= 0 && f->dropout < 1)) return mg_fail(MG_VALUE, "%s: dropout_p is %g, expected 0 to less than 1", op, (double)f->dropout);
  if (!f->q_start != !f->k_start)
    return mg_fail(MG_TYPE, "%s: cu_seqlens_%s is missing, expected both or none", op, f->q_start ? "k" : "q");
  if (f->q_start) {
    int64_t starts = f->q_start->shape[0];
    if (starts < 1 || f->k_start->shape[0] != starts)
      return mg_fail(MG_VALUE, "%s: cu_seqlens_q has size %lld and cu_seqlens_k %lld, expected the number of sequences plus 1 in both", op,
                     (long long)starts, (long long)f->k_start->shape[0]);
    if (x->batch != 1) return mg_fail(MG_VALUE, "%s: q has batch %lld, expected 1 where sequences are packed", op, (long long)x->batch);
    if (f->max_q < 0 || f->max_q > INT32_MAX / 2 || f->max_k < 0 || f->max_k > INT32_MAX / 2)
      return mg_fail(MG_VALUE, "%s: max_seqlen_q is %lld and max_seqlen_k %lld, expected 0 to 2^30", op, (long long)f->max_q, (long long)f->max_k);
    x->batch = starts - 1;
    x->q_rows = at_most(x->q_total, f->max_q);
    x->k_rows = at_most(x->k_total, f->max_k);
  }
  if (f->slopes && (f->slopes->shape[1] != x->q_heads || (f->slopes->shape[0] != 1 && f->slopes->shape[0] != x->batch)))
    return mg_fail(MG_VALUE, "%s: alibi_slopes has shape [%lld, %lld], expected [%lld] or [%lld, %lld] (heads of q, or batch and heads)", op,
                   (long long)f->slopes->shape[0], (long long)f->slopes->shape[1], (long long)x->q_heads, (long long)x->batch, (long long)x->q_heads);
  if (x->batch * x->q_heads > INT32_MAX / 2) return mg_fail(MG_VALUE, "%s: %lld sequences times heads, at most 2^30 are accepted", op, (long long)(x->batch * x->q_heads));
  return MG_OK;
}
static mg_status check_starts(const shape *x, const char *op, const mg_attention_features *f) {
  mg_status status = f->q_start ? mg_check_starts(op, 'q', f->q_start, x->q_total, f->max_q) : MG_OK;
  return !status && f->k_start ? mg_check_starts(op, 'k', f->k_start, x->k_total, f->max_k) : status;
}
static int feature_class(const mg_attention_features *f) {
  if (!f) return 0;
  if (f->softcap != 0 || f->dropout != 0 || f->sink || f->slopes) return 2;
  return f->q_start || (f->window && (f->left >= 0 || f->right >= 0));
}
// The diagonals between which a row sees keys; of packed sequences, before their lengths.
static int upper_diagonal(const shape *x, const mg_attention_options *options) {
  const mg_attention_features *f = options->features;
  int64_t right = f && f->window && f->right >= 0 ? f->right : -1;
  if (options->causal && (right < 0 || right > 0)) right = 0;
  return right < 0 || right >= NO_DIAGONAL / 2 ? NO_DIAGONAL : (int)((f && f->q_start ? 0 : x->k_rows - x->q_rows) + right);
}
static int lower_diagonal(const shape *x, const mg_attention_features *f) {
  if (!f || !f->window || f->left < 0 || f->left >= NO_DIAGONAL / 2) return -NO_DIAGONAL;
  return (int)((f->q_start ? 0 : x->k_rows - x->q_rows) - f->left);
}
// Keys that a row sees at most.
static int64_t span_of(const shape *x, const mg_attention_options *options) {
  const mg_attention_features *f = options->features;
  if (!f || !f->window || f->left < 0 || (f->right < 0 && !options->causal)) return x->k_rows;
  return at_most(x->k_rows, f->left + 1 + (options->causal ? 0 : f->right));
}
static attention_features features_of(const shape *x, const mg_attention_features *f) {
  attention_features k = {.lower = lower_diagonal(x, f)};
  if (!f) return k;
  if (f->q_start) {
    k.q_start = f->q_start->data;
    k.k_start = f->k_start->data;
  }
  if (f->sink) k.sink = f->sink->data;
  if (f->slopes) {
    k.slopes = f->slopes->data;
    k.slope_batch = f->slopes->shape[0] > 1 ? (int)x->q_heads : 0;
  }
  k.softcap = f->softcap;
  k.drop_below = (uint32_t)lrint((double)f->dropout * 4294967295.0);
  k.keep_scale = (float)(1 / (1 - (double)f->dropout));
  k.seed[0] = (uint32_t)f->seed;
  k.seed[1] = (uint32_t)(f->seed >> 32);
  return k;
}
static mg_status read_scale(float *scale, const char *op, const mg_attention_options *options, const shape *x) {
  *scale = options->scale != 0 ? options->scale : (float)(1 / sqrt((double)x->d));
  if (!(*scale > 0) || isinf(*scale)) return mg_fail(MG_VALUE, "%s: scale must be positive and finite, found %g", op, (double)options->scale);
  return MG_OK;
}
static mg_problem problem_of(const shape *x, const mg_attention_options *options, const mg_tensor *q, int sms) {
  return (mg_problem){.dtype = q->dtype, .gpu = q->device == MG_CUDA, .causal = options->causal, .deterministic = options->deterministic,
                      .d = x->d > x->dv ? x->d : x->dv, .batch = x->batch, .heads_q = x->q_heads, .heads_k = x->k_heads, .nq = x->q_rows,
                      .nk = x->k_rows, .span = span_of(x, options), .features = feature_class(options->features), .sms = sms};
}
// Grid of a persistent kernel. On the CPU the thread pool draws single tasks, in order.
static int64_t grid(const mg_context *c, const mg_kernel *row, int64_t tasks) {
  const mg_kernel_desc *d = mg_desc(row);   // a task is a cluster's
  return (c->persistent ? at_most(at_least(1, (int64_t)c->sms * d->blocks_per_sm / d->cluster), tasks) : tasks) * d->cluster;
}
// Of the numbers of heads from `most` down to half of that, the one that leaves the fullest last section.
static int even_section(int64_t most, int64_t heads) {
  int64_t best = most = at_most(heads, at_least(1, most));
  for (int64_t n = most; n > most / 2; n--)
    if (((heads - 1) % n + 1) * best > ((heads - 1) % best + 1) * n) best = n;
  return (int)best;
}
// Heads in a section of the causal forward, whose tasks run longest first: k and v in a quarter of the L2, since both halves of the chip keep a
// copy; at least 8, for the last section must balance the multiprocessors; few enough that loads of one section run beside products of the last.
static int forward_section(const mg_context *c, int64_t bytes, int64_t heads) {
  return even_section(at_least(8, at_most(c->sms / 4, c->l2_bytes * 2 / 7 / at_least(1, bytes))), heads);
}
// Key heads of k_blocks tasks in a section of the backward. Masked: as many as balance the multiprocessors; of grouped queries, whose tasks are long, a
// task for each. Else q, dout and dq stay in the L2.
static int backward_section(const mg_context *c, bool masked, int64_t bytes, const attention_bwd_params *p) {
  int64_t most = at_most(16, c->l2_bytes * 2 / 3 / at_least(1, bytes));
  if (masked) most = p->group == 1 ? 8 : at_least(4, at_most(8, c->sms / p->k_blocks));
  return even_section(most, (int64_t)p->batch * p->k_heads);
}
static mg_status map(gmap *m, const mg_context *c, const char *name, const mg_tensor *t, int box_rows) {
  return mg_map(m, c, name, t->data, t->dtype, t->shape, t->stride, box_rows, 64);
}
static mg_status map_once(gmap *m, const mg_context *c, const char *name, const mg_tensor *t) {   // read once: blocks of 64 rows
  return mg_map_once(m, c, name, t->data, t->dtype, t->shape, t->stride, 64, 64);
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
  shape x = {0};
  float scale = 0;
  const mg_attention_features none = {0}, *f = options->features ? options->features : &none;
  mg_status status = mg_check(MG_OP_attention_fwd, (const mg_tensor *[]){out, lse, q, k, v, workspace, f->sink, f->slopes, f->q_start, f->k_start});
  if (!status) status = read_shape(&x, op, q, k, v);
  const int64_t in_memory[] = {x.batch, x.q_heads, x.q_total, x.dv};
  if (!status) status = read_features(&x, op, options->features);
  if (!status) status = check_starts(&x, op, f);
  if (!status) status = read_scale(&scale, op, options, &x);
  if (!status) status = check_shape(op, "out", out, 4, in_memory);
  if (!status && lse) status = check_shape(op, "lse", lse, 3, in_memory);
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
  if (x.q_heads * in_memory[0] * x.q_total == 0) return MG_OK;
  if (x.k_total == 0) {
    status = mg_is_empty(out) ? MG_OK : fill(&c, out, 0);
    return status || !lse ? status : fill(&c, lse, 0xff800000u);   // -inf
  }
  if (x.dv == 0) return mg_fail(MG_UNSUPPORTED, "%s: v has head dimension 0, accepted are 1 to 256", op);
  const mg_kernel_desc *desc = mg_desc(row);
  attention_fwd_params p = {
    .lse = lse ? lse->data : NULL, .q_blocks = (int)ceil_div(x.q_rows, desc->tile_m), .batch = (int)x.batch, .q_heads = (int)x.q_heads,
    .group = (int)(x.q_heads / x.k_heads), .q_rows = (int)x.q_total, .k_rows = (int)x.k_rows,
    .diagonal = upper_diagonal(&x, options), .scale_log2 = (float)(scale * LOG2E), .features = features_of(&x, options->features),
    .out = out->data, .out_row = out->stride[2], .out_head = out->stride[1], .out_columns = (int)x.dv};
  int64_t tasks = (int64_t)p.q_blocks * x.batch * x.q_heads;
  if (tasks > INT32_MAX / 2) return mg_fail(MG_VALUE, "%s: %lld row blocks, at most 2^30 are accepted", op, (long long)tasks);
  p.tasks = (int)tasks;
  p.l2_heads = p.diagonal != NO_DIAGONAL ? forward_section(&c, x.k_rows * (x.d + x.dv) * 2 / p.group, x.batch * x.q_heads) : 1;
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
  int64_t tile, q_blocks, q_real, blocks64;   // blocks of the main kernel's tile rows; allocated blocks of 64 rows, of a sequence
  int64_t head_blocks;                        // allocated blocks of 64 rows of a head: of all its packed sequences
  int64_t width;                              // columns of an accumulator row: the main kernel's head dimension
  size_t lse2, delta, counters, counter_words, bytes;   // offsets in bytes
} plan;

static size_t round_up(size_t n) { return (n + 255) & ~(size_t)255; }

static mg_status make_plan(plan *w, const shape *x, const mg_problem *problem, bool packed, const mg_context *c) {
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
  w->head_blocks = w->blocks64;
  if (packed) {   // see padded_block() in attention_features.h
    heads = x->q_heads;
    w->blocks64 += w->tile / 64;
    w->head_blocks = (x->q_total / w->tile + 2 * x->batch) * (w->tile / 64);
    w->q_blocks = w->head_blocks / (w->tile / 64);
  }
  size_t rows = (size_t)(heads * w->head_blocks * 64);
  w->lse2 = round_up(rows * (size_t)w->width * sizeof(float));
  w->delta = w->lse2 + round_up(rows * sizeof(float));
  w->counters = w->delta + round_up(rows * sizeof(float));
  w->counter_words = 4 + (problem->deterministic ? (size_t)(heads * w->q_blocks * 4) : 0);
  w->bytes = w->counters + round_up(w->counter_words * sizeof(int));
  if (x->batch * x->q_heads * w->blocks64 > INT32_MAX / 8 || heads * w->head_blocks > INT32_MAX / 8) return mg_fail(MG_VALUE, "attention_backward: %lld row blocks, too many", (long long)(heads * w->blocks64));
  return MG_OK;
}

mg_status mg_attention_bwd_workspace(size_t *bytes, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v, const mg_attention_options *options) {
  shape x;
  plan w;
  mg_context c;
  mg_status status = q && k && v ? MG_OK : mg_fail(MG_TYPE, "attention_backward: q, k or v is missing, expected tensors");
  if (!status && (q->dims != 4 || k->dims != 4 || v->dims != 4)) status = mg_fail(MG_VALUE, "attention_backward: q, k, v must have 4 dimensions");
  if (!status) status = read_shape(&x, "attention_backward", q, k, v);
  if (!status) status = read_features(&x, "attention_backward", options->features);
  if (!status) status = mg_context_open(&c, q, NULL);
  if (status) return status;
  mg_problem problem = problem_of(&x, options, q, c.sms);
  if ((status = make_plan(&w, &x, &problem, options->features && options->features->q_start, &c))) return status;
  *bytes = x.q_heads * q->shape[0] * x.q_total * x.k_total == 0 ? 0 : w.bytes;
  return MG_OK;
}

mg_status mg_attention_bwd(const mg_tensor *dq, const mg_tensor *dk, const mg_tensor *dv, const mg_tensor *dout, const mg_tensor *q,
                           const mg_tensor *k, const mg_tensor *v, const mg_tensor *out, const mg_tensor *lse, const mg_tensor *dlse,
                           const mg_tensor *workspace, const mg_attention_options *options, mg_stream stream) {
  static const char op[] = "attention_backward";
  shape x = {0};
  float scale = 0;
  const mg_attention_features none = {0}, *f = options->features ? options->features : &none;
  mg_status status = mg_check(MG_OP_attention_bwd, (const mg_tensor *[]){dq, dk, dv, dout, q, k, v, out, lse, dlse, workspace, f->sink, f->slopes,
                                                                         f->q_start, f->k_start});
  if (!status) status = read_shape(&x, op, q, k, v);
  const int64_t o_shape[4] = {x.batch, x.q_heads, x.q_total, x.dv};
  if (!status) status = read_features(&x, op, options->features);
  if (!status) status = check_starts(&x, op, f);
  if (!status) status = read_scale(&scale, op, options, &x);
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
  if ((status = make_plan(&w, &x, &problem, options->features && options->features->q_start, &c))) return status;
  if (x.q_heads * o_shape[0] * x.q_total * x.k_total == 0) {
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
  const packed_rows packed = {f->q_start ? f->q_start->data : NULL, (int)(w.tile / 64), (int)w.head_blocks};

  attention_bwd_pre_params pre = {.lse = lse->data, .dlse = dlse ? dlse->data : NULL, .lse2 = lse2, .delta = delta, .dq_acc = acc,
                                  .counters = counters, .counter_words = (int)w.counter_words, .tasks = (int)(heads * w.blocks64),
                                  .q_blocks = (int)w.blocks64, .q_heads = (int)x.q_heads, .q_rows = (int)x.q_total,
                                  .packed = packed};
  if ((status = map_once(&pre.o, &c, "attention_backward: out", out)) || (status = map_once(&pre.dout, &c, "attention_backward: dout", dout)) ||
      (status = mg_launch(&c, w.pre, &pre, grid(&c, w.pre, pre.tasks))))
    return status;

  const mg_kernel_desc *desc = mg_desc(w.main);
  attention_bwd_params p = {
    .lse2 = lse2, .delta = delta, .dq_acc = acc, .counter = counters, .order = options->deterministic ? counters + 4 : NULL,
    .k_blocks = (int)ceil_div(x.k_rows, desc->tile_n), .q_blocks = (int)w.q_blocks, .q_real = (int)w.q_real, .batch = (int)x.batch,
    .q_heads = (int)x.q_heads, .k_heads = (int)x.k_heads, .group = (int)(x.q_heads / x.k_heads), .q_rows = (int)x.q_rows,
    .k_rows = (int)x.k_rows, .diagonal = upper_diagonal(&x, options), .scale = (float)(scale * LOG2E),
    .features = features_of(&x, options->features), .dk_out = dk->data, .dk_row = dk->stride[2], .dk_head = dk->stride[1],
    .dv_out = dv->data, .dv_row = dv->stride[2], .dv_head = dv->stride[1], .k_columns = (int)x.d, .v_columns = (int)x.dv};
  p.tasks = (int)(x.batch * x.k_heads * p.k_blocks);
  p.l2_heads = backward_section(&c, p.diagonal != NO_DIAGONAL, x.q_rows * p.group * (4 * w.width + 2 * (x.d + x.dv)), &p);
  int rows = (int)at_most(64, desc->tile_n);
  if ((status = map(&p.q, &c, "attention_backward: q", q, desc->tile_m)) || (status = map(&p.dout, &c, "attention_backward: dout", dout, desc->tile_m)) ||
      (status = map(&p.k, &c, "attention_backward: k", k, rows)) || (status = map(&p.v, &c, "attention_backward: v", v, rows)) ||
      (status = map(&p.dk, &c, "attention_backward: dk", dk, rows)) || (status = map(&p.dv, &c, "attention_backward: dv", dv, rows)) ||
      (status = mg_launch(&c, w.main, &p, grid(&c, w.main, p.tasks))))
    return status;

  attention_bwd_post_params post = {.dq_acc = acc, .q_blocks = (int)ceil_div(x.q_rows, 64), .acc_blocks = (int)w.blocks64,
                                    .q_heads = (int)x.q_heads, .scale = scale, .packed = packed, .out = dq->data, .out_row = dq->stride[2],
                                    .out_head = dq->stride[1], .columns = (int)x.d};
  post.tasks = (int)(heads * post.q_blocks);
  if ((status = map(&post.dq, &c, "attention_backward: dq", dq, 64))) return status;
  return mg_launch(&c, w.post, &post, grid(&c, w.post, post.tasks));
}
