// Host half of attention_decode and append_kv: checks what the arguments have to agree on, decides into how many splits the keys are cut, fills the
// kernels' parameters, launches them.
#include <float.h>
#include <math.h>
#include <stdio.h>
#include "attention/attention_decode.h"
#include "runtime/runtime.h"

#define LOG2E 1.4426950408889634
enum { NO_LIMIT = 1 << 30, MOST_SPLITS = 128, PAGE_UNIT = 16, COUNTER_BYTES = 256 };   // sequences are shorter than NO_LIMIT

typedef struct shape {
  int64_t batch, queries, q_heads, k_heads, d, caches, cache_rows, keys, group, rows, page;   // keys: the longest that a sequence can be; page: 0 without pages
} shape;
typedef struct plan {
  const mg_kernel *main, *combine;
  int64_t row_blocks, tasks, blocks;
  int splits;
  bool counter;
  size_t part, part_lse, bytes;    // offsets in the workspace
} plan;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t at_most(int64_t high, int64_t x) { return x > high ? high : x; }
static size_t round_up(size_t n) { return (n + 255) & ~(size_t)255; }
static int greatest_divisor(int a, int b) { return b ? greatest_divisor(b, a % b) : a; }

static divider divide_by(int64_t d) {
  divider x = {0, 0};
  while (((int64_t)1 << x.shift) < d) x.shift++;
  x.multiplier = (uint32_t)(((((uint64_t)1 << x.shift) - (uint64_t)d) << 32) / (uint64_t)d + 1);
  return x;
}

static mg_status check_size(const char *op, const char *name, const mg_tensor *t, int dim, int64_t want, const char *meaning) {
  if (!t || t->shape[dim] == want) return MG_OK;
  return mg_fail(MG_VALUE, "%s: %s has size %lld in dimension %d, expected %lld (%s)", op, name, (long long)t->shape[dim], dim, (long long)want, meaning);
}

static void read_cache(shape *x, const mg_tensor *k_cache, const mg_tensor *page_table) {
  x->caches = k_cache->shape[0], x->cache_rows = k_cache->shape[1], x->k_heads = k_cache->shape[2], x->d = k_cache->shape[3];
  x->page = page_table ? x->cache_rows : 0;
  x->keys = page_table ? at_most(NO_LIMIT, page_table->shape[1] * x->cache_rows) : x->cache_rows;
}
static mg_status check_cache(const shape *x, const char *op, const mg_tensor *v_cache, const mg_tensor *cache_seqlens, const mg_tensor *page_table,
                             const mg_tensor *cache_batch_idx) {
  static const char like_k[] = "same as k_cache", of_batch[] = "the batch";
  const int64_t k_shape[] = {x->caches, x->cache_rows, x->k_heads, x->d};
  mg_status status = MG_OK;
  for (int i = 0; i < 4 && !status; i++) status = check_size(op, "v_cache", v_cache, i, k_shape[i], like_k);
  if (!status) status = check_size(op, "cache_seqlens", cache_seqlens, 0, x->batch, of_batch);
  if (!status) status = check_size(op, "cache_batch_idx", cache_batch_idx, 0, x->batch, of_batch);
  if (!status && !cache_batch_idx) status = check_size(op, "page_table", page_table, 0, x->batch, of_batch);
  if (status) return status;
  if (page_table && cache_batch_idx)
    return mg_fail(MG_VALUE, "%s: cache_batch_idx is given with page_table, expected at most one of them: the table names each sequence's pages", op);
  if (!page_table && !cache_batch_idx && x->caches < x->batch)
    return mg_fail(MG_VALUE, "%s: k_cache has size %lld in dimension 0, expected at least %lld (the batch)", op, (long long)x->caches, (long long)x->batch);
  if (x->keys >= NO_LIMIT || x->caches > INT32_MAX / 2)
    return mg_fail(MG_VALUE, "%s: k_cache with %lld rows a sequence in %lld parts, expected less than 2^30 of both", op, (long long)x->keys,
                   (long long)x->caches);
  return MG_OK;
}

