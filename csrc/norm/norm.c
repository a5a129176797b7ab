// Host halves of the norms.
#include <float.h>
#include <math.h>
#include "norm/norm.h"
#include "runtime/runtime.h"

static int is_float(const mg_tensor *t) { return t && t->dtype == MG_FP32; }
static int64_t stride_of(const mg_tensor *t, int i) { return t->shape[i] > 1 ? t->stride[i] : 0; }
static norm_stream stream_of(const mg_tensor *t) {
  return t ? (norm_stream){t->data, stride_of(t, 0), t->dims > 2 ? stride_of(t, 1) : 0, is_float(t)} : (norm_stream){0};
}

// What an op is called with; NULL: absent.
typedef struct call {
  const mg_tensor *x, *extra, *out, *sum;            // of a backward, x is what was normalised or gated
  const mg_tensor *dout, *dextra_in, *dx, *dextra;   // dextra_in: the gradient of the sum
  const mg_tensor *weight, *bias, *dweight, *dbias, *mean, *rstd, *seed, *partials;
  const mg_tensor *out_scale, *descale;              // of results in e4m3
  float eps, dropout_p;
  bool zero_centred, rms;
  enum norm_extra kind;
} call;

// Eight numbers of a row may be one access, of bytes one of 8. On the CPU that is no question, unless a tool asks for
// what the GPU does.
static bool in_eights(const mg_tensor *t) {
  if (!t) return true;
  int64_t bits = (int64_t)(uintptr_t)t->data;
  for (int i = 0; i < t->dims - 1; i++) bits |= stride_of(t, i) * (int64_t)mg_dtype_size(t->dtype);
  return bits % (mg_dtype_size(t->dtype) == 1 ? 8 : 16) == 0;
}
static bool has_int_strides(const mg_tensor *t) {
  bool has = true;
  for (int i = 0; t && i < t->dims - 1; i++) has &= stride_of(t, i) >= 0 && stride_of(t, i) <= INT32_MAX;
  return has;
}
static bool fits(const mg_call *c, const call *a) {
  const mg_tensor *all[] = {a->x, a->extra, a->out, a->sum, a->dout, a->dextra_in, a->dx, a->dextra, a->weight,
                            a->bias};
  bool fit = true;
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) fit &= has_int_strides(all[i]);
  if (c->context.device == MG_CPU && !mg_intercepted()) return fit;
  fit &= c->n.N % 8 == 0;
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) fit &= in_eights(all[i]);
  return fit;
}
// Whether all streams are lines of 16 bits: those that bulk copies bring begin at multiples of 16 bytes on the CPU too.
static bool in_halves(const call *a) {
  const mg_tensor *all[] = {a->x, a->extra, a->sum, a->dout, a->dextra_in, a->dextra};
  bool fit = true;
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) fit &= !is_float(all[i]) && in_eights(all[i]);
  return fit && a->x->shape[a->x->dims - 1] % 8 == 0;
}

