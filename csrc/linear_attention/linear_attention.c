// Host halves of linear attention: a pass that writes the state in front of each chunk, then all chunks at once.
#include <math.h>
#include "linear_attention/linear_attention.h"
#include "runtime/runtime.h"

typedef struct pass {   // one over the sequence
  const mg_tensor *a, *b, *states, *initial, *final;
  bool backwards;
  float scale;
} pass;

static float scale_of(float scale, int64_t k) { return scale == 0 ? 1 / sqrtf((float)k) : scale; }

static mg_status run_states(mg_call *c, const pass *x) {
  if (!mg_choose_other(c, MG_OP_linear_attention_states)) return c->status;
  linear_attention_states_params p = {.initial = x->initial ? x->initial->data : NULL,
                                      .final = x->final ? x->final->data : NULL,
                                      .chunks = (int)c->n.CHUNKS, .heads = (int)c->n.H, .a_dim = (int)c->n.K,
                                      .b_dim = (int)c->n.V,
                                      .backwards = x->backwards, .scale = x->scale};
  if (c->n.CHUNKS) {
    mg_map_bthd(c, &p.a, x->a, 64, 64);
    mg_map_bthd(c, &p.b, x->b, 64, 64);
    mg_map_stack(c, &p.states, x->states, 64, 64);
  }
  return mg_run(c, &p, mg_tasks(c, c->n.B * c->n.H * (c->desc->tile_n / 64), "tiles"));
}

mg_status mg_linear_attention(const mg_linear_attention_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_linear_attention, a)) return c.status;
  const pass states = {a->k, a->v, a->states, a->initial_state, a->final_state, false, 1};
  if (run_states(&c, &states) || !c.n.CHUNKS || !mg_choose(&c)) return c.status;
  linear_attention_params p = {.chunks = (int)c.n.CHUNKS, .heads = (int)c.n.H, .scale = scale_of(a->scale, c.n.K)};
  mg_map_bthd(&c, &p.q, a->q, 64, 64);
  mg_map_bthd(&c, &p.k, a->k, 64, 64);
  mg_map_bthd(&c, &p.v, a->v, 64, 64);
  mg_map_bthd(&c, &p.out, a->out, 64, 64);
  mg_map_stack(&c, &p.states, a->states, c.desc->tile_n, 64);
  return mg_run(&c, &p, mg_tasks(&c, c.n.B * c.n.H * c.n.CHUNKS, "tiles"));
}

mg_status mg_linear_attention_bwd(const mg_linear_attention_bwd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_linear_attention_bwd, a)) return c.status;
  const float scale = scale_of(a->scale, c.n.K);
  const pass dstates = {a->q, a->dout, a->dstates, a->dfinal_state, a->dinitial_state, true, scale};
  if (run_states(&c, &dstates) || !c.n.CHUNKS || !mg_choose(&c)) return c.status;
  linear_attention_bwd_params p = {.chunks = (int)c.n.CHUNKS, .heads = (int)c.n.H, .scale = scale};
  mg_map_bthd(&c, &p.q, a->q, 64, 64);
  mg_map_bthd(&c, &p.k, a->k, 64, 64);
  mg_map_bthd(&c, &p.v, a->v, 64, 64);
  mg_map_bthd(&c, &p.dout, a->dout, 64, 64);
  mg_map_bthd(&c, &p.dq, a->dq, 64, 64);
  mg_map_bthd(&c, &p.dk, a->dk, 64, 64);
  mg_map_bthd(&c, &p.dv, a->dv, 64, 64);
  mg_map_stack(&c, &p.states, a->states, c.desc->tile_n, 64);
  mg_map_stack(&c, &p.dstates, a->dstates, c.desc->tile_n, 64);
  return mg_run(&c, &p, mg_tasks(&c, c.n.B * c.n.H * c.n.CHUNKS, "tiles"));
}
