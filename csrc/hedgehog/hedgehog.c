// Host half of hedgehog: one pass over the sequence or, where its blocks would fill less than half of the device, one
// over each of its segments, begun from states that two kernels before it compute.
#include <math.h>
#include "hedgehog/hedgehog.h"
#include "runtime/runtime.h"
#include "ssd/scan.h"

// Chunks of a segment; all of them where a row stays whole.
static int64_t segment_of(const mg_call *c, bool packed, int64_t blocks) {
  const int64_t chunks = mg_ceil_div(c->n.T, 64), resident = (int64_t)c->context.sms * c->desc->blocks_per_sm;
  const int64_t fit = resident / (blocks ? blocks : 1);
  const int64_t segments = packed || fit < 2 ? 1 : mg_min(fit, c->n.CUTS + 1);
  return mg_max(1, mg_ceil_div(chunks, segments));
}

static mg_status run_cuts(mg_call *c, const mg_hedgehog_args *a, const hedgehog_fwd_params *p) {
  hedgehog_cuts_params cuts = {.k = p->k, .v = p->v, .k_map = p->k_map, .steps = p->steps, .cuts = a->cuts->data,
                               .cut = p->steps.segments - 1, .cut_stride = p->cut_stride, .count = p->count,
                               .value_dim = p->value_dim};
  hedgehog_join_params join = {.cuts = cuts.cuts, .initial = p->initial, .cut = cuts.cut, .cut_stride = cuts.cut_stride,
                               .heads = p->steps.heads, .size = (int64_t)2 * p->count * (p->value_dim + 1)};
  const int64_t matrices = c->n.R * c->n.H;
  if (!mg_choose_other(c, MG_OP_hedgehog_cuts)) return c->status;
  if (mg_run(c, &cuts, mg_tasks(c, matrices * cuts.cut, "blocks"))) return c->status;
  if ((cuts.cut == 1 && !join.initial) || !mg_choose_other(c, MG_OP_hedgehog_join)) return c->status;
  return mg_run(c, &join, mg_tasks(c, matrices * mg_ceil_div(join.size, 64 * c->desc->tile_n), "tiles"));
}

mg_status mg_hedgehog(const mg_hedgehog_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_hedgehog, a)) return c.status;
  if (a->cu_seqlens && (c.status = ssd_check_starts(c.op, a->cu_seqlens, c.n.T))) return c.status;
  if (!mg_choose(&c)) return c.status;
  hedgehog_fwd_params p = {
    .steps = {.starts = mg_data(a->cu_seqlens), .count = (int)c.n.T, .rows = (int)c.n.R, .heads = (int)c.n.H,
              .segments = 1, .window = a->window, .sliding = a->sliding},
    .window_factor = a->window_factor->data, .linear_factor = a->linear_factor->data,
    .initial = mg_data(a->initial_state), .final = mg_data(a->final_state), .den = a->den->data,
    .out_data = a->out->data, .out_step = a->out->stride[1], .out_head = a->out->stride[2], .count = (int)c.n.F,
    .value_dim = (int)c.n.V, .scale = a->scale == 0 ? 1 / sqrtf((float)c.n.K) : a->scale};
  if (c.n.T) {
    const int d = c.desc->tile_n;
    mg_map_bthd(&c, &p.q, a->q, 64, 64);
    mg_map_bthd(&c, &p.k, a->k, 64, 64);
    mg_map_bthd(&c, &p.v, a->v, 64, 64);
    mg_map_bthd(&c, &p.out, a->out, 64, 64);
    mg_map_rows(&c, &p.q_map, a->q_map, d, 64);
    mg_map_rows(&c, &p.k_map, a->k_map, d, 64);
  }
  const int64_t blocks = c.n.R * c.n.H, segment = segment_of(&c, a->cu_seqlens, blocks);
  p.steps.segment = (int)segment;
  if (c.n.T > segment * 64) {
    p.steps.segments = (int)mg_ceil_div(mg_ceil_div(c.n.T, 64), segment);
    p.cuts = a->cuts->data;
    p.cut_stride = (int)c.n.CUTS;
    if (run_cuts(&c, a, &p) || !mg_choose(&c)) return c.status;
  }
  return mg_run(&c, &p, mg_tasks(&c, blocks * p.steps.segments, "blocks"));
}
