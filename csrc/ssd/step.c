// Host halves of steps of generation.
#include <math.h>
#include "ssd/step_host.h"

static step_numbers numbers(const mg_tensor *t) {
  if (!t) return (step_numbers){0};
  return (step_numbers){t->data, t->dims > 1 ? mg_stride(t, 0) : 0, t->dims > 2 ? mg_stride(t, 1) : 0, mg_is_float(t)};
}

static mg_status ssd(mg_call *c, const mg_ssd_step_args *a) {
  if (mg_is_empty(a->y)) return c->status;
  const bool fours = mg_in_fours(a->state) && mg_in_fours(a->b) && mg_in_fours(a->c);
  if (!mg_choose_other(c, fours ? MG_OP_ssd_step : MG_OP_ssd_step_ones)) return c->status;
  const int64_t parts = mg_ceil_div(c->n.P, c->desc->tile_m);
  const ssd_step_params p = {
    .states = mg_states(a->state, a->slots), .x = mg_vectors(a->x), .z = mg_vectors(a->z), .y = mg_vectors(a->y),
    .b = mg_vectors(a->b), .c = mg_vectors(a->c), .dt = numbers(a->dt), .a = numbers(a->a), .bias = numbers(a->dt_bias),
    .d = numbers(a->d),
    .d_wide = mg_data(a->d_wide), .d_wide_is_float = mg_is_float(a->d_wide), .softplus = a->dt_softplus,
    .low = a->dt_min, .high = a->dt_max, .steps = a->x->dims > 3 ? (int)c->n.T : 1, .heads = mg_divisor(c->n.H),
    .group_heads = mg_divisor(c->n.H / c->n.G), .parts = mg_divisor(parts)};
  return mg_run(c, &p, mg_tasks(c, c->n.B * c->n.H * parts, "tiles"));
}

mg_status mg_ssd_step(const mg_ssd_step_args *a) {
  mg_call c;
  return mg_begin(&c, MG_OP_ssd_step, a) ? ssd(&c, a) : c.status;
}

mg_status mg_ssd_steps(const mg_ssd_steps_args *a) {
  mg_call c;
  const mg_ssd_step_args same = {.y = a->y, .state = a->state, .x = a->x, .dt = a->dt, .a = a->a, .b = a->b, .c = a->c,
                                 .d = a->d, .d_wide = a->d_wide, .z = a->z, .dt_bias = a->dt_bias, .slots = a->slots,
                                 .dt_softplus = a->dt_softplus, .dt_min = a->dt_min, .dt_max = a->dt_max};
  return mg_begin(&c, MG_OP_ssd_steps, a) ? ssd(&c, &same) : c.status;
}

static mg_status linear_attention(mg_call *c, const mg_linear_attention_step_args *a) {
  if (mg_is_empty(a->out)) return c->status;
  const bool fours = mg_in_fours(a->state) && mg_in_fours(a->v) && mg_in_fours(a->out);
  c->problem.size.BYTES = (int64_t)mg_dtype_size(a->state->dtype);
  if (!mg_choose_other(c, fours ? MG_OP_linear_attention_step : MG_OP_linear_attention_step_ones)) return c->status;
  const int64_t parts = mg_ceil_div(c->n.V, c->desc->tile_n);
  const linear_attention_step_params p = {
    .states = mg_states(a->state, a->slots), .q = mg_vectors(a->q), .k = mg_vectors(a->k), .v = mg_vectors(a->v),
    .out = mg_vectors(a->out), .g = numbers(a->g), .g_head = numbers(a->g_head),
    .scale = a->scale == 0 ? 1 / sqrtf((float)c->n.K) : a->scale, .steps = a->q->dims > 3 ? (int)c->n.T : 1,
    .heads = mg_divisor(c->n.H), .parts = mg_divisor(parts)};
  return mg_run(c, &p, mg_tasks(c, c->n.B * c->n.H * parts, "tiles"));
}

mg_status mg_linear_attention_step(const mg_linear_attention_step_args *a) {
  mg_call c;
  return mg_begin(&c, MG_OP_linear_attention_step, a) ? linear_attention(&c, a) : c.status;
}

mg_status mg_linear_attention_steps(const mg_linear_attention_steps_args *a) {
  mg_call c;
  const mg_linear_attention_step_args same = {.out = a->out, .state = a->state, .q = a->q, .k = a->k, .v = a->v,
                                              .g = a->g, .g_head = a->g_head, .slots = a->slots, .scale = a->scale};
  return mg_begin(&c, MG_OP_linear_attention_steps, a) ? linear_attention(&c, &same) : c.status;
}
