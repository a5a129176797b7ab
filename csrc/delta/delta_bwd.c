// Host half of gated_delta_rule's backward. The sequence is cut into segments of SEG chunks, worked on from the last to
// the first: of each the states in front of its chunks and the errors, the gradients of the states behind, then all
// gradients. So the states of one segment are all that is kept. The norms' factors and M and P of the chunks are what
// the forward kept of all steps, or else made anew, M and P of a segment at a time.
#include "delta/delta_bwd.h"
#include "delta/delta_host.h"
#include "ssd/ssd_bwd.h"

typedef struct problem {
  mg_call *c;
  const mg_gated_delta_rule_bwd_args *a;
  delta_rows rows;
  delta_gates gates;
  float scale;
  ssd_order given, kept;      // of the caller's states, and of those between segments
  delta_pieces early;         // segments of both passes that begin early (delta.h), tried first; or n is 0
} problem;

// The last has the rest.
static delta_rows segment_of(const problem *x, int segment) {
  const int64_t steps = x->c->n.SEG * 64;
  delta_rows rows = x->rows;
  rows.places = (int)x->c->n.SEG;
  if (rows.starts) return rows;
  rows.from = (int)(segment * steps);
  if (rows.steps - rows.from > steps) rows.to = rows.from + (int)steps;
  return rows;
}

static bool is_empty(const mg_call *c) { return !(c->n.T && c->n.R && c->n.HV); }

// Without the columns that make rows of theirs whole: where a packed row ends, nothing is stored there.
static void map_errors(const problem *x, gmap *m) {
  mg_tensor errors = *x->a->errors;
  errors.shape[3] = x->c->n.V;
  mg_map_bthd(x->c, m, &errors, 64, 64);
}

static int64_t sweep_blocks(mg_call *c) { return c->n.R * c->n.HV * mg_ceil_div(c->n.V, c->desc->tile_n); }

// Those of a segment's chunks: of all chunks, or own ones of the segment.
static void map_matrices(const problem *x, int segment, gmap *m, const mg_tensor *kept, const mg_tensor *own) {
  const bool has = x->c->n.KEPT > 0;
  delta_map_matrices(x->c, m, has ? kept : own, has ? segment * x->c->n.SEG : 0);
}

static void begin_early(const problem *x, delta_sweep_params *p, bool back) {
  delta_fades_params f = delta_fades_of(x->c, &x->gates);
  f.back = back;
  delta_begin_early(x->c, p, &f, &x->early, x->a->early, x->a->cuts, back);
}

// States in front of the segment's chunks, and errors. The state behind it goes to `final`. early: by segments that
// begin so, of which it tells. taken: as in delta.h; M and P are there then.
static mg_status run_forth(const problem *x, int segment, float *final, delta_sweep_params *early,
                           const int *taken) {
  mg_call *c = x->c;
  const mg_gated_delta_rule_bwd_args *a = x->a;
  const int64_t state = c->n.R * c->n.HV * c->n.V * c->n.K;
  const bool first = segment == 0;
  delta_sweep_params p = {
    .initial = first ? mg_data(a->initial_state) : (float *)a->starts->data + (segment - 1) * state, .final = final,
    .initial_order = first ? x->given : x->kept, .final_order = x->kept, .rows = segment_of(x, segment),
    .gates = x->gates, .scale = x->scale, .o_data = a->errors->data, .o_step = a->errors->stride[1],
    .o_head = a->errors->stride[2], .key_dim = (int)c->n.K, .value_dim = (int)c->n.V, .taken = taken};
  if (c->n.KEPT <= 0 && !taken)
    delta_run_prepare(c, a->q, a->k, a->own_inverses, a->own_reads, &p.rows, &p.gates, p.scale, NULL);
  if (early) begin_early(x, &p, false);
  if (c->status || !mg_choose_other(c, early ? MG_OP_delta_keep_early : MG_OP_delta_keep)) return c->status;
  mg_map_bthd(c, &p.k, a->k, 64, 64);
  mg_map_bthd(c, &p.v, a->v, 64, 64);
  map_matrices(x, segment, &p.m, a->inverses, a->own_inverses);
  mg_map_stack(c, &p.states, a->states, 64, 64);
  map_errors(x, &p.errors);
  if (early) *early = p;
  return mg_run(c, &p, mg_tasks(c, sweep_blocks(c) * (early ? p.cut.segments : 1), "blocks"));
}

