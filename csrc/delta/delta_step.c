// Host halves of steps of the delta rules.
#include <math.h>
#include "delta/delta_step.h"
#include "ssd/step_host.h"

// per_key: the last dimension is a head's keys, not heads.
static delta_numbers numbers(const mg_tensor *t, int per_key, bool of_steps) {
  if (!t) return (delta_numbers){0};
  const int head = t->dims - 1 - per_key;
  return (delta_numbers){t->data, head > 0 ? mg_stride(t, 0) : 0, of_steps ? mg_stride(t, 1) : 0, mg_stride(t, head),
                         mg_is_float(t)};
}

// Strides of what has no elements say nothing.
static bool in_rows(const mg_tensor *t) {
  return mg_is_empty(t) || t->shape[t->dims - 1] == 1 || t->stride[t->dims - 1] == 1;
}
// The last two dimensions exchanged.
static mg_tensor turned(const mg_tensor *t) {
  const int d = t->dims;
  mg_tensor turned = *t;
  turned.shape[d - 2] = t->shape[d - 1];
  turned.shape[d - 1] = t->shape[d - 2];
  turned.stride[d - 2] = t->stride[d - 1];
  turned.stride[d - 1] = t->stride[d - 2];
  return turned;
}

typedef struct step_rows { mg_op plain, ones, turned, turned_ones; } step_rows;

static mg_status step(mg_call *c, const mg_gated_delta_rule_step_args *a, int channels, step_rows rows) {
  if (mg_is_empty(a->out)) return c->status;
  // As they lie in memory: rows of keys' values or, across, of values' keys.
  const mg_tensor *state = a->state, *kept = a->states;
  const mg_tensor state_turned = turned(state), states_turned = turned(kept ? kept : state);
  const bool several = a->q->dims > 3, across = !in_rows(state) || (kept && !in_rows(kept));
  if (across) {
    state = &state_turned;
    kept = kept ? &states_turned : NULL;
    if (!in_rows(state) || (kept && !in_rows(kept)))
      return mg_refuse(c, MG_VALUE,
                       "intermediate_states has another dimension contiguous than state, expected the same");
  }
  if (kept && kept->dtype != state->dtype)
    return mg_refuse(c, MG_TYPE, "intermediate_states has dtype %s, expected %s (same as state)",
                     mg_dtype_name(kept->dtype), mg_dtype_name(state->dtype));
  bool fours = mg_in_fours(state) && mg_in_fours(kept);
  if (!across) fours = fours && mg_in_fours(a->v) && mg_in_fours(a->out);
  else fours = fours && mg_in_fours(a->q) && mg_in_fours(a->k);
  if (across && channels) fours = fours && mg_in_fours(a->g) && mg_in_fours(a->dt_bias);
  const mg_tensor *begin = a->slots ? a->slots : a->kept;
  c->problem.size.BYTES = (int64_t)mg_dtype_size(state->dtype);
  c->problem.size.ONE_TOKEN = (!several || c->n.T == 1) && !a->kept && !a->accepted && !a->states && !a->still;
  if (!mg_choose_other(c, across ? fours ? rows.turned : rows.turned_ones : fours ? rows.plain : rows.ones))
    return c->status;
  const int64_t parts = mg_ceil_div(c->n.V, across ? c->desc->tile_m : c->desc->tile_n);
  delta_step_params p = {
    .states = mg_states(state, NULL), .places = mg_data(begin), .accepted = mg_data(a->accepted),
    .places_stride = begin ? mg_stride(begin, 0) : 0, .wide = begin && begin->dims > 1 ? (int)begin->shape[1] : 1,
    .update = !a->still && !a->kept,
    .q = mg_vectors(a->q), .k = mg_vectors(a->k), .v = mg_vectors(a->v), .out = mg_vectors(a->out),
    .g = numbers(a->g, channels, several), .bias = numbers(a->dt_bias, channels, false),
    .beta = numbers(a->beta, 0, several), .a_log = numbers(a->a_log, 0, false),
    .scale = a->scale == 0 ? 1 / sqrtf((float)c->n.K) : a->scale, .lower_bound = a->lower_bound, .l2norm = a->l2norm,
    .beta_form = a->beta_form, .steps = several ? (int)c->n.T : 1,
    .heads = mg_divisor(c->n.HV), .group_heads = mg_divisor(c->n.HV / c->n.H), .parts = mg_divisor(parts)};
  if (a->kept) {
    p.kept = mg_states(state, a->kept);
    p.kept_slots = mg_stride(a->kept, 0);
    p.kept_token = 1;
  } else if (kept) {
    p.kept = mg_states(kept, a->states_at);
    p.kept_slots = 1;
    p.kept_step = mg_stride(kept, 1);
  }
  return mg_run(c, &p, mg_tasks(c, c->n.B * c->n.HV * parts, "tiles"));
}

// All four ops have the same arguments, whose shapes differ.
#define STEP(op, row, channels) \
  mg_status mg_##op(const mg_##op##_args *a) { \
    mg_call c; \
    const mg_gated_delta_rule_step_args same = { \
      .out = a->out, .state = a->state, .states = a->states, .q = a->q, .k = a->k, .v = a->v, .g = a->g, \
      .beta = a->beta, .a_log = a->a_log, .dt_bias = a->dt_bias, .slots = a->slots, .kept = a->kept, \
      .accepted = a->accepted, .states_at = a->states_at, .scale = a->scale, .lower_bound = a->lower_bound, \
      .beta_form = a->beta_form, .l2norm = a->l2norm, .still = a->still}; \
    const step_rows rows = {MG_OP_##row, MG_OP_##row##_ones, MG_OP_##row##_turned, MG_OP_##row##_turned_ones}; \
    return mg_begin(&c, MG_OP_##op, a) ? step(&c, &same, channels, rows) : c.status; \
  }
STEP(gated_delta_rule_step, gated_delta_rule_step, 0)
STEP(gated_delta_rule_steps, gated_delta_rule_step, 0)
STEP(kda_step, kda_step, 1)
STEP(kda_steps, kda_step, 1)
