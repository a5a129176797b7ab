// Host halves of Based: passes over the sequence, one for each part of the features (based.h). Each adds to what the
// parts before it have, and the last writes the result.
#include <math.h>
#include "based/based.h"
#include "runtime/runtime.h"

// cu_seqlens begins with 0, does not fall and ends with the last step or before: what the CPU holds is looked at.
static mg_status check_starts(mg_call *c, const mg_tensor *t) {
  if (!t || t->device != MG_CPU) return MG_OK;
  const int32_t *start = t->data;
  if (start[0] != 0) return mg_refuse(c, MG_VALUE, "cu_seqlens[0] is %d, expected 0", start[0]);
  for (int64_t i = 1; i < t->shape[0]; i++)
    if (start[i] < start[i - 1] || start[i] > c->n.T)
      return mg_refuse(c, MG_VALUE, "cu_seqlens[%lld] is %d, expected %d (the one before) to %lld (the steps that "
                       "there are)", (long long)i, start[i], start[i - 1], (long long)c->n.T);
  return MG_OK;
}

static float *data_of(const mg_tensor *t) { return t ? t->data : NULL; }

static based_rows rows_of(const mg_call *c, const mg_tensor *starts, float scale, float eps) {
  return (based_rows){.starts = starts ? starts->data : NULL, .steps = (int)c->n.T, .heads = (int)c->n.H,
                      .dim = (int)c->n.K, .dim_v = (int)c->n.V, .parts = (int)c->n.PARTS,
                      .scale = scale == 0 ? 1 / sqrtf((float)c->n.K) : scale, .eps = eps};
}

// A pass for each part; rows: within params.
static mg_status run_parts(mg_call *c, const void *params, based_rows *rows) {
  for (rows->part = 0; rows->part < rows->parts && !c->status; rows->part++)
    mg_run(c, params, mg_tasks(c, c->n.R * c->n.H, "blocks"));
  return c->status;
}

mg_status mg_based(const mg_based_args *a) {
  mg_call c;
  if (!mg_open(&c, MG_OP_based, a) || check_starts(&c, a->cu_seqlens)) return c.status;
  based_fwd_params p = {.rows = rows_of(&c, a->cu_seqlens, a->scale, a->eps),
                        .initial = {data_of(a->initial_state), data_of(a->initial_sums)},
                        .final = {data_of(a->final_state), data_of(a->final_sums)},
                        .norm = a->normalize ? data_of(a->norm) : NULL, .partial = data_of(a->partial),
                        .out_data = a->out->data, .out_step = a->out->stride[1], .out_head = a->out->stride[2]};
  if (c.n.T) {
    mg_map_bthd(&c, &p.q, a->q, 64, 64);
    mg_map_bthd(&c, &p.k, a->k, 64, 64);
    mg_map_bthd(&c, &p.v, a->v, 64, 64);
    mg_map_bthd(&c, &p.out, a->out, 64, 64);
  }
  return run_parts(&c, &p, &p.rows);
}

mg_status mg_based_bwd(const mg_based_bwd_args *a) {
  mg_call c;
  if (!mg_open(&c, MG_OP_based_bwd, a) || check_starts(&c, a->cu_seqlens)) return c.status;
  const based_rows rows = rows_of(&c, a->cu_seqlens, a->scale, a->eps);
  float *norm = a->normalize ? data_of(a->norm) : NULL;
  based_dq_params q = {.rows = rows, .initial = {data_of(a->initial_state), data_of(a->initial_sums)}, .norm = norm,
                       .delta = data_of(a->delta), .partial = data_of(a->partial), .dq = a->dq->data,
                       .dq_batch = a->dq->stride[0], .dq_step = a->dq->stride[1], .dq_head = a->dq->stride[2]};
  based_dkv_params kv = {.rows = rows, .final = {data_of(a->dfinal_state), data_of(a->dfinal_sums)},
                         .initial = {data_of(a->dinitial_state), data_of(a->dinitial_sums)}, .norm = norm,
                         .delta = q.delta, .partial = q.partial, .partial_v = data_of(a->partial_v),
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
    kv.q = q.q;
    kv.k = q.k;
    kv.v = q.v;
    kv.dout = q.dout;
    if (run_parts(&c, &q, &q.rows)) return c.status;
  }
  if (!mg_choose_other(&c, MG_OP_based_bwd_kv)) return c.status;
  return run_parts(&c, &kv, &kv.rows);
}
