// Host half of attention's backward: picks the kernels, lays out the workspace, launches them.
#include <string.h>
#include "attention/attention_problem.h"

// Key heads (or parts) of k_blocks tasks in a section of the backward. Masked: as many as balance the multiprocessors;
// of grouped queries, whose tasks are long, a task for each. Else q, dout and dq stay in the L2.
static int backward_section(const mg_context *c, bool masked, int64_t bytes, const attention_bwd_params *p) {
  int64_t most = mg_min(16, c->l2_bytes * 2 / 3 / mg_max(1, bytes));
  if (masked) most = p->group == 1 ? 8 : mg_max(4, mg_min(8, c->sms / p->k_blocks));
  return attention_even_section(most, (int64_t)p->batch * p->k_heads);
}
// Whole sections, whose tasks are all drawn before the next one's, and so many that they are done by then: half as many
// tasks again as run at a time.
static int backward_lag(const mg_context *c, const attention_bwd_params *p) {
  int64_t lag = p->l2_heads * mg_ceil_div(3 * c->sms, 2 * (int64_t)p->k_blocks * p->l2_heads);
  return lag < (int64_t)p->batch * p->k_heads ? (int)lag : 0;
}

// The workspace is  dq accumulator | lse2 | delta | counter | order | zeroed | dk accumulator | dv accumulator
typedef struct plan {
  const mg_kernel *pre, *main, *post;
  int64_t tile, q_padded, q_blocks, blocks64;   // blocks of the main kernel's tile rows; allocated blocks of 64 rows,
                                                // of a sequence
  int64_t head_blocks;                        // allocated blocks of 64 rows of a head: of all its packed sequences
  int64_t width;                              // columns of an accumulator row: the main kernel's head dimension
  int64_t acc_blocks;                         // blocks of 64 keys of a head in dk's and dv's accumulators, packed
                                              // sequences: of all of them
  int parts;                                  // of each group of query heads; 1: dk and dv need no accumulators
  // offsets in bytes; zeroed: in words, from the counters
  size_t lse2, delta, counters, zeroed, counter_words, dk, dv, bytes;
} plan;

// The kernel of all features, whose blocks have 64 keys, does not add up parts.
static bool adds_parts(const mg_kernel *main) { return mg_desc(main)->tile_n >= 128; }
// Not every kernel zeroes dq itself: those for packed sequences and for all features have no thread for it. For pairs
// of 128 keys (D=128), and for groups in parts there, zeros before the kernel are 1 to 3 % faster.
static bool writes_zeros(const plan *w) {
  return w->main->constant().FEATURES < FEATURES_PACKED && mg_desc(w->main)->tile_n == 128 &&
         (w->parts == 1 || mg_desc(w->main)->cluster > 1);
}

// A task walks over the query rows of all heads that share its keys. Where such tasks are too few for the
// multiprocessors, or their heads have more than 512 columns (found by measuring: 0.87 of the speed with 1024), the
// heads are dealt out to tasks whose dk and dv are added up in fp32.
static int parts_of(const mg_call *c, const attention_shape *x, const plan *w, int64_t k_blocks) {
  const int64_t group = x->q_heads / mg_max(1, x->k_heads);
  const int64_t blocks = mg_min(NO_DIAGONAL, mg_times(x->batch * x->k_heads, k_blocks * mg_desc(w->main)->cluster));
  int64_t parts = 1;
  if (x->deterministic || !adds_parts(w->main)) return 1;
  while (parts < group && (2 * blocks * parts < 3 * c->context.sms ||
                           (c->problem.gpu && group / parts * w->width > 512)))
    do parts++; while (group % parts);
  return (int)parts;
}