static mg_status read_shape(shape *x, const char *op, const mg_tensor *q, const mg_tensor *k_cache, const mg_tensor *page_table) {
  read_cache(x, k_cache, page_table);
  mg_status status = check_size(op, "q", q, 3, x->d, "same as k_cache");
  if (status) return status;
  x->batch = q->shape[0], x->queries = q->shape[1], x->q_heads = q->shape[2];
  if (x->k_heads == 0 ? x->q_heads != 0 : x->q_heads % x->k_heads != 0)
    return mg_fail(MG_VALUE, "%s: q has %lld heads and k_cache has %lld, expected a multiple of k_cache's", op, (long long)x->q_heads, (long long)x->k_heads);
  if (x->d < 1 || x->d > 256) return mg_fail(MG_UNSUPPORTED, "%s: head dimension %lld, accepted are 1 to 256", op, (long long)x->d);
  if (mg_times(x->batch * x->q_heads, ceil_div(x->queries, 64)) > INT32_MAX / 2 || x->q_heads * x->queries > INT32_MAX / 2)
    return mg_fail(MG_VALUE, "%s: batch %lld * heads %lld * queries %lld is too large, expected below 2^30", op, (long long)x->batch, (long long)x->q_heads,
                   (long long)x->queries);
  x->group = x->k_heads ? x->q_heads / x->k_heads : 0;
  x->rows = x->group * x->queries;
  return MG_OK;
}

static mg_status check_options(const char *op, const mg_decode_options *o, const shape *x) {
  if (o->scale != 0 && (!(o->scale > 0) || isinf(o->scale)))
    return mg_fail(MG_VALUE, "%s: scale must be positive and finite, found %g", op, (double)o->scale);
  mg_status status = mg_check_softcap(op, o->softcap);
  if (status) return status;
  if (o->window_left < -1 || o->window_right < -1)
    return mg_fail(MG_VALUE, "%s: window is (%d, %d), expected -1 (no limit) or more", op, o->window_left, o->window_right);
  if (o->splits < 0 || o->splits > MOST_SPLITS) return mg_fail(MG_VALUE, "%s: num_splits is %d, expected 0 (chosen) to %d", op, o->splits, MOST_SPLITS);
  if (o->length < -1 || o->length > x->keys)
    return mg_fail(MG_VALUE, "%s: cache_seqlens is %d, expected 0 to %lld (what the cache holds)", op, o->length, (long long)x->keys);
  return MG_OK;
}

#define MOST_WORK ((int64_t)1 << 48)   // of explain's problems, which may be absurd; a call has at most 2^30 tasks
typedef struct work {
  int64_t units, slots;        // multiprocessors and the blocks that reside on them, or threads
  int64_t tasks, rows;         // of one split; of the output
  int64_t key_blocks;
  int copies;                  // that make a key block of pages, 0 without pages
  bool gpu;
} work;

static work work_of(const mg_kernel *row, const mg_problem *p) {
  const mg_kernel_desc *desc = mg_desc(row);
  const int copies = p->page > 0 ? desc->tile_n / greatest_divisor((int)at_most(NO_LIMIT, p->page), desc->tile_n) : 0;
  const int64_t row_blocks = p->heads_k ? ceil_div(p->heads_q / p->heads_k * p->nq, 64) : 0;
  return (work){.units = p->sms, .slots = (int64_t)p->sms * (p->gpu ? desc->blocks_per_sm : 1),
                .tasks = at_most(MOST_WORK, mg_times(p->batch * p->heads_k, row_blocks)),
                .rows = at_most(MOST_WORK, mg_times(p->batch * p->heads_q, p->nq)), .key_blocks = ceil_div(p->nk, desc->tile_n), .copies = copies, .gpu = p->gpu};
}

