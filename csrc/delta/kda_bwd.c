// Host half of Kimi delta attention's backward, in segments as gated_delta_rule's (delta_bwd.c). Of M and P that the
// forward kept the tiles of q, k and gates are left to be made.
#include "delta/delta_bwd.h"
#include "delta/kda_bwd.h"
#include "delta/kda_host.h"
#include "ssd/ssd_bwd.h"

typedef struct problem {
  mg_call *c;
  const mg_kda_bwd_args *a;
  delta_rows rows;
  kda_gates gates;
  float scale;
  ssd_order given, kept;      // of the caller's states, and of those between segments
  delta_pieces early;         // as in delta_bwd.c
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

static delta_gates beta_of(const problem *x) { return kda_beta_of(&x->gates, x->a->betas); }

// M and P of a segment's chunks: of all chunks, or own ones of the segment.
static void map_matrices(const problem *x, int segment, gmap *m, gmap *p) {
  const mg_kda_bwd_args *a = x->a;
  const bool has = x->c->n.KEPT > 0;
  const int64_t first = has ? segment * x->c->n.SEG : 0;
  delta_map_matrices(x->c, m, has ? a->inverses : a->own_inverses, first);
  delta_map_matrices(x->c, p, has ? a->reads : a->own_reads, first);
}

static void begin_early(const problem *x, delta_sweep_params *p, const kda_gates *acting, bool back) {
  delta_fades_params f = kda_fades_of(x->c, acting);
  f.back = back;
  delta_begin_early(x->c, p, &f, &x->early, x->a->early, x->a->cuts, back);
}

// States in front of the segment's chunks, and errors. The state behind it goes to `final`. early: by segments that
// begin so, of which it tells; `down`, those of the pass back, are begun, too. taken: as in delta.h; what chunks want
// is there then.
static mg_status run_forth(const problem *x, int segment, float *final, delta_sweep_params *early,
                           delta_sweep_params *down, const int *taken) {
  mg_call *c = x->c;
  const mg_kda_bwd_args *a = x->a;
  const int64_t state = c->n.R * c->n.HV * c->n.V * c->n.K;
  const bool first = segment == 0;
  delta_sweep_params p = {
    .ends = mg_data(a->ends),
    .initial = first ? mg_data(a->initial_state) : (float *)a->starts->data + (segment - 1) * state, .final = final,
    .initial_order = first ? x->given : x->kept, .final_order = x->kept, .rows = segment_of(x, segment),
    .gates = beta_of(x), .scale = x->scale, .o_data = a->errors->data, .o_step = a->errors->stride[1],
    .o_head = a->errors->stride[2], .key_dim = (int)c->n.K, .value_dim = (int)c->n.V, .taken = taken};
  map_matrices(x, segment, &p.m, &p.p);
  mg_map_rows(c, &p.k, a->read_k, 64, 64);
  mg_map_rows(c, &p.q, a->read_q, 64, 64);
  mg_map_rows(c, &p.w, a->write_k, 64, 64);
  const bool kept = c->n.KEPT > 0;
  if (!taken) {
    kda_acting acting;
    kda_run_decays(c, &acting, a->g, &x->gates, kept ? NULL : a->decays, a->betas, &p.rows);
    kda_run_prepare(c, kept ? MG_OP_kda_tiles : MG_OP_kda_prepare, a->q, a->k, &acting, &p, NULL);
    if (early) begin_early(x, &p, &acting.gates, false);
    if (early) begin_early(x, down, &acting.gates, true);
  }
  if (c->status || !mg_choose_other(c, early ? MG_OP_kda_keep_early : MG_OP_kda_keep)) return c->status;
  mg_map_bthd(c, &p.v, a->v, 64, 64);
  mg_map_stack(c, &p.states, a->states, 64, 64);
  map_errors(x, &p.errors);
  if (early) *early = p;
  return mg_run(c, &p, mg_tasks(c, sweep_blocks(c) * (early ? p.cut.segments : 1), "blocks"));
}

static mg_status run_back(const problem *x, int segment, float *between, const delta_sweep_params *early,
                          const int *taken) {
  mg_call *c = x->c;
  const mg_kda_bwd_args *a = x->a;
  const bool first = segment == 0, last = segment == c->n.LATER;
  delta_back_params p = {
    .ends = mg_data(a->ends), .initial = last ? mg_data(a->dfinal_state) : between,
    .final = first ? mg_data(a->dinitial_state) : between, .initial_order = last ? x->given : x->kept,
    .final_order = first ? x->given : x->kept, .rows = segment_of(x, segment), .gates = beta_of(x), .scale = x->scale,
    .dv_data = a->dv->data, .dv_step = a->dv->stride[1], .dv_head = a->dv->stride[2], .key_dim = (int)c->n.K,
    .value_dim = (int)c->n.V, .taken = taken};
  if (early) p.cut = early->cut;
  if (c->status || !mg_choose_other(c, early ? MG_OP_kda_back_early : MG_OP_kda_back)) return c->status;
  if (!is_empty(c)) {
    map_matrices(x, segment, &p.m, &p.p);
    mg_map_rows(c, &p.k, a->read_k, 64, 64);
    mg_map_rows(c, &p.q, a->read_q, 64, 64);
    mg_map_rows(c, &p.w, a->write_k, 64, 64);
    mg_map_bthd(c, &p.dout, a->dout, 64, 64);
    mg_map_bthd(c, &p.dv, a->dv, 64, 64);
    mg_map_stack(c, &p.dstates, a->dstates, 64, 64);
  }
  const int blocks = mg_tasks(c, sweep_blocks(c) * (early ? early->cut.segments : 1), "blocks");
  return is_empty(c) ? mg_run(c, &p, blocks) : mg_run_beside(c, &p, blocks);
}

static mg_status run_grads(const problem *x, int segment) {
  mg_call *c = x->c;
  const mg_kda_bwd_args *a = x->a;
  kda_grads_params p = {
    .dq = a->dq->data, .dk = a->dk->data, .parts = c->n.PARTS ? mg_data(a->parts) : NULL, .dg = mg_data(a->dg),
    .dbeta = mg_data(a->dbeta), .sums = a->a_log ? mg_data(a->sums) : NULL, .rows = segment_of(x, segment),
    .gates = x->gates, .scale = x->scale, .batches = (int)c->n.B, .all_places = (int)c->n.CHUNKS,
    .key_dim = (int)c->n.K, .value_dim = (int)c->n.V};
  const delta_rows *r = &p.rows;
  p.places = r->starts ? r->places : (int)mg_ceil_div(r->to - r->from, 64);
  if (c->status || !mg_choose_other(c, MG_OP_kda_bwd)) return c->status;
  ssd_bwd_join_params j = {.parts = p.parts, .steps = {.starts = r->starts, .count = r->steps, .rows = r->rows},
                           .dc = p.dq, .db = p.dk, .first = r->from / 64, .chunks = p.places, .batches = p.batches,
                           .groups = (int)c->n.H, .splits = r->group_heads, .state_dim = p.key_dim};
  for (int i = 0; i < 3; i++) {
    j.dc_stride[i] = p.dq_stride[i] = a->dq->stride[i];
    j.db_stride[i] = p.dk_stride[i] = a->dk->stride[i];
  }
  mg_map_bthd(c, &p.q, a->q, 64, 64);
  mg_map_bthd(c, &p.k, a->k, 64, 64);
  mg_map_bthd(c, &p.dout, a->dout, 64, 64);
  mg_map_bthd(c, &p.dv, a->dv, 64, 64);
  mg_map_bthd(c, &p.to_q, a->dq, 16, 64);
  mg_map_bthd(c, &p.to_k, a->dk, 16, 64);
  map_errors(x, &p.errors);
  mg_map_stack(c, &p.states, a->states, 64, 64);
  mg_map_stack(c, &p.dstates, a->dstates, 64, 64);
  mg_run_resident(c, &p, mg_tasks(c, c->n.B * c->n.HV * p.places, "chunks of heads"));
  // dq and dk of heads of v that share those of q and k, summed in their order
  if (c->status || !p.parts) return c->status;
  const int64_t columns = c->n.N;
  c->n.N = c->n.K;
  if (mg_choose_other(c, MG_OP_ssd_bwd_join)) mg_run(c, &j, mg_tasks(c, c->n.B * p.places * c->n.H * 2, "blocks"));
  c->n.N = columns;
  return c->status;
}

// da_log and ddt_bias: shares of chunks summed for each head and channel, then those of da_log over the channels.
static mg_status run_sums(mg_call *c, const mg_kda_bwd_args *a) {
  float *rates = a->da_log ? mg_data(a->rates) : NULL;
  const int64_t of_step = c->n.HV * c->n.K;
  if (!mg_choose_other(c, MG_OP_ssd_bwd_sums)) return c->status;
  const ssd_bwd_sums_params shares = {.sums = mg_data(a->sums), .batches = (int)c->n.B, .chunks = (int)c->n.CHUNKS,
                                      .heads = (int)of_step, .out = {rates, mg_data(a->dt_bias ? a->ddt_bias : NULL)}};
  const ssd_bwd_sums_params channels = {.sums = rates, .batches = 1, .chunks = (int)c->n.K, .heads = (int)c->n.HV,
                                        .out = {mg_data(a->da_log)}};
  mg_run(c, &shares, mg_tasks(c, mg_ceil_div(of_step, 64) * 3, "blocks"));
  if (rates) mg_run(c, &channels, mg_tasks(c, mg_ceil_div(c->n.HV, 64) * 3, "blocks"));
  return c->status;
}

mg_status mg_kda_bwd(const mg_kda_bwd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_kda_bwd, a)) return c.status;
  if (a->cu_seqlens && (c.status = ssd_check_starts(c.op, a->cu_seqlens, c.n.T))) return c.status;
  problem x = {.c = &c, .a = a, .rows = delta_rows_of(&c, a->cu_seqlens),
                     .gates = kda_gates_of(a->g, a->beta, a->a_log, a->dt_bias, a->lower_bound, a->beta_form,
                                            a->l2norm),
                     .scale = delta_scale_of(&c, a->scale), .given = delta_order_of(&c, a->state_v_first),
                     .kept = {(int)c.n.K, 1, (int)(c.n.K * c.n.V)}};
  enum { chunk = 2500, moved = 66 };     // nanoseconds, on an H200
  const int64_t state = c.n.R * c.n.HV * c.n.V * c.n.K;
  const int later = (int)c.n.LATER;
  if (!later && a->q->dtype == MG_BF16 && c.n.K > 64 && c.n.V > 64 &&
      (a->form == 0 || a->form == 4))
    x.early = delta_early_back_of(&c, &x.rows, c.n.CUTS ? a->cuts : NULL, chunk, moved, a->form == 4);
  float *starts = a->starts->data, *between = later ? starts + later * state : NULL;
  // gradients of what is not there, as the operator asks for them
  if (a->da_log && !a->a_log) mg_set(&c, a->da_log->data, 0, 4, c.n.HV);
  if (a->ddt_bias && !a->dt_bias) mg_set(&c, a->ddt_bias->data, 0, 4, c.n.HV * c.n.K);
  // Places where packed rows have no chunk have no shares.
  if (a->a_log && a->cu_seqlens) mg_set(&c, a->sums->data, 0, 4, c.n.B * c.n.TRIPLE * c.n.HV * c.n.K);
  if (is_empty(&c)) {
    run_back(&x, 0, NULL, NULL, NULL);           // the states' gradients, which nothing stands between
  } else {
    const int *there = NULL, *back = NULL;
    if (x.early.n) {
      delta_sweep_params forth, down = {.rows = x.rows, .key_dim = (int)c.n.K, .value_dim = (int)c.n.V};
      run_forth(&x, 0, NULL, &forth, &down, NULL);
      run_back(&x, 0, NULL, &down, NULL);
      there = delta_end_early(&c, &forth);
      back = delta_end_early(&c, &down);
    }
    for (int i = 0; i < later; i++) run_forth(&x, i, starts + i * state, NULL, NULL, NULL);
    for (int i = later; i >= 0 && !c.status; i--) {
      run_forth(&x, i, NULL, NULL, NULL, there);
      run_back(&x, i, between, NULL, back);
      run_grads(&x, i);
    }
  }
  if (c.status || !a->a_log || !(a->da_log || (a->ddt_bias && a->dt_bias))) return c.status;
  return run_sums(&c, a);
}
