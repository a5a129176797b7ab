// Host halves of the rotary embedding, its backward, and its form in place: one kernel.
#include "rotary/rotary.h"
#include "runtime/runtime.h"

// What an op is called with. q_out or k_out NULL: not wanted.
typedef struct call {
  const mg_tensor *q, *k, *q_out, *k_out, *cos, *sin, *positions, *offsets;
  int offset;
  bool interleaved, back;
} call;

// Of a dimension that the first does not move along: 0.
static int64_t stride_of(const mg_tensor *t, int i) { return t->shape[i] > 1 ? t->stride[i] : 0; }
static rotary_rows rows_of(const mg_tensor *t) {
  return t ? (rotary_rows){t->data, {stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)}} : (rotary_rows){0};
}

// Eight columns may be one access. On the CPU that is no question, unless a tool asks for what the GPU does.
static bool in_eights(const mg_tensor *t) {
  bool eights = !t || mg_is_empty(t) || (uintptr_t)t->data % 16 == 0;
  for (int i = 0; t && i < t->dims - 1; i++) eights &= stride_of(t, i) % 8 == 0;
  return eights;
}
static bool all_in_eights(const call *a, const pairing *p) {
  if (a->q->device == MG_CPU && !mg_intercepted()) return true;
  return p->pairs % 8 == 0 && p->width % 16 == 0 && in_eights(a->q) && in_eights(a->k) && in_eights(a->q_out) &&
      in_eights(a->k_out) && in_eights(a->cos) && in_eights(a->sin);
}

static int log2_above(int64_t n) {
  int log2 = 0;
  while ((int64_t)1 << log2 < n) log2++;
  return log2;
}

// As many slots for a step as waste few rows of those in flight, rather more than fewer.
static rotary_side side_of(mg_call *c, const mg_tensor *in, const mg_tensor *out, int64_t heads, const rotary_params *p) {
  const int rows = c->desc->tile_m;
  rotary_side x = {.in = rows_of(in), .out = rows_of(out), .heads = mg_tasks(c, heads, "heads")};
  int64_t least = INT64_MAX;
  for (int log2 = 0; log2 <= p->slots_log2; log2++) {
    const int64_t pass = (int64_t)rows << log2, taken = mg_ceil_div(heads, pass) * pass;
    if (taken > least + least / 8) continue;
    least = mg_min(least, taken);
    x.heads_log2 = log2;
  }
  x.blocks = (int)mg_ceil_div(p->tokens, (int64_t)1 << (p->slots_log2 - x.heads_log2));
  return x;
}

static mg_status run(mg_call *c, const call *a) {
  const bool in_place = a->q == a->q_out;
  const bool with_q = a->q_out && !mg_is_empty(a->q_out), with_k = a->k_out && !mg_is_empty(a->k_out);
  rotary_params p = {
    .columns = {.pairs = (int)c->n.ANGLES, .width = (int)(in_place ? 2 * c->n.ANGLES : c->n.K),
                .interleaved = a->interleaved},
    .cos = a->cos->data, .sin = a->sin->data, .cos_stride = {stride_of(a->cos, 0), stride_of(a->cos, 1)},
    .sin_stride = {stride_of(a->sin, 0), stride_of(a->sin, 1)}, .positions = mg_data(a->positions),
    .offsets = mg_data(a->offsets), .positions_stride = a->positions ? stride_of(a->positions, 0) : 0,
    .angles_are_float = a->cos->dtype == MG_FP32, .offset = a->offset, .sign = a->back ? -1 : 1,
    .steps = (int)c->n.T, .tokens = mg_tasks(c, c->n.BQ * c->n.T, "steps")};
  if ((!with_q && !with_k) || p.columns.width == 0) return c->status;
  if (a->cos->dtype != a->sin->dtype)
    return mg_refuse(c, MG_TYPE, "sin has dtype %s, expected %s (same as cos)", mg_dtype_name(a->sin->dtype),
                     mg_dtype_name(a->cos->dtype));
  if (!mg_choose_other(c, all_in_eights(a, &p.columns) ? MG_OP_rotary : MG_OP_rotary_ones)) return c->status;
  p.angle_rows = (int)mg_min(c->n.ROWS, INT32_MAX);
  const int64_t paired = mg_ceil_div(p.columns.pairs, 8),
                alone = mg_ceil_div(p.columns.width - 2 * p.columns.pairs, 16);
  p.columns.lanes_log2 = log2_above(paired + alone);
  p.slots_log2 = 7 - p.columns.lanes_log2;
  if (with_q) p.q = side_of(c, a->q, a->q_out, c->n.H, &p);
  if (with_k) p.k = side_of(c, a->k, a->k_out, c->n.HK, &p);
  return mg_run(c, &p, mg_tasks(c, (int64_t)p.q.blocks + p.k.blocks, "steps"));
}

mg_status mg_rotary(const mg_rotary_args *a) {
  mg_call c;
  const call asked = {a->q, a->k, a->q_out, a->k_out, a->cos, a->sin, a->positions, a->offsets, a->offset,
                      a->interleaved, false};
  return mg_begin(&c, MG_OP_rotary, a) ? run(&c, &asked) : c.status;
}

mg_status mg_rotary_bwd(const mg_rotary_bwd_args *a) {
  mg_call c;
  const call asked = {a->dq_out, a->dk_out, a->dq, a->dk, a->cos, a->sin, a->positions, a->offsets, a->offset,
                      a->interleaved, true};
  return mg_begin(&c, MG_OP_rotary_bwd, a) ? run(&c, &asked) : c.status;
}

mg_status mg_rotary_in_place(const mg_rotary_in_place_args *a) {
  mg_call c;
  const call asked = {a->q, a->k, a->q, a->k, a->cos, a->sin, a->positions, a->offsets, a->offset, a->interleaved,
                      false};
  return mg_begin(&c, MG_OP_rotary_in_place, a) ? run(&c, &asked) : c.status;
}