static bool make_plan(mg_call *c, plan *w, const attention_shape *x) {
  if (!mg_choose(c)) return false;
  c->problem.main = w->main = c->kernel;
  if (!mg_choose_other(c, MG_OP_attention_bwd_pre)) return false;
  w->pre = c->kernel;
  if (!mg_choose_other(c, MG_OP_attention_bwd_post)) return false;
  w->post = c->kernel;
  const bool packed = x->q_start;
  int64_t heads = x->batch * x->q_heads;
  w->tile = mg_desc(w->main)->tile_m;
  w->width = mg_desc(w->pre)->tile_n;
  w->q_blocks = mg_ceil_div(x->q_rows, w->tile);
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
  w->lse2 = mg_round_up(rows * (size_t)w->width * sizeof(float));
  w->delta = w->lse2 + mg_round_up(rows * sizeof(float));
  w->counters = w->delta + mg_round_up(rows * sizeof(float));
  int64_t tile_n = mg_desc(w->main)->tile_n, k_blocks = mg_ceil_div(x->k_rows, tile_n);
  w->parts = parts_of(c, x, w, mg_max(1, k_blocks));
  w->zeroed = 4 + (x->deterministic ? (size_t)(heads * w->q_padded * 4) : 0);
  w->counter_words = w->zeroed + (size_t)(x->batch * x->k_heads * w->parts);
  w->dk = w->counters + mg_round_up(w->counter_words * sizeof(int));
  w->acc_blocks = (packed ? x->k_total / tile_n + 2 * x->batch : k_blocks) * (tile_n / 64);
  size_t acc = w->parts > 1 ? (size_t)(x->rows_batch * x->k_heads * w->acc_blocks * 64 * w->width) * sizeof(float) : 0;
  w->dv = w->dk + mg_round_up(acc);
  w->bytes = w->dv + mg_round_up(acc);
  // `parts` of the accumulators' blocks of 64 keys are less than these
  const int64_t key_tasks = mg_times(x->batch * x->k_heads, w->parts * k_blocks);
  if (key_tasks > INT32_MAX / 2)
    mg_refuse(c, MG_VALUE,
              "%lld blocks of keys (%lld %s, %lld heads, %lld blocks for up to %lld keys), at most 2^30 are accepted",
              (long long)key_tasks,
              (long long)x->batch, packed ? "packed sequences" : "batch", (long long)x->k_heads * w->parts,
              (long long)k_blocks, (long long)x->k_rows);
  if (x->batch * x->q_heads * w->blocks64 > INT32_MAX / 8 || heads * w->head_blocks > INT32_MAX / 8)
    mg_refuse(c, MG_VALUE, "%lld row blocks, too many", (long long)(heads * w->blocks64));
  return !c->status;
}

static bool is_empty(const attention_shape *x) { return x->q_heads * x->rows_batch * x->q_total * x->k_total == 0; }

mg_status mg_attention_bwd_workspace(size_t *bytes, const mg_attention_bwd_args *a) {
  mg_call c;
  plan w;
  attention_shape x = {ATTENTION_ASKED(a), .deterministic = a->deterministic};
  if (!mg_begin_space(&c, MG_OP_attention_bwd, a) || !attention_read(&c, &x) || !make_plan(&c, &w, &x)) return c.status;
  *bytes = is_empty(&x) ? 0 : w.bytes;
  return MG_OK;
}

// ds carries the softmax scale, so that no product with k or q leaves the range of fp32 that the gradient is in. Of a
// scale above 2^10 the rest comes later: dout v^T may be as large as k and q are small. fp16 has no such range, and few
// bits for a small ds.
static float ds_scale_of(const attention_shape *x, mg_dtype dtype) {
  return dtype == MG_FP16 ? 1.0f : fminf(x->scale, 1024);
}

static attention_grad gradient(const mg_tensor *t, float *acc) {
  return (attention_grad){.data = t->data, .row = t->stride[2], .head = t->stride[1],
                          .columns = (int)t->shape[3], .acc = acc};
}

// out = scale * acc. acc_blocks: allocated blocks of 64 rows of a head. behind: three, or NULL.
static mg_status round_acc(mg_call *c, const mg_tensor *out, const float *acc,
                           float scale, int64_t batch, int64_t rows, int64_t acc_blocks,
                           packed_rows packed, const rows_behind *behind) {
  attention_bwd_post_params p = {.dq_acc = acc, .q_blocks = (int)mg_ceil_div(rows, 64),
                                 .acc_blocks = (int)acc_blocks, .q_heads = (int)out->shape[1],
                                 .scale = scale, .packed = packed, .out = out->data,
                                 .out_row = out->stride[2], .out_head = out->stride[1],
                                 .columns = (int)out->shape[3]};
  p.tasks = (int)(batch * out->shape[1] * p.q_blocks);
  if (behind) memcpy(p.behind, behind, sizeof p.behind);
  mg_map_rows(c, &p.dq, out, 64, 64);
  return mg_run_resident(c, &p, p.tasks);
}

