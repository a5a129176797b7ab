// Host half of ssd's backward. The sequence is cut into segments of SEG chunks, worked on from the last to the first:
// of each the states in front of its chunks and the gradients of those behind, then all gradients. So the states of one
// segment are all that is kept.
#include <math.h>
#include "ssd/scan.h"
#include "ssd/ssd_bwd.h"

typedef struct segment { int first, chunks; } segment;

// Nothing is copied of a tensor without elements, and the driver refuses to map one.
static void map_bthd(mg_call *c, gmap *m, const mg_tensor *t) { if (!mg_is_empty(t)) mg_map_bthd(c, m, t, 64, 64); }
static void map_stack(mg_call *c, gmap *m, const mg_tensor *t) { if (!mg_is_empty(t)) mg_map_stack(c, m, t, 64, 64); }

// What the scan is of, for all of its launches.
typedef struct scan { mg_call *c; const mg_ssd_bwd_args *a; const ssd_form *f; } scan;

static ssd_steps steps_of(const scan *x) {
  const mg_tensor *starts = x->a->cu_seqlens, *seq_idx = x->a->seq_idx;
  const mg_sizes *n = &x->c->n;
  return (ssd_steps){.dt = x->f->dt, .starts = starts ? starts->data : NULL, .seq_idx = seq_idx ? seq_idx->data : NULL,
                     .seq_stride = seq_idx ? seq_idx->stride[0] : 0, .count = (int)n->T, .rows = (int)n->R,
                     .heads = (int)n->H};
}

// What of a pass the call's tensors say.
static ssd_pass pass_of(mg_call *c, const mg_ssd_bwd_args *a, bool backwards, bool keep) {
  ssd_pass q = {.backwards = backwards, .keep = keep};
  map_bthd(c, &q.a, backwards ? a->dy : a->x);
  map_bthd(c, &q.b, backwards ? a->c : a->b);
  map_stack(c, &q.states, backwards ? a->dstates : a->states);
  return q;
}

static int64_t state_blocks(const mg_call *c) { return c->n.R * c->n.H * mg_ceil_div(c->n.P, 64) / c->desc->tile_n; }

static mg_status run_states(const scan *x, ssd_states_params *p, int passes, segment s) {
  mg_call *c = x->c;
  if (!mg_choose_other(c, MG_OP_ssd_bwd_states)) return c->status;
  p->steps = steps_of(x);
  p->scale = x->f->scale;
  p->order = x->f->order;
  p->passes = passes;
  p->first = s.first;
  p->chunks = s.chunks;
  p->every = (int)c->n.SEG;
  if (p->cut_stride == 0) p->part = s.chunks ? s.chunks : 1;       // one part
  p->parts = (int)mg_ceil_div(s.chunks, p->part);
  if (p->parts < 1 || x->a->cu_seqlens) p->parts = 1;
  p->groups = (int)c->n.G;
  p->group_heads = (int)(c->n.H / c->n.G);
  p->head_dim = (int)c->n.P;
  p->state_dim = (int)c->n.N;
  return mg_run(c, p, mg_tasks(c, passes * p->parts * state_blocks(c), "blocks"));
}

// Chunks of a part, which a segment has a whole number of; 0 where rows stay whole: where a wave of blocks has no room
// for several.
static int64_t part_of(const scan *x) {
  mg_call *c = x->c;
  if (!x->a->cuts || c->n.CUTS < 1 || !mg_choose_other(c, MG_OP_ssd_bwd_states)) return 0;
  const int64_t resident = (int64_t)c->context.sms * c->desc->blocks_per_sm, blocks = 2 * state_blocks(c);
  int64_t parts = resident / (blocks ? blocks : 1), most = c->n.CUTS / (c->n.LATER + 1);
  if (parts > most) parts = most;
  if (parts < 2) return 0;
  if (!c->n.LATER) return mg_ceil_div(c->n.SEG, parts);
  int64_t half = 1;           // a segment is a multiple of 16 chunks
  while (half < 8 && 2 * half <= parts) half *= 2;
  return c->n.SEG / half;
}

