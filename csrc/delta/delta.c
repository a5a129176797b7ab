// Host half of gated_delta_rule, and what the delta rules' ops share. One kernel, which prepares chunks beside the pass
// over the sequence; where heads are few, one that prepares all chunks at once, and then the pass alone.
#include <math.h>
#include "delta/delta_host.h"

delta_rows delta_rows_of(const mg_call *c, const mg_tensor *starts) {
  return (delta_rows){.starts = mg_data(starts), .rows = (int)c->n.R, .steps = (int)c->n.T, .to = (int)c->n.T,
                      .places = (int)c->n.CHUNKS, .heads = (int)c->n.HV,
                      .group_heads = c->n.H ? (int)(c->n.HV / c->n.H) : 1, .key_heads = (int)c->n.H};
}

delta_gates delta_gates_of(const mg_call *c, const mg_tensor *g, const mg_tensor *beta, const mg_tensor *a_log,
                           const mg_tensor *dt_bias, const mg_tensor *norms, int beta_form) {
  const float *norm = mg_data(norms);
  return (delta_gates){.g = mg_data(g), .beta = mg_data(beta), .a_log = mg_data(a_log), .dt_bias = mg_data(dt_bias),
                       .norm_q = norm, .norm_k = norm ? norm + c->n.B * c->n.H * c->n.T : NULL,
                       .sigmoid = beta_form > 0, .most = beta_form == 2 ? 2 : 1};
}

ssd_order delta_order_of(const mg_call *c, bool v_first) {
  return (ssd_order){v_first ? (int)c->n.K : 1, v_first ? 1 : (int)c->n.V, (int)(c->n.K * c->n.V)};
}

float delta_scale_of(const mg_call *c, float scale) { return scale == 0 ? 1 / sqrtf((float)c->n.K) : scale; }

void delta_map_matrices(mg_call *c, gmap *m, const mg_tensor *t, int64_t first) {
  mg_tensor rest = *t;
  rest.shape[2] -= first * 64;
  rest.data = (char *)rest.data + first * 64 * rest.stride[2] * (int64_t)mg_dtype_size(rest.dtype);
  mg_map_rows(c, m, first ? &rest : t, 64, 64);
}

mg_status delta_run_norms(mg_call *c, const mg_tensor *q, const mg_tensor *k, const mg_tensor *norms) {
  float *norm = mg_data(norms);
  delta_norms_params p = {.norm_q = norm, .norm_k = norm + c->n.B * c->n.H * c->n.T, .batches = (int)c->n.B,
                          .heads = (int)c->n.H, .steps = (int)c->n.T};
  if (!mg_choose_other(c, MG_OP_delta_norms)) return c->status;
  mg_map_bthd(c, &p.q, q, 64, 64);
  mg_map_bthd(c, &p.k, k, 64, 64);
  const int tiles = mg_tasks(c, 2 * c->n.B * c->n.H * mg_ceil_div(c->n.T, 64), "tiles");
  return mg_run(c, &p, mg_ceil_div(tiles, c->desc->tile_n));
}

mg_status delta_run_prepare(mg_call *c, const mg_tensor *q, const mg_tensor *k, const mg_tensor *inverses,
                            const mg_tensor *reads, const delta_rows *rows, const delta_gates *gates, float scale,
                            const int *taken) {
  delta_prepare_params p = {.rows = *rows, .gates = *gates, .scale = scale, .batches = (int)c->n.B, .taken = taken};
  if (c->status || !mg_choose_other(c, MG_OP_delta_prepare)) return c->status;
  mg_map_bthd(c, &p.q, q, 64, 64);
  mg_map_bthd(c, &p.k, k, 64, 64);
  mg_map_rows(c, &p.m, inverses, 64, 64);
  mg_map_rows(c, &p.p, reads, 64, 64);
  return mg_run_resident(c, &p, mg_tasks(c, c->n.B * c->n.HV * rows->places, "chunks"));
}