// Estimated microseconds, the launch included. A key block takes `alone` in a block that has its multiprocessor for itself, `shared` for each of several,
// and as long as its share of the memory's bandwidth (`full` where all slots are). Pages make a block alone slower: by each copy, and by a look-up that
// finds its line of the table in the cache less often the further apart a split's blocks are. The second kernel has a price, and so has each split and each row there.
static double split_time(int splits, const work *w) {
  const double key_block = 0.87, copy = 0.04, look_up = 0.14, shared = 0.88, full = 1.95, begin = 6, start = 1.5, second = 0.8, row = 0.005, each = 0.02;
  const int64_t blocks = at_most(w->slots, w->tasks * splits), waves = ceil_div(w->tasks * splits, w->slots), steps = ceil_div(w->key_blocks, splits);
  if (!w->gpu) return (double)waves * (start + (double)steps * key_block) + (splits > 1 ? 0.1 + 0.04 * splits : 0);
  const double alone = key_block + (w->copies ? copy * (w->copies - 1) + look_up * (double)at_most(32, splits) / 32 : 0);
  const double step = fmax(alone, fmax(shared * (double)ceil_div(blocks, w->units), full * (double)blocks / (double)w->slots));
  return begin + (double)waves * (start + (double)steps * step) + (splits > 1 ? second + row * (double)w->rows + each * splits : 0);
}
// The number of splits with the least estimated time.
static int choose_splits(const work *w) {
  double least = INFINITY;
  int best = 1;
  for (int splits = 1; splits <= at_most(MOST_SPLITS, w->key_blocks); splits++) {
    double time = split_time(splits, w);
    if (time < least * 0.99) least = time, best = splits;
  }
  return best;
}

size_t mg_explain_splits(const mg_problem *p, const mg_context *c, char *buf, size_t n) {
  const mg_kernel *row;
  if (n) *buf = 0;
  if (!p->batch || !p->heads_q || !p->heads_k || !p->nq || p->heads_q % p->heads_k || mg_select(&row, MG_OP_attention_decode, p, c)) return 0;
  const work w = work_of(row, p);
  const int64_t row_blocks = w.tasks / (p->batch * p->heads_k);
  const int splits = p->splits ? p->splits : choose_splits(&w);
  char *end = buf;
  size_t left = n, length = 0;
#define ADD(...) do { \
    int more = snprintf(end, left, __VA_ARGS__); \
    length += (size_t)more; \
    end = buf + (length < n ? length : n), left = length < n ? n - length : 0; \
  } while (0)
  ADD("\n  %d split%s, %s: %lld task%s each (batch %lld, %lld key heads, %lld block%s of 64 rows) for the %lld %s there are; %lld key block%s of %d", splits,
      splits == 1 ? "" : "s", p->splits ? "as num_splits says" : "chosen", (long long)w.tasks, w.tasks == 1 ? "" : "s", (long long)p->batch, (long long)p->heads_k,
      (long long)row_blocks, row_blocks == 1 ? "" : "s", (long long)w.slots, p->gpu ? "resident blocks" : "threads", (long long)w.key_blocks,
      w.key_blocks == 1 ? "" : "s", mg_desc(row)->tile_n);
  for (int at = 1; at <= MOST_SPLITS && at <= w.key_blocks; at *= 2) {
    ADD("%s%d: %.1f us", at == 1 ? "\n  estimated for splits " : ", ", at, split_time(at, &w));
    if (splits > at && splits < 2 * at && splits <= w.key_blocks) ADD(", %d: %.1f us", splits, split_time(splits, &w));
  }
#undef ADD
  if (splits == 1) return length;
  if (left > 1) *end++ = '\n', left--;
  return length + 1 + mg_explain(&row, MG_OP_attention_combine, p, c, end, left);
}

static mg_status make_plan(plan *w, const shape *x, const mg_tensor *q, const mg_decode_options *options, const mg_context *c) {
  const int64_t heads = x->batch * x->k_heads, keys = options->length >= 0 ? options->length : x->keys;
  const mg_problem problem = {.dtype = q->dtype, .gpu = q->device == MG_CUDA, .causal = options->causal, .d = x->d, .batch = x->batch, .heads_q = x->q_heads,
                              .heads_k = x->k_heads, .nq = x->queries, .nk = keys, .page = x->page, .splits = options->splits, .sms = c->sms};
  mg_status status = mg_select(&w->main, MG_OP_attention_decode, &problem, c);
  if (!status) status = mg_select(&w->combine, MG_OP_attention_combine, &problem, c);
  if (status) return status;
  work work = work_of(w->main, &problem);
  if (c->persistent) work.slots = (int64_t)c->sms * mg_desc(w->main)->blocks_per_sm;   // where the checker takes the launch, on the CPU too
  w->row_blocks = ceil_div(x->rows, 64);
  w->splits = options->splits ? options->splits : choose_splits(&work);
  w->tasks = heads * w->row_blocks * w->splits;
  if (w->tasks > INT32_MAX / 2) return mg_fail(MG_VALUE, "attention_decode: %lld tasks, at most 2^30 are accepted", (long long)w->tasks);
  w->blocks = c->persistent ? at_most(work.slots, w->tasks) : w->tasks;
  w->counter = c->persistent && w->tasks > w->blocks && mg_times(mg_times(heads, keys), x->d) > 1 << 24;   // worth a launch more
  const int64_t parts = w->splits > 1 ? heads * w->splits * x->rows : 0;
  w->part = w->counter ? COUNTER_BYTES : 0;
  w->part_lse = w->part + round_up((size_t)(parts * x->d) * sizeof(float));
  w->bytes = w->part_lse + round_up((size_t)parts * sizeof(float));
  return MG_OK;
}

