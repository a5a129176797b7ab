// Host half of Kimi delta attention: what does not depend on the state, of all chunks, then, or meanwhile, the pass
// over the sequence, or one kernel for both; of SEG chunks at a time.
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

delta_fades_params kda_fades_of(const mg_call *c, const kda_gates *acting) {
  const kda_given *g = &acting->g;
  return (delta_fades_params){.g = g->data, .batch = g->batch, .step = g->step, .head = g->head,
                              .is_float = g->is_float, .a_log = acting->a_log, .dt_bias = acting->dt_bias,
                              .lower_bound = acting->lower_bound, .line.heads = mg_divisor(c->n.HV),
                              .columns = (int)c->n.K};
}

static bool copied(const mg_call *c, const mg_tensor *g) {
  return ((uintptr_t)g->data | (uint64_t)c->n.K * mg_dtype_size(g->dtype)) % 16 == 0;
}

mg_status kda_run_decays(mg_call *c, kda_acting *acting, const mg_tensor *g, const kda_gates *given_gates,
                         const mg_tensor *decays, const mg_tensor *betas, const delta_rows *rows) {
  const bool raw = given_gates->gate != KDA_LOG && decays, weighed = kda_makes_beta(given_gates);
  *acting = (kda_acting){*g, *given_gates};
  if (c->status || !(raw || weighed)) return c->status;
  kda_decays_params p = {.gates = *given_gates, .decays = raw ? mg_data(decays) : NULL,
                         .betas = weighed ? mg_data(betas) : NULL, .rows = *rows, .batches = (int)c->n.B,
                         .key_dim = (int)c->n.K};
  kda_gates *made = &acting->gates;
  if (raw) {                          // those of step `from` come first
    mg_tensor *m = &acting->g;
    const int64_t row = decays->shape[3], step = decays->shape[2] * row;
    *m = *decays;
    m->shape[1] = rows->to;
    m->shape[3] = c->n.K;
    m->data = (void *)((uintptr_t)decays->data - (uintptr_t)(rows->from * step) * sizeof(float));
    p.batch = decays->stride[0] / row;
    made->g = given(m);
    made->gate = KDA_LOG;
    made->a_log = made->dt_bias = NULL;
  }
  if (weighed) {
    made->beta = given(betas);
    made->most = 0;
  }
  const int size = (int)mg_dtype_size(g->dtype);
  const int64_t strides = g->stride[0] | g->stride[1] | g->stride[2];
  p.eights = ((uintptr_t)g->data | (uint64_t)(strides * size)) % 16 == 0 && c->n.K % 8 == 0;
  if (!mg_choose_other(c, MG_OP_kda_decays)) return c->status;
  p.tasks = mg_tasks(c, c->n.B * mg_ceil_div(rows->to - rows->from, c->desc->tile_m) *
                        mg_ceil_div(c->n.HV, c->desc->tile_n), "tasks");
  return mg_run_resident(c, &p, p.tasks);
}

mg_status kda_run_prepare(mg_call *c, mg_op part, const mg_tensor *q, const mg_tensor *k, const kda_acting *acting,
                          const delta_sweep_params *s, const kda_plan *plan) {
  const mg_tensor *g = &acting->g;
  kda_prepare_params p = {.ends = (float *)s->ends, .taken = s->taken, .rows = s->rows, .scale = s->scale,
                          .gates = acting->gates, .m = s->m, .p = s->p, .read_k = s->k, .read_q = s->q,
                          .write_k = s->w, .batches = (int)c->n.B, .key_dim = (int)c->n.K,
                          .wave = (int)(c->n.B * c->n.HV)};
  if (plan) p.next = plan->next;
  if (plan && plan->done) {
    p.done = plan->done;
    p.wave = plan->wave;
    p.ending = plan->ending;
  }
  if (!mg_choose_other(c, part)) return c->status;
  mg_map_bthd(c, &p.q, q, 64, 64);
  mg_map_bthd(c, &p.k, k, 64, 64);
  p.copied = copied(c, g);
  if (p.copied) mg_map_bthd(c, &p.g, g, 64, 64);
  const int tasks = mg_tasks(c, c->n.B * c->n.HV * s->rows.places, "chunks of heads");
  return p.done ? mg_run(c, &p, c->context.sms) : mg_run_resident(c, &p, tasks);
}

