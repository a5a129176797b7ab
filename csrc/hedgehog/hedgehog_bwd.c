// Host half of hedgehog's backward: what each step has alone, the window, two passes over the sequence for the linear
// part, then the maps. Where the passes' blocks would fill less than half of the device, their segments begin with
// states that are summed up before.
#include <math.h>
#include "hedgehog/hedgehog_bwd.h"
#include "runtime/runtime.h"
#include "ssd/scan.h"

// Chunks of a segment of `chunks`, so that there are no more segments than `most` and blocks fit the device `waves`
// times.
static int segment_of(const mg_call *c, int64_t chunks, int64_t blocks, int64_t most, int waves) {
  const int64_t resident = (int64_t)c->context.sms * c->desc->blocks_per_sm * waves;
  const int64_t fit = resident / (blocks ? blocks : 1);
  return (int)mg_max(1, mg_ceil_div(chunks, mg_max(1, mg_min(fit, most))));
}
static int segments_of(int64_t chunks, int segment) { return (int)mg_max(1, mg_ceil_div(chunks, segment)); }

// One of the two halves of [2, batch, step, head, column].
static mg_tensor half_of(const mg_tensor *t, int which) {
  mg_tensor half = *t;
  half.data = (char *)t->data + which * t->stride[0] * (int64_t)mg_dtype_size(t->dtype);
  half.dims--;
  for (int i = 0; i < half.dims; i++) {
    half.shape[i] = t->shape[i + 1];
    half.stride[i] = t->stride[i + 1];
  }
  return half;
}
static void place_of(void **data, int64_t *stride, const mg_tensor *t) {
  *data = t->data;
  stride[0] = t->stride[1];
  stride[1] = t->stride[2];
}
static hedgehog_steps steps_of(const mg_call *c, const mg_hedgehog_bwd_args *a) {
  return (hedgehog_steps){.starts = mg_data(a->cu_seqlens), .count = (int)c->n.T, .rows = (int)c->n.R,
                          .heads = (int)c->n.H, .segments = 1, .window = a->window, .sliding = a->sliding};
}
// What is known of each step of a head: e, and sums over its window.
static float *known_of(const mg_call *c, const mg_hedgehog_bwd_args *a, int kind) {
  return (float *)a->e->data + kind * c->n.B * c->n.H * c->n.T;
}
static void rows_map(mg_call *c, gmap *m, const mg_tensor *t) { mg_map_bthd(c, m, t, 64, 64); }

static mg_status run_pre(mg_call *c, const mg_hedgehog_bwd_args *a) {
  if (!mg_choose(c)) return c->status;
  const int64_t chunks = mg_ceil_div(c->n.T, 64), blocks = c->n.B * c->n.H;
  const mg_tensor f = half_of(a->features, 0), g = half_of(a->features, 1);
  hedgehog_bwd_pre_params p = {.den = a->den->data, .window_factor = a->window_factor->data,
                               .linear_factor = a->linear_factor->data, .e = a->e->data, .steps = (int)c->n.T,
                               .heads = (int)c->n.H, .count = (int)c->n.F};
  p.run = segment_of(c, chunks, blocks, chunks, 4);
  p.runs = segments_of(chunks, p.run);
  rows_map(c, &p.q, a->q);
  rows_map(c, &p.k, a->k);
  rows_map(c, &p.out, a->out);
  rows_map(c, &p.dout, a->dout);
  rows_map(c, &p.u, a->u);
  rows_map(c, &p.f, &f);
  rows_map(c, &p.g, &g);
  mg_map_rows(c, &p.q_map, a->q_map, c->desc->tile_n, 64);
  mg_map_rows(c, &p.k_map, a->k_map, c->desc->tile_n, 64);
  return mg_run(c, &p, mg_tasks(c, blocks * p.runs, "blocks"));
}