mg_status mg_attention_decode_workspace(size_t *bytes, const mg_tensor *q, const mg_tensor *k_cache, const mg_tensor *page_table,
                                        const mg_decode_options *options) {
  static const char op[] = "attention_decode";
  shape x = {0};
  plan w;
  mg_context c;
  if (!q || !k_cache) return mg_fail(MG_TYPE, "%s: q or k_cache is missing, expected tensors", op);
  if (q->dims != 4 || k_cache->dims != 4) return mg_fail(MG_VALUE, "%s: q has %d and k_cache %d dimensions, expected 4", op, q->dims, k_cache->dims);
  if (page_table && page_table->dims != 2) return mg_fail(MG_VALUE, "%s: page_table has %d dimensions, expected 2", op, page_table->dims);
  mg_status status = mg_check_sizes(op, "q", q);
  if (!status) status = mg_check_sizes(op, "k_cache", k_cache);
  if (!status && page_table) status = mg_check_sizes(op, "page_table", page_table);
  if (!status) status = read_shape(&x, op, q, k_cache, page_table);
  if (!status) status = check_options(op, options, &x);
  if (!status) status = mg_context_open(&c, q, NULL);
  if (!status) status = make_plan(&w, &x, q, options, &c);
  if (!status) *bytes = x.batch * x.rows == 0 ? 0 : w.bytes;
  return status;
}

// [cache or page, row, head, column] as [cache or page, head, row, column]
static mg_status map_cache(gmap *m, const mg_context *c, const char *name, const mg_tensor *t, int box) {
  const int64_t shape[] = {t->shape[0], t->shape[2], t->shape[1], t->shape[3]}, stride[] = {t->stride[0], t->stride[2], t->stride[1], 1};
  return mg_map_once(m, c, name, t->data, t->dtype, shape, stride, box, 64);
}
static void copy_strides(int64_t stride[3], const mg_tensor *t) {
  for (int i = 0; i < 3; i++) stride[i] = t->stride[i];
}
static void *data_of(const mg_tensor *t) { return t ? t->data : NULL; }

static mg_status combine(const mg_context *c, const plan *w, const attention_decode_params *p, const shape *x) {
  attention_combine_params q = {.part = p->part, .part_lse = p->part_lse, .sink = p->sink, .out = p->out, .lse = p->lse, .splits = p->splits,
                                .rows = p->rows, .q_heads = p->q_heads, .k_heads = p->k_heads, .queries = p->queries, .dim = p->dim,
                                .column_blocks = (int)ceil_div(x->d, mg_desc(w->combine)->tile_n)};
  for (int i = 0; i < 3; i++) q.out_stride[i] = p->out_stride[i];
  const int64_t tasks = x->batch * x->k_heads * x->rows * q.column_blocks;
  if (tasks > INT32_MAX / 2) return mg_fail(MG_VALUE, "attention_decode: %lld rows to combine, at most 2^30 are accepted", (long long)tasks);
  q.tasks = (int)tasks;
  const int64_t blocks = ceil_div(tasks, mg_desc(w->combine)->tile_m);
  return mg_launch(c, w->combine, &q, c->persistent ? at_most((int64_t)c->sms * mg_desc(w->combine)->blocks_per_sm, blocks) : blocks);
}

