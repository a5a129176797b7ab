// Host halves of the long convolution.
#include "fft_conv/fft_conv.h"
#include "runtime/runtime.h"

// What the ops are called with; NULL: absent.
enum { MOST_ROWS = 7 };
typedef struct call {
  const mg_tensor *k, *skip;
  bool causal, precise, spectrum_is_given;
  const mg_tensor *rows[MOST_ROWS];   // all [B, H, L]
} call;

// Where a spectrum and its parts lie.
typedef struct filter {
  float *spectrum;
  bool fast;                  // for fft_conv.cu
  int log_rows, log_parts;    // rows of 2^log_parts times 64 << log_rows elements
} filter;

static int type_of(const mg_tensor *t) {
  return t->dtype == MG_BF16 ? FFT_BF16 : t->dtype == MG_FP16 ? FFT_FP16 : FFT_FP32;
}

static bool wants_pieces(const mg_call *c, const call *a) { return a->precise || c->problem.dtype == MG_FP32; }

// Rows of one kernel: 64 to 4096 elements, a power of two.
static int log_rows_of(const mg_call *c) {
  int log = 0;
  while (log < 6 && 64 << log < c->n.L) log++;
  return log;
}
static filter filter_of(const mg_call *c, const call *a, const mg_tensor *spectrum) {
  const int log = log_rows_of(c), parts = c->n.L == 4 * FFT_BLOCK ? 2 : c->n.L == 2 * FFT_BLOCK;
  bool fast = !wants_pieces(c, a) && 64 << log << parts == c->n.L;
  for (int i = 0; i < MOST_ROWS && !a->spectrum_is_given; i++)
    fast &= !a->rows[i] || c->n.H == 1 || a->rows[i]->stride[1] == c->n.L;
  return (filter){.spectrum = spectrum->data, .fast = fast, .log_rows = fast ? log : 6, .log_parts = parts};
}
static fft_complex *units_of(const filter *f) { return (fft_complex *)(f->spectrum + FFT_TABLE_FLOATS); }

static bool choose_fast(mg_call *c, const call *a) {         // circular: two rows at a time
  c->problem.size.SPLIT = a->causal ? 1 : 2;
  return mg_choose_other(c, MG_OP_fft_conv);
}
// Kernels whose rows are bf16, whatever the tensors are: their operands are fp16. precise: two for each number.
static bool choose(mg_call *c, mg_op op, bool precise) {
  const mg_dtype dtype = c->problem.dtype;
  c->problem.dtype = MG_BF16;
  c->problem.size.SPLIT = precise ? 2 : 1;
  const bool chosen = mg_choose_other(c, op);
  c->problem.dtype = dtype;
  return chosen;
}
static mg_status run(mg_call *c, const void *params, int64_t tasks) {   // a block's tasks: its warpgroups
  return mg_run_resident(c, params, mg_ceil_div(tasks, c->desc->tile_m));
}

static fft_rows rows_of(const mg_tensor *t, const mg_tensor *gate) {
  fft_rows x = {.data = t->data, .batch = t->stride[0], .head = t->stride[1], .type = type_of(t),
                .length = (int)t->shape[2]};
  if (gate) {
    x.gate = gate->data;
    x.gate_batch = gate->stride[0];
    x.gate_head = gate->stride[1];
    x.gate_type = type_of(gate);
  }
  return x;
}

static float *tiles_of(const filter *f) { return f->spectrum + FFT_TABLE_FLOATS; }
static int64_t filter_tiles(const mg_call *c, const filter *f) {
  return mg_ceil_div(c->n.H << f->log_parts << f->log_rows, 64);
}
static float *factors_of(const mg_call *c, const filter *f) { return tiles_of(f) + filter_tiles(c, f) * FFT_BLOCK; }

