// Host halves of steps of generation.
#include <math.h>
#include "ssd/step.h"
#include "runtime/runtime.h"

static int is_float(const mg_tensor *t) { return t && t->dtype == MG_FP32; }
static step_vectors vectors(const mg_tensor *t) {
  return t ? (step_vectors){t->data, t->stride[0], 0, t->stride[1]} : (step_vectors){0};
}
static step_numbers numbers(const mg_tensor *t) {
  return t ? (step_numbers){t->data, t->dims > 1 ? t->stride[0] : 0, 0, is_float(t)} : (step_numbers){0};
}
static step_states states(const mg_tensor *t, const mg_tensor *slots) {
  return (step_states){.data = t->data, .place = t->stride[0], .head = t->stride[1], .row = t->stride[2],
                       .slots = mg_data(slots), .places = (int)t->shape[0], .rows = (int)t->shape[2],
                       .cols = (int)t->shape[3], .is_float = is_float(t)};
}

mg_status mg_ssd_step(const mg_ssd_step_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_ssd_step, a)) return c.status;
  if (mg_is_empty(a->y) || !mg_choose(&c)) return c.status;
  const int64_t parts = mg_ceil_div(c.n.P, c.desc->tile_m);
  const ssd_step_params p = {
    .states = states(a->state, a->slots), .x = vectors(a->x), .z = vectors(a->z), .y = vectors(a->y), .b = vectors(a->b),
    .c = vectors(a->c), .dt = numbers(a->dt), .a = numbers(a->a), .bias = numbers(a->dt_bias), .d = numbers(a->d),
    .d_wide = mg_data(a->d_wide), .d_wide_is_float = is_float(a->d_wide), .softplus = a->dt_softplus, .low = a->dt_min,
    .high = a->dt_max, .steps = 1, .heads = (int)c.n.H, .group_heads = (int)(c.n.H / c.n.G), .parts = (int)parts};
  return mg_run(&c, &p, mg_tasks(&c, c.n.B * c.n.H * parts, "tiles"));
}

mg_status mg_linear_attention_step(const mg_linear_attention_step_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_linear_attention_step, a)) return c.status;
  if (mg_is_empty(a->out) || !mg_choose(&c)) return c.status;
  const int64_t parts = mg_ceil_div(c.n.V, c.desc->tile_n);
  const linear_attention_step_params p = {
    .states = states(a->state, a->slots), .q = vectors(a->q), .k = vectors(a->k), .v = vectors(a->v),
    .out = vectors(a->out), .g = numbers(a->g), .g_head = numbers(a->g_head),
    .scale = a->scale == 0 ? (float)(1 / sqrt((double)c.n.K)) : a->scale, .steps = 1, .heads = (int)c.n.H,
    .parts = (int)parts};
  return mg_run(&c, &p, mg_tasks(&c, c.n.B * c.n.H * parts, "tiles"));
}