mg_status mg_attention_decode(const mg_tensor *out, const mg_tensor *lse, const mg_tensor *q, const mg_tensor *k_cache, const mg_tensor *v_cache,
                              const mg_tensor *cache_seqlens, const mg_tensor *page_table, const mg_tensor *cache_batch_idx, const mg_tensor *sink,
                              const mg_tensor *alibi_slopes, const mg_tensor *workspace, const mg_decode_options *options, mg_stream stream) {
  static const char op[] = "attention_decode";
  shape x = {0};
  plan w;
  mg_context c;
  mg_status status = mg_check_by_hand(MG_OP_attention_decode, (const mg_tensor *[]){out, lse, q, k_cache, v_cache, cache_seqlens, page_table, cache_batch_idx, sink,
                                                                            alibi_slopes, workspace});
  if (!status) status = read_shape(&x, op, q, k_cache, page_table);
  if (!status) status = check_cache(&x, op, v_cache, cache_seqlens, page_table, cache_batch_idx);
  if (!status) status = check_options(op, options, &x);
  for (int i = 0; i < 4 && !status; i++) status = check_size(op, "out", out, i, q->shape[i], "same as q");
  for (int i = 0; i < 3 && !status; i++) status = check_size(op, "lse", lse, i, q->shape[i == 0 ? 0 : 3 - i], "[B, Hq, Nq]");
  if (!status) status = check_size(op, "sink", sink, 0, x.q_heads, "the heads of q");
  if (!status) status = check_size(op, "alibi_slopes", alibi_slopes, 1, x.q_heads, "the heads of q");
  if (!status && alibi_slopes && alibi_slopes->shape[0] != 1) status = check_size(op, "alibi_slopes", alibi_slopes, 0, x.batch, "the batch, or 1");
  if (!status && x.page % PAGE_UNIT)
    status = mg_fail(MG_UNSUPPORTED, "%s: k_cache has pages of %lld keys, expected a multiple of %d", op, (long long)x.page, PAGE_UNIT);
  if (status) return status;
  if ((status = mg_context_open(&c, q, stream)) || (status = make_plan(&w, &x, q, options, &c))) return status;
  if (x.batch * x.rows == 0) return MG_OK;
  if (w.bytes && (!workspace || workspace->shape[0] < (int64_t)w.bytes || ((uintptr_t)workspace->data & 15)))
    return mg_fail(MG_VALUE, "%s: workspace has %lld bytes at %p, expected %zu bytes, 16-byte aligned", op, workspace ? (long long)workspace->shape[0] : 0ll,
                   data_of(workspace), w.bytes);
  const double scale = options->scale != 0 ? options->scale : 1 / sqrt((double)x.d);
  const bool paged = page_table && x.cache_rows;
  char *base = w.bytes ? workspace->data : NULL;
  attention_decode_params p = {
    .q = q->data, .out = out->data, .lse = data_of(lse), .lengths = data_of(cache_seqlens), .page_table = data_of(page_table),
    .cache_index = data_of(cache_batch_idx), .sink = data_of(sink), .slopes = data_of(alibi_slopes),
    .page_stride = page_table ? page_table->stride[0] : 0, .slope_stride = alibi_slopes && alibi_slopes->shape[0] > 1 ? x.q_heads : 0,
    .tasks = (int)w.tasks, .splits = w.splits, .row_blocks = (int)w.row_blocks, .rows = (int)x.rows, .q_heads = (int)x.q_heads, .k_heads = (int)x.k_heads,
    .by_row_blocks = divide_by(w.row_blocks), .by_k_heads = divide_by(x.k_heads), .by_splits = divide_by(w.splits),
    .queries = (int)x.queries, .dim = (int)x.d, .keys = (int)(options->length >= 0 && !cache_seqlens ? options->length : x.keys), .caches = (int)x.caches,
    .page_size = paged ? (int)x.cache_rows : NO_LIMIT, .left = options->window_left < 0 ? NO_LIMIT : (int)at_most(NO_LIMIT, options->window_left),
    .right = options->causal ? 0 : options->window_right < 0 ? NO_LIMIT : (int)at_most(NO_LIMIT, options->window_right),
    .scale_log2 = (float)fmin(scale * LOG2E, FLT_MAX), .cap_log2 = (float)(mg_softcap(options->softcap) * LOG2E)};
  p.box = paged ? greatest_divisor(p.page_size, mg_desc(w.main)->tile_n) : mg_desc(w.main)->tile_n;
  copy_strides(p.q_stride, q);
  copy_strides(p.out_stride, out);
  if (w.splits > 1) p.part = (float *)(base + w.part), p.part_lse = (float *)(base + w.part_lse);
  if (x.caches == 0) p.keys = 0;
  if (p.keys && ((status = map_cache(&p.k, &c, "attention_decode: k_cache", k_cache, p.box)) ||   // an empty cache has no map, and needs none
                 (status = map_cache(&p.v, &c, "attention_decode: v_cache", v_cache, p.box))))
    return status;
  if (w.counter) {
    p.counter = (int *)base;
    if ((status = mg_fill(&c, p.counter, 0, sizeof(int), 1))) return status;
  }
  status = mg_launch(&c, w.main, &p, w.blocks);
  return status || w.splits == 1 ? status : combine(&c, &w, &p, &x);
}