// backward: for the kernel fft_conv_bwd.cu
static void make_filter(mg_call *c, const call *a, const filter *f, bool backward) {
  const int64_t heads = c->n.H;
  if (!heads) return;
  if (f->fast) {
    fft_filters_params p = {
      .k = a->k->data, .k_type = type_of(a->k), .skip = mg_data(a->skip), .skip_type = a->skip ? type_of(a->skip) : 0,
      .taps = (int)c->n.LK, .heads = (int)heads << f->log_parts, .log_rows = f->log_rows, .log_parts = f->log_parts,
      .quarter = a->causal, .plain = !a->causal || f->log_parts, .accumulators = backward, .tables = f->spectrum,
      .out = tiles_of(f), .factors = factors_of(c, f), .tasks = mg_tasks(c, filter_tiles(c, f), "tiles")};
    if (choose(c, MG_OP_fft_conv_filters, c->problem.dtype == MG_FP16 || f->log_parts)) run(c, &p, p.tasks);
    return;
  }
  fft_spectra_params p = {
    .x = {.data = a->k->data, .head = c->n.LK, .type = type_of(a->k), .length = (int)c->n.LK},
    .skip = mg_data(a->skip), .skip_type = a->skip ? type_of(a->skip) : 0, .batches = 1, .blocks = (int)c->n.RK,
    .out = units_of(f), .tasks = mg_tasks(c, heads * c->n.RK, "blocks")};
  if (choose(c, MG_OP_fft_conv_spectra, true)) run(c, &p, p.tasks);
}

// ---- one pass

// [B, H, L] as rows of 64
static void map_rows(mg_call *c, gmap *m, const char *name, const mg_tensor *t) {
  const int64_t rows = c->n.H * c->n.L / 64;
  if (c->n.H > 1 && t->stride[1] != c->n.L)
    mg_refuse(c, MG_VALUE, "%s has a stride of %lld elements between heads, expected %lld; call .contiguous() first",
              name, (long long)t->stride[1], (long long)c->n.L);
  if (!c->status)
    c->status = mg_map_once(m, &c->context, name, t->data, t->dtype, (int64_t[4]){c->n.B, 1, rows, 64},
                            (int64_t[4]){t->stride[0], rows * 64, 64, 1}, 64, 64);
}
static void map_tables(mg_call *c, gmap *m, const filter *f) {
  if (!c->status)
    c->status = mg_map(m, &c->context, "spectrum", f->spectrum, MG_FP16, (int64_t[4]){1, FFT_TABLES, 64, 64},
                       (int64_t[4]){FFT_TABLES * 4096, 4096, 64, 1}, 64, 64);
}
// What both kernels of one pass read and write.
static void map_operands(mg_call *c, fft_operands *m, const filter *f, const mg_tensor *x, const mg_tensor *pre,
                         const mg_tensor *post, const mg_tensor *out) {
  map_tables(c, &m->tables, f);
  map_rows(c, &m->u, "u", x);
  map_rows(c, &m->out, "out", out);
  if (pre) map_rows(c, &m->pre, "pregate", pre);
  if (post) map_rows(c, &m->post, "postgate", post);
}
// factor, other: of long rows, or NULL. conjugate: of those alone
static mg_status convolve_fast(mg_call *c, const call *a, const filter *f, const mg_tensor *x, const mg_tensor *pre,
                               const mg_tensor *post, const mg_tensor *out, const mg_tensor *factor,
                               const mg_tensor *other, bool conjugate) {
  if (!choose_fast(c, a)) return c->status;
  const int64_t batches = mg_ceil_div(c->n.B, c->problem.size.SPLIT);
  if (f->log_parts) {
    fft_long_params p = {.filter = tiles_of(f), .factors = factors_of(c, f), .batches = (int)c->n.B,
                         .quarter = a->causal, .has_pre = pre != NULL, .has_post = post != NULL,
                         .has_other = other != NULL, .conjugate = conjugate,
                         .tasks = mg_tasks(c, c->n.H * c->n.B, "rows")};
    map_operands(c, &p.of, f, x, pre, post, out);
    if (other) {
      map_rows(c, &p.factor, "u", factor);
      map_rows(c, &p.other, "dpregate", other);
    }
    return run(c, &p, p.tasks);
  }
  fft_conv_params p = {.filter = tiles_of(f), .factors = factors_of(c, f), .batches = (int)batches,
                       .rows = (int)(c->n.H << f->log_rows), .log_rows = f->log_rows, .has_pre = pre != NULL,
                       .has_post = post != NULL,
                       .tasks = mg_tasks(c, filter_tiles(c, f) * batches, "tiles")};
  map_operands(c, &p.of, f, x, pre, post, out);
  return mg_run_resident(c, &p, p.tasks);
}

