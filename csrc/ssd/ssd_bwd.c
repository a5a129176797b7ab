// Host half of mg.ssd's backward. The sequence is cut into segments of SEG chunks, worked on from the last to the first: of each the states in front of
// its chunks, the gradients of those behind, then all gradients. So the states of one segment are all that is kept.
#include "ssd/ssd_bwd.h"
#include "runtime/runtime.h"

typedef struct segment { int first, chunks; } segment;

static ssd_steps steps_of(const mg_call *c, const mg_ssd_bwd_args *a) {
  return (ssd_steps){.dt = a->dt->data, .a = a->a->data, .dt_bias = a->dt_bias ? a->dt_bias->data : NULL, .dt_min = a->dt_min, .dt_max = a->dt_max,
                     .softplus = a->dt_softplus, .count = (int)c->n.T, .heads = (int)c->n.H};
}

static mg_status run_states(mg_call *c, const mg_ssd_bwd_args *a, bool backwards, bool keep, segment s, const float *initial, float *final, float *starts) {
  if (!mg_choose_other(c, MG_OP_ssd_bwd_states)) return c->status;
  ssd_states_params p = {.steps = steps_of(c, a), .initial = initial, .final = final, .starts = starts, .first = s.first, .chunks = s.chunks,
                         .every = (int)c->n.SEG, .keep = keep, .groups = (int)c->n.G, .group_heads = (int)(c->n.H / c->n.G), .head_dim = (int)c->n.P,
                         .state_dim = (int)c->n.N, .backwards = backwards};
  if (s.chunks) {
    mg_map_bthd(c, &p.a, backwards ? a->dy : a->x, 64, 64);
    mg_map_bthd(c, &p.b, backwards ? a->c : a->b, 64, 64);
    mg_map_stack(c, &p.states, backwards ? a->dstates : a->states, 64, 64);
  }
  return mg_run(c, &p, mg_tasks(c, c->n.B * c->n.H * mg_ceil_div(c->n.P, 64) / c->desc->tile_n));
}

static void strides_of(int64_t *stride, const mg_tensor *t) {
  for (int i = 0; i < 3; i++) stride[i] = t->stride[i];
}

static mg_status run_gradients(mg_call *c, const mg_ssd_bwd_args *a, segment s) {
  if (!mg_choose(c)) return c->status;
  const int splits = (int)c->n.SPLIT;
  float *parts = splits > 1 ? a->parts->data : NULL;
  ssd_bwd_params p = {.steps = steps_of(c, a), .d = a->d ? a->d->data : NULL, .ddt = a->ddt->data, .sums = a->sums->data, .db = a->db->data, .dc = a->dc->data,
                      .parts = parts, .first = s.first, .chunks = s.chunks, .all_chunks = (int)c->n.CHUNKS, .groups = (int)c->n.G,
                      .group_heads = (int)(c->n.H / c->n.G), .splits = splits, .head_dim = (int)c->n.P, .state_dim = (int)c->n.N, .skips = a->dd != NULL,
                      .biased = a->ddt_bias != NULL};
  strides_of(p.db_stride, a->db);
  strides_of(p.dc_stride, a->dc);
  mg_map_bthd(c, &p.x, a->x, 64, 64);
  mg_map_bthd(c, &p.dy, a->dy, 64, 64);
  mg_map_bthd(c, &p.dx, a->dx, 64, 64);
  mg_map_bthd(c, &p.b, a->b, 64, 64);
  mg_map_bthd(c, &p.c, a->c, 64, 64);
  mg_map_stack(c, &p.states, a->states, 64, 64);
  mg_map_stack(c, &p.dstates, a->dstates, 64, 64);
  const int64_t tiles = c->n.B * s.chunks * c->n.G;
  if (mg_run(c, &p, mg_tasks(c, tiles * splits)) || splits == 1 || !mg_choose_other(c, MG_OP_ssd_bwd_join)) return c->status;
  ssd_bwd_join_params j = {.parts = parts, .db = p.db, .dc = p.dc, .first = s.first, .chunks = s.chunks, .steps = (int)c->n.T, .batch = (int)c->n.B,
                           .groups = p.groups, .splits = splits, .state_dim = p.state_dim};
  strides_of(j.db_stride, a->db);
  strides_of(j.dc_stride, a->dc);
  return mg_run(c, &j, mg_tasks(c, tiles * 2));
}

static float *data_of(const mg_tensor *t) { return t ? t->data : NULL; }

mg_status mg_ssd_bwd(const mg_ssd_bwd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_ssd_bwd, a)) return c.status;
  const int chunks = (int)c.n.CHUNKS, each = (int)c.n.SEG;
  const int64_t state = c.n.B * c.n.H * c.n.P * c.n.N;
  const float *initial = data_of(a->initial_states), *behind = data_of(a->dfinal_states);
  float *starts = data_of(a->starts), *front = data_of(a->dinitial_states);
  // Of segment s the state in front of it is in starts[s - 1], and, once that was read, the gradient of the same.
  if (c.n.LATER > 0) run_states(&c, a, false, false, (segment){0, each * (int)c.n.LATER}, initial, starts + (c.n.LATER - 1) * state, starts);
  for (int s = (int)c.n.LATER; s >= 0 && !c.status; s--) {
    const segment at = {s * each, chunks - s * each < each ? chunks - s * each : each};
    float *here = s ? starts + (s - 1) * state : NULL;
    if (at.chunks && run_states(&c, a, false, true, at, s ? here : initial, NULL, NULL)) break;
    if (run_states(&c, a, true, true, at, s == c.n.LATER ? behind : starts + s * state, s ? here : front, NULL) || !at.chunks) break;
    run_gradients(&c, a, at);
  }
  if (c.status || !mg_choose_other(&c, MG_OP_ssd_bwd_sums)) return c.status;
  const ssd_bwd_sums_params p = {.sums = a->sums->data, .out = {a->da->data, data_of(a->dd), data_of(a->ddt_bias)}, .batch = (int)c.n.B, .chunks = chunks,
                                 .heads = (int)c.n.H};
  return mg_run(&c, &p, mg_tasks(&c, mg_ceil_div(c.n.H, 64) * 3));
}