// Segments of a row that take the least time, in hundredths of that of a chunk of the pass over whole rows, of which a
// multiprocessor has 64 columns of v; a pair of them takes four fifths. Of segments it has all columns: a chunk takes
// 1.8 times as long, and 1.2 times where it is made into what segments begin with (measured). `heads`: of all rows.
static int64_t segments_of(const mg_call *c, int64_t chunks, int64_t heads, int64_t most, int64_t *time_of_all) {
  const int64_t parts = mg_ceil_div(c->n.V, 64) * c->desc->cluster, sms = c->context.sms;
  int64_t best = 1, least = (c->desc->cluster > 1 ? 80 : 100) * chunks * mg_ceil_div(heads * parts, sms);
  for (int64_t n = 2; n <= most && n <= chunks; n++) {
    const int64_t cuts = mg_ceil_div(heads * (2 * n - 3), sms), whole = mg_ceil_div(heads * n, sms);
    const int64_t time = mg_ceil_div(chunks, n) * (120 * cuts + 180 * whole) + 300 * (n - 2) + 800;
    if (time < least) {
      least = time;
      best = n;
    }
  }
  *time_of_all = least;
  return best;
}

delta_pieces delta_pieces_of(const mg_call *c, const delta_rows *rows, const mg_tensor *cuts, bool all) {
  const int64_t heads = c->n.R * c->n.HV, most = rows->starts || !cuts ? 1 : c->n.CUTS + 1;
  const int64_t whole = mg_ceil_div(rows->to - rows->from, 64);
  int64_t time = 0;
  const int64_t best = segments_of(c, whole, heads, most, &time), some = all ? most : best;
  const int64_t chunks = mg_ceil_div(whole, some);
  return (delta_pieces){mg_ceil_div(whole, chunks + !chunks), chunks, time};
}

mg_status delta_run_sweep(mg_call *c, delta_sweep_params *p, const delta_parts *parts, const mg_tensor *cuts,
                          const mg_tensor *turns, bool all) {
  const int64_t heads = c->n.R * c->n.HV;
  const delta_pieces cut = delta_pieces_of(c, &p->rows, cuts, all);
  const int64_t n = cut.n, chunks = cut.chunks;
  p->cut.segments = (int)n;
  if (n < 2)
    return mg_run(c, p, mg_tasks(c, heads * mg_ceil_div(c->n.V, c->desc->tile_n) * c->desc->cluster, "blocks"));
  p->cut.segment = (int)chunks * 64;
  p->cut.states = cuts->data;
  p->cut.stride = (int)c->n.CUTS;
  mg_map_stack(c, &p->turns, turns, 64, 64);
  if (!mg_choose_other(c, parts->cuts)) return c->status;
  const int64_t width = c->desc->tile_n, value = mg_ceil_div(c->n.V, width), key = mg_ceil_div(turns->shape[4], width);
  mg_run(c, p, mg_tasks(c, heads * ((n - 1) * value + (n - 2) * key), "blocks"));
  if (n > 2) {
    delta_join_params join = {.cuts = p->cut.states, .cut = (int)n - 1, .cut_stride = p->cut.stride,
                              .rows = (int)c->n.R, .heads = (int)c->n.HV, .key_dim = (int)c->n.K,
                              .value_dim = (int)c->n.V, .taken = p->taken};
    if (!mg_choose_other(c, MG_OP_delta_join)) return c->status;
    mg_map_stack(c, &join.turns, turns, (int)turns->shape[4], 64);
    mg_run(c, &join, mg_tasks(c, heads * mg_ceil_div(c->n.V, c->desc->tile_n), "blocks"));
  }
  if (!mg_choose_other(c, parts->segments)) return c->status;
  return mg_run(c, p, mg_tasks(c, heads * n * mg_ceil_div(c->n.V, c->desc->tile_n), "blocks"));
}

delta_fades_params delta_fades_of(const mg_call *c, const delta_gates *gates) {
  return (delta_fades_params){.g = gates->g, .batch = c->n.T * c->n.HV, .step = c->n.HV, .is_float = 1,
                              .a_log = gates->a_log, .dt_bias = gates->dt_bias, .columns_are_heads = 1,
                              .line.heads = mg_divisor(1), .columns = (int)c->n.HV};
}

