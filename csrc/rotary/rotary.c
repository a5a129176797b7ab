// Host halves of the rotary embedding, its backward, and its form in place: one kernel.
#include "rotary/rotary_host.h"

// What an op is called with. q_out or k_out NULL: not wanted.
typedef struct call {
  const mg_tensor *q, *k, *q_out, *k_out, *cos, *sin, *positions, *offsets;
  int offset;
  bool interleaved, back;
} call;

static bool all_in_eights(const call *a, const pairing *p) {
  const mg_tensor *all[] = {a->q, a->k, a->q_out, a->k_out, a->cos, a->sin};
  return in_eights(all, 6, p);
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
  p.columns.lanes_log2 = lanes_log2_of(&p.columns);
  p.slots_log2 = 7 - p.columns.lanes_log2;
  if (with_q) p.q = side_of(c, a->q, a->q_out, c->n.H, p.tokens, p.slots_log2);
  if (with_k) p.k = side_of(c, a->k, a->k_out, c->n.HK, p.tokens, p.slots_log2);
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
