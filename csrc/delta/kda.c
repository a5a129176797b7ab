// Host half of Kimi delta attention: what does not depend on the state, of all chunks, then, or meanwhile, the pass
// over the sequence; of SEG chunks at a time.
#include "delta/kda_host.h"

static kda_given given(const mg_tensor *t) {
  return (kda_given){t->data, t->stride[0], t->stride[1], t->stride[2], t->dtype == MG_FP32};
}

kda_gates kda_gates_of(const mg_tensor *g, const mg_tensor *beta, const mg_tensor *a_log, const mg_tensor *dt_bias,
                       float lower_bound, int beta_form, bool l2norm) {
  return (kda_gates){.g = given(g), .beta = given(beta), .a_log = mg_data(a_log), .dt_bias = mg_data(dt_bias),
                     .lower_bound = lower_bound, .most = (float)beta_form,
                     .gate = !a_log ? KDA_LOG : lower_bound == 0 ? KDA_SOFTPLUS : KDA_BOUNDED, .norm = l2norm};
}

mg_status kda_run_prepare(mg_call *c, mg_op part, const mg_tensor *q, const mg_tensor *k, const kda_gates *gates,
                          const delta_sweep_params *s, float *betas, const kda_plan *plan) {
  kda_prepare_params p = {.ends = (float *)s->ends, .betas = betas, .rows = s->rows, .scale = s->scale, .gates = *gates,
                          .m = s->m, .p = s->p, .read_k = s->k, .read_q = s->q, .write_k = s->w, .batches = (int)c->n.B,
                          .key_dim = (int)c->n.K};
  if (plan && plan->done) {
    p.done = plan->done;
    p.ending = plan->blocks;
    p.shared = plan->first * p.batches * p.rows.heads;
  }
  if (!mg_choose_other(c, part)) return c->status;
  mg_map_bthd(c, &p.q, q, 64, 64);
  mg_map_bthd(c, &p.k, k, 64, 64);
  const int tasks = mg_tasks(c, c->n.B * c->n.HV * s->rows.places, "chunks of heads");
  return p.done ? mg_run(c, &p, c->context.sms) : mg_run_resident(c, &p, tasks);
}

// While both run, `rest` multiprocessors prepare. Where they fall behind the pass, all prepare first what they would
// lack at its end. That saves what is prepared meanwhile, at the price of zeros for the marks and of the first chunks'
// way through memory: 8 us. made, passed: nanoseconds that a chunk of a head takes on a multiprocessor where it is
// prepared, and in the pass, whose kernel has been chosen. It knows of marks where its blocks have 64 columns.
static kda_plan plan_of(mg_call *c, const delta_sweep_params *p, const mg_tensor *cuts, bool all,
                        const mg_tensor *done) {
  enum { made = 5500, passed = 1200 };
  const kda_plan none = {NULL, 0, 0};
  if (c->status) return none;
  const int64_t heads = c->n.R * c->n.HV, blocks = heads * mg_ceil_div(c->n.V, c->desc->tile_n);
  const int64_t sms = c->context.sms, rest = sms - blocks, places = p->rows.places;
  if (!c->context.persistent || p->rows.starts || c->desc->tile_n > 64 || 2 * blocks > sms) return none;
  const int64_t work = heads * made, meanwhile = rest * passed, first = mg_max(0, places - places * meanwhile / work);
  if (delta_pieces_of(c, &p->rows, cuts, all).n > 1 || (places - first) * work < 8000 * sms) return none;
  mg_set(c, done->data, 0, sizeof(int), mg_ceil_div(places, DELTA_PART));
  return (kda_plan){done->data, (int)blocks, (int)first};
}

mg_status mg_kda(const mg_kda_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_kda, a)) return c.status;
  if (a->cu_seqlens && (c.status = ssd_check_starts(c.op, a->cu_seqlens, c.n.T))) return c.status;
  if (!mg_choose(&c)) return c.status;
  const mg_kernel *sweep = c.kernel;
  const ssd_order order = delta_order_of(&c, a->state_v_first);
  float *betas = kda_makes_beta(a->beta, a->beta_form) ? mg_data(a->betas) : NULL;
  const kda_gates gates = kda_gates_of(a->g, a->beta, a->a_log, a->dt_bias, a->lower_bound, a->beta_form, a->l2norm);
  delta_sweep_params p = {
    .ends = mg_data(a->ends), .initial = mg_data(a->initial_state), .initial_order = order,
    .rows = delta_rows_of(&c, a->cu_seqlens), .gates = {.beta = betas ? betas : mg_data(a->beta), .most = 1},
    .scale = delta_scale_of(&c, a->scale),
    .o_data = a->out->data, .o_step = a->out->stride[1], .o_head = a->out->stride[2], .key_dim = (int)c.n.K,
    .value_dim = (int)c.n.V};
  if (c.n.T && c.n.R && c.n.HV) {     // the driver refuses to map what has no elements
    mg_map_rows(&c, &p.k, a->read_k, 64, 64);
    mg_map_rows(&c, &p.q, a->read_q, 64, 64);
    mg_map_rows(&c, &p.w, a->write_k, 64, 64);
    mg_map_bthd(&c, &p.v, a->v, 64, 64);
    mg_map_bthd(&c, &p.o, a->out, 64, 64);
  }
  const delta_parts parts = {MG_OP_kda_segments, MG_OP_kda_cuts};
  const ssd_order between = delta_order_of(&c, false);
  const mg_tensor *inverses = a->keep ? a->inverses : a->own_inverses, *reads = a->keep ? a->reads : a->own_reads;
  const int64_t chunks = c.n.CHUNKS, each = c.n.SEG;
  bool last = false;
  for (int64_t first = 0; !last && !c.status; first += each) {
    last = first + each >= chunks;
    if (first) {
      p.initial = mg_data(a->carry);
      p.initial_order = between;
    }
    p.final = mg_data(last ? a->final_state : a->carry);
    p.final_order = last ? order : between;
    p.rows.from = (int)(first * 64);
    p.rows.to = last ? (int)c.n.T : (int)((first + each) * 64);
    p.rows.places = (int)(last ? chunks - first : each);
    if (c.n.T && c.n.R && c.n.HV) {
      delta_map_matrices(&c, &p.m, inverses, a->keep ? first : 0);
      delta_map_matrices(&c, &p.p, reads, a->keep ? first : 0);
      mg_use(&c, sweep);
      const kda_plan plan = plan_of(&c, &p, c.n.CUTS ? a->cuts : NULL, a->form == 3, a->done);
      p.done = plan.done;
      kda_run_prepare(&c, MG_OP_kda_prepare, a->q, a->k, &gates, &p, betas, &plan);
    }
    mg_use(&c, sweep);
    if (!c.status) delta_run_sweep(&c, &p, &parts, c.n.CUTS ? a->cuts : NULL, a->turns, a->form == 3);
  }
  return c.status;
}