// Gradients, of which p says which are wanted, or what goes to sums: nothing of no rows.
static void run_gradients(mg_call *c, const mg_fft_conv_bwd_args *a, const filter *f, fft_grads_params *p) {
  p->sums = a->blocks->data;
  p->batches = (int)c->n.B;
  p->chunks = (int)c->n.CHUNKS;
  p->step = (int)c->n.STEPS;
  p->has_pre = a->pregate != NULL;
  p->has_post = a->postgate != NULL;
  p->tasks = mg_tasks(c, c->n.SLOTS * c->n.CHUNKS, "tiles");
  c->problem.size.SPLIT = 1;
  if (mg_is_empty(a->u) || !mg_choose(c)) return;
  map_tables(c, &p->tables, f);
  map_rows(c, &p->u, "u", a->u);
  map_rows(c, &p->dout, "dout", a->dout);
  if (p->has_pre) map_rows(c, &p->pre, "pregate", a->pregate);
  if (p->has_post) map_rows(c, &p->post, "postgate", a->postgate);
  if (p->has_du) map_rows(c, &p->du, "du", a->du);
  if (p->has_dpre) map_rows(c, &p->dpre, "dpregate", a->dpregate);
  if (p->has_dpost) map_rows(c, &p->dpost, "dpostgate", a->dpostgate);
  run(c, p, p->tasks);
}
// Where the filter's gradient goes. skip is added to the filter's first element, so its gradient is that one's.
static fft_sums_params filter_sums(const mg_call *c, const mg_fft_conv_bwd_args *a) {
  const mg_tensor *dk = a->dk, *dskip = a->dskip;
  return (fft_sums_params){
    .out = mg_data(dk), .out_head = c->n.LK, .type = type_of(dk ? dk : dskip), .length = (int)c->n.LK,
    .first = mg_data(dskip), .first_type = dskip ? type_of(dskip) : 0, .chunks = (int)c->n.CHUNKS,
    .parts = a->blocks->data};
}

// All gradients of rows of at most 4096 elements.
static mg_status gradients_fast(mg_call *c, const mg_fft_conv_bwd_args *a, const filter *f) {
  const bool sums = a->dk || a->dskip;
  fft_grads_params p = {
    .filter = tiles_of(f), .factors = factors_of(c, f), .rows = (int)(c->n.H << f->log_rows), .log_rows = f->log_rows,
    .has_du = a->du != NULL, .has_dpre = a->dpregate != NULL, .has_dpost = a->dpostgate != NULL, .has_sums = sums};
  run_gradients(c, a, f, &p);
  if (sums) {
    fft_sums_params q = filter_sums(c, a);
    q.of_parts = true;
    q.log_rows = f->log_rows;
    q.plain = !a->causal;
    q.rows = p.rows;
    q.blocks = 1;
    q.tasks = mg_tasks(c, c->n.SLOTS, "tiles");
    if (choose(c, MG_OP_fft_conv_sums, true)) run(c, &q, q.tasks);
  }
  return c->status;
}

// ---- blocks

// Spectra of the rows from first_row, head by head, `count` of them.
static mg_status make_spectra(mg_call *c, const fft_rows *x, fft_complex *out, int64_t first_row, int64_t count,
                              int64_t past, bool pairs, bool precise) {
  const int64_t blocks = c->n.R + past;
  if (!choose(c, MG_OP_fft_conv_spectra, precise)) return c->status;
  fft_spectra_params p = {.x = *x, .batches = (int)c->n.B, .first_row = (int)first_row,
                          .blocks = (int)blocks, .past = (int)past, .pairs = pairs, .out = out,
                          .tasks = mg_tasks(c, count * blocks, "blocks")};
  return run(c, &p, p.tasks);
}