// The states at the cuts, of both directions: where every part of every segment begins.
static mg_status run_cuts(const scan *x, ssd_states_params *p) {
  mg_call *c = x->c;
  const int64_t states = c->n.R * c->n.CUTS * c->n.H, state = c->n.P * c->n.N;
  const float *initial[2] = {mg_data(x->a->dfinal_states), mg_data(x->a->initial_states)};
  p->local = 1;
  p->cut_stride = (int)c->n.CUTS;
  p->all_parts = (int)mg_ceil_div(c->n.CHUNKS, p->part);
  for (int i = 0; i < 2; i++) {
    p->pass[i] = pass_of(c, x->a, i == 0, false);
    p->pass[i].cuts = (float *)x->a->cuts->data + i * states * state;
    p->pass[i].decays = (float *)x->a->decays->data + i * states;
  }
  if (run_states(x, p, 2, (segment){0, (int)c->n.CHUNKS})) return c->status;
  p->local = 0;
  if (!mg_choose_other(c, MG_OP_ssd_join)) return c->status;
  const int64_t tiles = mg_ceil_div(c->n.P, 64) * mg_ceil_div(c->n.N, c->desc->tile_n);
  for (int i = 0; i < 2 && !c->status; i++) {
    const ssd_join_params join = {.cuts = p->pass[i].cuts, .initial = initial[i], .order = p->order,
                                  .factor = i == 0 ? 1 / x->f->scale : 1, .decays = p->pass[i].decays,
                                  .cut = p->all_parts - 1, .cut_stride = p->cut_stride, .heads = (int)c->n.H,
                                  .head_dim = (int)c->n.P, .state_dim = (int)c->n.N};
    if (join.cut > 1 || join.initial) mg_run(c, &join, mg_tasks(c, c->n.R * c->n.H * tiles, "tiles"));
  }
  return c->status;
}

static void strides_of(int64_t *stride, const mg_tensor *t) {
  for (int i = 0; i < 3; i++) stride[i] = t->stride[i];
}

static mg_status run_gradients(const scan *x, segment s) {
  mg_call *c = x->c;
  const mg_ssd_bwd_args *a = x->a;
  if (!mg_choose_other(c, MG_OP_ssd_bwd)) return c->status;
  const int splits = (int)c->n.SPLIT;
  float *parts = splits > 1 ? a->parts->data : NULL;
  ssd_bwd_params p = {.steps = steps_of(x), .scale = x->f->scale, .log_scale = log2f(x->f->scale), .d = mg_data(a->d),
                      .ddt = mg_data(a->ddt), .sums = mg_data(a->sums), .dx_data = a->dx->data, .db = a->db->data,
                      .dc = a->dc->data, .parts = parts, .first = s.first, .chunks = s.chunks,
                      .all_chunks = (int)c->n.CHUNKS, .batches = (int)c->n.B, .groups = (int)c->n.G,
                      .group_heads = (int)(c->n.H / c->n.G), .splits = splits, .head_dim = (int)c->n.P,
                      .state_dim = (int)c->n.N, .skips = a->dd != NULL, .biased = a->ddt_bias != NULL};
  strides_of(p.dx_stride, a->dx);
  strides_of(p.db_stride, a->db);
  strides_of(p.dc_stride, a->dc);
  map_bthd(c, &p.x, a->x);
  map_bthd(c, &p.dy, a->dy);
  map_bthd(c, &p.dx, a->dx);
  map_bthd(c, &p.b, a->b);
  map_bthd(c, &p.c, a->c);
  map_stack(c, &p.states, a->states);
  map_stack(c, &p.dstates, a->dstates);
  const int64_t tiles = c->n.B * s.chunks * c->n.G;
  if (mg_run(c, &p, mg_tasks(c, tiles * splits, "blocks")) || splits == 1) return c->status;
  if (!mg_choose_other(c, MG_OP_ssd_bwd_join)) return c->status;
  ssd_bwd_join_params j = {.parts = parts, .steps = p.steps, .db = p.db, .dc = p.dc, .first = s.first,
                           .chunks = s.chunks, .batches = p.batches,
                           .groups = p.groups, .splits = splits, .state_dim = p.state_dim};
  strides_of(j.db_stride, a->db);
  strides_of(j.dc_stride, a->dc);
  return mg_run(c, &j, mg_tasks(c, tiles * 2, "blocks"));
}

