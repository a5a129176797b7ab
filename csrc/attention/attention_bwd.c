// Host half of attention's backward: checks what the arguments have to agree on, picks the kernels, lays out the workspace, launches them.
#include <string.h>
#include "attention/attention_problem.h"

static mg_status check_out(const char *op, const char *name, const mg_tensor *t, const mg_tensor *like) {
  return attention_check_shape(op, name, t, like->dims, like->shape);
}
static mg_status map_once(gmap *m, const mg_context *c, const char *name, const mg_tensor *t) {   // read once: blocks of 64 rows
  return mg_map_once(m, c, name, t->data, t->dtype, t->shape, t->stride, 64, 64);
}
// Key heads (or parts) of k_blocks tasks in a section of the backward. Masked: as many as balance the multiprocessors; of grouped queries, whose tasks
// are long, a task for each. Else q, dout and dq stay in the L2.
static int backward_section(const mg_context *c, bool masked, int64_t bytes, const attention_bwd_params *p) {
  int64_t most = at_most(16, c->l2_bytes * 2 / 3 / at_least(1, bytes));
  if (masked) most = p->group == 1 ? 8 : at_least(4, at_most(8, c->sms / p->k_blocks));
  return attention_even_section(most, (int64_t)p->batch * p->k_heads);
}
// Whole sections, whose tasks are all drawn before the next one's, and so many that they are done by then: half as many tasks again as run at a time.
static int backward_lag(const mg_context *c, const attention_bwd_params *p) {
  int64_t lag = p->l2_heads * ceil_div(3 * c->sms, 2 * (int64_t)p->k_blocks * p->l2_heads);
  return lag < (int64_t)p->batch * p->k_heads ? (int)lag : 0;
}

// The workspace is  dq accumulator | lse2 | delta | counter | order | zeroed | dk accumulator | dv accumulator
typedef struct plan {
  const mg_kernel *pre, *main, *post;
  int64_t tile, q_padded, q_blocks, blocks64;   // blocks of the main kernel's tile rows; allocated blocks of 64 rows, of a sequence
  int64_t head_blocks;                        // allocated blocks of 64 rows of a head: of all its packed sequences
  int64_t width;                              // columns of an accumulator row: the main kernel's head dimension
  int64_t acc_blocks;                         // blocks of 64 keys of a head in dk's and dv's accumulators, packed sequences: of all of them
  int parts;                                  // of each group of query heads; 1: dk and dv need no accumulators
  size_t lse2, delta, counters, zeroed, counter_words, dk, dv, bytes;   // offsets in bytes; zeroed: in words, from the counters
} plan;

static size_t round_up(size_t n) { return (n + 255) & ~(size_t)255; }

// The kernel of all features, whose blocks have 64 keys, does not add up parts.
static bool adds_parts(const mg_kernel *main) { return mg_desc(main)->tile_n >= 128; }
// Not every kernel zeroes dq itself: those for packed sequences and for all features have no thread for it. For pairs of 128
// keys (D=128), and for groups in parts there, zeros before the kernel are 1 to 3 % faster.
static bool writes_zeros(const plan *w) {
  return w->main->constant().FEATURES < FEATURES_PACKED && mg_desc(w->main)->tile_n == 128 &&
         (w->parts == 1 || mg_desc(w->main)->cluster > 1);
}

// A task walks over the query rows of all heads that share its keys. Where such tasks are too few for the multiprocessors, or their heads have more than 512
// columns (found by measuring: 0.87 of the speed with 1024), the heads are dealt out to tasks whose dk and dv are added up in fp32.
static int parts_of(const attention_shape *x, const mg_problem *problem, const plan *w, int64_t k_blocks, const mg_context *c) {
  const int64_t group = x->q_heads / at_least(1, x->k_heads);
  const int64_t blocks = at_most(NO_DIAGONAL, mg_times(x->batch * x->k_heads, k_blocks * mg_desc(w->main)->cluster));
  int64_t parts = 1;
  if (problem->deterministic || !adds_parts(w->main)) return 1;
  while (parts < group && (2 * blocks * parts < 3 * c->sms || (problem->gpu && group / parts * w->width > 512)))
    do parts++; while (group % parts);
  return (int)parts;
}