// marks: room for a counter of tasks, and for those of chunks. The former is worth its zero where a multiprocessor has
// some tasks.
static kda_plan apart(mg_call *c, int *marks, int64_t tasks) {
  if (!c->context.persistent || tasks < 16 * (int64_t)c->context.sms) return (kda_plan){0};
  return (kda_plan){.next = marks, .zeros = 1};
}
// Ranges of the chunks of all heads that begin early, as many as there are multiprocessors; `time` in nanoseconds, with
// `chunk` for one; all: as many as there may be. n is 0 where there are none.
static delta_pieces ranges_of(const mg_call *c, const delta_rows *rows, const mg_tensor *cuts, int64_t chunk,
                              bool all) {
  enum { around = 30000 };            // kernels in front and behind, and what a block's first chunk takes longer
  const int64_t heads = c->n.R * c->n.HV, line = heads * rows->places, sms = c->context.persistent ? c->context.sms : 0;
  const int64_t most = rows->starts || !cuts || !heads ? 1 : heads * c->n.CUTS + 1, n = all ? most : mg_min(most, sms);
  if (n < 2 || line < 2 * n || (!all && n < 2 * heads)) return (delta_pieces){0};
  const int64_t chunks = mg_ceil_div(line, n);
  return (delta_pieces){n, chunks, (chunks + 3) * chunk + around};
}
// Whether chunks are prepared beside the pass, whose kernel has been chosen. It pays where they stay in the L2 until
// the pass reads them, so the pass must not fall behind: a block of it keeps up with 1.5 multiprocessors that prepare,
// whatever its columns, and of few heads the rest has no work. Many heads are worked on in waves of about as many as
// fit, with some room: 52 of 132 multiprocessors are 3 % faster than 56 in some runs and 8 % slower in most.
// Where heads are about as many as multiprocessors, or many times that, one kernel does both, a head on each.
// Nanoseconds of a chunk of a head on a multiprocessor, measured on an H100. made, passed: where it is prepared beside
// the pass, and there; made_alone, passed_alone: one behind the other, the latter of 64 columns; both: in one kernel,
// on an H200 5500 to 6200, where `made` is a tenth more, too; and `moved` of the whole device, which has tiles, v and o
// to move then. slow: the preparation makes factors in two parts, and has no warpgroup left that waits for memory.
// whole: there is one kernel. Of packed rows the lengths are not known here: it is tried where it would be faster if
// all were as long.
// early: it is tried on ranges that begin early where it would be faster if gates forget.
static kda_plan plan_of(mg_call *c, const delta_sweep_params *p, const mg_tensor *cuts, int form, bool slow, bool whole,
                        const mg_tensor *marks) {
  enum { passed = 1500, passed_alone = 1500, moved = 33, both = 5300, early_both = 5100 };
  const int64_t made = slow ? 8500 : 4500, made_alone = slow ? 8700 : 6900;
  const int64_t heads = c->n.R * c->n.HV, parts = mg_ceil_div(c->n.V, c->desc->tile_n), sms = c->context.sms;
  const int64_t places = p->rows.places, chunks = c->n.B * c->n.HV * places, fit = mg_max(1, sms * 3 / 7);
  int *next = marks->data;
  if (whole && form == 1) return (kda_plan){.whole = true};
  const delta_pieces early = ranges_of(c, &p->rows, whole ? cuts : NULL, early_both, form == 4);
  if (c->status || !c->context.persistent || p->rows.starts || form == 3) {
    kda_plan plan = apart(c, next, chunks);
    if (form == 4) plan.early = early;
    if (whole && p->rows.starts && both < (KDA_MADE + KDA_PASSED) * mg_min(heads, sms)) {
      plan.taken = next + 1;
      plan.zeros = 3;
    }
    return plan;
  }
  const int64_t waves = mg_max(1, (heads * parts + fit / 2) / fit), wave = mg_ceil_div(heads, waves);
  const int64_t ending = mg_max(wave * parts, waves > 1 ? fit : sms - heads * parts * 3 / 2);
  const delta_pieces pieces = delta_pieces_of(c, &p->rows, cuts, false);
  const int64_t beside = mg_max(chunks * made / mg_max(1, sms - ending), places * passed) + 8000;
  const int64_t behind = chunks * made_alone / sms + mg_max(pieces.time * passed_alone / 100, chunks * moved);
  const int64_t together = mg_ceil_div(heads, sms) * places * both + 8000;
  if (form != 4 && whole && !slow && together < behind && (ending >= sms || together < beside))
    return (kda_plan){.whole = true};
  const bool alone = ending >= sms || beside > behind;
  kda_plan plan = alone ? apart(c, next, chunks)
                        : (kda_plan){.next = next, .done = next + 1, .wave = (int)wave, .ending = (int)ending,
                                     .zeros = (int)(1 + mg_ceil_div(heads, wave) * places)};
  if (early.n && (form == 4 || (form == 0 && early.time < (alone ? behind : beside)))) plan.early = early;
  return plan;
}

// In ranges that begin early where s has some.
static mg_status run_whole(mg_call *c, const mg_kda_args *a, const delta_sweep_params *s, const kda_acting *acting,
                           const kda_plan *plan, int *taken) {
  const bool early = s->cut.line.ranges.by > 0;
  kda_whole_params p = {.m = s->m, .p = s->p, .v = s->v, .o = s->o, .initial = s->initial, .final = s->final,
                        .initial_order = s->initial_order, .final_order = s->final_order, .rows = s->rows,
                        .gates = acting->gates, .scale = s->scale, .key_dim = s->key_dim, .value_dim = s->value_dim,
                        .copied = copied(c, &acting->g), .o_data = s->o_data, .o_step = s->o_step,
                        .o_head = s->o_head, .taken = taken, .cut = s->cut};
  if (early) {
    p.marks = plan->next;
    p.mark_count = plan->zeros;
  }
  if (c->status || !mg_choose_other(c, early ? MG_OP_kda_early : MG_OP_kda_whole)) return c->status;
  mg_map_bthd(c, &p.q, a->q, 64, 64);
  mg_map_bthd(c, &p.k, a->k, 64, 64);
  if (p.copied) mg_map_bthd(c, &p.g, &acting->g, 64, 64);
  if (early) return mg_run(c, &p, s->cut.line.ranges.by);
  return mg_run_resident(c, &p, mg_tasks(c, c->n.R * c->n.HV, "heads"));
}