mg_status ssd_scan_bwd(mg_call *c, const mg_ssd_bwd_args *a, const ssd_form *f) {
  const scan x = {c, a, f};
  const int chunks = (int)c->n.CHUNKS, each = (int)c->n.SEG, last = (int)c->n.LATER;
  const int64_t state = c->n.R * c->n.H * c->n.P * c->n.N;
  // starts: the states in front of segments 1, 2, ..., then the gradient of the state that one segment hands to the one
  // in front of it.
  float *starts = mg_data(a->starts), *between = last ? starts + last * state : NULL;
  ssd_states_params p = {.all_parts = 1, .part = (int)part_of(&x)};
  if (c->status) return c->status;
  const bool cut = p.part > 0;
  if (cut) {
    if (run_cuts(&x, &p)) return c->status;
  } else if (last) {
    p.pass[0] = pass_of(c, a, false, false);
    p.pass[0].initial = mg_data(a->initial_states);
    p.pass[0].starts = starts;
    p.pass[0].final = starts + (last - 1) * state;
    run_states(&x, &p, 1, (segment){0, each * last});
  }
  // Places where packed rows have no chunk have no shares.
  if (a->cu_seqlens && a->sums && !c->status)
    c->status = mg_fill(&c->context, a->sums->data, 0, 4, c->n.B * 3 * c->n.CHUNKS * c->n.H);
  const ssd_pass at_cuts[2] = {p.pass[0], p.pass[1]};
  for (int s = last; s >= 0 && !c->status; s--) {
    const segment at = {s * each, chunks - s * each < each ? chunks - s * each : each};
    p.pass[0] = pass_of(c, a, true, true);
    p.pass[0].initial = s == last || cut ? mg_data(a->dfinal_states) : between;
    p.pass[0].final = s && !cut ? between : mg_data(a->dinitial_states);
    p.pass[1] = pass_of(c, a, false, true);
    p.pass[1].initial = s && !cut ? starts + (s - 1) * state : mg_data(a->initial_states);
    for (int i = 0; cut && i < 2; i++) p.pass[i].cuts = at_cuts[i].cuts;
    if (!run_states(&x, &p, 2, at) && at.chunks && c->n.T && c->n.R) run_gradients(&x, at);
  }
  if (c->status || !a->sums || !mg_choose_other(c, MG_OP_ssd_bwd_sums)) return c->status;
  const ssd_bwd_sums_params sums = {.sums = a->sums->data, .batches = (int)c->n.B, .chunks = chunks,
                                    .heads = (int)c->n.H,
                                    .out = {mg_data(a->da), mg_data(a->dd), mg_data(a->ddt_bias)}};
  return mg_run(c, &sums, mg_tasks(c, mg_ceil_div(c->n.H, 64) * 3, "blocks"));
}

mg_status mg_ssd_bwd(const mg_ssd_bwd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_ssd_bwd, a)) return c.status;
  const ssd_form f = {{.dt = a->dt->data, .a = a->a->data, .bias = mg_data(a->dt_bias), .softplus = a->dt_softplus,
                       .low = a->dt_min, .high = a->dt_max}, 1, {(int)c.n.N, 1, (int)(c.n.P * c.n.N)},
                      MG_OP_ssd_bwd};
  return ssd_scan_bwd(&c, a, &f);
}
