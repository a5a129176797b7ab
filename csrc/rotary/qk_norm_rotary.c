// Host halves of qk_norm_rotary, of its form that writes into a cache, by the same kernel, and of its gradients.
#include "norm/norm.h"
#include "rotary/qk_norm_rotary.h"
#include "rotary/rotary_host.h"

// What both are called with; the caches' part has NULL and 0 without one.
typedef struct call {
  const mg_tensor *q, *k, *v, *q_out, *k_out, *v_out, *q_weight, *k_weight, *cos, *sin, *positions, *offsets;
  const mg_tensor *lengths, *page_table, *cache_index;
  int offset, length;
  float eps;
  bool interleaved;
} call;

static qk_side side_of_call(mg_call *c, const call *a, int i, const qk_norm_rotary_params *p) {
  const mg_tensor *in[] = {a->q, a->k, a->v}, *out[] = {a->q_out, a->k_out, a->v_out},
                  *weight[] = {a->q_weight, a->k_weight, NULL};
  if (!in[i] || mg_is_empty(in[i])) return (qk_side){0};
  return (qk_side){.rows = side_of(c, in[i], out[i], i ? c->n.HK : c->n.H, p->tokens, p->slots_log2),
                   .weight = mg_data(weight[i]), .weight_is_float = weight[i] && weight[i]->dtype == MG_FP32,
                   .turned = i < 2, .cached = i && a->v};
}

static mg_status run(mg_call *c, const call *a) {
  if (c->n.K == 0 || (mg_is_empty(a->q) && mg_is_empty(a->k))) return c->status;
  qk_norm_rotary_params p = {
    .columns = {.pairs = (int)c->n.ANGLES, .width = (int)c->n.K, .interleaved = a->interleaved},
    .cos = a->cos->data, .sin = a->sin->data, .cos_stride = {stride_of(a->cos, 0), stride_of(a->cos, 1)},
    .sin_stride = {stride_of(a->sin, 0), stride_of(a->sin, 1)}, .positions = mg_data(a->positions),
    .offsets = mg_data(a->offsets), .positions_stride = a->positions ? stride_of(a->positions, 0) : 0,
    .lengths = mg_data(a->lengths), .page_table = c->n.KEYS > 0 ? mg_data(a->page_table) : NULL,   // else there is none
    .cache_index = mg_data(a->cache_index),
    .page_stride = a->page_table ? stride_of(a->page_table, 0) : 0, .length = a->length,
    .angles_are_float = a->cos->dtype == MG_FP32, .angle_rows = (int)mg_min(c->n.ROWS, INT32_MAX),
    .offset = a->offset, .steps = (int)c->n.T, .tokens = mg_tasks(c, c->n.BQ * c->n.T, "steps"), .eps = a->eps,
    .per_column = 1.f / (float)c->n.K};
  if (a->cos->dtype != a->sin->dtype)
    return mg_refuse(c, MG_TYPE, "sin has dtype %s, expected %s (same as cos)", mg_dtype_name(a->sin->dtype),
                     mg_dtype_name(a->cos->dtype));
  const mg_tensor *all[] = {a->q, a->k, a->v, a->q_out, a->k_out, a->v_out, a->q_weight, a->k_weight, a->cos, a->sin};
  if (!mg_choose_other(c, in_eights(all, 10, &p.columns) ? MG_OP_qk_norm_rotary : MG_OP_qk_norm_rotary_ones))
    return c->status;
  if (a->v) {
    p.keys = (int)c->n.KEYS;
    p.caches = (int)c->n.CACHES;
    p.page_size = (int)mg_max(1, c->n.LENGTH);
  }
  p.columns.lanes_log2 = lanes_log2_of(&p.columns);
  p.slots_log2 = 7 - p.columns.lanes_log2;
  int64_t blocks = 0;
  for (int i = 0; i < 3; i++) {
    p.side[i] = side_of_call(c, a, i, &p);
    blocks += p.side[i].rows.blocks;
  }
  return mg_run(c, &p, mg_tasks(c, blocks, "steps"));
}

mg_status mg_qk_norm_rotary(const mg_qk_norm_rotary_args *a) {
  mg_call c;
  const call asked = {
    .q = a->q, .k = a->k, .q_out = a->q_out, .k_out = a->k_out, .q_weight = a->q_weight, .k_weight = a->k_weight,
    .cos = a->cos, .sin = a->sin, .positions = a->positions, .offsets = a->offsets, .offset = a->offset, .eps = a->eps,
    .interleaved = a->interleaved};
  return mg_begin(&c, MG_OP_qk_norm_rotary, a) ? run(&c, &asked) : c.status;
}

