// Host half of Kimi delta attention's backward.
#include <math.h>
#include "runtime/runtime.h"
#include "delta/kda_bwd.h"
#include "ssd/ssd_bwd.h"

static float *data_of(const mg_tensor *t) { return t ? t->data : NULL; }
static kda_given given(const mg_tensor *t) {
  return (kda_given){t->data, t->stride[0], t->stride[1], t->stride[2], t->dtype == MG_FP32};
}

mg_status mg_kda_grads(const mg_kda_grads_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_kda_grads, a)) return c.status;
  if (!mg_choose_other(&c, MG_OP_kda_grads)) return c.status;
  const bool shares = a->da_log || a->ddt_bias;
  kda_grads_params p = {.g = given(a->g), .beta = given(a->beta), .a_log = data_of(a->a_log),
    .dt_bias = data_of(a->dt_bias), .starts = a->cu_seqlens ? a->cu_seqlens->data : NULL, .dq = a->dq->data,
    .dk = a->dk->data, .parts = c.n.G ? a->parts->data : NULL, .dg = a->dg->data, .dbeta = a->dbeta->data,
    .sums = shares ? a->sums->data : NULL, .scale = a->scale == 0 ? 1 / sqrtf((float)c.n.K) : a->scale,
    .lower_bound = a->lower_bound, .beta_factor = a->beta_sigmoid ? 1 + a->beta_double : 0,
    .gate = !a->a_log ? KDA_LOG : a->lower_bound == 0 ? KDA_SOFTPLUS : KDA_BOUNDED, .norm = a->qk_norm, .first = 0,
    .chunks = (int)c.n.CHUNKS, .all_chunks = (int)c.n.CHUNKS, .batches = (int)c.n.B, .steps = (int)c.n.T,
    .rows = (int)c.n.R, .heads = (int)c.n.HV, .group_heads = (int)(c.n.HV / c.n.H), .key_dim = (int)c.n.K,
    .value_dim = (int)c.n.V};
  for (int i = 0; i < 3; i++) {
    p.dq_stride[i] = a->dq->stride[i];
    p.dk_stride[i] = a->dk->stride[i];
  }
  mg_map_bthd(&c, &p.q, a->q, 64, 64);
  mg_map_bthd(&c, &p.k, a->k, 64, 64);
  mg_map_bthd(&c, &p.dout, a->dout, 64, 64);
  mg_map_bthd(&c, &p.dv, a->dv, 64, 64);
  mg_map_bthd(&c, &p.errors, a->errors, 64, 64);
  mg_map_stack(&c, &p.states, a->states, 64, 64);
  mg_map_stack(&c, &p.dstates, a->dstates, 64, 64);
  if (mg_run(&c, &p, mg_tasks(&c, c.n.B * c.n.HV * c.n.CHUNKS, "blocks"))) return c.status;
  if (p.parts && mg_choose_other(&c, MG_OP_ssd_bwd_join)) {
    ssd_bwd_join_params j = {.parts = p.parts, .steps = {.starts = p.starts, .count = p.steps, .rows = p.rows}, .db = p.dk,
      .dc = p.dq, .first = p.first, .chunks = p.chunks, .batches = p.batches, .groups = (int)c.n.H,
      .splits = p.group_heads, .state_dim = p.key_dim};
    for (int i = 0; i < 3; i++) {
      j.dc_stride[i] = p.dq_stride[i];
      j.db_stride[i] = p.dk_stride[i];
    }
    mg_run(&c, &j, mg_tasks(&c, c.n.B * c.n.CHUNKS * c.n.H * 2, "blocks"));
  }
  return c.status;
}