// early: as above, but begun.
static mg_status run_back(const problem *x, int segment, float *between, const delta_sweep_params *early,
                          const int *taken) {
  mg_call *c = x->c;
  const mg_gated_delta_rule_bwd_args *a = x->a;
  const bool first = segment == 0, last = segment == c->n.LATER;
  delta_back_params p = {
    .initial = last ? mg_data(a->dfinal_state) : between, .final = first ? mg_data(a->dinitial_state) : between,
    .initial_order = last ? x->given : x->kept, .final_order = first ? x->given : x->kept,
    .rows = segment_of(x, segment), .gates = x->gates, .scale = x->scale, .dv_data = a->dv->data,
    .dv_step = a->dv->stride[1], .dv_head = a->dv->stride[2], .key_dim = (int)c->n.K, .value_dim = (int)c->n.V,
    .taken = taken};
  if (early) p.cut = early->cut;
  if (c->status || !mg_choose_other(c, early ? MG_OP_delta_back_early : MG_OP_delta_back)) return c->status;
  if (!is_empty(c)) {
    mg_map_bthd(c, &p.q, a->q, 64, 64);
    mg_map_bthd(c, &p.k, a->k, 64, 64);
    mg_map_bthd(c, &p.dout, a->dout, 64, 64);
    mg_map_bthd(c, &p.dv, a->dv, 64, 64);
    map_matrices(x, segment, &p.m, a->inverses, a->own_inverses);
    map_matrices(x, segment, &p.p, a->reads, a->own_reads);
    mg_map_stack(c, &p.dstates, a->dstates, 64, 64);
  }
  const int blocks = mg_tasks(c, sweep_blocks(c) * (early ? early->cut.segments : 1), "blocks");
  return is_empty(c) ? mg_run(c, &p, blocks) : mg_run_beside(c, &p, blocks);
}

static mg_status run_grads(const problem *x, int segment) {
  mg_call *c = x->c;
  const mg_gated_delta_rule_bwd_args *a = x->a;
  delta_grads_params p = {
    .dq_data = a->dq->data, .dk_data = a->dk->data, .dg = a->g ? mg_data(a->dg) : NULL, .dbeta = mg_data(a->dbeta),
    .sums = a->a_log ? mg_data(a->sums) : NULL, .rows = segment_of(x, segment), .gates = x->gates, .scale = x->scale,
    .key_heads = (int)c->n.H,
    .panels = (int)mg_ceil_div(c->n.V, 64), .all_places = (int)c->n.CHUNKS, .key_dim = (int)c->n.K};
  if (c->status || !mg_choose_other(c, MG_OP_gated_delta_rule_bwd)) return c->status;
  for (int i = 0; i < 3; i++) {
    p.dq_stride[i] = a->dq->stride[i];
    p.dk_stride[i] = a->dk->stride[i];
  }
  mg_map_bthd(c, &p.q, a->q, 64, 64);
  mg_map_bthd(c, &p.k, a->k, 64, 64);
  mg_map_bthd(c, &p.dout, a->dout, 64, 64);
  mg_map_bthd(c, &p.dv, a->dv, 64, 64);
  mg_map_bthd(c, &p.dq, a->dq, 64, 64);
  mg_map_bthd(c, &p.dk, a->dk, 64, 64);
  map_errors(x, &p.errors);
  mg_map_stack(c, &p.states, a->states, 64, 64);
  mg_map_stack(c, &p.dstates, a->dstates, 64, 64);
  const delta_rows *r = &p.rows;
  p.chunks = r->starts ? r->places : mg_ceil_div(r->to - r->from, 64);
  p.tasks = mg_tasks(c, c->n.B * p.chunks * c->n.H, "chunks");
  return mg_run_resident(c, &p, p.tasks);
}

