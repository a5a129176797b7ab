// Host half of attention_decode and append_kv: decides into how many splits the keys are cut, fills the kernels'
// parameters, launches them.
#include <stdio.h>
#include "attention/attention_decode.h"
#include "attention/attention_problem.h"

enum { NO_LIMIT = 1 << 30, MOST_SPLITS = 128, COUNTER_BYTES = 256 };   // sequences are shorter than NO_LIMIT

typedef struct plan {
  const mg_kernel *main, *combine;
  int64_t group, rows;             // query heads of a key head; rows that share its keys
  int64_t row_blocks, tasks, blocks;
  int splits;
  bool counter;
  size_t part, part_lse, bytes;    // offsets in the workspace
} plan;

static int greatest_divisor(int a, int b) { return b ? greatest_divisor(b, a % b) : a; }

static divider divide_by(int64_t d) {
  divider x = {0, 0};
  while (((int64_t)1 << x.shift) < d) x.shift++;
  x.multiplier = (uint32_t)(((((uint64_t)1 << x.shift) - (uint64_t)d) << 32) / (uint64_t)d + 1);
  return x;
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
  const int copies = p->page > 0 ? desc->tile_n / greatest_divisor((int)mg_min(NO_LIMIT, p->page), desc->tile_n) : 0;
  const int64_t row_blocks = p->heads_k ? mg_ceil_div(p->heads_q / p->heads_k * p->nq, 64) : 0;
  return (work){.units = p->sms, .slots = (int64_t)p->sms * (p->gpu ? desc->blocks_per_sm : 1),
                .tasks = mg_min(MOST_WORK, mg_times(p->batch * p->heads_k, row_blocks)),
                .rows = mg_min(MOST_WORK, mg_times(p->batch * p->heads_q, p->nq)),
                .key_blocks = mg_ceil_div(p->nk, desc->tile_n), .copies = copies, .gpu = p->gpu};
}

// Estimated microseconds, the launch included. A key block takes `alone` in a block that has its multiprocessor for
// itself, `shared` for each of several, and as long as its share of the memory's bandwidth (`full` where all slots
// are). Pages make a block alone slower: by each copy, and by a look-up that finds its line of the table in the cache
// less often the further apart a split's blocks are. The second kernel has a price, and so has each split and each row
// there.
static double split_time(int splits, const work *w) {
  const double key_block = 0.87, copy = 0.04, look_up = 0.14, shared = 0.88,
               full = 1.95, begin = 6, start = 1.5, second = 0.8, row = 0.005, each = 0.02;
  const int64_t blocks = mg_min(w->slots, w->tasks * splits), waves = mg_ceil_div(w->tasks * splits, w->slots),
                steps = mg_ceil_div(w->key_blocks, splits);
  if (!w->gpu) return (double)waves * (start + (double)steps * key_block) + (splits > 1 ? 0.1 + 0.04 * splits : 0);
  const double alone = key_block + (w->copies ? copy * (w->copies - 1) + look_up * (double)mg_min(32, splits) / 32 : 0);
  const double step = fmax(alone, fmax(shared * (double)mg_ceil_div(blocks, w->units),
                                       full * (double)blocks / (double)w->slots));
  return begin + (double)waves * (start + (double)steps * step) +
      (splits > 1 ? second + row * (double)w->rows + each * splits : 0);
}
// The number of splits with the least estimated time.
static int choose_splits(const work *w) {
  double least = INFINITY;
  int best = 1;
  for (int splits = 1; splits <= mg_min(MOST_SPLITS, w->key_blocks); splits++) {
    double time = split_time(splits, w);
    if (time < least * 0.99) least = time, best = splits;
  }
  return best;
}