static mg_status make_plan(plan *w, const attention_shape *x, const mg_problem *problem, bool packed, const mg_context *c) {
  mg_status status = mg_select(&w->main, MG_OP_attention_bwd, problem, c);
  if (status) return status;
  mg_problem beside = *problem;
  beside.main = w->main;
  status = mg_select(&w->pre, MG_OP_attention_bwd_pre, &beside, c);
  if (!status) status = mg_select(&w->post, MG_OP_attention_bwd_post, &beside, c);
  if (status) return status;
  int64_t heads = x->batch * x->q_heads;
  w->tile = mg_desc(w->main)->tile_m;
  w->width = mg_desc(w->pre)->tile_n;
  w->q_blocks = ceil_div(x->q_rows, w->tile);
  w->q_padded = w->q_blocks + 1;
  w->blocks64 = w->q_padded * (w->tile / 64);
  w->head_blocks = w->blocks64;
  if (packed) {   // see padded_block() in attention_rows.h
    heads = x->q_heads;
    w->blocks64 += w->tile / 64;
    w->head_blocks = (x->q_total / w->tile + 2 * x->batch) * (w->tile / 64);
    w->q_padded = w->head_blocks / (w->tile / 64);
  }
  size_t rows = (size_t)(heads * w->head_blocks * 64);
  w->lse2 = round_up(rows * (size_t)w->width * sizeof(float));
  w->delta = w->lse2 + round_up(rows * sizeof(float));
  w->counters = w->delta + round_up(rows * sizeof(float));
  int64_t tile_n = mg_desc(w->main)->tile_n, k_blocks = ceil_div(x->k_rows, tile_n);
  w->parts = parts_of(x, problem, w, at_least(1, k_blocks), c);
  w->zeroed = 4 + (problem->deterministic ? (size_t)(heads * w->q_padded * 4) : 0);
  w->counter_words = w->zeroed + (size_t)(x->batch * x->k_heads * w->parts);
  w->dk = w->counters + round_up(w->counter_words * sizeof(int));
  w->acc_blocks = (packed ? x->k_total / tile_n + 2 * x->batch : k_blocks) * (tile_n / 64);
  size_t acc = w->parts > 1 ? (size_t)((packed ? 1 : x->batch) * x->k_heads * w->acc_blocks * 64 * w->width) * sizeof(float) : 0;
  w->dv = w->dk + round_up(acc);
  w->bytes = w->dv + round_up(acc);
  // `parts` of the accumulators' blocks of 64 keys are less than these
  const int64_t key_tasks = mg_times(x->batch * x->k_heads, w->parts * k_blocks);
  if (key_tasks > INT32_MAX / 2)
    return mg_fail(MG_VALUE, "attention_backward: %lld blocks of keys (%lld %s, %lld heads, %lld blocks for up to %lld keys), "
                   "at most 2^30 are accepted", (long long)key_tasks, (long long)x->batch, packed ? "packed sequences" : "batch",
                   (long long)x->k_heads * w->parts, (long long)k_blocks, (long long)x->k_rows);
  if (x->batch * x->q_heads * w->blocks64 > INT32_MAX / 8 || heads * w->head_blocks > INT32_MAX / 8) return mg_fail(MG_VALUE, "attention_backward: %lld row blocks, too many", (long long)(heads * w->blocks64));
  return MG_OK;
}

mg_status mg_attention_bwd_workspace(size_t *bytes, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v, const mg_attention_options *options) {
  attention_shape x;
  plan w;
  mg_context c;
  mg_status status = q && k && v ? MG_OK : mg_fail(MG_TYPE, "attention_backward: q, k or v is missing, expected tensors");
  if (!status && (q->dims != 4 || k->dims != 4 || v->dims != 4)) status = mg_fail(MG_VALUE, "attention_backward: q, k, v must have 4 dimensions");
  const mg_tensor *const tensors[] = {q, k, v};
  for (int i = 0; i < 3 && !status; i++)
    status = mg_check_sizes("attention_backward", (const char *[]){"q", "k", "v"}[i], tensors[i]);
  if (!status) status = attention_read(&x, "attention_backward", q, k, v, options);
  if (!status) status = mg_context_open(&c, q, NULL);
  if (status) return status;
  mg_problem problem = attention_problem_of(&x, options, q, c.sms);
  if ((status = make_plan(&w, &x, &problem, options->features && options->features->q_start, &c))) return status;
  *bytes = x.q_heads * q->shape[0] * x.q_total * x.k_total == 0 ? 0 : w.bytes;
  return MG_OK;
}

