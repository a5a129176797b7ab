// Host halves of linear attention, which is ssd's scan of q = c, k = b and v = x. Its groups are the heads, a step's
// weight is 1 and its log decay g + g_head, and its states are transposed.
#include <math.h>
#include "ssd/scan.h"

enum { MOST_K = 256, MOST_V = 128 };             // of the scan's kernels: N and P

// The tensors of a pass by ssd's names, with its sizes: x and y have P columns, b and c N. turned: of its states.
typedef struct pass { mg_op op; const mg_tensor *y, *x, *b, *c, *initial, *final; int64_t P, N; bool turned; } pass;

static const float *data_of(const mg_tensor *t) { return t ? t->data : NULL; }

static void set_sizes(mg_call *c, int64_t P, int64_t N) {
  c->n.G = c->n.H;
  c->n.P = P;
  c->n.N = N;
  c->n.SPLIT = 1;
  c->problem.size = c->n;
}

static ssd_form form(const mg_call *c, mg_op op, const mg_tensor *g, const mg_tensor *g_head, float scale,
                     bool turned) {
  return (ssd_form){{.dt = data_of(g), .a = data_of(g_head), .gates = 1},
                    scale == 0 ? 1 / sqrtf((float)c->n.K) : scale,
                    {turned ? 1 : (int)c->n.N, turned ? (int)c->n.P : 1}, op};
}

mg_status mg_linear_attention(const mg_linear_attention_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_linear_attention, a)) return c.status;
  if (c.n.K > MOST_K || c.n.V > MOST_V)          // ssd's rows would say it in their own terms
    return mg_fail(MG_UNSUPPORTED, "linear_attention: %s has head dim %lld, kernels exist up to %d",
                   c.n.K > MOST_K ? "q" : "v", (long long)(c.n.K > MOST_K ? c.n.K : c.n.V),
                   c.n.K > MOST_K ? MOST_K : MOST_V);
  set_sizes(&c, c.n.V, c.n.K);
  const ssd_form f = form(&c, MG_OP_ssd, a->g, a->g_head, a->scale, true);
  const mg_ssd_args s = {.y = a->out, .final_states = a->final_state, .cuts = a->cuts, .decays = a->decays, .x = a->v,
                         .b = a->k, .c = a->q, .initial_states = a->initial_state, .cu_seqlens = a->cu_seqlens};
  return ssd_scan(&c, &s, &f);
}

// Each gradient of q, k and v is a scan too: q's forwards, the others' backwards. For each this reads three tensors and
// writes one, and no states, but it says nothing of g's gradient.
static mg_status run_sweeps(mg_call *c, const mg_linear_attention_bwd_args *a) {
  const mg_op back = MG_OP_linear_attention_back;
  const int64_t K = c->n.K, V = c->n.V;
  const pass passes[] = {{MG_OP_ssd, a->dq, a->k, a->v, a->dout, a->initial_state, NULL, K, V, false},
                         {back, a->dk, a->q, a->dout, a->v, a->dfinal_state, a->dinitial_state, K, V, false},
                         {back, a->dv, a->dout, a->q, a->k, a->dfinal_state, NULL, V, K, true}};
  for (const pass *p = passes; p < passes + 3 && !c->status; p++) {
    set_sizes(c, p->P, p->N);
    const ssd_form f = form(c, p->op, a->g, a->g_head, a->scale, p->turned);
    const mg_ssd_args s = {.y = p->y, .x = p->x, .b = p->b, .c = p->c, .initial_states = p->initial,
                           .final_states = p->final, .cu_seqlens = a->cu_seqlens};
    c->status = ssd_scan(c, &s, &f);
  }
  return c->status;
}

mg_status mg_linear_attention_bwd(const mg_linear_attention_bwd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_linear_attention_bwd, a)) return c.status;
  // gradients of what is not there, as the operator asks for them
  const mg_tensor *dg = a->g ? a->dg : NULL, *dg_head = a->g_head ? a->dg_head : NULL;
  if (a->dg && !dg) c.status = mg_fill(&c.context, a->dg->data, 0, 4, c.n.B * c.n.T * c.n.H);
  if (a->dg_head && !dg_head && !c.status) c.status = mg_fill(&c.context, a->dg_head->data, 0, 4, c.n.H);
  if (c.status) return c.status;
  // Few heads would want the sweeps cut into segments.
  const bool wide = c.n.K > 128 || c.n.V > 128, few = 2 * c.n.R * c.n.H <= c.context.sms;
  if (c.n.SWEEP || !(dg || dg_head || wide || few)) return run_sweeps(&c, a);
  set_sizes(&c, c.n.V, c.n.K);
  const ssd_form f = form(&c, MG_OP_ssd_bwd, a->g, a->g_head, a->scale, true);
  const mg_ssd_bwd_args s = {.dx = a->dv, .ddt = dg, .da = dg_head, .db = a->dk, .dc = a->dq,
                             .dinitial_states = a->dinitial_state, .states = a->states, .dstates = a->dstates,
                             .starts = a->starts, .sums = dg_head ? a->sums : NULL, .dy = a->dout,
                             .dfinal_states = a->dfinal_state, .x = a->v, .b = a->k, .c = a->q,
                             .initial_states = a->initial_state, .cu_seqlens = a->cu_seqlens};
  return ssd_scan_bwd(&c, &s, &f);
}
