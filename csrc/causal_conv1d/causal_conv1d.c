// Host halves of the causal convolution.
#include "causal_conv1d/causal_conv1d.h"
#include "runtime/runtime.h"

enum { STEPS = 16, COLS = 64 };     // of a tile, and of a map's box

static const void *data(const mg_tensor *t) { return t ? t->data : NULL; }
static causal_conv1d_states states_of(const mg_tensor *t) {
  return t ? (causal_conv1d_states){t->data, t->stride[0], t->stride[1]} : (causal_conv1d_states){0};
}

static causal_conv1d_problem problem_of(mg_call *c, const mg_tensor *weight, const mg_tensor *bias, const mg_tensor *initial, const mg_tensor *starts,
                                        const mg_tensor *seq_idx, bool silu) {
  const causal_conv1d_states first = states_of(initial);
  return (causal_conv1d_problem){
    .weight = weight->data, .bias = data(bias), .weight_is_float = weight->dtype == MG_FP32, .bias_is_float = bias && bias->dtype == MG_FP32,
    .initial = first.data, .initial_sequence = first.sequence, .initial_step = first.step, .starts = data(starts), .seq_idx = data(seq_idx),
    .seq_idx_batch = seq_idx ? seq_idx->stride[0] : 0, .steps = (int)c->n.T, .channels = (int)c->n.C, .sequences = (int)c->n.SEQS, .silu = silu};
}

// Tasks are equal but for the last segment of a sequence, so the time is that of the waves. A segment costs about a tile for its start, and a tile
// that it reads twice where it is not the first. One with too many segments waits less for its last wave.
static causal_conv1d_cut cut_of(mg_call *c, int64_t steps, int64_t most) {
  const int64_t tiles = mg_ceil_div(steps, STEPS), blocks = mg_ceil_div(c->n.C, c->desc->tile_n), units = c->n.B * blocks;
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
  return (causal_conv1d_cut){.tasks = mg_tasks(c, units * segments), .col_blocks = (int)blocks, .segments = (int)segments,
                             .segment_steps = (int)best_tiles * STEPS, .steps = (int)steps};
}

// As many blocks as there are multiprocessors: a block has as many warpgroups as one of these takes.
static mg_status run(mg_call *c, const void *params, int64_t tasks) {
  return mg_run(c, params, tasks < c->context.sms ? tasks : c->context.sms);
}

static mg_status check(mg_call *c, const mg_tensor *starts, const mg_tensor *seq_idx, const mg_tensor *initial, const mg_tensor *final) {
  if (starts && seq_idx) c->status = mg_fail(MG_VALUE, "%s: cu_seqlens and seq_idx are given, expected at most one of them", mg_op_name(c->op));
  else if (seq_idx && (initial || final))
    c->status = mg_fail(MG_VALUE, "%s: states are given beside seq_idx, expected them of a batch or of cu_seqlens", mg_op_name(c->op));
  else if (starts) c->status = mg_check_starts(mg_op_name(c->op), 0, starts, c->n.T, c->n.T);
  return c->status;
}

mg_status mg_causal_conv1d(const mg_causal_conv1d_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_causal_conv1d, a) || check(&c, a->cu_seqlens, a->seq_idx, a->initial_states, a->final_states) || !mg_choose(&c)) return c.status;
  causal_conv1d_params p = {.problem = problem_of(&c, a->weight, a->bias, a->initial_states, a->cu_seqlens, a->seq_idx, a->silu),
                            .first = a->x->data, .x_batch = a->x->stride[0], .x_step = a->x->stride[1], .final = states_of(a->final_states)};
  p.cut.col_blocks = (int)mg_ceil_div(c.n.C, c.desc->tile_n);
  if (c.n.T) {
    p.cut = cut_of(&c, c.n.T, c.n.T);
    mg_map_rows(&c, &p.x, a->x, STEPS, COLS);
    mg_map_rows(&c, &p.out, a->out, STEPS, COLS);
  }
  if (a->final_states) p.states = mg_tasks(&c, c.n.SEQS * p.cut.col_blocks);
  return run(&c, &p, p.cut.tasks > p.states ? p.cut.tasks : p.states);
}

