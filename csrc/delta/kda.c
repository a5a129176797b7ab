// Host half of Kimi delta attention: what the steps of chunks are to the state, then the pass over the sequence.
#include <math.h>
#include "runtime/runtime.h"
#include "delta/kda.h"

static float *data_of(const mg_tensor *t) { return t ? t->data : NULL; }

static kda_given given(const mg_tensor *t) {
  return (kda_given){t->data, t->stride[0], t->stride[1], t->stride[2], t->dtype == MG_FP32};
}

static kda_gates gates_of(const mg_kda_args *a) {
  return (kda_gates){.g = given(a->g), .beta = given(a->beta), .a_log = data_of(a->a_log),
                     .dt_bias = data_of(a->dt_bias), .lower_bound = a->lower_bound, .most = (float)a->beta_form,
                     .gate = !a->a_log ? KDA_LOG : a->lower_bound == 0 ? KDA_SOFTPLUS : KDA_BOUNDED, .norm = a->l2norm};
}

// Scratch in tiles of 64 x 64, of M and P in fp16 whatever the 16-bit type of the call.
static void map_scratch(mg_call *c, gmap *m, const mg_tensor *t, bool square) {
  mg_tensor s = *t;
  if (square && s.dtype == MG_BF16) s.dtype = MG_FP16;
  mg_map_rows(c, m, &s, 64, 64);
}

static mg_status prepare(mg_call *c, const mg_kda_args *a, const delta_rows *rows) {
  if (!mg_choose_other(c, MG_OP_kda_prepare)) return c->status;
  kda_prepare_params p = {.ends = data_of(a->ends), .betas = data_of(a->betas), .rows = *rows, .gates = gates_of(a),
                          .scale = a->scale == 0 ? 1 / sqrtf((float)c->n.K) : a->scale, .batches = (int)c->n.B,
                          .key_dim = (int)c->n.K};
  mg_map_bthd(c, &p.q, a->q, 64, 64);
  mg_map_bthd(c, &p.k, a->k, 64, 64);
  map_scratch(c, &p.m, a->inverses, true);
  map_scratch(c, &p.p, a->pairs, true);
  map_scratch(c, &p.read_k, a->read_k, false);
  map_scratch(c, &p.read_q, a->read_q, false);
  map_scratch(c, &p.write_k, a->write_k, false);
  return mg_run_resident(c, &p, mg_tasks(c, c->n.B * c->n.HV * rows->places, "chunks of heads"));
}

mg_status mg_kda(const mg_kda_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_kda, a)) return c.status;
  const delta_rows rows = {.starts = a->cu_seqlens ? a->cu_seqlens->data : NULL, .rows = (int)c.n.R, .steps = (int)c.n.T,
                           .from = 0, .to = (int)c.n.T, .places = (int)c.n.PLACES, .heads = (int)c.n.HV,
                           .group_heads = c.n.H ? (int)(c.n.HV / c.n.H) : 1};
  if (c.n.T && c.n.R) prepare(&c, a, &rows);
  return c.status;
}