static mg_status run_window(mg_call *c, const mg_hedgehog_bwd_args *a) {
  if (!mg_choose_other(c, MG_OP_hedgehog_bwd_window)) return c->status;
  const int64_t chunks = mg_ceil_div(c->n.T, 64), blocks = c->n.R * c->n.H;
  hedgehog_bwd_window_params p = {.steps = steps_of(c, a), .e = known_of(c, a, 0), .sums = known_of(c, a, 1),
                                  .weights = known_of(c, a, 2), .key_dim = (int)c->n.K, .value_dim = (int)c->n.V,
                                  .scale = a->scale == 0 ? 1 / sqrtf((float)c->n.K) : a->scale};
  p.steps.segment = segment_of(c, chunks, blocks, a->cu_seqlens ? 1 : chunks, 4);
  p.steps.segments = segments_of(chunks, p.steps.segment);
  place_of(&p.dq_data, p.dq_stride, a->dq);
  place_of(&p.dk_data, p.dk_stride, a->dk);
  place_of(&p.dv_data, p.dv_stride, a->dv);
  rows_map(c, &p.q, a->q);
  rows_map(c, &p.k, a->k);
  rows_map(c, &p.v, a->v);
  rows_map(c, &p.u, a->u);
  rows_map(c, &p.dq, a->dq);
  rows_map(c, &p.dk, a->dk);
  rows_map(c, &p.dv, a->dv);
  return mg_run(c, &p, mg_tasks(c, blocks * p.steps.segments, "blocks"));
}

// The states in front of a pass's segments.
static mg_status run_cuts(mg_call *c, hedgehog_bwd_scan_params *p) {
  const int64_t blocks = c->n.R * c->n.H;
  hedgehog_join_params join = {.cuts = p->cuts, .initial = p->initial, .cut = p->steps.segments - 1,
                               .cut_stride = p->cut_stride, .heads = p->steps.heads,
                               .size = (int64_t)2 * p->count * (p->value_dim + 1)};
  p->only_state = 1;
  mg_run(c, p, mg_tasks(c, blocks * join.cut, "blocks"));
  p->only_state = 0;
  if (c->status || (join.cut == 1 && !join.initial) || !mg_choose_other(c, MG_OP_hedgehog_join)) return c->status;
  return mg_run(c, &join, mg_tasks(c, blocks * mg_ceil_div(join.size, 64 * c->desc->tile_n), "tiles"));
}

static mg_status run_scan(mg_call *c, const mg_hedgehog_bwd_args *a, bool backwards, int *segments) {
  const mg_op op = backwards ? MG_OP_hedgehog_bwd_back : MG_OP_hedgehog_bwd_scan;
  const int64_t chunks = mg_ceil_div(c->n.T, 64), blocks = c->n.R * c->n.H;
  const mg_tensor f = half_of(a->features, 0), g = half_of(a->features, 1), dy = half_of(a->dfeatures, backwards);
  if (!mg_choose_other(c, op)) return c->status;
  hedgehog_bwd_scan_params p = {.steps = steps_of(c, a), .window_factor = a->window_factor->data,
                                .linear_factor = a->linear_factor->data, .e = known_of(c, a, 0),
                                .den = a->den->data, .window_sums = known_of(c, a, 1),
                                .window_weights = known_of(c, a, 2),
                                .initial = mg_data(backwards ? a->dfinal_state : a->initial_state),
                                .cuts = a->cuts->data, .final = backwards ? mg_data(a->dinitial_state) : NULL,
                                .sums = a->sums->data, .cut_stride = (int)c->n.CUTS, .sum_stride = (int)c->n.SLOTS,
                                .count = (int)c->n.F, .value_dim = (int)c->n.V};
  const int64_t fit = (int64_t)c->context.sms * c->desc->blocks_per_sm / mg_max(1, blocks);
  p.steps.segment = segment_of(c, chunks, blocks, a->cu_seqlens || fit < 2 ? 1 : c->n.SLOTS, 1);
  p.steps.segments = *segments = segments_of(chunks, p.steps.segment);
  place_of(&p.dy_data, p.dy_stride, &dy);
  place_of(&p.dv_data, p.dv_stride, a->dv);
  if (c->n.T) {
    rows_map(c, &p.a, backwards ? &f : &g);
    rows_map(c, &p.b, backwards ? a->u : a->v);
    rows_map(c, &p.r, backwards ? &g : &f);
    rows_map(c, &p.u, backwards ? a->v : a->u);
    rows_map(c, &p.dy, &dy);
    rows_map(c, &p.dv, a->dv);
  }
  if (p.steps.segments > 1 && (run_cuts(c, &p) || !mg_choose_other(c, op))) return c->status;
  return mg_run(c, &p, mg_tasks(c, blocks * p.steps.segments, "blocks"));
}