mg_status mg_gated_delta_rule_bwd(const mg_gated_delta_rule_bwd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_gated_delta_rule_bwd, a)) return c.status;
  if (a->cu_seqlens && (c.status = ssd_check_starts(c.op, a->cu_seqlens, c.n.T))) return c.status;
  const bool made = c.n.NORMS <= 0;
  const mg_tensor *norms = !a->l2norm ? NULL : made ? a->own_norms : a->norms;
  problem x = {.c = &c, .a = a, .rows = delta_rows_of(&c, a->cu_seqlens),
                     .gates = delta_gates_of(&c, a->g, a->beta, a->a_log, a->dt_bias, norms, a->beta_form),
                     .scale = delta_scale_of(&c, a->scale), .given = delta_order_of(&c, a->state_v_first),
                     .kept = {(int)c.n.K, 1, (int)(c.n.K * c.n.V)}};
  enum { chunk = 2500, moved = 56 };     // nanoseconds, on an H200
  const int64_t state = c.n.R * c.n.HV * c.n.V * c.n.K;
  const int later = (int)c.n.LATER;
  if (!later && a->g && a->q->dtype == MG_BF16 && c.n.V > 64 && c.n.HV <= 128 && (a->form == 0 || a->form == 4))
    x.early = delta_early_back_of(&c, &x.rows, c.n.CUTS ? a->cuts : NULL, chunk, moved, a->form == 4);
  float *starts = a->starts->data, *between = later ? starts + later * state : NULL;
  // gradients of what is not there, as the operator asks for them
  if (a->dg && !a->g) mg_set(&c, a->dg->data, 0, 4, c.n.B * c.n.T * c.n.HV);
  if (a->da_log && !a->a_log) mg_set(&c, a->da_log->data, 0, 4, c.n.HV);
  if (a->ddt_bias && !a->dt_bias) mg_set(&c, a->ddt_bias->data, 0, 4, c.n.HV);
  // Places where packed rows have no chunk have no shares.
  if (a->a_log && a->cu_seqlens) mg_set(&c, a->sums->data, 0, 4, c.n.B * c.n.TRIPLE * c.n.HV);
  if (is_empty(&c)) {
    run_back(&x, 0, NULL, NULL, NULL);           // the states' gradients, which nothing stands between
  } else {
    if (norms && made) delta_run_norms(&c, a->q, a->k, norms);
    const int *there = NULL, *back = NULL;
    if (x.early.n) {
      delta_sweep_params forth, down = {.rows = x.rows, .key_dim = (int)c.n.K, .value_dim = (int)c.n.V};
      begin_early(&x, &down, true);
      run_forth(&x, 0, NULL, &forth, NULL);
      run_back(&x, 0, NULL, &down, NULL);
      there = delta_end_early(&c, &forth);
      back = delta_end_early(&c, &down);
    }
    for (int i = 0; i < later; i++) run_forth(&x, i, starts + i * state, NULL, NULL);
    for (int i = later; i >= 0 && !c.status; i--) {
      run_forth(&x, i, NULL, NULL, there);
      run_back(&x, i, between, NULL, back);
      run_grads(&x, i);
    }
  }
  const mg_tensor *da_log = a->a_log ? a->da_log : NULL, *ddt_bias = a->dt_bias ? a->ddt_bias : NULL;
  if (c.status || !(da_log || ddt_bias) || !mg_choose_other(&c, MG_OP_ssd_bwd_sums)) return c.status;
  const ssd_bwd_sums_params sums = {.sums = a->sums->data, .batches = (int)c.n.B, .chunks = (int)c.n.CHUNKS,
                                    .heads = (int)c.n.HV, .out = {mg_data(da_log), NULL, mg_data(ddt_bias)}};
  return mg_run(&c, &sums, mg_tasks(&c, mg_ceil_div(c.n.HV, 64) * 3, "blocks"));
}