delta_pieces delta_early_of(const mg_call *c, const delta_rows *rows, const mg_tensor *cuts, int64_t chunk, bool all,
                            int passes) {
  enum { around = 12000 };            // the kernels in front and behind
  const int64_t heads = c->n.R * c->n.HV, whole = mg_ceil_div(rows->to - rows->from, 64);
  const int64_t most = rows->starts || !cuts || !heads ? 1 : c->n.CUTS / (2 * passes) + 1;
  const int64_t fit = all ? most : c->context.persistent ? mg_min(most, c->context.sms / (passes * heads)) : 1;
  if (fit < 2 || whole < 2 * fit) return (delta_pieces){0};
  const int64_t chunks = mg_ceil_div(whole, fit);
  return (delta_pieces){mg_ceil_div(whole, chunks), chunks, (chunks + 3) * chunk + passes * around};
}

delta_pieces delta_early_back_of(const mg_call *c, const delta_rows *rows, const mg_tensor *cuts, int64_t chunk,
                                 int64_t moved, bool all) {
  delta_pieces cut = delta_early_of(c, rows, cuts, chunk, all, 2);
  const int64_t whole = mg_ceil_div(rows->to - rows->from, 64), least = whole * c->n.R * c->n.HV * moved;
  cut.time = mg_max(cut.time, least + 30000);
  // The last segment wants two whole chunks for the one in front of it.
  const int64_t last = (rows->to - rows->from) / 64 - (cut.n - 1) * cut.chunks;
  const bool pays = all || cut.time * 10 < 9 * mg_max(whole * chunk, least);
  return cut.n && last > 1 && pays ? cut : (delta_pieces){0};
}

mg_status delta_begin_early(mg_call *c, delta_sweep_params *p, delta_fades_params *f, const delta_pieces *cut,
                            const mg_tensor *early, const mg_tensor *cuts, int pass) {
  const int64_t ends = cut->n - 1, numbers = 2 + c->n.R * f->line.heads.by * ends;
  const int64_t whole_of_last = (p->rows.to - p->rows.from) / 64 - ends * cut->chunks;
  int *takes = (int *)early->data + pass * numbers;
  p->cut = (delta_cut){.states = (float *)cuts->data + 2 * pass * ends * cuts->stride[1], .stride = (int)c->n.CUTS,
                       .segments = (int)cut->n, .segment = (int)cut->chunks * 64, .takes = takes,
                       .early = (float *)takes + 2, .earlies = (int)numbers - 2};
  f->line.places = mg_divisor(ends);
  f->segment = p->cut.segment;
  f->early = (float *)takes + 2;
  f->wrong = takes + 1;
  f->from = p->rows.from;
  f->most = (int)mg_min(DELTA_MOST_EARLY, f->back ? whole_of_last : cut->chunks);
  return mg_choose_other(c, MG_OP_delta_fades) ? mg_run(c, f, p->cut.earlies) : c->status;
}

const int *delta_end_early(mg_call *c, const delta_sweep_params *p) {
  if (c->status) return NULL;
  const delta_meets_params m = {.cuts = p->cut.states, .taken = p->cut.takes,
                                .segments = p->cut.segments, .cut_stride = p->cut.stride, .heads = p->rows.heads,
                                .keys = p->key_dim <= 64 ? 64 : 128};
  if (mg_choose_other(c, MG_OP_delta_meets))
    mg_run(c, &m, mg_tasks(c, c->n.R * c->n.HV * (p->cut.segments - 1), "blocks"));
  return p->cut.takes;
}