// ds carries the softmax scale, so that no product with k or q leaves the range of fp32 that the gradient is in. Of a scale above 2^10 the rest comes later:
// dout v^T may be as large as k and q are small. fp16 has no such range, and few bits for a small ds.
static float ds_scale_of(const attention_shape *x, mg_dtype dtype) { return dtype == MG_FP16 ? 1.0f : fminf(x->scale, 1024); }

// out = scale * acc. acc_blocks: allocated blocks of 64 rows of a head. behind: three, or NULL.
static mg_status round_acc(const mg_context *c, const mg_kernel *post, const char *name, const mg_tensor *out, const float *acc, float scale,
                           int64_t batch, int64_t rows, int64_t acc_blocks, packed_rows packed, const rows_behind *behind) {
  attention_bwd_post_params p = {.dq_acc = acc, .q_blocks = (int)ceil_div(rows, 64), .acc_blocks = (int)acc_blocks, .q_heads = (int)out->shape[1],
                                 .scale = scale, .packed = packed, .out = out->data, .out_row = out->stride[2], .out_head = out->stride[1],
                                 .columns = (int)out->shape[3]};
  p.tasks = (int)(batch * out->shape[1] * p.q_blocks);
  if (behind) memcpy(p.behind, behind, sizeof p.behind);
  mg_status status = attention_map(&p.dq, c, name, out, 64, 64);
  return status ? status : mg_launch(c, post, &p, attention_grid(c, post, p.tasks));
}

