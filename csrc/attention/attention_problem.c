// Attention's arguments, read: see attention_problem.h.
#include "attention/attention_problem.h"

mg_status attention_check_shape(const char *op, const char *name, const mg_tensor *t, int dims, const int64_t *want) {
  for (int i = 0; i < dims; i++)
    if (t->shape[i] != want[i])
      return mg_fail(MG_VALUE, "%s: %s has size %lld in dimension %d, expected %lld", op, name, (long long)t->shape[i], i, (long long)want[i]);
  return MG_OK;
}
mg_status attention_check_contiguous(const char *op, const char *name, const mg_tensor *t) {
  int64_t stride = 1;
  if (mg_is_empty(t)) return MG_OK;
  for (int i = t->dims - 1; i >= 0; i--) {
    if (t->shape[i] > 1 && t->stride[i] != stride)
      return mg_fail(MG_VALUE, "%s: %s must be contiguous, its stride in dimension %d is %lld, expected %lld", op, name, i,
                     (long long)t->stride[i], (long long)stride);
    stride *= t->shape[i];
  }
  return MG_OK;
}

static mg_status read_shape(attention_shape *x, const char *op, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v) {
  *x = (attention_shape){.batch = q->shape[0], .q_heads = q->shape[1], .k_heads = k->shape[1], .q_rows = q->shape[2], .k_rows = k->shape[2],
                         .d = q->shape[3], .dv = v->shape[3], .q_total = q->shape[2], .k_total = k->shape[2],
                         .out = {q->shape[0], q->shape[1], q->shape[2], v->shape[3]}};
  mg_status status = attention_check_shape(op, "k", k, 4, (int64_t[]){x->batch, x->k_heads, x->k_rows, x->d});
  if (!status) status = attention_check_shape(op, "v", v, 4, (int64_t[]){x->batch, x->k_heads, x->k_rows, x->dv});
  if (status) return status;
  if (x->k_heads == 0 ? x->q_heads != 0 : x->q_heads % x->k_heads != 0)
    return mg_fail(MG_VALUE, "%s: q has %lld heads and k has %lld, expected a multiple of k's", op, (long long)x->q_heads, (long long)x->k_heads);
  if (x->d < 1 || x->d > 256 || x->dv > 256)
    return mg_fail(MG_UNSUPPORTED, "%s: head dimension %lld (q, k) and %lld (v), accepted are 1 to 256", op, (long long)x->d, (long long)x->dv);
  if (x->q_rows > INT32_MAX / 2 || x->k_rows > INT32_MAX / 2 || mg_times(x->batch, x->q_heads) > INT32_MAX / 2)
    return mg_fail(MG_VALUE, "%s: sequences and batch * heads must stay below 2^30, found %lld, %lld and %lld", op, (long long)x->q_rows,
                   (long long)x->k_rows, (long long)(x->batch * x->q_heads));
  return MG_OK;
}
// How many of the 65536 values of its random bits drop a probability.
static uint32_t dropped_of_65536(const mg_attention_features *f) { return (uint32_t)lrint((double)f->dropout * 65536); }
// What the features' arguments have to agree on; packed sequences become the shape's batch and rows.
static mg_status read_features(attention_shape *x, const char *op, const mg_attention_features *f) {
  static const mg_attention_features none;
  if (!f) f = &none;
  if (f->sink && f->sink->shape[0] != x->q_heads)
    return mg_fail(MG_VALUE, "%s: sink has size %lld, expected %lld (heads of q)", op, (long long)f->sink->shape[0], (long long)x->q_heads);
  mg_status status = mg_check_softcap(op, f->softcap);
  if (status) return status;
  if (!(f->dropout >= 0 && f->dropout < 1)) return mg_fail(MG_VALUE, "%s: dropout_p is %g, expected 0 to less than 1", op, (double)f->dropout);
  if (dropped_of_65536(f) == 65536)
    return mg_fail(MG_VALUE, "%s: dropout_p is %.9g, which is rounded to a multiple of 1 / 65536 and becomes 1, "
                   "expected at most 65535 / 65536", op, (double)f->dropout);
  if (!f->q_start != !f->k_start)
    return mg_fail(MG_TYPE, "%s: cu_seqlens_%s is missing, expected both or none", op, f->q_start ? "k" : "q");
  if (f->q_start) {
    int64_t starts = f->q_start->shape[0];
    if (starts < 1 || f->k_start->shape[0] != starts)
      return mg_fail(MG_VALUE, "%s: cu_seqlens_q has size %lld and cu_seqlens_k %lld, expected the number of sequences plus 1 in both", op,
                     (long long)starts, (long long)f->k_start->shape[0]);
    if (x->batch != 1) return mg_fail(MG_VALUE, "%s: q has batch %lld, expected 1 where sequences are packed", op, (long long)x->batch);
    if (f->max_q < 0 || f->max_q > INT32_MAX / 2 || f->max_k < 0 || f->max_k > INT32_MAX / 2)
      return mg_fail(MG_VALUE, "%s: max_seqlen_q is %lld and max_seqlen_k %lld, expected 0 to 2^30", op, (long long)f->max_q, (long long)f->max_k);
    x->batch = starts - 1;
    x->q_rows = at_most(x->q_total, f->max_q);
    x->k_rows = at_most(x->k_total, f->max_k);
  }
  if (f->slopes && (f->slopes->shape[1] != x->q_heads || (f->slopes->shape[0] != 1 && f->slopes->shape[0] != x->batch)))
    return mg_fail(MG_VALUE, "%s: alibi_slopes has shape [%lld, %lld], expected [%lld] or [%lld, %lld] (heads of q, or batch and heads)", op,
                   (long long)f->slopes->shape[0], (long long)f->slopes->shape[1], (long long)x->q_heads, (long long)x->batch, (long long)x->q_heads);
  if (x->batch * x->q_heads > INT32_MAX / 2) return mg_fail(MG_VALUE, "%s: %lld sequences times heads, at most 2^30 are accepted", op, (long long)(x->batch * x->q_heads));
  return MG_OK;
}
mg_status attention_check_starts(const attention_shape *x, const char *op, const mg_attention_features *f) {
  mg_status status = f && f->q_start ? mg_check_starts(op, 'q', f->q_start, x->q_total, f->max_q) : MG_OK;
  return !status && f && f->k_start ? mg_check_starts(op, 'k', f->k_start, x->k_total, f->max_k) : status;
}
// Soft caps that models have. The fast backward kernels take no others, and none of fp32: they find the cap's slope in the probabilities, to |lse| 2^-22 / softcap.
// As is_usual() of attention_features.h.
static const float CAP_LEAST = 4, CAP_MOST = 256;
// One of FEATURES_* of attention.h; without the sink, which the backward finds in the lse.
static int feature_class(const mg_attention_features *f, mg_dtype dtype) {
  if (!f) return FEATURES_NONE;
  if (f->softcap != 0 && (f->softcap < CAP_LEAST || f->softcap > CAP_MOST || dtype == MG_FP32)) return FEATURES_ANY_SOFTCAP;
  if (f->softcap != 0 || f->dropout != 0 || f->slopes) return FEATURES_ALL;
  return f->q_start ? FEATURES_PACKED : f->window && (f->left >= 0 || f->right >= 0) ? FEATURES_WINDOWS : FEATURES_NONE;
}
int attention_upper_diagonal(const attention_shape *x, const mg_attention_options *options) {
  const mg_attention_features *f = options->features;
  int64_t right = f && f->window && f->right >= 0 ? f->right : -1;
  if (options->causal && (right < 0 || right > 0)) right = 0;
  return right < 0 || right >= NO_DIAGONAL / 2 ? NO_DIAGONAL : (int)((f && f->q_start ? 0 : x->k_rows - x->q_rows) + right);
}
static int lower_diagonal(const attention_shape *x, const mg_attention_features *f) {
  if (!f || !f->window || f->left < 0 || f->left >= NO_DIAGONAL / 2) return -NO_DIAGONAL;
  return (int)((f->q_start ? 0 : x->k_rows - x->q_rows) - f->left);
}
// Keys that a row sees at most.
static int64_t span_of(const attention_shape *x, const mg_attention_options *options) {
  const mg_attention_features *f = options->features;
  if (!f || !f->window || f->left < 0 || (f->right < 0 && !options->causal)) return x->k_rows;
  return at_most(x->k_rows, at_most(NO_DIAGONAL, f->left) + 1 + (options->causal ? 0 : at_most(NO_DIAGONAL, f->right)));
}
attention_features attention_features_of(const attention_shape *x, const mg_attention_features *f) {
  attention_features k = {.lower = lower_diagonal(x, f)};
  if (!f) return k;
  if (f->q_start) {
    k.q_start = f->q_start->data;
    k.k_start = f->k_start->data;
  }
  if (f->sink) k.sink = f->sink->data;
  if (f->slopes) {
    k.slopes = f->slopes->data;
    k.slope_batch = f->slopes->shape[0] > 1 ? (int)x->q_heads : 0;
  }
  k.softcap = mg_softcap(f->softcap);
  k.drop_below = dropped_of_65536(f);
  k.keep_scale = (float)(65536.0 / (65536 - k.drop_below));   // of the probability that is drawn: the mean stays
  k.seed[0] = (uint32_t)f->seed;
  k.seed[1] = (uint32_t)(f->seed >> 32);
  return k;
}
mg_status attention_read(attention_shape *x, const char *op, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v, const mg_attention_options *options) {
  mg_status status = read_shape(x, op, q, k, v);
  if (!status) status = read_features(x, op, options->features);
  if (status) return status;
  x->scale = options->scale != 0 ? options->scale : (float)(1 / sqrt((double)x->d));
  if (!(x->scale > 0) || isinf(x->scale)) return mg_fail(MG_VALUE, "%s: scale must be positive and finite, found %g", op, (double)options->scale);
  return MG_OK;
}
mg_problem attention_problem_of(const attention_shape *x, const mg_attention_options *options, const mg_tensor *q, int sms) {
  return (mg_problem){.dtype = q->dtype, .gpu = q->device == MG_CUDA, .causal = options->causal, .deterministic = options->deterministic,
                      .d = x->d > x->dv ? x->d : x->dv, .dv = x->dv, .batch = x->batch, .heads_q = x->q_heads, .heads_k = x->k_heads, .nq = x->q_rows,
                      .nk = x->k_rows, .span = span_of(x, options), .features = feature_class(options->features, q->dtype), .sms = sms};
}
int64_t attention_grid(const mg_context *c, const mg_kernel *row, int64_t tasks) {
  const mg_kernel_desc *d = mg_desc(row);   // a task is a cluster's
  return (c->persistent ? at_most(at_least(1, (int64_t)c->sms * d->blocks_per_sm / d->cluster), tasks) : tasks) * d->cluster;
}
int attention_even_section(int64_t most, int64_t heads) {
  int64_t best = most = at_most(heads, at_least(1, most));
  for (int64_t n = most; n > most / 2; n--)
    if (((heads - 1) % n + 1) * best > ((heads - 1) % best + 1) * n) best = n;
  return (int)best;
}
mg_status attention_map(gmap *m, const mg_context *c, const char *name, const mg_tensor *t, int box_rows, int box_cols) {
  return mg_map(m, c, name, t->data, t->dtype, t->shape, t->stride, box_rows, box_cols);
}
mg_status attention_fill(const mg_context *c, const mg_tensor *t, uint32_t word) {
  size_t size = mg_dtype_size(t->dtype);
  int64_t n[4] = {1, 1, 1, t->shape[t->dims - 1]}, stride[4] = {0, 0, 0, 1};
  for (int i = 0; i + 1 < t->dims; i++) {
    n[4 - t->dims + i] = t->shape[i];
    stride[4 - t->dims + i] = t->stride[i];
  }
  int inner = 3;   // dimensions after `inner` form one run
  int64_t run = n[3];
  while (inner > 0 && (n[inner - 1] == 1 || stride[inner - 1] == run)) run *= n[--inner];
  for (int i = inner; i < 4; i++) n[i] = 1;
  for (int64_t a = 0; a < n[0]; a++)
    for (int64_t b = 0; b < n[1]; b++)
      for (int64_t r = 0; r < n[2]; r++) {
        mg_status status = mg_fill(c, (char *)t->data + (a * stride[0] + b * stride[1] + r * stride[2]) * (int64_t)size, word, size, run);
        if (status) return status;
      }
  return MG_OK;
}