static mg_status run_maps(mg_call *c, const mg_hedgehog_bwd_args *a, int *runs) {
  if (!mg_choose_other(c, MG_OP_hedgehog_bwd_maps)) return c->status;
  const mg_tensor *x[2] = {a->q, a->k}, *dx[2] = {a->dq, a->dk}, *map[2] = {a->q_map, a->k_map};
  const int64_t chunks = mg_ceil_div(c->n.T, 64), blocks = 2 * c->n.B * c->n.H;
  hedgehog_bwd_maps_params p = {.parts = a->parts->data, .steps = (int)c->n.T, .heads = (int)c->n.H,
                                .batches = (int)c->n.B, .key_dim = (int)c->n.K, .count = (int)c->n.F};
  p.run = segment_of(c, chunks, blocks, c->n.SLOTS, 4);
  p.runs = *runs = segments_of(chunks, p.run);
  for (int i = 0; i < 2; i++) {
    const mg_tensor dy = half_of(a->dfeatures, i);
    rows_map(c, &p.x[i], x[i]);
    rows_map(c, &p.dx[i], dx[i]);
    rows_map(c, &p.dy[i], &dy);
    mg_map_rows(c, &p.map[i], map[i], c->desc->tile_n, 64);
  }
  return mg_run(c, &p, mg_tasks(c, blocks * p.runs, "blocks"));
}

mg_status mg_hedgehog_bwd(const mg_hedgehog_bwd_args *a) {
  mg_call c;
  int segments = 0, back = 0, runs = 0;
  if (!mg_begin(&c, MG_OP_hedgehog_bwd, a)) return c.status;
  if (a->cu_seqlens && (c.status = ssd_check_starts(c.op, a->cu_seqlens, c.n.T))) return c.status;
  if (c.n.T && c.n.B) {
    if (run_pre(&c, a) || run_window(&c, a) || run_scan(&c, a, false, &segments)) return c.status;
  }
  if (((c.n.T && c.n.B) || a->dinitial_state) && c.n.R && run_scan(&c, a, true, &back)) return c.status;
  if (c.n.T && c.n.B && run_maps(&c, a, &runs)) return c.status;
  if (!c.n.H || !mg_choose_other(&c, MG_OP_hedgehog_bwd_sums)) return c.status;
  const mg_tensor *map[2] = {a->dq_map, a->dk_map};
  hedgehog_bwd_sums_params p = {.parts = a->parts->data, .sums = a->sums->data,
                                .window_factor = a->window_factor->data, .linear_factor = a->linear_factor->data,
                                .dwindow_factor = a->dwindow_factor->data, .dlinear_factor = a->dlinear_factor->data,
                                .shares = (int)(c.n.B * runs), .rows = (int)c.n.R,
                                .segments = segments, .sum_stride = (int)c.n.SLOTS,
                                .heads = (int)c.n.H, .key_dim = (int)c.n.K, .count = (int)c.n.F};
  for (int i = 0; i < 2; i++) {
    p.map[i] = map[i]->data;
    p.map_stride[i][0] = map[i]->stride[0];
    p.map_stride[i][1] = map[i]->stride[1];
  }
  return mg_run(&c, &p, mg_tasks(&c, c.n.H * (2 * mg_ceil_div(c.n.K, 64) + 1), "blocks"));
}