// Returns what the kernels behind it are to look at.
static const int *run_early(mg_call *c, const mg_kda_args *a, const delta_sweep_params *s, const kda_acting *acting,
                              const kda_plan *plan) {
  delta_fades_params f = kda_fades_of(c, &acting->gates);
  delta_sweep_params early = *s;
  const int cuts = (int)plan->early.n - 1;
  int *taken = a->early->data;
  f.line = (delta_line){mg_divisor(plan->early.n), mg_divisor(s->rows.places), mg_divisor(c->n.HV),
                        (int)(c->n.R * c->n.HV) * s->rows.places};
  early.cut = (delta_cut){.states = mg_data(a->cuts), .early = (float *)taken + 2, .earlies = cuts,
                          .line = f.line, .told = taken + 2 + cuts};
  f.from = s->rows.from;
  f.most = DELTA_MOST_EARLY;
  f.early = (float *)taken + 2;
  f.told = early.cut.told;
  f.wrong = taken + 1;
  if (c->status || !mg_choose_other(c, MG_OP_delta_fades)) return NULL;
  mg_run(c, &f, cuts);
  run_whole(c, a, &early, acting, plan, taken);
  return taken;
}

// The states in front of pass number `pass`, not the first. They are not where the next ones go: what began early may
// be done anew.
static float *carry_in_front(const mg_call *c, const mg_kda_args *a, int64_t pass) {
  return (float *)a->carry->data + pass % 2 * (c->n.R * c->n.HV * c->n.K * c->n.V);
}

mg_status mg_kda(const mg_kda_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_kda, a)) return c.status;
  if (a->cu_seqlens && (c.status = ssd_check_starts(c.op, a->cu_seqlens, c.n.T))) return c.status;
  if (!mg_choose(&c)) return c.status;
  const mg_kernel *sweep = c.kernel;
  const ssd_order order = delta_order_of(&c, a->state_v_first);
  const kda_gates gates = kda_gates_of(a->g, a->beta, a->a_log, a->dt_bias, a->lower_bound, a->beta_form, a->l2norm);
  delta_sweep_params p = {
    .ends = mg_data(a->ends), .initial = mg_data(a->initial_state), .initial_order = order,
    .rows = delta_rows_of(&c, a->cu_seqlens), .gates = kda_beta_of(&gates, a->betas),
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
  const bool whole = a->q->dtype == MG_BF16 && c.n.K > 64 && c.n.V > 64 && a->form != 2;
  const bool slow = a->q->dtype == MG_FP16 && c.n.K > 64;
  bool last = false;
  for (int64_t first = 0; !last && !c.status; first += each) {
    last = first + each >= chunks;
    if (first) {
      p.initial = carry_in_front(&c, a, first / each);
      p.initial_order = between;
    }
    p.final = last ? mg_data(a->final_state) : carry_in_front(&c, a, first / each + 1);
    p.final_order = last ? order : between;
    p.rows.from = (int)(first * 64);
    p.rows.to = last ? (int)c.n.T : (int)((first + each) * 64);
    p.rows.places = (int)(last ? chunks - first : each);
    if (c.n.T && c.n.R && c.n.HV) {
      kda_acting acting;
      kda_run_decays(&c, &acting, a->g, &gates, a->decays, a->betas, &p.rows);
      delta_map_matrices(&c, &p.m, inverses, a->keep ? first : 0);
      delta_map_matrices(&c, &p.p, reads, a->keep ? first : 0);
      mg_use(&c, sweep);
      const kda_plan plan = plan_of(&c, &p, c.n.CUTS ? a->cuts : NULL, a->form, slow, whole, a->marks);
      if (plan.whole) {
        run_whole(&c, a, &p, &acting, &plan, NULL);
        continue;
      }
      p.taken = plan.taken;
      if (plan.zeros && !plan.early.n) mg_set(&c, a->marks->data, 0, sizeof(int), plan.zeros);
      if (plan.taken) run_whole(&c, a, &p, &acting, &plan, plan.taken);
      if (plan.early.n) p.taken = run_early(&c, a, &p, &acting, &plan);
      p.done = plan.done;
      p.wave = plan.wave;
      kda_run_prepare(&c, MG_OP_kda_prepare, a->q, a->k, &acting, &p, &plan);
    }
    mg_use(&c, sweep);
    if (!c.status) delta_run_sweep(&c, &p, &parts, c.n.CUTS && !p.done ? a->cuts : NULL, a->turns, a->form == 3);
  }
  return c.status;
}