mg_status mg_causal_conv1d_bwd(const mg_causal_conv1d_bwd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_causal_conv1d_bwd, a) || check(&c, a->cu_seqlens, a->seq_idx, a->initial_states, a->dinitial_states) || !mg_choose(&c)) return c.status;
  const causal_conv1d_problem problem = problem_of(&c, a->weight, a->bias, a->initial_states, a->cu_seqlens, a->seq_idx, a->silu);
  causal_conv1d_bwd_params p = {.problem = problem, .writes_dx = a->dx != NULL, .partials = a->partials->data};
  if (c.n.T && c.n.B) {
    p.cut = cut_of(&c, c.n.T + c.n.W - 1, c.n.PARTS / c.n.B);
    mg_map_rows(&c, &p.x, a->x, STEPS, COLS);
    mg_map_rows(&c, &p.dout, a->dout, STEPS, COLS);
    if (a->dx) mg_map_rows(&c, &p.dx, a->dx, STEPS, COLS);
    if (run(&c, &p, p.cut.tasks)) return c.status;
  }
  if (!mg_choose_other(&c, MG_OP_causal_conv1d_bwd_post)) return c.status;
  const int64_t blocks = mg_ceil_div(c.n.C, c.desc->tile_n);
  causal_conv1d_bwd_post_params q = {
    .problem = problem, .partials = p.partials, .parts = (int)(c.n.B * p.cut.segments), .col_blocks = (int)blocks, .dweight = a->dweight->data,
    .dbias = a->dbias ? a->dbias->data : NULL, .x = a->x->data, .dout = a->dout->data, .dx = a->dx ? a->dx->data : NULL,
    .x_batch = a->x->stride[0], .x_step = a->x->stride[1], .dout_batch = a->dout->stride[0], .dout_step = a->dout->stride[1],
    .dx_batch = a->dx ? a->dx->stride[0] : 0, .dx_step = a->dx ? a->dx->stride[1] : 0,
    .dfinal = states_of(a->dfinal_states), .dinitial = states_of(a->dinitial_states)};
  q.sums = mg_tasks(&c, blocks * (c.n.W + (a->dbias != NULL)));
  if ((a->dfinal_states && a->dx) || a->dinitial_states) q.edges = mg_tasks(&c, c.n.SEQS * blocks);
  return mg_run(&c, &q, q.sums + q.edges);
}

mg_status mg_causal_conv1d_step(const mg_causal_conv1d_step_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_causal_conv1d_step, a)) return c.status;
  if (c.n.LENGTH < c.n.W - 1)
    return mg_fail(MG_VALUE, "causal_conv1d_step: state has %lld steps, expected at least %lld", (long long)c.n.LENGTH, (long long)c.n.W - 1);
  if (!a->slots && c.n.SLOTS < c.n.B)
    return mg_fail(MG_VALUE, "causal_conv1d_step: state has %lld places, expected at least %lld (B)", (long long)c.n.SLOTS, (long long)c.n.B);
  if (mg_is_empty(a->out) || !mg_choose(&c)) return c.status;
  const int64_t blocks = mg_ceil_div(c.n.C, c.desc->tile_n);
  causal_conv1d_step_params p = {
    .problem = problem_of(&c, a->weight, a->bias, NULL, NULL, NULL, a->silu), .x = a->x->data, .out = a->out->data, .state = a->state->data,
    .x_batch = a->x->stride[0], .x_step = a->x->stride[1], .out_batch = a->out->stride[0], .out_step = a->out->stride[1],
    .state_slot = a->state->stride[0], .state_step = a->state->stride[1], .state_channel = c.n.C > 1 ? a->state->stride[2] : 1,
    .used = data(a->cache_seqlens), .slots = data(a->slots), .steps = (int)c.n.T, .length = (int)c.n.LENGTH, .states = (int)c.n.SLOTS,
    .col_blocks = (int)blocks};
  return mg_run(&c, &p, mg_tasks(&c, c.n.B * blocks));
}