mg_status mg_attention_bwd(const mg_tensor *dq, const mg_tensor *dk, const mg_tensor *dv, const mg_tensor *dout, const mg_tensor *q,
                           const mg_tensor *k, const mg_tensor *v, const mg_tensor *out, const mg_tensor *lse, const mg_tensor *dlse,
                           const mg_tensor *workspace, const mg_attention_options *options, mg_stream stream) {
  static const char op[] = "attention_backward";
  attention_shape x = {0};
  const mg_attention_features none = {0}, *f = options->features ? options->features : &none;
  mg_status status = mg_check_by_hand(MG_OP_attention_bwd, (const mg_tensor *[]){dq, dk, dv, dout, q, k, v, out, lse, dlse, workspace, f->sink, f->slopes,
                                                                         f->q_start, f->k_start});
  if (!status) status = attention_read(&x, op, q, k, v, options);
  if (!status) status = attention_check_starts(&x, op, options->features);
  if (!status) status = attention_check_shape(op, "out", out, 4, x.out);
  if (!status) status = attention_check_shape(op, "dout", dout, 4, x.out);
  if (!status) status = attention_check_shape(op, "lse", lse, 3, x.out);
  if (!status) status = attention_check_contiguous(op, "lse", lse);
  if (!status && dlse) status = attention_check_shape(op, "dlse", dlse, 3, x.out);
  if (!status && dlse) status = attention_check_contiguous(op, "dlse", dlse);
  if (!status) status = check_out(op, "dq", dq, q);
  if (!status) status = check_out(op, "dk", dk, k);
  if (!status) status = check_out(op, "dv", dv, v);
  if (status) return status;
  mg_context c;
  if ((status = mg_context_open(&c, q, stream))) return status;
  mg_problem problem = attention_problem_of(&x, options, q, c.sms);
  plan w;
  if ((status = make_plan(&w, &x, &problem, options->features && options->features->q_start, &c))) return status;
  if (x.q_heads * x.out[0] * x.q_total * x.k_total == 0 || x.batch * x.q_rows * x.k_rows == 0) {   // the latter: no sequence, or only empty ones
    const mg_tensor *all[] = {dq, dk, dv};
    for (int i = 0; i < 3; i++)
      if (!mg_is_empty(all[i]) && (status = attention_fill(&c, all[i], 0))) return status;
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
  const packed_rows packed_keys = {f->k_start ? f->k_start->data : NULL, mg_desc(w.main)->tile_n / 64, (int)w.acc_blocks};


  const mg_kernel_desc *desc = mg_desc(w.main);
  const float ds_scale = ds_scale_of(&x, q->dtype);
  attention_bwd_params p = {
    .lse2 = lse2, .delta = delta, .dq_acc = acc, .counter = counters, .order = options->deterministic ? counters + 4 : NULL,
    .zeroed = counters + w.zeroed, .k_blocks = (int)ceil_div(x.k_rows, desc->tile_n), .q_padded = (int)w.q_padded, .q_blocks = (int)w.q_blocks, .batch = (int)x.batch,
    .q_heads = (int)x.q_heads, .k_heads = (int)x.k_heads * w.parts, .group = (int)(x.q_heads / x.k_heads) / w.parts, .parts = w.parts,
    .acc_blocks = (int)w.acc_blocks,
    .q_rows = (int)x.q_rows, .k_rows = (int)x.k_rows, .diagonal = attention_upper_diagonal(&x, options), .scale_log2 = attention_log2_scale(&x),
    .ds_scale = ds_scale, .out_scale = x.scale / ds_scale, .features = attention_features_of(&x, options->features),
    .dk = {.data = dk->data, .row = dk->stride[2], .head = dk->stride[1], .columns = (int)x.d, .acc = w.parts > 1 ? (float *)(base + w.dk) : NULL},
    .dv = {.data = dv->data, .row = dv->stride[2], .head = dv->stride[1], .columns = (int)x.dv, .acc = w.parts > 1 ? (float *)(base + w.dv) : NULL}};
  p.tasks = (int)(x.batch * p.k_heads * p.k_blocks);   // make_plan has seen that it fits
  p.l2_heads = backward_section(&c, p.diagonal != NO_DIAGONAL, x.q_rows * p.group * (4 * w.width + 2 * (x.d + x.dv)), &p);
  if (writes_zeros(&w)) p.lag = backward_lag(&c, &p);
  attention_bwd_pre_params pre = {.lse = lse->data, .dlse = dlse ? dlse->data : NULL, .lse2 = lse2, .delta = delta, .dq_acc = acc,
                                  .zero_blocks = p.lag ? p.lag * p.group * w.blocks64 : INT64_MAX, .counters = counters, .counter_words = (int)w.counter_words, .tasks = (int)(heads * w.blocks64),
                                  .q_padded = (int)w.blocks64, .q_heads = (int)x.q_heads, .q_total = (int)x.q_total,
                                  .packed = packed, .ds_scale = ds_scale};
  if ((status = map_once(&pre.o, &c, "attention_backward: out", out)) || (status = map_once(&pre.dout, &c, "attention_backward: dout", dout)) ||
      (status = mg_launch(&c, w.pre, &pre, attention_grid(&c, w.pre, pre.tasks))))
    return status;

  if (w.parts > 1 && (status = mg_fill(&c, base + w.dk, 0, sizeof(int), (int64_t)((w.bytes - w.dk) / sizeof(int))))) return status;
  int rows = (int)at_most(64, desc->tile_n);
  if ((status = attention_map(&p.q, &c, "attention_backward: q", q, desc->tile_m, 64)) || (status = attention_map(&p.dout, &c, "attention_backward: dout", dout, desc->tile_m, 64)) ||
      (status = attention_map(&p.k, &c, "attention_backward: k", k, rows, 64)) || (status = attention_map(&p.v, &c, "attention_backward: v", v, rows, 64)) ||
      (status = attention_map(&p.dk.map, &c, "attention_backward: dk", dk, rows, 64)) || (status = attention_map(&p.dv.map, &c, "attention_backward: dv", dv, rows, 64)) ||
      (status = mg_launch(&c, w.main, &p, attention_grid(&c, w.main, p.tasks))))
    return status;

  rows_behind behind[3] = {0};
  for (int i = 0; i < 3 && f->q_start; i++) {
    const mg_tensor *t = (const mg_tensor *[]){dq, dk, dv}[i];
    const int *start = (i ? f->k_start : f->q_start)->data;
    behind[i] = (rows_behind){t->data, t->stride[2], t->stride[1], (int)t->shape[3], (int)t->shape[1], (int)t->shape[2], start + x.batch};
  }
  status = round_acc(&c, w.post, "attention_backward: dq", dq, acc, p.out_scale, x.batch, x.q_rows, w.blocks64, packed, behind);
  if (status || w.parts == 1) return status;
  if ((status = round_acc(&c, w.post, "attention_backward: dk", dk, p.dk.acc, 1, x.batch, x.k_rows, w.acc_blocks, packed_keys, NULL))) return status;
  return round_acc(&c, w.post, "attention_backward: dv", dv, p.dv.acc, 1, x.batch, x.k_rows, w.acc_blocks, packed_keys, NULL);
}
