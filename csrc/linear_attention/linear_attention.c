// Host halves of linear attention, which is ssd's scan of q = c, k = b and v = x. Its groups are the heads, a step's
// weight is 1 and its log decay g + g_head, and its states are transposed.
#include <math.h>
#include "linear_attention/linear_attention.h"
#include "ssd/scan.h"
#include "ssd/ssd_bwd.h"

enum { MOST_K = 256, PART_V = 128 };             // of the scan's kernels: N and P

static void set_sizes(mg_call *c, int64_t P, int64_t N) {
  c->n.G = c->n.H;
  c->n.P = P;
  c->n.N = N;
  c->n.SPLIT = 1;
  c->problem.size = c->n;
}

// turned: rows of the states count columns of v.
static ssd_form form(const mg_call *c, const mg_tensor *g, const mg_tensor *g_head, float scale, bool turned) {
  return (ssd_form){{.dt = mg_data(g), .a = mg_data(g_head), .gates = 1},
                    scale == 0 ? 1 / sqrtf((float)c->n.K) : scale,
                    {turned ? 1 : (int)c->n.V, turned ? (int)c->n.V : 1, (int)(c->n.K * c->n.V)}, MG_OP_ssd};
}

// PART_V columns of t from `col` on, or those that there are.
static const mg_tensor *columns(mg_tensor *part, const mg_tensor *t, int64_t col, bool whole) {
  if (whole || !t) return t;
  const int last = t->dims - 1;
  *part = *t;
  part->data = (char *)t->data + col * t->stride[last] * (int64_t)mg_dtype_size(t->dtype);
  if ((part->shape[last] = t->shape[last] - col) > PART_V) part->shape[last] = PART_V;
  return part;
}

mg_status mg_linear_attention(const mg_linear_attention_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_linear_attention, a)) return c.status;
  if (c.n.K > MOST_K)                            // ssd's rows would say it in their own terms
    return mg_fail(MG_UNSUPPORTED, "linear_attention: q has head dim %lld, kernels exist up to %d", (long long)c.n.K,
                   MOST_K);
  const ssd_form f = form(&c, a->g, a->g_head, a->scale, true);
  // All of this is linear in the columns of v.
  for (int64_t col = 0; col < c.n.V && !c.status; col += PART_V) {
    mg_tensor part[4];
    const bool whole = c.n.V <= PART_V;
    const mg_ssd_args s = {.y = columns(part, a->out, col, whole), .x = columns(part + 1, a->v, col, whole),
                           .final_states = columns(part + 2, a->final_state, col, whole),
                           .initial_states = columns(part + 3, a->initial_state, col, whole), .cuts = a->cuts,
                           .decays = a->decays, .b = a->k, .c = a->q, .cu_seqlens = a->cu_seqlens};
    set_sizes(&c, c.n.V - col < PART_V ? c.n.V - col : PART_V, c.n.K);
    ssd_scan(&c, &s, &f);
  }
  return c.status;
}

// ---- the backward, by sweeps: each gradient of q, k and v is a scan too, q's forth, the others' back

// y, x, b and c are the kernel's names; z: what y is multiplied with for the gradient of g.
typedef struct sweep {
  mg_op op;
  const mg_tensor *y, *x, *b, *c, *z, *initial, *final;
  int64_t P, N;
  bool turned;      // of its states
} sweep;

// Steps of a segment, whole chunks; all of them where rows are many or packed.
static int64_t segment_of(const mg_call *c, bool packed) {
  const int64_t rows = c->n.R * c->n.H, chunks = mg_ceil_div(c->n.T, 64);
  const int64_t fit = (int64_t)c->context.sms * c->desc->blocks_per_sm / (rows ? rows : 1);
  const int64_t segments = packed || fit < 2 ? 1 : fit < c->n.CUTS + 1 ? fit : c->n.CUTS + 1;
  return mg_ceil_div(chunks, segments) * 64;
}

