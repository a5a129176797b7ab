// Host half of Kimi delta attention: what the steps of each chunk are to the state, then the states.
#include <math.h>
#include "runtime/runtime.h"
#include "delta/kda.h"

static float *data_of(const mg_tensor *t) { return t ? t->data : NULL; }

static kda_given given(const mg_tensor *t) {
  return (kda_given){t->data, t->stride[0], t->stride[1], t->stride[2], t->dtype == MG_FP32};
}

static enum kda_gate gate_of(const mg_kda_args *a) {
  return !a->a_log ? KDA_LOG : a->lower_bound == 0 ? KDA_SOFTPLUS : KDA_BOUNDED;
}

// Scratch as matrices: `count` of 64 rows by `cols` for each place of a chunk.
static void map_scratch(mg_call *c, gmap *m, const mg_tensor *t, mg_dtype dtype, int64_t count, int64_t cols) {
  const int64_t row = t->stride[t->dims - 2], places = c->n.SEG * count;
  if (!c->status)
    c->status = mg_map(m, &c->context, "scratch", t->data, dtype, (int64_t[4]){c->n.B * c->n.HV, places, 64, cols},
                       (int64_t[4]){places * 64 * row, 64 * row, row, 1}, 64, 64);
}

static mg_status prepare(mg_call *c, const mg_kda_args *a, int64_t first, int64_t chunks) {
  if (!mg_choose_other(c, MG_OP_kda_prepare)) return c->status;
  const mg_dtype type = a->q->dtype;
  kda_prepare_params p = {
    .decays = data_of(a->ends), .g = given(a->g), .beta = given(a->beta), .a_log = data_of(a->a_log),
    .dt_bias = data_of(a->dt_bias), .starts = a->cu_seqlens ? a->cu_seqlens->data : NULL,
    .scale = a->scale == 0 ? 1 / sqrtf((float)c->n.K) : a->scale, .lower_bound = a->lower_bound,
    .beta_factor = a->beta_sigmoid ? 1 + a->beta_double : 0, .gate = gate_of(a), .norm = a->qk_norm, .first = (int)first,
    .chunks = (int)chunks, .batches = (int)c->n.B, .steps = (int)c->n.T, .rows = (int)c->n.R, .heads = (int)c->n.HV,
    .group_heads = (int)(c->n.HV / c->n.H), .key_dim = (int)c->n.K};
  mg_map_bthd(c, &p.q, a->q, 64, 64);
  mg_map_bthd(c, &p.k, a->k, 64, 64);
  map_scratch(c, &p.pairs, a->pairs, type == MG_FP32 ? MG_FP32 : MG_FP16, 2, 64);
  map_scratch(c, &p.scaled, a->scaled, type, 3, c->n.K);
  return mg_run_resident(c, &p, mg_tasks(c, c->n.B * c->n.HV * chunks, "chunks of heads"));
}

mg_status mg_kda(const mg_kda_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_kda, a)) return c.status;
  if (c.n.T && c.n.R) prepare(&c, a, 0, c.n.CHUNKS);
  return c.status;
}