// Chooses the kernel. Of a row with LINES its tile is the lines of a block by their most columns, and the kernel reads
// neither lines nor span; else the warpgroups of a block by the columns of each.
static norm_problem problem_of(mg_call *c, const call *a, mg_op op) {
  const int64_t groups = c->n.G > 0 ? c->n.G : 1;
  const bool fit = fits(c, a), halves = fit && in_halves(a), gate = a->kind != NORM_PLAIN && a->kind != NORM_ADD,
             adds = a->kind == NORM_ADD && a->rms && !(a->dropout_p > 0),
             scales = a->weight && !is_float(a->weight) && !a->zero_centred && !a->bias;
  c->problem.size.FIT = fit + halves + (halves && !gate) + (halves && adds) + (halves && adds && scales);
  if (c->problem.gpu && c->problem.dtype == MG_FP32) c->problem.dtype = MG_BF16;    // whose kernels read both
  norm_problem p = {
    .rows = (int)c->n.B, .groups = (int)groups, .dim = (int)c->n.N,
    .inverse_groups = groups > 1 ? (uint32_t)(((uint64_t)1 << 32) / groups) : UINT32_MAX, .eights = fit,
    .rms = a->rms, .extra = a->kind, .weight = mg_data(a->weight), .bias = mg_data(a->bias),
    .weight_is_float = is_float(a->weight), .bias_is_float = is_float(a->bias),
    .weight_offset = !a->weight || a->zero_centred, .inverse = 1 / (float)c->n.N,
    .mean = mg_data(a->mean), .rstd = mg_data(a->rstd), .lines = 1, .span = 1};
  const uint32_t dropped = (uint32_t)lrintf(a->dropout_p * 65536);   // of 65536 draws
  if (dropped > 0) {
    p.seed = a->seed->data;
    p.drop_most = (uint32_t)(((uint64_t)dropped << 16) - 1);
    p.keep_scale = dropped < 65536 ? 65536 / (float)(65536 - dropped) : 0;
  }
  if (!mg_choose_other(c, op)) return p;
  p.slots = c->desc->tile_m;
  if (c->kernel->constant().LINES) return p;
  while (p.lines < 16 && c->n.N * 2 * p.lines <= c->desc->tile_n) p.lines *= 2;
  while (p.span < c->desc->tile_m && c->n.N > p.span * c->desc->tile_n) p.span *= 2;
  p.slots = p.slots / p.span * p.lines;
  return p;
}
static int tiles_of(mg_call *c, const norm_problem *p) {
  if (c->status) return 0;
  // The row of a place (norm_tile.h) is an int, also of the last block's lines behind the last row.
  // Tiles are at most 2^30.
  const int64_t most = mg_min(((int64_t)INT32_MAX + 1) / p->slots, ((int64_t)1 << 30) / p->groups) * p->slots;
  if (p->rows > most) mg_refuse(c, MG_VALUE, "x has %d rows, expected at most %lld (of %d columns)", p->rows,
                                (long long)most, p->dim);
  return c->status ? 0 : mg_tasks(c, mg_ceil_div(p->rows, p->slots) * p->groups, "tiles");
}

static mg_status forward(mg_call *c, const call *a) {
  const mg_op op = a->out->dtype == MG_E4M3 ? MG_OP_norm_fp8 : MG_OP_norm_fwd;
  norm_fwd_params p = {.problem = problem_of(c, a, op), .x = stream_of(a->x), .extra = stream_of(a->extra),
                       .out = stream_of(a->out), .sum = stream_of(a->sum), .root_eps = sqrtf(a->eps),
                       .out_scale = mg_data(a->out_scale), .descale = mg_data(a->descale)};
  p.least_squares = a->eps < 1e-20f ? 1e-30f : -1;
  p.most_scale = p.root_eps > 0x1p-60f ? 1e18f / p.root_eps : 1e37f;
  p.rounds = (a->kind == NORM_ADD || a->dropout_p > 0) && !is_float(a->kind == NORM_ADD ? a->extra : a->x);
  return mg_run(c, &p, tiles_of(c, &p.problem));
}

// Blocks: a multiple of the groups, so that each has lines of one; no more than partials has room for.
static mg_status backward(mg_call *c, const call *a) {
  norm_bwd_params p = {.partials = a->partials->data, .columns = c->n.N8};
  int64_t parts = 0, blocks = 0;
  if (c->n.B) {
    p.problem = problem_of(c, a, MG_OP_norm_bwd);
    p.x = stream_of(a->x);
    p.dout = stream_of(a->dout);
    p.extra = stream_of(a->kind == NORM_ADD ? a->dextra_in : a->extra);
    p.dx = stream_of(a->dx);
    p.dextra = stream_of(a->dextra);
    p.tiles = tiles_of(c, &p.problem);
    if (c->status) return c->status;
    // Blocks with a loader have warpgroups beside those of their lines, and add up their sums themselves. A block of
    // norm_bwd.cu with LINES has one line.
    const int64_t sums = (int)c->desc->threads > 128 * c->desc->tile_m ? 1 : p.problem.slots;
    blocks = mg_min(p.tiles / p.problem.groups, c->n.PARTS / sums);
    blocks = mg_max(mg_resident(c, blocks * p.problem.groups) / p.problem.groups, 1);
    parts = blocks * sums;
    if (mg_run(c, &p, blocks * p.problem.groups)) return c->status;
  }
  if (!a->dweight && !a->dbias) return c->status;
  const int64_t groups = c->n.G > 0 ? c->n.G : 1;
  if (c->problem.gpu && c->problem.dtype == MG_FP32) c->problem.dtype = MG_BF16;
  if (!mg_choose_other(c, MG_OP_norm_bwd_post)) return c->status;
  norm_bwd_post_params q = {
    .partials = p.partials, .parts = (int)parts, .groups = (int)groups, .dim = (int)c->n.N, .columns = c->n.N8,
    .col_blocks = (int)mg_ceil_div(c->n.N, c->desc->tile_n), .dweight = mg_data(a->dweight), .dbias = mg_data(a->dbias),
    .weight_is_float = is_float(a->dweight), .bias_is_float = is_float(a->dbias)};
  return mg_run(c, &q, mg_tasks(c, (a->dbias ? 2 : 1) * groups * q.col_blocks, "tiles"));
}