mg_status mg_append_kv(const mg_tensor *k_cache, const mg_tensor *v_cache, const mg_tensor *k, const mg_tensor *v, const mg_tensor *cache_seqlens,
                       const mg_tensor *page_table, const mg_tensor *cache_batch_idx, int length, mg_stream stream) {
  static const char op[] = "append_kv";
  shape x = {0};
  mg_context c;
  const mg_kernel *row;
  mg_status status = mg_check_by_hand(MG_OP_append_kv, (const mg_tensor *[]){k_cache, v_cache, k, v, cache_seqlens, page_table, cache_batch_idx});
  if (status) return status;
  x.batch = k->shape[0];
  read_cache(&x, k_cache, page_table);
  status = check_cache(&x, op, v_cache, cache_seqlens, page_table, cache_batch_idx);
  for (int i = 2; i < 4 && !status; i++) status = check_size(op, "k", k, i, k_cache->shape[i], "same as k_cache");
  for (int i = 0; i < 4 && !status; i++) status = check_size(op, "v", v, i, k->shape[i], "same as k");
  if (!status && !cache_seqlens && (length < 0 || length > x.keys))
    status = mg_fail(MG_VALUE, "%s: cache_seqlens is %d, expected 0 to %lld (what the cache holds)", op, length, (long long)x.keys);
  if (status) return status;
  if (mg_is_empty(k) || mg_is_empty(k_cache)) return MG_OK;
  const int64_t tasks = mg_times(x.batch * k->shape[1], x.k_heads);
  if (tasks > INT32_MAX / 2) return mg_fail(MG_VALUE, "%s: %lld new rows, at most 2^30 are accepted", op, (long long)tasks);
  if ((status = mg_context_open(&c, k, stream))) return status;
  const mg_problem problem = {.dtype = k->dtype, .gpu = k->device == MG_CUDA, .d = x.d, .batch = x.batch, .heads_k = x.k_heads, .nq = k->shape[1], .nk = x.keys,
                              .sms = c.sms};
  if ((status = mg_select(&row, MG_OP_append_kv, &problem, &c))) return status;
  append_kv_params p = {.k = k->data, .v = v->data, .k_cache = k_cache->data, .v_cache = v_cache->data, .lengths = data_of(cache_seqlens),
                        .page_table = data_of(page_table), .cache_index = data_of(cache_batch_idx), .page_stride = page_table ? page_table->stride[0] : 0,
                        .tasks = (int)tasks, .new_rows = (int)k->shape[1], .heads = (int)x.k_heads, .length = length, .dim = (int)x.d, .keys = (int)x.keys,
                        .caches = (int)x.caches, .page_size = page_table ? (int)x.cache_rows : NO_LIMIT};
  copy_strides(p.k_stride, k);
  copy_strides(p.v_stride, v);
  copy_strides(p.k_cache_stride, k_cache);
  copy_strides(p.v_cache_stride, v_cache);
  const int64_t blocks = ceil_div(tasks, mg_desc(row)->tile_m);
  return mg_launch(&c, row, &p, c.persistent ? at_most((int64_t)c.sms * mg_desc(row)->blocks_per_sm, blocks) : blocks);
}
