// Host half of ssd: one pass over the sequence or, where its blocks would fill less than half of the device, one over
// each of its segments, begun from states that two kernels before it compute.
#include <math.h>
#include "ssd/scan.h"

// cu_seqlens begins with 0, does not fall and ends with the last step or before: what the CPU holds is looked at. Of
// steps behind, y and all gradients are 0.
mg_status ssd_check_starts(mg_op op, const mg_tensor *t, int64_t steps) {
  const char *name = mg_op_name(op);
  const int32_t *start = t->data;
  const int64_t n = t->shape[0];
  if (t->device != MG_CPU) return MG_OK;
  if (start[0] != 0) return mg_fail(MG_VALUE, "%s: cu_seqlens[0] is %d, expected 0", name, start[0]);
  for (int64_t i = 1; i < n; i++)
    if (start[i] < start[i - 1] || start[i] > steps)
      return mg_fail(MG_VALUE, "%s: cu_seqlens[%lld] is %d, expected %d (the one before) to %lld (the steps that there "
                     "are)", name, (long long)i, start[i], start[i - 1], (long long)steps);
  return MG_OK;
}

// Steps of a segment, whole chunks; all of them where a row stays whole.
static int64_t segment_of(const mg_call *c, bool whole, int64_t blocks) {
  const int64_t chunks = mg_ceil_div(c->n.T, 64), resident = (int64_t)c->context.sms * c->desc->blocks_per_sm;
  const int64_t fit = resident / (blocks ? blocks : 1);
  const int64_t segments = whole || fit < 2 ? 1 : fit < c->n.CUTS + 1 ? fit : c->n.CUTS + 1;
  return mg_ceil_div(chunks, segments) * 64;
}

static mg_status run_cuts(mg_call *c, const mg_ssd_args *a, const ssd_fwd_params *p) {
  ssd_cuts_params cuts = {.x = p->x, .b = p->b, .dt = p->dt, .seq_idx = p->seq_idx, .seq_stride = p->seq_stride,
                          .cuts = a->cuts->data, .decays = a->decays->data, .steps = p->steps, .cut = p->segments - 1,
                          .segment = p->segment, .cut_stride = p->cut_stride, .heads = p->heads,
                          .group_heads = p->group_heads, .head_dim = p->head_dim, .state_dim = p->state_dim};
  ssd_join_params join = {.cuts = cuts.cuts, .initial = p->initial, .order = p->order, .factor = 1,
                          .decays = cuts.decays, .cut = cuts.cut, .cut_stride = cuts.cut_stride, .heads = cuts.heads,
                          .head_dim = cuts.head_dim, .state_dim = cuts.state_dim};
  if (!mg_choose_other(c, MG_OP_ssd_cuts)) return c->status;
  const int64_t units = mg_ceil_div((c->n.P + 63) / 64 * cuts.group_heads, c->desc->tile_n);
  if (mg_run(c, &cuts, mg_tasks(c, c->n.R * c->n.G * units * cuts.cut, "blocks"))) return c->status;
  if ((cuts.cut == 1 && !join.initial) || !mg_choose_other(c, MG_OP_ssd_join)) return c->status;
  const int64_t tiles = mg_ceil_div(c->n.P, 64) * mg_ceil_div(c->n.N, c->desc->tile_n);
  return mg_run(c, &join, mg_tasks(c, c->n.R * c->n.H * tiles, "tiles"));
}

mg_status ssd_scan(mg_call *c, const mg_ssd_args *a, const ssd_form *f) {
  if (a->cu_seqlens && (c->status = ssd_check_starts(c->op, a->cu_seqlens, c->n.T))) return c->status;
  c->problem.size.B = c->n.R;         // conditions ask for blocks
  if (!mg_choose_other(c, f->op)) return c->status;
  const mg_tensor *seq_idx = a->seq_idx;
  ssd_fwd_params p = {
    .dt = f->dt, .scale = f->scale, .log_scale = log2f(f->scale), .order = f->order,
    .d = a->d ? a->d->data : NULL, .initial = a->initial_states ? a->initial_states->data : NULL,
    .final = a->final_states ? a->final_states->data : NULL, .starts = a->cu_seqlens ? a->cu_seqlens->data : NULL,
    .seq_idx = seq_idx ? seq_idx->data : NULL, .seq_stride = seq_idx ? seq_idx->stride[0] : 0,
    .y_data = a->y->data, .y_step = a->y->stride[1], .y_head = a->y->stride[2], .steps = (int)c->n.T, .segments = 1,
    .rows = (int)c->n.R, .heads = (int)c->n.H, .group_heads = (int)(c->n.H / c->n.G), .head_dim = (int)c->n.P,
    .state_dim = (int)c->n.N};
  const int64_t blocks = c->n.R * (c->n.H / c->desc->tile_n);
  if (c->n.T && blocks) {     // the driver refuses to map what has no elements
    mg_map_bthd(c, &p.x, a->x, 64, 64);
    mg_map_bthd(c, &p.y, a->y, 64, 64);
    mg_map_bthd(c, &p.b, a->b, 64, 64);
    mg_map_bthd(c, &p.c, a->c, 64, 64);
  }
  const int64_t segment = segment_of(c, a->cu_seqlens || !a->cuts, blocks);
  p.segment = (int)segment;
  if (c->n.T > segment) {
    p.segments = (int)mg_ceil_div(c->n.T, segment);
    p.cuts = a->cuts->data;
    p.cut_stride = (int)c->n.CUTS;
    if (run_cuts(c, a, &p) || !mg_choose_other(c, f->op)) return c->status;
  }
  return mg_run(c, &p, mg_tasks(c, blocks * p.segments, "blocks"));
}

mg_status mg_ssd(const mg_ssd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_ssd, a)) return c.status;
  const ssd_form f = {{.dt = a->dt->data, .a = a->a->data, .bias = a->dt_bias ? a->dt_bias->data : NULL,
                       .softplus = a->dt_softplus, .low = a->dt_min, .high = a->dt_max}, 1,
                      {(int)c.n.N, 1, (int)(c.n.P * c.n.N)}, MG_OP_ssd};
  return ssd_scan(&c, a, &f);
}
