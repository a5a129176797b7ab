// Host halves of steps of generation. Tensors of one step lack the dimension of steps.
#include <math.h>
#include "ssd/step.h"
#include "runtime/runtime.h"

static int is_float(const mg_tensor *t) { return t && t->dtype == MG_FP32; }
// Of a dimension that the first does not move along: 0.
static int64_t stride(const mg_tensor *t, int i) { return t->shape[i] > 1 ? t->stride[i] : 0; }
static step_vectors vectors(const mg_tensor *t) {
  if (!t) return (step_vectors){0};
  const int last = t->dims - 1;
  return (step_vectors){t->data, stride(t, 0), last == 3 ? stride(t, 1) : 0, stride(t, last - 1)};
}
static step_numbers numbers(const mg_tensor *t) {
  if (!t) return (step_numbers){0};
  return (step_numbers){t->data, t->dims > 1 ? stride(t, 0) : 0, t->dims > 2 ? stride(t, 1) : 0, is_float(t)};
}
static step_states states(const mg_tensor *t, const mg_tensor *slots) {
  return (step_states){.data = t->data, .place = stride(t, 0), .head = stride(t, 1), .row = stride(t, 2),
                       .slots = mg_data(slots), .places = (int)t->shape[0], .rows = (int)t->shape[2],
                       .cols = (int)t->shape[3], .is_float = is_float(t)};
}

// Four numbers of a row may be one access.
static bool in_fours(const mg_tensor *t) {
  bool fours = (uintptr_t)t->data % (4 * mg_dtype_size(t->dtype)) == 0 && t->shape[t->dims - 1] % 4 == 0;
  for (int i = 0; i < t->dims - 1; i++) fours &= stride(t, i) % 4 == 0;
  return fours;
}

static mg_status ssd(mg_call *c, const mg_ssd_step_args *a) {
  if (mg_is_empty(a->y)) return c->status;
  const bool fours = in_fours(a->state) && in_fours(a->b) && in_fours(a->c);
  if (!mg_choose_other(c, fours ? MG_OP_ssd_step : MG_OP_ssd_step_ones)) return c->status;
  const int64_t parts = mg_ceil_div(c->n.P, c->desc->tile_m);
  const ssd_step_params p = {
    .states = states(a->state, a->slots), .x = vectors(a->x), .z = vectors(a->z), .y = vectors(a->y), .b = vectors(a->b),
    .c = vectors(a->c), .dt = numbers(a->dt), .a = numbers(a->a), .bias = numbers(a->dt_bias), .d = numbers(a->d),
    .d_wide = mg_data(a->d_wide), .d_wide_is_float = is_float(a->d_wide), .softplus = a->dt_softplus, .low = a->dt_min,
    .high = a->dt_max, .steps = a->x->dims > 3 ? (int)c->n.T : 1, .heads = (int)c->n.H,
    .group_heads = (int)(c->n.H / c->n.G), .parts = (int)parts};
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
  const bool fours = in_fours(a->state) && in_fours(a->v) && in_fours(a->out);
  c->problem.size.BYTES = (int64_t)mg_dtype_size(a->state->dtype);
  if (!mg_choose_other(c, fours ? MG_OP_linear_attention_step : MG_OP_linear_attention_step_ones)) return c->status;
  const int64_t parts = mg_ceil_div(c->n.V, c->desc->tile_n);
  const linear_attention_step_params p = {
    .states = states(a->state, a->slots), .q = vectors(a->q), .k = vectors(a->k), .v = vectors(a->v),
    .out = vectors(a->out), .g = numbers(a->g), .g_head = numbers(a->g_head),
    .scale = a->scale == 0 ? 1 / sqrtf((float)c->n.K) : a->scale, .steps = a->q->dims > 3 ? (int)c->n.T : 1,
    .heads = (int)c->n.H, .parts = (int)parts};
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