size_t mg_explain_splits(const mg_problem *p, const mg_context *c, char *buf, size_t n) {
  const mg_kernel *row;
  if (n) *buf = 0;
  if (!p->batch || !p->heads_q || !p->heads_k || !p->nq || p->heads_q % p->heads_k ||
      mg_select(&row, MG_OP_attention_decode, p, c)) return 0;
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
  ADD("\n  %d split%s, %s: %lld task%s each (batch %lld, %lld key heads, %lld block%s of 64 rows) for the %lld %s "
      "there are; %lld key block%s of %d", splits,
      splits == 1 ? "" : "s", p->splits ? "as num_splits says" : "chosen", (long long)w.tasks,
      w.tasks == 1 ? "" : "s", (long long)p->batch, (long long)p->heads_k,
      (long long)row_blocks, row_blocks == 1 ? "" : "s", (long long)w.slots,
      p->gpu ? "resident blocks" : "threads", (long long)w.key_blocks,
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

// In the words of the Python functions, whose cache_seqlens may be a number.
static void check_length(mg_call *c, int length, int least) {
  if (length < least || length > c->n.KEYS)
    mg_refuse(c, MG_VALUE, "cache_seqlens is %d, expected 0 to %lld (what the cache holds)",
              length, (long long)c->n.KEYS);
}

static bool make_plan(mg_call *c, plan *w, const mg_attention_decode_args *a) {
  const mg_sizes *n = &c->n;
  check_length(c, a->length, -1);
  const int64_t heads = n->B * n->HK, keys = a->length >= 0 ? a->length : n->KEYS;
  c->problem = (mg_problem){.dtype = c->problem.dtype, .gpu = c->problem.gpu,
                            .causal = a->causal, .d = n->K, .batch = n->B, .heads_q = n->H, .heads_k = n->HK,
                            .nq = n->NQ, .nk = keys, .page = a->page_table ? n->ROWS : 0,
                            .splits = a->num_splits, .sms = c->context.sms, .size = *n};
  if (!mg_choose(c)) return false;
  w->main = c->kernel;
  if (!mg_choose_other(c, MG_OP_attention_combine)) return false;
  w->combine = c->kernel;
  mg_use(c, w->main);
  work work = work_of(w->main, &c->problem);
  // Where the checker takes the launch, on the CPU too
  if (c->context.persistent) work.slots = (int64_t)c->context.sms * c->desc->blocks_per_sm;
  w->group = n->HK ? n->H / n->HK : 0;
  w->rows = w->group * n->NQ;
  w->row_blocks = mg_ceil_div(w->rows, 64);
  w->splits = a->num_splits ? a->num_splits : choose_splits(&work);
  w->tasks = mg_tasks(c, heads * w->row_blocks * w->splits, "tasks");
  w->blocks = mg_resident(c, w->tasks);
  // Worth a launch more
  w->counter = c->context.persistent && w->tasks > w->blocks && mg_times(mg_times(heads, keys), n->K) > 1 << 24;
  const int64_t parts = w->splits > 1 ? heads * w->splits * w->rows : 0;
  w->part = w->counter ? COUNTER_BYTES : 0;
  w->part_lse = w->part + mg_round_up((size_t)(parts * n->K) * sizeof(float));
  w->bytes = w->part_lse + mg_round_up((size_t)parts * sizeof(float));
  return !c->status;
}

mg_status mg_attention_decode_workspace(size_t *bytes, const mg_attention_decode_args *a) {
  mg_call c;
  plan w;
  if (!mg_begin_space(&c, MG_OP_attention_decode, a) || !make_plan(&c, &w, a)) return c.status;
  *bytes = c.n.B * w.rows == 0 ? 0 : w.bytes;
  return MG_OK;
}

static void copy_strides(int64_t stride[3], const mg_tensor *t) {
  for (int i = 0; i < 3; i++) stride[i] = t->stride[i];
}
static int no_limit(int side) { return side < 0 ? NO_LIMIT : (int)mg_min(NO_LIMIT, side); }

static mg_status combine(mg_call *c, const plan *w, const attention_decode_params *p) {
  mg_use(c, w->combine);
  attention_combine_params q = {.part = p->part, .part_lse = p->part_lse, .sink = p->sink,
                                .out = p->out, .lse = p->lse, .splits = p->splits,
                                .rows = p->rows, .q_heads = p->q_heads, .k_heads = p->k_heads,
                                .queries = p->queries, .dim = p->dim,
                                .column_blocks = (int)mg_ceil_div(p->dim, mg_desc(w->combine)->tile_n)};
  for (int i = 0; i < 3; i++) q.out_stride[i] = p->out_stride[i];
  const int64_t tasks = c->n.B * c->n.HK * w->rows * q.column_blocks;
  q.tasks = mg_tasks(c, tasks, "rows to combine");
  return mg_run_resident(c, &q, mg_ceil_div(tasks, mg_desc(w->combine)->tile_m));
}

mg_status mg_attention_decode(const mg_attention_decode_args *a) {
  mg_call c;
  plan w;
  if (!mg_begin(&c, MG_OP_attention_decode, a) || !make_plan(&c, &w, a)) return c.status;
  const mg_sizes *n = &c.n;
  char *base = mg_space(&c, a->workspace, w.bytes);
  const double scale = a->scale != 0 ? a->scale : 1 / sqrt((double)n->K);
  const bool paged = a->page_table && n->ROWS;
  attention_decode_params p = {
    .q = a->q->data, .out = a->out->data, .lse = mg_data(a->lse), .lengths = mg_data(a->cache_seqlens),
    .page_table = mg_data(a->page_table),
    .cache_index = mg_data(a->cache_batch_idx), .sink = mg_data(a->sink), .slopes = mg_data(a->alibi_slopes),
    .page_stride = a->page_table ? a->page_table->stride[0] : 0, .slope_stride = n->SLOPES > 1 ? n->H : 0,
    .tasks = (int)w.tasks, .splits = w.splits, .row_blocks = (int)w.row_blocks,
    .rows = (int)w.rows, .q_heads = (int)n->H, .k_heads = (int)n->HK,
    .by_row_blocks = divide_by(w.row_blocks), .by_k_heads = divide_by(n->HK), .by_splits = divide_by(w.splits),
    .queries = (int)n->NQ, .dim = (int)n->K, .keys = (int)(a->length >= 0 && !a->cache_seqlens ? a->length : n->KEYS),
    .caches = (int)n->CACHES,
    .page_size = paged ? (int)n->ROWS : NO_LIMIT, .left = no_limit(a->left),
    .right = a->causal ? 0 : no_limit(a->right),
    .scale_log2 = (float)fmin(scale * MG_LOG2E, FLT_MAX),
    .cap_log2 = (float)(attention_softcap(a->softcap) * MG_LOG2E)};
  p.box = paged ? greatest_divisor(p.page_size, c.desc->tile_n) : c.desc->tile_n;
  copy_strides(p.q_stride, a->q);
  copy_strides(p.out_stride, a->out);
  if (base && w.splits > 1) p.part = (float *)(base + w.part), p.part_lse = (float *)(base + w.part_lse);
  if (n->CACHES == 0) p.keys = 0;
  if (p.keys) {                     // an empty cache has no map, and needs none
    mg_map_bthd_once(&c, &p.k, a->k_cache, p.box, 64);
    mg_map_bthd_once(&c, &p.v, a->v_cache, p.box, 64);
  }
  if (base && w.counter) {
    p.counter = (int *)base;
    mg_set(&c, p.counter, 0, sizeof(int), 1);
  }
  mg_run(&c, &p, w.blocks);
  return w.splits == 1 ? c.status : combine(&c, &w, &p);
}

mg_status mg_append_kv(const mg_append_kv_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_append_kv, a) || mg_is_empty(a->k)) return c.status;
  const mg_sizes *n = &c.n;
  if (!a->cache_seqlens) check_length(&c, a->length, 0);
  const int64_t tasks = mg_times(n->B * n->NEW, n->HK);
  append_kv_params p = {.k = a->k->data, .v = a->v->data, .k_cache = a->k_cache->data,
                        .v_cache = a->v_cache->data, .lengths = mg_data(a->cache_seqlens),
                        .page_table = mg_data(a->page_table), .cache_index = mg_data(a->cache_batch_idx),
                        .page_stride = a->page_table ? a->page_table->stride[0] : 0,
                        .tasks = mg_tasks(&c, tasks, "new rows"), .new_rows = (int)n->NEW,
                        .heads = (int)n->HK, .length = a->length, .dim = (int)n->K,
                        .keys = (int)n->KEYS, .caches = (int)n->CACHES,
                        .page_size = a->page_table ? (int)n->ROWS : NO_LIMIT};
  c.problem = (mg_problem){.dtype = c.problem.dtype, .gpu = c.problem.gpu, .d = n->K,
                           .batch = n->B, .heads_k = n->HK, .nq = n->NEW, .nk = n->KEYS,
                           .sms = c.context.sms, .size = *n};
  if (!mg_choose(&c)) return c.status;
  copy_strides(p.k_stride, a->k);
  copy_strides(p.v_stride, a->v);
  copy_strides(p.k_cache_stride, a->k_cache);
  copy_strides(p.v_cache_stride, a->v_cache);
  return mg_run_resident(&c, &p, mg_ceil_div(tasks, c.desc->tile_m));
}