// backwards: with all rows, and the filter, from the end
static mg_status convolve_blocks(mg_call *c, const call *a, const filter *f, const mg_tensor *x, const mg_tensor *pre,
                                 const mg_tensor *post, const mg_tensor *out, const mg_tensor *work, bool backwards) {
  const int64_t rows = mg_tasks(c, c->n.B * c->n.H, "rows"), most = mg_max(1, c->n.ROOM / FFT_UNIT_FLOATS / c->n.UNITS);
  const bool precise = wants_pieces(c, a);
  fft_rows from = rows_of(x, pre);
  from.circular = !a->causal;
  from.reversed = backwards;
  fft_sums_params p = {
    .a = work->data, .b = units_of(f), .batches = (int)c->n.B, .blocks = (int)c->n.R, .a_blocks = (int)c->n.UNITS,
    .b_blocks = (int)c->n.RK, .past = (int)(c->n.UNITS - c->n.R), .out = out->data, .out_batch = out->stride[0],
    .out_head = out->stride[1], .type = type_of(out), .length = (int)c->n.L, .reversed = backwards,
    .log_rows = 6};
  if (post) {
    p.gate = post->data;
    p.gate_batch = post->stride[0];
    p.gate_head = post->stride[1];
  }
  for (int64_t first = 0; first < rows && !c->status; first += most) {
    const int64_t count = mg_min(most, rows - first);
    make_spectra(c, &from, work->data, first, count, p.past, true, precise);
    p.first_row = (int)first;
    p.tasks = mg_tasks(c, count * c->n.R, "blocks");
    if (choose(c, MG_OP_fft_conv_sums, precise)) run(c, &p, p.tasks);
  }
  return c->status;
}

static mg_status convolve(mg_call *c, const call *a, const filter *f, const mg_tensor *x, const mg_tensor *pre,
                          const mg_tensor *post, const mg_tensor *out, const mg_tensor *work, bool backwards) {
  if (c->status || mg_is_empty(out)) return c->status;
  return f->fast ? convolve_fast(c, a, f, x, pre, post, out, NULL, NULL, backwards)
                 : convolve_blocks(c, a, f, x, pre, post, out, work, backwards);
}

// Of rows of one pass over 4096 elements.
static mg_status filter_gradient_long(mg_call *c, const mg_fft_conv_bwd_args *a, const filter *f) {
  fft_grads_params p = {.log_parts = f->log_parts, .quarter = a->causal};
  fft_sums_params q = filter_sums(c, a);
  q.log_parts = f->log_parts;
  q.quarter = a->causal;
  q.tasks = mg_tasks(c, c->n.SLOTS, "tiles");
  run_gradients(c, a, f, &p);
  if (choose(c, MG_OP_fft_conv_parts, true)) run(c, &q, q.tasks);
  return c->status;
}

static mg_status filter_gradient(mg_call *c, const mg_fft_conv_bwd_args *a) {
  const int64_t units = c->n.B * (c->n.R + c->n.UNITS), heads = c->n.H;
  const int64_t most = mg_max(1, units ? c->n.ROOM / FFT_UNIT_FLOATS / units : heads);
  fft_complex *first = a->blocks->data, *second = first + FFT_BLOCK * mg_min(most, heads) * c->n.B * c->n.R;
  fft_rows dy = rows_of(a->dout, a->postgate), x = rows_of(a->u, a->pregate);
  x.circular = !a->causal;
  fft_sums_params p = filter_sums(c, a);
  p.a = first;
  p.b = second;
  p.batches = (int)c->n.B;
  p.blocks = (int)(a->dk ? c->n.RK : 1);
  p.of_filters = true;
  p.a_blocks = (int)c->n.R;
  p.b_blocks = (int)c->n.UNITS;
  p.past = (int)(c->n.UNITS - c->n.R);
  p.log_rows = 6;
  mg_tasks(c, c->n.B * heads, "rows");
  for (int64_t head = 0; head < heads && !c->status; head += most) {
    const int64_t count = mg_min(most, heads - head), rows = count * c->n.B;
    if (rows) {
      make_spectra(c, &dy, first, head * c->n.B, rows, 0, false, true);
      make_spectra(c, &x, second, head * c->n.B, rows, p.past, true, true);
    }
    p.first_row = (int)head;
    p.tasks = mg_tasks(c, count * p.blocks, "blocks");
    if (choose(c, MG_OP_fft_conv_sums, true)) run(c, &p, p.tasks);
  }
  return c->status;
}