// The states where segments begin, or their gradients where they end, for the sweeps to begin with.
static mg_status run_cuts(mg_call *c, const mg_linear_attention_bwd_args *a, const sweep *w, const ssd_form *f,
                          int64_t segment, int cut) {
  const bool back = w->op != MG_OP_ssd_cuts;
  ssd_cuts_params p = {.dt = f->dt, .cuts = a->cuts->data, .decays = a->decays->data, .steps = (int)c->n.T, .cut = cut,
                       .segment = (int)segment, .cut_stride = (int)c->n.CUTS, .heads = (int)c->n.H, .group_heads = 1,
                       .head_dim = (int)w->P, .state_dim = (int)w->N};
  const ssd_join_params join = {.cuts = p.cuts, .initial = mg_data(w->initial), .order = f->order,
                                .factor = back ? 1 / f->scale : 1, .decays = p.decays, .cut = cut,
                                .cut_stride = p.cut_stride, .heads = p.heads, .head_dim = p.head_dim,
                                .state_dim = p.state_dim};
  set_sizes(c, w->P, w->N);
  if (!mg_choose_other(c, w->op)) return c->status;
  mg_map_bthd(c, &p.x, w->x, 64, 64);
  mg_map_bthd(c, &p.b, w->b, 64, 64);
  const int64_t heads = c->n.R * c->n.H, units = mg_ceil_div(mg_ceil_div(w->P, 64), c->desc->tile_n);
  if (mg_run(c, &p, mg_tasks(c, heads * units * cut, "blocks"))) return c->status;
  if ((cut == 1 && !join.initial) || !mg_choose_other(c, MG_OP_ssd_join)) return c->status;
  const int64_t tiles = mg_ceil_div(w->P, 64) * mg_ceil_div(w->N, c->desc->tile_n);
  return mg_run(c, &join, mg_tasks(c, heads * tiles, "tiles"));
}

static mg_status run_sweep(mg_call *c, const mg_linear_attention_bwd_args *a, const sweep *w, const ssd_form *f,
                           int64_t segment) {
  const int64_t segments = segment ? mg_ceil_div(c->n.T, segment) : 1, rows = c->n.R * c->n.H;
  linear_attention_sweep_params p = {
    .gates = f->dt, .scale = f->scale, .log_scale = log2f(f->scale), .initial = mg_data(w->initial),
    .cuts = mg_data(a->cuts), .final = mg_data(w->final), .starts = a->cu_seqlens ? a->cu_seqlens->data : NULL,
    .y_data = w->y->data, .y_step = w->y->stride[1], .y_head = w->y->stride[2], .rows = (int)c->n.R,
    .steps = (int)c->n.T, .segments = (int)(segments ? segments : 1), .segment = (int)segment,
    .cut_stride = (int)c->n.CUTS, .heads = (int)c->n.H, .head_dim = (int)w->P, .state_dim = (int)w->N,
    .chunks = (int)c->n.CHUNKS, .order = f->order,
    .cut_order = {w->turned ? 1 : (int)c->n.V, w->turned ? (int)c->n.V : 1, (int)(c->n.K * c->n.V)}};
  set_sizes(c, w->P, w->N);
  if (!mg_choose_other(c, w->op)) return c->status;
  if (c->n.T && rows) {     // the driver refuses to map what has no elements
    mg_map_bthd(c, &p.x, w->x, 64, 64);
    mg_map_bthd(c, &p.y, w->y, 64, 64);
    mg_map_bthd(c, &p.b, w->b, 64, 64);
    mg_map_bthd(c, &p.c, w->c, 64, 64);
  }
  if (c->n.T && rows && w->z) {
    mg_map_bthd(c, &p.z, w->z, 64, 64);
    p.products = a->products->data;
    p.ends = p.segments > 1 || a->dfinal_state ? a->ends->data : NULL;
    p.end_stride = (int)c->n.ENDS;
    p.dg = a->g ? mg_data(a->dg) : NULL;
    p.sums = a->g_head && a->dg_head ? a->sums->data : NULL;
  }
  return mg_run(c, &p, mg_tasks(c, rows * p.segments, "blocks"));
}

