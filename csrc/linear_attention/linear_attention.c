// Host halves of linear attention, which is ssd's scan of q = c, k = b and v = x: the groups are the heads, a step's weight
// is 1, and its log decay is g + g_head. The states are transposed.
#include <math.h>
#include "ssd/scan.h"

static const float *data_of(const mg_tensor *t) { return t ? t->data : NULL; }

static ssd_form form(const mg_sizes *n, const mg_tensor *g, const mg_tensor *g_head, float scale) {
  return (ssd_form){{.dt = data_of(g), .a = data_of(g_head), .gates = 1}, scale == 0 ? 1 / sqrtf((float)n->K) : scale,
                    {1, (int)n->V}};
}

// Sizes by ssd's names.
static void rename_sizes(mg_call *c) {
  c->n.G = c->n.H;
  c->n.P = c->n.V;
  c->n.N = c->n.K;
  c->n.SPLIT = 1;
  c->problem.size = c->n;
}

mg_status mg_linear_attention(const mg_linear_attention_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_linear_attention, a)) return c.status;
  rename_sizes(&c);
  const ssd_form f = form(&c.n, a->g, a->g_head, a->scale);
  const mg_ssd_args s = {.y = a->out, .final_states = a->final_state, .cuts = a->cuts, .decays = a->decays, .x = a->v,
                         .b = a->k, .c = a->q, .initial_states = a->initial_state, .cu_seqlens = a->cu_seqlens};
  return ssd_scan(&c, &s, &f);
}

mg_status mg_linear_attention_bwd(const mg_linear_attention_bwd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_linear_attention_bwd, a)) return c.status;
  rename_sizes(&c);
  const ssd_form f = form(&c.n, a->g, a->g_head, a->scale);
  const mg_ssd_bwd_args s = {.dx = a->dv, .ddt = a->dg, .da = a->dg_head, .db = a->dk, .dc = a->dq,
                             .dinitial_states = a->dinitial_state, .states = a->states, .dstates = a->dstates,
                             .starts = a->starts, .sums = a->dg_head ? a->sums : NULL, .dy = a->dout,
                             .dfinal_states = a->dfinal_state, .x = a->v, .b = a->k, .c = a->q,
                             .initial_states = a->initial_state, .cu_seqlens = a->cu_seqlens};
  return ssd_scan_bwd(&c, &s, &f);
}