mg_status mg_layer_norm(const mg_layer_norm_args *a) {
  mg_call c;
  const call asked = {.x = a->x, .out = a->out, .weight = a->weight, .bias = a->bias, .mean = a->mean, .rstd = a->rstd,
                      .eps = a->eps};
  return mg_begin(&c, MG_OP_layer_norm, a) ? forward(&c, &asked) : c.status;
}
mg_status mg_rms_norm(const mg_rms_norm_args *a) {
  mg_call c;
  const call asked = {.x = a->x, .out = a->out, .weight = a->weight, .bias = a->bias, .rstd = a->rstd, .eps = a->eps,
                      .zero_centred = a->zero_centred, .rms = true};
  return mg_begin(&c, MG_OP_rms_norm, a) ? forward(&c, &asked) : c.status;
}
mg_status mg_layer_norm_residual(const mg_layer_norm_residual_args *a) {
  mg_call c;
  const call asked = {.x = a->x, .extra = a->residual, .out = a->out, .sum = a->new_residual, .weight = a->weight,
                      .bias = a->bias, .mean = a->mean, .rstd = a->rstd, .seed = a->seed, .eps = a->eps,
                      .dropout_p = a->dropout_p, .kind = a->residual ? NORM_ADD : NORM_PLAIN};
  return mg_begin(&c, MG_OP_layer_norm_residual, a) ? forward(&c, &asked) : c.status;
}
mg_status mg_rms_norm_residual(const mg_rms_norm_residual_args *a) {
  mg_call c;
  const call asked = {.x = a->x, .extra = a->residual, .out = a->out, .sum = a->new_residual, .weight = a->weight,
                      .bias = a->bias, .rstd = a->rstd, .seed = a->seed, .eps = a->eps, .dropout_p = a->dropout_p,
                      .zero_centred = a->zero_centred, .rms = true, .kind = a->residual ? NORM_ADD : NORM_PLAIN};
  return mg_begin(&c, MG_OP_rms_norm_residual, a) ? forward(&c, &asked) : c.status;
}
// 1 / it is finite. What a GPU has is not read here.
static bool is_scale(mg_call *c, const mg_tensor *t) {
  const float scale = t && t->device == MG_CPU ? *(const float *)t->data : 1;
  if (scale >= FLT_MIN && scale <= FLT_MAX) return true;
  mg_refuse(c, MG_VALUE, "out_scale is %g, expected a finite number of at least 2^-126", (double)scale);
  return false;
}
mg_status mg_layer_norm_fp8(const mg_layer_norm_fp8_args *a) {
  mg_call c;
  const call asked = {.x = a->x, .extra = a->residual, .out = a->out, .sum = a->new_residual, .weight = a->weight,
                      .bias = a->bias, .seed = a->seed, .out_scale = a->out_scale, .descale = a->descale, .eps = a->eps,
                      .dropout_p = a->dropout_p, .kind = a->residual ? NORM_ADD : NORM_PLAIN};
  return mg_begin(&c, MG_OP_layer_norm_fp8, a) && is_scale(&c, a->out_scale) ? forward(&c, &asked) : c.status;
}
mg_status mg_rms_norm_fp8(const mg_rms_norm_fp8_args *a) {
  mg_call c;
  const call asked = {.x = a->x, .extra = a->residual, .out = a->out, .sum = a->new_residual, .weight = a->weight,
                      .bias = a->bias, .seed = a->seed, .out_scale = a->out_scale, .descale = a->descale, .eps = a->eps,
                      .dropout_p = a->dropout_p, .zero_centred = a->zero_centred, .rms = true,
                      .kind = a->residual ? NORM_ADD : NORM_PLAIN};
  return mg_begin(&c, MG_OP_rms_norm_fp8, a) && is_scale(&c, a->out_scale) ? forward(&c, &asked) : c.status;
}
mg_status mg_gated_rms_norm(const mg_gated_rms_norm_args *a) {
  mg_call c;
  const call asked = {.x = a->x, .extra = a->z, .out = a->out, .weight = a->weight, .rstd = a->rstd, .eps = a->eps,
                      .rms = true, .kind = a->gate_first ? NORM_GATE_FIRST : NORM_GATE_LAST};
  return mg_begin(&c, MG_OP_gated_rms_norm, a) ? forward(&c, &asked) : c.status;
}