// Nanoseconds, on an H200, of whole rows, whose kernel has been chosen. made: of ten chunks, all prepared at once;
// passed: of ten hundredths of a chunk of the pass; narrow, wide: of a chunk of 64 columns of v, of 128, in one kernel.
static int64_t time_of_rows(mg_call *c, const delta_rows *rows, const mg_tensor *cuts) {
  enum { made = 105, passed = 125, narrow = 2300, wide = 3300 };
  const int64_t heads = c->n.R * c->n.HV, tile = c->desc->tile_n;
  if (c->n.FORM) return heads * rows->places * made / 10 + delta_pieces_of(c, rows, cuts, false).time * passed / 10;
  return mg_ceil_div(heads * mg_ceil_div(c->n.V, tile), c->context.sms) * rows->places * (tile > 64 ? wide : narrow);
}

// The pass over segments that begin early, where that pays: then the kernels behind it may find all done.
static mg_status run_early(mg_call *c, delta_sweep_params *p, const mg_gated_delta_rule_args *a) {
  enum { chunk = 3300 };
  const mg_tensor *cuts = c->n.CUTS ? a->cuts : NULL;
  const bool able = a->g && c->n.V > 64 && c->n.HV <= 128 && a->q->dtype == MG_BF16;
  const delta_pieces cut = delta_early_of(c, &p->rows, able ? cuts : NULL, chunk, a->form == 4, 1);
  if (c->status || !cut.n || (a->form && a->form != 4)) return c->status;
  if (!a->form && cut.time > time_of_rows(c, &p->rows, cuts)) return c->status;
  delta_fades_params f = delta_fades_of(c, &p->gates);
  delta_sweep_params early = *p;
  delta_begin_early(c, &early, &f, &cut, a->early, cuts, 0);
  if (c->status || !mg_choose_other(c, MG_OP_delta_early)) return c->status;
  mg_run(c, &early, mg_tasks(c, c->n.R * c->n.HV * cut.n, "blocks"));
  p->taken = delta_end_early(c, &early);
  return c->status;
}

mg_status mg_gated_delta_rule(const mg_gated_delta_rule_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_gated_delta_rule, a)) return c.status;
  if (a->cu_seqlens && (c.status = ssd_check_starts(c.op, a->cu_seqlens, c.n.T))) return c.status;
  if (!mg_choose(&c)) return c.status;
  const mg_kernel *sweep = c.kernel;
  const mg_tensor *norms = a->l2norm ? a->norms : NULL;
  const mg_tensor *inverses = a->keep ? a->inverses : a->own_inverses, *reads = a->keep ? a->reads : a->own_reads;
  const ssd_order order = delta_order_of(&c, a->state_v_first);
  delta_sweep_params p = {
    .initial = mg_data(a->initial_state), .final = mg_data(a->final_state), .initial_order = order,
    .final_order = order, .rows = delta_rows_of(&c, a->cu_seqlens),
    .gates = delta_gates_of(&c, a->g, a->beta, a->a_log, a->dt_bias, norms, a->beta_form),
    .scale = delta_scale_of(&c, a->scale), .o_data = a->out->data, .o_step = a->out->stride[1],
    .o_head = a->out->stride[2], .key_dim = (int)c.n.K, .value_dim = (int)c.n.V};
  if (c.n.T && c.n.R && c.n.HV) {     // the driver refuses to map what has no elements
    if (norms) delta_run_norms(&c, a->q, a->k, norms);
    mg_use(&c, sweep);
    if (c.n.FORM) {
      mg_map_rows(&c, &p.m, inverses, 64, 64);
      mg_map_rows(&c, &p.p, reads, 64, 64);
    }
    mg_map_bthd(&c, &p.q, a->q, 64, 64);
    mg_map_bthd(&c, &p.k, a->k, 64, 64);
    mg_map_bthd(&c, &p.v, a->v, 64, 64);
    mg_map_bthd(&c, &p.o, a->out, 64, 64);
    run_early(&c, &p, a);
    if (c.n.FORM) delta_run_prepare(&c, a->q, a->k, inverses, reads, &p.rows, &p.gates, p.scale, p.taken);
  }
  mg_use(&c, sweep);
  if (c.status) return c.status;
  const delta_parts parts = {MG_OP_delta_segments, MG_OP_delta_cuts};
  return delta_run_sweep(&c, &p, &parts, c.n.FORM ? a->cuts : NULL, a->turns, a->form == 3);
}
