// Host halves of the causal convolution.
#include "causal_conv1d/causal_conv1d.h"
#include "runtime/runtime.h"

enum { STEPS = 16, COLS = 64 };     // of a tile, and of a map's box

static int is_float(const mg_tensor *t) { return t && t->dtype == MG_FP32; }
static causal_conv1d_states states_of(const mg_tensor *t) {
  return t ? (causal_conv1d_states){t->data, t->stride[0], t->stride[1]} : (causal_conv1d_states){0};
}

// What an op is called with; NULL: absent.
typedef struct call {
  const mg_tensor *x, *weight, *bias, *initial, *starts, *seq_idx;
  bool silu;
} call;

static causal_conv1d_problem problem_of(mg_call *c, const call *a) {
  const causal_conv1d_states first = states_of(a->initial);
  return (causal_conv1d_problem){
    .weight = a->weight->data, .weight_is_float = is_float(a->weight), .bias = mg_data(a->bias),
    .bias_is_float = is_float(a->bias),
    .initial = first.data, .initial_sequence = first.sequence, .initial_step = first.step, .starts = mg_data(a->starts),
    .seq_idx = mg_data(a->seq_idx), .seq_idx_batch = a->seq_idx ? a->seq_idx->stride[0] : 0,
    .steps = (int)c->n.T, .channels = (int)c->n.C,
    .sequences = (int)(a->starts ? c->n.STARTS - 1 : c->n.B), .silu = a->silu};
}

// Tasks are equal but for the last segment of a sequence, so the time is that of the waves. A segment costs about a
// tile for its start, and a tile that it reads twice where it is not the first. One with too many segments waits less
// for its last wave.
static causal_conv1d_cut cut_of(mg_call *c, int64_t steps, int64_t most) {
  const int64_t tiles = mg_ceil_div(steps, STEPS), blocks = mg_ceil_div(c->n.C, c->desc->tile_n);
  const int64_t units = c->n.B * blocks;
  const int64_t slots = (int64_t)c->context.sms * c->desc->tile_m;
  int64_t best = 0, best_tiles = tiles;
  for (int64_t waves = 1; waves <= 16; waves++) {
    int64_t segments = waves * slots / units;
    segments = segments < 1 ? 1 : segments < tiles ? segments : tiles;
    if (segments > most) segments = most;
    const int64_t length = mg_ceil_div(tiles, segments);
    segments = mg_ceil_div(tiles, length);
    const int64_t time = mg_ceil_div(units * segments, slots) * (length + 1 + (segments > 1));
    if (best && time >= best) continue;
    best = time;
    best_tiles = length;
  }
  const int64_t segments = mg_ceil_div(tiles, best_tiles);
  return (causal_conv1d_cut){.tasks = mg_tasks(c, units * segments, "tiles"), .col_blocks = (int)blocks,
                             .segments = (int)segments, .segment_steps = (int)best_tiles * STEPS, .steps = (int)steps};
}

// As many blocks as there are multiprocessors: a block has as many warpgroups as one of these takes.
static mg_status run(mg_call *c, const void *params, int64_t tasks) {
  return mg_run(c, params, tasks < c->context.sms ? tasks : c->context.sms);
}

// The starts of packed sequences begin with 0, do not fall, and end with at most T. What a GPU holds is not looked at.
static bool starts_are_wrong(mg_call *c, const mg_tensor *starts) {
  if (!starts || starts->device != MG_CPU) return false;
  const int32_t *start = starts->data;
  for (int64_t i = 0; i < starts->shape[0] && !c->status; i++) {
    const int32_t low = i ? start[i - 1] : 0, high = i ? (int32_t)c->n.T : 0;
    if (start[i] < low || start[i] > high)
      c->status = mg_fail(MG_VALUE, "%s: cu_seqlens[%lld] is %d, expected %d to %d", mg_op_name(c->op), (long long)i,
                          start[i], low, high);
  }
  return c->status;
}

static mg_status forward(mg_call *c, const call *a, const mg_tensor *out, const mg_tensor *final) {
  if (starts_are_wrong(c, a->starts) || !mg_choose_other(c, MG_OP_causal_conv1d)) return c->status;
  causal_conv1d_params p = {.problem = problem_of(c, a), .first = a->x->data, .x_batch = a->x->stride[0],
                            .x_step = a->x->stride[1], .final = states_of(final)};
  p.cut.col_blocks = (int)mg_ceil_div(c->n.C, c->desc->tile_n);
  if (c->n.T && c->n.B) {
    p.cut = cut_of(c, c->n.T, c->n.T);
    mg_map_rows(c, &p.x, a->x, STEPS, COLS);
    mg_map_rows(c, &p.out, out, STEPS, COLS);
  }
  if (final) p.states = mg_tasks(c, p.problem.sequences * (int64_t)p.cut.col_blocks, "tiles");
  return run(c, &p, p.cut.tasks > p.states ? p.cut.tasks : p.states);
}

mg_status mg_causal_conv1d(const mg_causal_conv1d_args *a) {
  mg_call c;
  const call asked = {a->x, a->weight, a->bias, a->initial_states, NULL, a->seq_idx, a->silu};
  return mg_begin(&c, MG_OP_causal_conv1d, a) ? forward(&c, &asked, a->out, a->final_states) : c.status;
}