mg_status mg_layer_norm_bwd(const mg_layer_norm_bwd_args *a) {
  mg_call c;
  const call asked = {.x = a->x, .dout = a->dout, .dx = a->dx, .weight = a->weight, .dweight = a->dweight,
                      .dbias = a->dbias, .mean = a->mean, .rstd = a->rstd, .partials = a->partials};
  return mg_begin(&c, MG_OP_layer_norm_bwd, a) ? backward(&c, &asked) : c.status;
}
mg_status mg_rms_norm_bwd(const mg_rms_norm_bwd_args *a) {
  mg_call c;
  const call asked = {.x = a->x, .dout = a->dout, .dx = a->dx, .weight = a->weight, .dweight = a->dweight,
                      .dbias = a->dbias, .rstd = a->rstd, .partials = a->partials, .zero_centred = a->zero_centred,
                      .rms = true};
  return mg_begin(&c, MG_OP_rms_norm_bwd, a) ? backward(&c, &asked) : c.status;
}
mg_status mg_layer_norm_residual_bwd(const mg_layer_norm_residual_bwd_args *a) {
  mg_call c;
  const call asked = {.x = a->new_residual, .dout = a->dout, .dextra_in = a->dnew_residual, .dx = a->dx,
                      .dextra = a->dresidual, .weight = a->weight, .dweight = a->dweight, .dbias = a->dbias,
                      .mean = a->mean, .rstd = a->rstd, .seed = a->seed, .partials = a->partials,
                      .dropout_p = a->dropout_p, .kind = NORM_ADD};
  return mg_begin(&c, MG_OP_layer_norm_residual_bwd, a) ? backward(&c, &asked) : c.status;
}
mg_status mg_rms_norm_residual_bwd(const mg_rms_norm_residual_bwd_args *a) {
  mg_call c;
  const call asked = {.x = a->new_residual, .dout = a->dout, .dextra_in = a->dnew_residual, .dx = a->dx,
                      .dextra = a->dresidual, .weight = a->weight, .dweight = a->dweight, .dbias = a->dbias,
                      .rstd = a->rstd, .seed = a->seed, .partials = a->partials, .dropout_p = a->dropout_p,
                      .zero_centred = a->zero_centred, .rms = true, .kind = NORM_ADD};
  return mg_begin(&c, MG_OP_rms_norm_residual_bwd, a) ? backward(&c, &asked) : c.status;
}
mg_status mg_gated_rms_norm_bwd(const mg_gated_rms_norm_bwd_args *a) {
  mg_call c;
  const call asked = {.x = a->x, .extra = a->z, .dout = a->dout, .dx = a->dx, .dextra = a->dz, .weight = a->weight,
                      .dweight = a->dweight, .rstd = a->rstd, .partials = a->partials, .rms = true,
                      .kind = a->gate_first ? NORM_GATE_FIRST : NORM_GATE_LAST};
  return mg_begin(&c, MG_OP_gated_rms_norm_bwd, a) ? backward(&c, &asked) : c.status;
}