static mg_status run_sweeps(mg_call *c, const mg_linear_attention_bwd_args *a, bool dg, bool dg_head) {
  const int64_t K = c->n.K, V = c->n.V;
  const bool dots = dg || dg_head;
  const mg_op forth = dots ? MG_OP_linear_attention_forth_dots : MG_OP_linear_attention_forth;
  const mg_op back = dots ? MG_OP_linear_attention_back_dots : MG_OP_linear_attention_back;
  const sweep dq = {forth, a->dq, a->k, a->v, a->dout, dots ? a->q : NULL, a->initial_state, NULL, K, V, false};
  const sweep dk = {back, a->dk, a->q, a->dout, a->v, dots ? a->k : NULL, a->dfinal_state, a->dinitial_state, K, V,
                    false};
  const sweep dv = {MG_OP_linear_attention_back, a->dv, a->dout, a->q, a->k, NULL, a->dfinal_state, NULL, V, K, true};
  const ssd_form plain = form(c, a->g, a->g_head, a->scale, false), turned = form(c, a->g, a->g_head, a->scale, true);
  if (a->cu_seqlens && (c->status = ssd_check_starts(c->op, a->cu_seqlens, c->n.T))) return c->status;
  set_sizes(c, K, V);
  if (!mg_choose_other(c, forth)) return c->status;
  const int64_t segment = segment_of(c, a->cu_seqlens);
  const int cut = segment ? (int)mg_ceil_div(c->n.T, segment) - 1 : 0;
  sweep cuts = dq;
  cuts.op = MG_OP_ssd_cuts;
  if (cut > 0) run_cuts(c, a, &cuts, &plain, segment, cut);
  run_sweep(c, a, &dq, &plain, segment);
  cuts = dk;
  cuts.op = MG_OP_linear_attention_cuts;
  if (cut > 0) run_cuts(c, a, &cuts, &plain, segment, cut);
  // Places where packed rows have no chunk have no shares.
  if (dg_head && a->cu_seqlens) mg_set(c, a->sums->data, 0, 4, c->n.B * c->n.TRIPLE * c->n.H);
  run_sweep(c, a, &dk, &plain, segment);
  run_sweep(c, a, &dv, &turned, segment);
  if (c->status || !dg_head || !mg_choose_other(c, MG_OP_ssd_bwd_sums)) return c->status;
  const ssd_bwd_sums_params sums = {.sums = a->sums->data, .batches = (int)c->n.B, .chunks = (int)c->n.CHUNKS,
                                    .heads = (int)c->n.H, .out = {mg_data(a->dg_head)}};
  return mg_run(c, &sums, mg_tasks(c, mg_ceil_div(c->n.H, 64) * 3, "blocks"));
}

mg_status mg_linear_attention_bwd(const mg_linear_attention_bwd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_linear_attention_bwd, a)) return c.status;
  // gradients of what is not there, as the operator asks for them
  const mg_tensor *dg = a->g ? a->dg : NULL, *dg_head = a->g_head ? a->dg_head : NULL;
  if (a->dg && !dg) mg_set(&c, a->dg->data, 0, 4, c.n.B * c.n.T * c.n.H);
  if (a->dg_head && !dg_head) mg_set(&c, a->dg_head->data, 0, 4, c.n.H);
  if (c.status) return c.status;
  if (c.n.SWEEP) return run_sweeps(&c, a, dg, dg_head);
  const ssd_form f = form(&c, a->g, a->g_head, a->scale, true);
  const mg_ssd_bwd_args s = {.dx = a->dv, .ddt = dg, .da = dg_head, .db = a->dk, .dc = a->dq,
                             .dinitial_states = a->dinitial_state, .states = a->states, .dstates = a->dstates,
                             .starts = a->starts, .sums = dg_head ? a->sums : NULL, .dy = a->dout,
                             .dfinal_states = a->dfinal_state, .x = a->v, .b = a->k, .c = a->q,
                             .initial_states = a->initial_state, .cu_seqlens = a->cu_seqlens};
  set_sizes(&c, c.n.V, c.n.K);
  return ssd_scan_bwd(&c, &s, &f);
}