mg_status mg_causal_conv1d_packed(const mg_causal_conv1d_packed_args *a) {
  mg_call c;
  const call asked = {a->x, a->weight, a->bias, a->initial_states, a->cu_seqlens, NULL, a->silu};
  return mg_begin(&c, MG_OP_causal_conv1d_packed, a) ? forward(&c, &asked, a->out, a->final_states) : c.status;
}

typedef struct gradients { const mg_tensor *dout, *dfinal, *dx, *dweight, *dbias, *dinitial, *partials; } gradients;

static mg_status backward(mg_call *c, const call *a, const gradients *g) {
  if (starts_are_wrong(c, a->starts) || !mg_choose_other(c, MG_OP_causal_conv1d_bwd)) return c->status;
  causal_conv1d_bwd_params p = {.problem = problem_of(c, a), .writes_dx = g->dx != NULL, .partials = g->partials->data};
  if (c->n.T && c->n.B && c->n.C) {
    p.cut = cut_of(c, c->n.T, c->n.PARTS / c->n.B);
    mg_map_rows(c, &p.x, a->x, STEPS, COLS);
    mg_map_rows(c, &p.dout, g->dout, STEPS, COLS);
    if (g->dx) mg_map_rows(c, &p.dx, g->dx, STEPS, COLS);
    run(c, &p, p.cut.tasks);
  }
  if (!mg_choose_other(c, MG_OP_causal_conv1d_bwd_post)) return c->status;
  const mg_tensor *dx = g->dx ? g->dx : g->dout;       // its strides only
  const int64_t blocks = mg_ceil_div(c->n.C, c->desc->tile_n);
  causal_conv1d_bwd_post_params q = {
    .problem = p.problem, .partials = p.partials, .parts = (int)(c->n.B * p.cut.segments), .col_blocks = (int)blocks,
    .dweight = g->dweight->data, .dweight_is_float = is_float(g->dweight), .dbias = mg_data(g->dbias),
    .dbias_is_float = is_float(g->dbias), .x = a->x->data, .dout = g->dout->data, .dx = mg_data(g->dx),
    .x_batch = a->x->stride[0], .x_step = a->x->stride[1], .dout_batch = g->dout->stride[0],
    .dout_step = g->dout->stride[1], .dx_batch = dx->stride[0], .dx_step = dx->stride[1],
    .dfinal = states_of(g->dfinal), .dinitial = states_of(g->dinitial)};
  q.sums = mg_tasks(c, blocks * (c->n.W + (g->dbias != NULL)), "tiles");
  if ((g->dfinal && g->dx) || g->dinitial) q.edges = mg_tasks(c, p.problem.sequences * blocks, "tiles");
  return mg_run(c, &q, q.sums + q.edges);
}

mg_status mg_causal_conv1d_bwd(const mg_causal_conv1d_bwd_args *a) {
  mg_call c;
  const call asked = {a->x, a->weight, a->bias, a->initial_states, NULL, a->seq_idx, a->silu};
  const gradients g = {a->dout, a->dfinal_states, a->dx, a->dweight, a->dbias, a->dinitial_states, a->partials};
  return mg_begin(&c, MG_OP_causal_conv1d_bwd, a) ? backward(&c, &asked, &g) : c.status;
}

mg_status mg_causal_conv1d_packed_bwd(const mg_causal_conv1d_packed_bwd_args *a) {
  mg_call c;
  const call asked = {a->x, a->weight, a->bias, a->initial_states, a->cu_seqlens, NULL, a->silu};
  const gradients g = {a->dout, a->dfinal_states, a->dx, a->dweight, a->dbias, a->dinitial_states, a->partials};
  return mg_begin(&c, MG_OP_causal_conv1d_packed_bwd, a) ? backward(&c, &asked, &g) : c.status;
}

mg_status mg_causal_conv1d_step(const mg_causal_conv1d_step_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_causal_conv1d_step, a)) return c.status;
  if (mg_is_empty(a->out) || !mg_choose(&c)) return c.status;
  const mg_tensor *x = a->x, *out = a->out, *state = a->state;
  const int64_t blocks = mg_ceil_div(c.n.C, c.desc->tile_n);
  causal_conv1d_step_params p = {
    .problem = problem_of(&c, &(call){.x = x, .weight = a->weight, .bias = a->bias, .silu = a->silu}),
    .x = x->data, .x_batch = x->stride[0], .x_step = x->stride[1], .out = out->data, .out_batch = out->stride[0],
    .out_step = out->stride[1], .state = state->data, .state_slot = state->stride[0], .state_step = state->stride[1],
    .state_channel = c.n.C > 1 ? state->stride[2] : 1, .used = mg_data(a->cache_seqlens), .slots = mg_data(a->slots),
    .steps = (int)c.n.T, .length = (int)c.n.LENGTH, .states = (int)c.n.SLOTS, .col_blocks = (int)blocks};
  return mg_run(&c, &p, mg_tasks(&c, c.n.B * blocks, "tiles"));
}