// ---- ops

mg_status mg_fft_conv_spectrum(const mg_fft_conv_spectrum_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_fft_conv_spectrum, a)) return c.status;
  const call asked = {.k = a->k, .skip = a->skip, .causal = a->causal, .precise = a->precise};
  const filter f = filter_of(&c, &asked, a->spectrum);
  make_filter(&c, &asked, &f, false);
  return c.status;
}

// What computes a problem is chosen first: explain() asks for that.
static bool choose_main(mg_call *c, const call *a, const filter *f, bool precise) {
  return f->fast ? choose_fast(c, a) : choose(c, MG_OP_fft_conv_spectra, precise);
}

mg_status mg_fft_conv(const mg_fft_conv_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_fft_conv, a)) return c.status;
  const call asked = {.k = a->k, .skip = a->skip, .causal = a->causal, .precise = a->precise,
                      .spectrum_is_given = a->spectrum != NULL, .rows = {a->u, a->pregate, a->postgate, a->out}};
  const filter f = filter_of(&c, &asked, a->spectrum ? a->spectrum : a->made);
  if (!choose_main(&c, &asked, &f, wants_pieces(&c, &asked))) return c.status;
  if (!a->spectrum) make_filter(&c, &asked, &f, false);
  return convolve(&c, &asked, &f, a->u, a->pregate, a->postgate, a->out, a->blocks, false);
}

// By blocks and of long rows, the gradient of u and of the first gate is the convolution with the filter reversed, that
// of the second gate the forward without it.
mg_status mg_fft_conv_bwd(const mg_fft_conv_bwd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_fft_conv_bwd, a)) return c.status;
  const call asked = {
    .k = a->k, .skip = a->skip, .causal = a->causal, .precise = a->precise,
    .rows = {a->dout, a->u, a->pregate, a->postgate, a->du, a->dpregate, a->dpostgate}};
  const filter f = filter_of(&c, &asked, a->made);
  if (f.fast && !f.log_parts) {
    c.problem.size.SPLIT = 1;
    if (!mg_is_empty(a->u) && !mg_choose(&c)) return c.status;
    make_filter(&c, &asked, &f, true);
    return gradients_fast(&c, a, &f);
  }
  if (!choose_main(&c, &asked, &f, wants_pieces(&c, &asked))) return c.status;
  if (f.fast || a->du || a->dpregate || a->dpostgate) make_filter(&c, &asked, &f, false);
  const bool both = f.fast && a->du && a->dpregate && !mg_is_empty(a->u);
  if (both)
    convolve_fast(&c, &asked, &f, a->dout, a->postgate, a->pregate, a->du, a->u, a->dpregate, true);
  else if (a->du)
    convolve(&c, &asked, &f, a->dout, a->postgate, a->pregate, a->du, a->blocks, true);
  if (a->dpregate && !both)
    convolve(&c, &asked, &f, a->dout, a->postgate, a->u, a->dpregate, a->blocks, true);
  if (a->dpostgate) convolve(&c, &asked, &f, a->u, a->pregate, a->dout, a->dpostgate, a->blocks, false);
  if (a->dk || a->dskip) {
    if (f.fast) filter_gradient_long(&c, a, &f);
    else filter_gradient(&c, a);
  }
  return c.status;
}
