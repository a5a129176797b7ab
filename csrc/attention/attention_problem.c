// What attention is asked, read: see attention_problem.h.
#include "attention/attention_problem.h"

// How many of the 65536 values of its random bits drop a probability.
static uint32_t dropped_of_65536(const attention_shape *x) { return (uint32_t)lrint((double)x->dropout_p * 65536); }

static void check_starts(mg_call *c, char which, const mg_tensor *starts, int64_t total, int64_t max_seqlen) {
  const int32_t *start = starts->data;
  if (start[0] != 0) mg_refuse(c, MG_VALUE, "cu_seqlens_%c[0] is %d, expected 0", which, start[0]);
  for (int64_t i = 1; i < starts->shape[0] && !c->status; i++) {
    if (start[i] < start[i - 1] || start[i] > total)
      mg_refuse(c, MG_VALUE,
                "cu_seqlens_%c[%lld] is %d, expected %d (the one before) to %lld (the rows that there are)",
                which, (long long)i, start[i],
                start[i - 1], (long long)total);
    if (start[i] - start[i - 1] > max_seqlen)
      mg_refuse(c, MG_VALUE, "max_seqlen_%c is %lld, expected at least %d (rows of sequence %lld)",
                which, (long long)max_seqlen, start[i] - start[i - 1],
                (long long)i - 1);
  }
}
void attention_check_starts(mg_call *c, const attention_shape *x) {
  if (!x->q_start || x->q_start->device != MG_CPU) return;
  check_starts(c, 'q', x->q_start, x->q_total, x->max_q);
  check_starts(c, 'k', x->k_start, x->k_total, x->max_k);
}

// Soft caps that models have. The fast backward kernels take no others, and none of fp32: they find the cap's slope in
// the probabilities, to |lse| 2^-22 / softcap. As is_usual() of attention_features.h.
static const float CAP_LEAST = 4, CAP_MOST = 256;
// One of FEATURES_* of attention.h; without the sink, which the backward finds in the lse.
static int feature_class(const attention_shape *x, mg_dtype dtype) {
  if (x->softcap != 0 && (x->softcap < CAP_LEAST || x->softcap > CAP_MOST || dtype == MG_FP32))
    return FEATURES_ANY_SOFTCAP;
  if (x->softcap != 0 || x->dropout_p != 0 || x->slopes) return FEATURES_ALL;
  return x->q_start ? FEATURES_PACKED : x->left >= 0 || x->right >= 0 ? FEATURES_WINDOWS : FEATURES_NONE;
}
int attention_upper_diagonal(const attention_shape *x) {
  const int64_t right = x->causal ? 0 : x->right;
  return right < 0 || right >= NO_DIAGONAL / 2 ? NO_DIAGONAL : (int)((x->q_start ? 0 : x->k_rows - x->q_rows) + right);
}
static int lower_diagonal(const attention_shape *x) {
  if (x->left < 0 || x->left >= NO_DIAGONAL / 2) return -NO_DIAGONAL;
  return (int)((x->q_start ? 0 : x->k_rows - x->q_rows) - x->left);
}
// Keys that a row sees at most.
static int64_t span_of(const attention_shape *x) {
  if (x->left < 0 || (x->right < 0 && !x->causal)) return x->k_rows;
  return mg_min(x->k_rows, mg_min(NO_DIAGONAL, x->left) + 1 + (x->causal ? 0 : mg_min(NO_DIAGONAL, x->right)));
}
attention_features attention_features_of(const attention_shape *x) {
  attention_features k = {.lower = lower_diagonal(x), .q_start = mg_data(x->q_start),
                          .k_start = mg_data(x->k_start), .sink = mg_data(x->sink),
                          .slopes = mg_data(x->slopes),
                          .slope_batch = x->slopes && x->slopes->shape[0] > 1 ? (int)x->q_heads : 0,
                          .softcap = attention_softcap(x->softcap), .drop_below = dropped_of_65536(x),
                          .seed = {(uint32_t)x->seed, (uint32_t)(x->seed >> 32)}};
  k.keep_scale = (float)(65536.0 / (65536 - k.drop_below));   // of the probability that is drawn: the mean stays
  return k;
}

bool attention_read(mg_call *c, attention_shape *x) {
  const mg_sizes *n = &c->n;
  const bool packed = x->q_start;
  x->rows_batch = n->BQ;
  x->batch = packed ? n->STARTS - 1 : n->BQ;
  x->q_heads = n->H, x->k_heads = n->HK, x->d = n->K, x->dv = n->V, x->q_total = n->NQ, x->k_total = n->NK;
  x->q_rows = packed ? mg_min(n->NQ, x->max_q) : n->NQ;
  x->k_rows = packed ? mg_min(n->NK, x->max_k) : n->NK;
  if (x->scale == 0) x->scale = (float)(1 / sqrt((double)x->d));
  c->problem = (mg_problem){.dtype = c->problem.dtype, .gpu = c->problem.gpu,
                            .causal = x->causal, .deterministic = x->deterministic,
                            .d = mg_max(x->d, x->dv), .dv = x->dv, .batch = x->batch,
                            .heads_q = x->q_heads, .heads_k = x->k_heads, .nq = x->q_rows,
                            .nk = x->k_rows, .span = span_of(x), .features = feature_class(x, c->problem.dtype),
                            .sms = c->context.sms, .size = c->n};
  return !c->status;
}

int attention_even_section(int64_t most, int64_t heads) {
  int64_t best = most = mg_min(heads, mg_max(1, most));
  for (int64_t n = most; n > most / 2; n--)
    if (((heads - 1) % n + 1) * best > ((heads - 1) % best + 1) * n) best = n;
  return (int)best;
}
void attention_fill(mg_call *c, const mg_tensor *t, uint32_t word) {
  size_t size = mg_dtype_size(t->dtype);
  int64_t n[4] = {1, 1, 1, t->shape[t->dims - 1]}, stride[4] = {0, 0, 0, 1};
  if (mg_is_empty(t)) return;
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
      for (int64_t r = 0; r < n[2]; r++)
        mg_set(c, (char *)t->data + (a * stride[0] + b * stride[1] + r * stride[2]) * (int64_t)size, word, size, run);
}