mg_status mg_qk_norm_rotary_append(const mg_qk_norm_rotary_append_args *a) {
  mg_call c;
  const call asked = {
    .q = a->q, .k = a->k, .v = a->v, .q_out = a->q_out, .k_out = a->k_cache, .v_out = a->v_cache,
    .q_weight = a->q_weight, .k_weight = a->k_weight, .cos = a->cos, .sin = a->sin, .positions = a->positions,
    .offsets = a->offsets, .lengths = a->cache_seqlens, .page_table = a->page_table,
    .cache_index = a->cache_batch_idx, .offset = a->offset, .length = a->length, .eps = a->eps,
    .interleaved = a->interleaved};
  return mg_begin(&c, MG_OP_qk_norm_rotary_append, a) ? run(&c, &asked) : c.status;
}

// The weights' gradients are added up by the norms' kernel for that, as if q's were a weight's and k's a bias's.
static mg_status add_up(mg_call *c, const mg_qk_norm_rotary_bwd_args *a, int64_t parts) {
  const mg_tensor *q = a->dq_weight, *k = a->dk_weight;
  if ((!q && !k) || !mg_choose_other(c, MG_OP_norm_bwd_post)) return c->status;
  const norm_bwd_post_params p = {
    .partials = a->partials->data, .parts = (int)parts, .groups = 1, .dim = (int)c->n.K, .columns = c->n.N8,
    .col_blocks = (int)mg_ceil_div(c->n.K, c->desc->tile_n), .dweight = mg_data(q), .dbias = mg_data(k),
    .weight_is_float = q && q->dtype == MG_FP32, .bias_is_float = k && k->dtype == MG_FP32};
  return mg_run(c, &p, (k ? 2 : 1) * p.col_blocks);
}
static qk_bwd_side side_of_backward(mg_call *c, const mg_tensor *grad, const mg_tensor *x, const mg_tensor *dx,
                                    const mg_tensor *weight, bool wanted, const qk_norm_rotary_bwd_params *p) {
  if (mg_is_empty(x) || !wanted) return (qk_bwd_side){0};
  qk_bwd_side side = {.rows = side_of(c, grad, dx ? dx : grad, x->shape[2], p->tokens, p->slots_log2), .x = rows_of(x),
                      .weight = mg_data(weight), .weight_is_float = weight && weight->dtype == MG_FP32};
  if (!dx) side.rows.out.data = NULL;
  return side;
}
mg_status mg_qk_norm_rotary_bwd(const mg_qk_norm_rotary_bwd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_qk_norm_rotary_bwd, a) || c.n.K == 0) return c.status;
  if (c.n.PARTS == 0) return add_up(&c, a, 0);
  qk_norm_rotary_bwd_params p = {
    .columns = {.pairs = (int)c.n.ANGLES, .width = (int)c.n.K, .interleaved = a->interleaved},
    .cos = a->cos->data, .sin = a->sin->data, .cos_stride = {stride_of(a->cos, 0), stride_of(a->cos, 1)},
    .sin_stride = {stride_of(a->sin, 0), stride_of(a->sin, 1)}, .positions = mg_data(a->positions),
    .offsets = mg_data(a->offsets), .positions_stride = a->positions ? stride_of(a->positions, 0) : 0,
    .angles_are_float = a->cos->dtype == MG_FP32, .angle_rows = (int)mg_min(c.n.ROWS, INT32_MAX),
    .offset = a->offset, .steps = (int)c.n.T, .tokens = mg_tasks(&c, c.n.BQ * c.n.T, "steps"), .eps = a->eps,
    .per_column = 1.f / (float)c.n.K, .partials = a->dq_weight || a->dk_weight ? a->partials->data : NULL,
    .padded = c.n.N8};
  if (a->cos->dtype != a->sin->dtype)
    return mg_refuse(&c, MG_TYPE, "sin has dtype %s, expected %s (same as cos)", mg_dtype_name(a->sin->dtype),
                     mg_dtype_name(a->cos->dtype));
  const mg_tensor *all[] = {a->q, a->k, a->dq_out, a->dk_out, a->dq, a->dk, a->q_weight, a->k_weight, a->cos, a->sin};
  if (!mg_choose_other(&c, in_eights(all, 10, &p.columns) ? MG_OP_qk_norm_rotary_bwd : MG_OP_qk_norm_rotary_bwd_ones))
    return c.status;
  p.columns.lanes_log2 = lanes_log2_of(&p.columns);
  p.slots_log2 = 7 - p.columns.lanes_log2;
  p.side[0] = side_of_backward(&c, a->dq_out, a->q, a->dq, a->q_weight, a->dq || a->dq_weight, &p);
  p.side[1] = side_of_backward(&c, a->dk_out, a->k, a->dk, a->k_weight, a->dk || a->dk_weight, &p);
  const int64_t tasks = mg_tasks(&c, (int64_t)p.side[0].rows.blocks + p.side[1].rows.blocks, "steps");
  const int64_t blocks = mg_min(mg_resident(&c, mg_max(1, tasks)), c.n.PARTS);
  return mg_run(&c, &p, blocks) ? c.status : add_up(&c, a, blocks);
}