mg_status mg_attention_bwd(const mg_attention_bwd_args *a) {
  mg_call c;
  plan w;
  attention_shape x = {ATTENTION_ASKED(a), .deterministic = a->deterministic};
  if (!mg_begin(&c, MG_OP_attention_bwd, a) || !attention_read(&c, &x)) return c.status;
  attention_check_starts(&c, &x);
  if (!make_plan(&c, &w, &x)) return c.status;
  if (is_empty(&x) || x.batch * x.q_rows * x.k_rows == 0) {   // the latter: no sequence, or only empty ones
    attention_fill(&c, a->dq, 0);
    attention_fill(&c, a->dk, 0);
    attention_fill(&c, a->dv, 0);
    return c.status;
  }
  char *base = mg_space(&c, a->workspace, w.bytes);
  if (!base) return c.status;
  float *acc = (float *)base, *lse2 = (float *)(base + w.lse2), *delta = (float *)(base + w.delta);
  float *dk_acc = w.parts > 1 ? (float *)(base + w.dk) : NULL, *dv_acc = w.parts > 1 ? (float *)(base + w.dv) : NULL;
  int *counters = (int *)(base + w.counters);
  const mg_kernel_desc *desc = mg_desc(w.main);
  const packed_rows packed = {mg_data(x.q_start), (int)(w.tile / 64), (int)w.head_blocks},
                    packed_keys = {mg_data(x.k_start), desc->tile_n / 64, (int)w.acc_blocks};
  const float ds_scale = ds_scale_of(&x, c.problem.dtype);
  attention_bwd_params p = {
    .lse2 = lse2, .delta = delta, .dq_acc = acc, .counter = counters, .order = x.deterministic ? counters + 4 : NULL,
    .zeroed = counters + w.zeroed, .k_blocks = (int)mg_ceil_div(x.k_rows, desc->tile_n), .q_padded = (int)w.q_padded,
    .q_blocks = (int)w.q_blocks,
    .batch = (int)x.batch, .q_heads = (int)x.q_heads, .k_heads = (int)x.k_heads * w.parts,
    .group = (int)(x.q_heads / x.k_heads) / w.parts,
    .parts = w.parts, .acc_blocks = (int)w.acc_blocks, .q_rows = (int)x.q_rows,
    .k_rows = (int)x.k_rows, .diagonal = attention_upper_diagonal(&x),
    .scale_log2 = attention_log2_scale(&x), .ds_scale = ds_scale, .out_scale = x.scale / ds_scale,
    .features = attention_features_of(&x),
    .dk = gradient(a->dk, dk_acc), .dv = gradient(a->dv, dv_acc)};
  p.tasks = (int)(x.batch * p.k_heads * p.k_blocks);   // make_plan has seen that it fits
  p.l2_heads = backward_section(&c.context, p.diagonal != NO_DIAGONAL,
                                x.q_rows * p.group * (4 * w.width + 2 * (x.d + x.dv)), &p);
  if (writes_zeros(&w)) p.lag = backward_lag(&c.context, &p);
  attention_bwd_pre_params pre = {.lse = a->lse->data, .dlse = mg_data(a->dlse),
                                  .lse2 = lse2, .delta = delta, .dq_acc = acc,
                                  .zero_blocks = p.lag ? p.lag * p.group * w.blocks64 : INT64_MAX, .counters = counters,
                                  .counter_words = (int)w.counter_words,
                                  .tasks = (int)(x.batch * x.q_heads * w.blocks64), .q_padded = (int)w.blocks64,
                                  .q_heads = (int)x.q_heads, .q_total = (int)x.q_total,
                                  .packed = packed, .ds_scale = ds_scale};
  mg_use(&c, w.pre);
  mg_map_rows_once(&c, &pre.o, a->out, 64, 64);
  mg_map_rows_once(&c, &pre.dout, a->dout, 64, 64);
  mg_run_resident(&c, &pre, pre.tasks);

  if (dk_acc) mg_set(&c, dk_acc, 0, sizeof(int), (int64_t)((w.bytes - w.dk) / sizeof(int)));
  const int rows = (int)mg_min(64, desc->tile_n);
  mg_use(&c, w.main);
  mg_map_rows(&c, &p.q, a->q, desc->tile_m, 64);
  mg_map_rows(&c, &p.dout, a->dout, desc->tile_m, 64);
  mg_map_rows(&c, &p.k, a->k, rows, 64);
  mg_map_rows(&c, &p.v, a->v, rows, 64);
  mg_map_rows(&c, &p.dk.map, a->dk, rows, 64);
  mg_map_rows(&c, &p.dv.map, a->dv, rows, 64);
  mg_run_resident(&c, &p, p.tasks);

  rows_behind behind[3] = {0};
  for (int i = 0; i < 3 && x.q_start; i++) {
    const mg_tensor *t = (const mg_tensor *[]){a->dq, a->dk, a->dv}[i];
    const int *start = (i ? x.k_start : x.q_start)->data;
    behind[i] = (rows_behind){t->data, t->stride[2], t->stride[1], (int)t->shape[3],
                              (int)t->shape[1], (int)t->shape[2], start + x.batch};
  }
  mg_use(&c, w.post);
  round_acc(&c, a->dq, acc, p.out_scale, x.batch, x.q_rows, w.blocks64, packed, behind);
  if (!dk_acc) return c.status;
  round_acc(&c, a->dk, dk_acc, 1, x.batch, x.k_rows, w.acc_blocks, packed_keys, NULL);
  return round_acc(&c, a->dv, dv_acc, 1, x.batch, x.k_rows, w.acc_blocks, packed_keys, NULL);
}
