// Host halves of Based: passes over the sequence, one for each part of the features (based.h). Each adds to what the
// parts before it have, and the last writes the result.
#include <math.h>
#include "based/based.h"
#include "runtime/runtime.h"
#include "ssd/scan.h"

static based_rows rows_of(const mg_call *c, const mg_tensor *starts, float scale, float eps) {
  return (based_rows){.starts = starts ? starts->data : NULL, .steps = (int)c->n.T, .heads = (int)c->n.H,
                      .dim = (int)c->n.K, .dim_v = (int)c->n.V, .parts = (int)c->n.PARTS,
                      .scale = scale == 0 ? 1 / sqrtf((float)c->n.K) : scale, .eps = eps};
}

// Steps of a segment, whole chunks; all of them where a row stays whole.
static void set_segments(mg_call *c, based_rows *rows) {
  const int64_t chunks = mg_ceil_div(c->n.T, 64), resident = (int64_t)c->context.sms * c->desc->blocks_per_sm;
  const int64_t blocks = c->n.R * c->n.H, fit = resident / (blocks ? blocks : 1);
  const int64_t segments = rows->starts || fit < 2 ? 1 : fit < c->n.CUTS + 1 ? fit : c->n.CUTS + 1;
  const int64_t segment = mg_ceil_div(chunks, segments) * 64;
  rows->segment = (int)segment;
  rows->segments = c->n.T > segment ? (int)mg_ceil_div(c->n.T, segment) : 1;
  rows->cut_stride = (int)c->n.CUTS;
}

// A pass for each part; rows: within params.
static mg_status run_parts(mg_call *c, const void *params, based_rows *rows) {
  const int64_t tasks = c->n.R * c->n.H * (rows->segments - rows->cutting);
  for (rows->part = 0; rows->part < rows->parts && !c->status; rows->part++)
    mg_run(c, params, mg_tasks(c, tasks, "blocks"));
  return c->status;
}

static mg_status join(mg_call *c, float *cuts, const float *given, int64_t size, const based_rows *rows,
                      bool backwards) {
  based_join_params p = {.cuts = cuts, .given = given, .size = size, .cut = rows->segments - 1,
                         .cut_stride = rows->cut_stride, .backwards = backwards};
  const int64_t tiles = mg_ceil_div(size, c->desc->tile_m * c->desc->tile_n);
  return mg_run(c, &p, mg_tasks(c, c->n.R * tiles, "blocks"));
}

// The same where rows are cut: first the segments' own states, then what is in front of each of them or, backwards,
// behind.
static mg_status run_segments(mg_call *c, mg_op main, mg_op cutting, const void *params, based_rows *rows,
                              const void *own, based_rows *own_rows, based_state given, based_state cuts,
                              bool backwards) {
  if (rows->segments > 1) {
    const int64_t features = c->n.H * c->n.PARTS * c->n.V * c->n.F, sums = c->n.H * c->n.M * c->n.N;
    own_rows->cutting = 1;
    if (!mg_choose_other(c, cutting) || run_parts(c, own, own_rows)) return c->status;
    own_rows->cutting = 0;
    if (!mg_choose_other(c, MG_OP_based_join) || join(c, cuts.features, given.features, features, rows, backwards))
      return c->status;
    if (join(c, cuts.sums, given.sums, sums, rows, backwards) || !mg_choose_other(c, main)) return c->status;
  }
  return run_parts(c, params, rows);
}

mg_status mg_based(const mg_based_args *a) {
  mg_call c;
  if (!mg_open(&c, MG_OP_based, a)) return c.status;
  if (a->cu_seqlens && (c.status = ssd_check_starts(c.op, a->cu_seqlens, c.n.T))) return c.status;
  based_fwd_params p = {.rows = rows_of(&c, a->cu_seqlens, a->scale, a->eps),
                        .initial = {mg_data(a->initial_state), mg_data(a->initial_sums)},
                        .final = {mg_data(a->final_state), mg_data(a->final_sums)},
                        .cuts = {mg_data(a->cuts), mg_data(a->cut_sums)},
                        .norm = a->normalize ? mg_data(a->norm) : NULL, .partial = mg_data(a->partial),
                        .out_data = a->out->data, .out_step = a->out->stride[1], .out_head = a->out->stride[2]};
  if (c.n.T) {
    mg_map_bthd(&c, &p.q, a->q, 64, 64);
    mg_map_bthd(&c, &p.k, a->k, 64, 64);
    mg_map_bthd(&c, &p.v, a->v, 64, 64);
    mg_map_bthd(&c, &p.out, a->out, 64, 64);
  }
  set_segments(&c, &p.rows);
  return run_segments(&c, MG_OP_based, MG_OP_based, &p, &p.rows, &p, &p.rows, p.initial, p.cuts, false);
}

mg_status mg_based_bwd(const mg_based_bwd_args *a) {
  mg_call c;
  if (!mg_open(&c, MG_OP_based_bwd, a)) return c.status;
  if (a->cu_seqlens && (c.status = ssd_check_starts(c.op, a->cu_seqlens, c.n.T))) return c.status;
  const based_state initial = {mg_data(a->initial_state), mg_data(a->initial_sums)};
  const based_state cuts = {mg_data(a->cuts), mg_data(a->cut_sums)};
  based_rows rows = rows_of(&c, a->cu_seqlens, a->scale, a->eps);
  set_segments(&c, &rows);
  float *norm = a->normalize ? mg_data(a->norm) : NULL;
  // the forward's states in front of segments, once more
  based_fwd_params own = {.rows = rows, .cuts = cuts};
  based_dq_params q = {.rows = rows, .initial = initial, .cuts = cuts, .norm = norm, .delta = mg_data(a->delta),
                       .partial = mg_data(a->partial), .dq = a->dq->data,
                       .dq_batch = a->dq->stride[0], .dq_step = a->dq->stride[1], .dq_head = a->dq->stride[2]};
  based_dkv_params kv = {.rows = rows, .final = {mg_data(a->dfinal_state), mg_data(a->dfinal_sums)},
                         .initial = {mg_data(a->dinitial_state), mg_data(a->dinitial_sums)}, .cuts = cuts, .norm = norm,
                         .delta = q.delta, .partial = q.partial, .partial_v = mg_data(a->partial_v),
                         .dk = a->dk->data, .dv_data = a->dv->data,
                         .dk_batch = a->dk->stride[0], .dk_step = a->dk->stride[1], .dk_head = a->dk->stride[2],
                         .dv_step = a->dv->stride[1], .dv_head = a->dv->stride[2]};
  if (c.n.T) {
    mg_map_bthd(&c, &q.q, a->q, 64, 64);
    mg_map_bthd(&c, &q.k, a->k, 64, 64);
    mg_map_bthd(&c, &q.v, a->v, 64, 64);
    mg_map_bthd(&c, &q.dout, a->dout, 64, 64);
    mg_map_bthd(&c, &q.out, a->out, 64, 64);
    mg_map_bthd(&c, &kv.dv, a->dv, 64, 64);
    own.k = kv.k = q.k;
    own.v = kv.v = q.v;
    kv.q = q.q;
    kv.dout = q.dout;
    if (run_segments(&c, MG_OP_based_bwd, MG_OP_based, &q, &q.rows, &own, &own.rows, initial, cuts, false))
      return c.status;
  }
  if (!mg_choose_other(&c, MG_OP_based_bwd_kv)) return c.status;
  return run_segments(&c, MG_OP_based_bwd_kv, MG_OP_based_bwd_kv, &kv, &kv.rows, &kv, &kv.rows, kv.final, cuts, true);
}
