// Attention of few queries to a long cache of keys and values:  o = softmax(x) v,  x = scale q k^T, optionally
//   x = cap tanh(scale q k^T / cap) - slope |distance|,  and a sink: a logit that only enters the denominator
// The query heads that share a key head, times the queries, are the rows of one tile, so that k and v are read once.
// Keys are cut into n splits, so that the GPU is full. A split has every n-th key block; attention_combine.cu adds up
// the splits' results. The softmax is online over key blocks, as in attention_fwd.cu. Lengths and pages are read on the
// device. What lies outside of a sequence's keys may hold anything, NaN included: scores there are replaced, values
// cleared.
#include "tile/tile.h"
#include "attention/attention_decode.h"

// From the row: D, BN (keys a block), STAGES (of k and v), PER_SM (blocks of a multiprocessor), *_REGS
typedef ring<STAGES, ASYNC_READS> key_ring;
struct shared {
  st<elem, 64, D> q;
  st<elem, BN, D> k[STAGES], v[STAGES];
  key_ring k_ring, v_ring;  // at the same position always
  task_queue queue;
};

TILE void init(shared &s) {
  ring_init(s.k_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
  ring_init(s.v_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
  queue_init(s.queue, arrivals(1, 0, 1));
}

// ---- tasks: which rows, which keys, and where these lie

struct task {
  int batch, head, split, row0;
  int length, cache;
  int shift;                // query i is at position i + shift of its sequence
  int low, high;            // some row sees keys [low, high), all rows see keys [low_all, high_all)
  int low_all, high_all;
  int begin, end;           // key blocks of this split: begin, begin + splits, ..., below end
};

TILE int min_of(int a, int b) { return a < b ? a : b; }
TILE int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

TILE int divide(int n, divider d) {
  return (int)(((uint32_t)((uint64_t)n * d.multiplier >> 32) + (uint32_t)n) >> d.shift);
}

TILE task numbers_of(const attention_decode_params &p, int i) {   // without what is in memory
  task t;
  int heads = divide(i, p.by_row_blocks), splits = divide(heads, p.by_k_heads);
  t.row0 = (i - heads * p.row_blocks) * 64;
  t.head = heads - splits * p.k_heads;
  t.batch = divide(splits, p.by_splits);
  t.split = splits - t.batch * p.splits;
  return t;
}
TILE void read_task(const attention_decode_params &p, task &t) {
  t.length = p.lengths ? p.lengths[t.batch] : p.keys;
  t.cache = p.cache_index ? p.cache_index[t.batch] : t.batch;
}
// The rest of a task: what depends on its sequence's length.
TILE void set_keys(const attention_decode_params &p, task &t) {
  // queries of these rows
  int length = clamp(t.length, 0, p.keys), first = t.row0 % p.queries, last = first + min_of(64, p.rows - t.row0) - 1;
  if (last >= p.queries) first = 0, last = p.queries - 1;
  t.shift = length - p.queries;
  t.low = clamp(first + t.shift - p.left, 0, length);
  t.low_all = clamp(last + t.shift - p.left, 0, length);
  t.high = clamp(last + t.shift + p.right + 1, t.low, length);
  t.high_all = clamp(first + t.shift + p.right + 1, 0, length);
  t.begin = t.low / BN + t.split;
  t.end = t.high > t.low ? (t.high + BN - 1) / BN : 0;
}
// Without a window a split begins at the same key block whatever the length is. That block is loaded before the length
// has come, and thrown away where the sequence ends in front of it.
TILE bool loads_ahead(const attention_decode_params &p, const task &t) {
  return p.left == 1 << 30 && t.split * BN < p.keys;
}

// ---- loads

// Where the parts of a key block lie: place is the page or the cache of each part, row that of the first. Parts that
// begin behind the last key are read from outside of the tensor: zeros, without a page and without memory traffic. So
// is a page that does not exist.
struct parts { int place[BN / 16], row; };

TILE parts parts_of(const attention_decode_params &p, const task &t, int key0) {
  parts x;
  const int *pages = p.page_table ? p.page_table + t.batch * p.page_stride : nullptr;
  int page = pages ? key0 / p.page_size : 0, row = x.row = key0 - page * p.page_size;
  UNROLLED for (int i = 0; i < BN / 16; i++) {
    if (i * p.box < BN) x.place[i] = key0 + i * p.box >= t.high ? p.caches : pages ? pages[page] : t.cache;
    if ((row += p.box) == p.page_size) row = 0, page++;
  }
  return x;
}

TILE void load_block(st<elem, BN, D> &tile, const gmap &map, sem &full, const attention_decode_params &p,
                     const task &t, const parts &x) {
  int row = x.row;
  UNROLLED for (int i = 0; i < BN / 16; i++) {
    if (i * p.box >= BN) break;
    tma_load_rows(tile, i * p.box, p.box, map, full, row, 0, t.head, x.place[i]);
    if ((row += p.box) == p.page_size) row = 0;
  }
}

// Thread, before grid_wait(). Brings the first key block of this block's first task into the L2. The kernel in front
// may still write to the cache, and what it writes goes to the L2 too. But a page table or an index of caches may not
// be read yet.
TILE void prefetch_first(const gmap &map, const attention_decode_params &p, const task &t) {
  if (p.page_table || p.cache_index || p.left != 1 << 30) return;
  if (t.split * BN < p.keys) tma_prefetch_rows<D>(map, t.split * BN, 0, t.head, t.batch);
}
// The first task's numbers are worked out before grid_wait(): all that stands between it and the first load is latency.
TILE void load_keys(st<elem, BN, D> *stages, key_ring &ring, const gmap &map, const attention_decode_params &p, int i,
                    ring_pos &at, bool first) {
  task t = numbers_of(p, i);
  bool ahead = loads_ahead(p, t);
  if (first) {
    prefetch_first(map, p, t);
    grid_wait();
  }
  read_task(p, t);
  if (ahead) t.begin = t.split, t.end = t.begin + 1, t.high = p.keys;
  else set_keys(p, t);
  for (int j = t.begin; j < t.end; j += p.splits) {
    parts x = parts_of(p, t, j * BN);                // read while the stage is waited for
    ring_acquire(ring, at);
    ring_expect(ring, at, tile_bytes(stages[0]));
    load_block(stages[at.stage], map, ring.full[at.stage], p, t, x);
    ring_next(ring, at);
    if (ahead) set_keys(p, t), ahead = false;
  }
}

// Keys and values have a thread each, because pages of few keys cost many copies.
TILE void k_loader(const attention_decode_params &p, shared &s, int) {
  ring_pos at = {};
  int next = 0;
  tma_prefetch(p.k);
  for (uint32_t count = 0; (next = queue_draw(s.queue, count, next, p.counter)) < p.tasks; count++)
    load_keys(s.k, s.k_ring, p.k, p, next, at, count == 0);
}

TILE void v_loader(const attention_decode_params &p, shared &s, int) {
  ring_pos at = {};
  int next;
  tma_prefetch(p.v);
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    queue_release<THREAD>(s.queue, count);
    load_keys(s.v, s.v_ring, p.v, p, next, at, count == 0);
  }
}

// ---- blocks of scores

// Raw scores to those that the softmax takes, up to the factor c: scale log2 e where they stay raw, 1 where they become
// base 2 here.
TILE void adjust(rt<float, BN> &x, const attention_decode_params &p, const task &t, const rv &slopes, int key0) {
  if (p.cap_log2 != 0.f) {
    float cap = p.cap_log2, inverse = fast_rcp(cap), scale = p.scale_log2;
    map(x, [=](float a) { return cap * fast_tanh(a * scale * inverse); });
  } else if (p.slopes) {
    map(x, [scale = p.scale_log2](float a) { return a * scale; });
  }
  int row0 = t.row0, queries = p.queries, shift = t.shift - key0;
  if (p.slopes) map_rc(x, slopes, [=](float a, float slope, int row, int col) {
    int distance = (row0 + row) % queries + shift - col;
    return fused(-slope, (float)(distance < 0 ? -distance : distance), a);
  });
  if (key0 < t.low_all || key0 + BN > t.high_all) {
    int length = t.shift + queries - key0, left = p.left, right = p.right;
    map_rc(x, [=](float a, int row, int col) {
      int distance = (row0 + row) % queries + shift - col;
      return col < length && distance <= left && -distance <= right ? a : -infinity();
    });
  }
}

// Scores to probabilities; alpha = 2^(c (m - m')). The difference is taken before the product with c: where scores are
// large, rounding of c m would leave the numbers' range.
TILE void softmax(rt<float, BN> &x, rv &m, rsum &l, rv &alpha, float c) {
  rv old = m, top;
  row_max(m, x);
  map(top, m, [](float a) { return a == -infinity() ? 0.f : a; });
  map(alpha, old, top, [=](float a, float b) { return fast_exp2((a - b) * c); });
  map_row(x, top, [=](float a, float b) { return fast_exp2((a - b) * c); });
  scale(l, alpha);
  row_sum_add(l, x);
}

TILE void finish(const attention_decode_params &p, const task &t, rt<float, D> &o, rv &m, const rsum &l, float c) {
  int rows = p.rows - t.row0, row0 = t.row0, queries = p.queries, head0 = t.head * (p.q_heads / p.k_heads);
  int64_t part = ((int64_t)(t.batch * p.k_heads + t.head) * p.splits + t.split) * p.rows + row0;
  const float *sink = p.splits == 1 ? p.sink : nullptr;
  rv sum, sinks, top, factor;
  reduce(sum, l);
  map_rows(sinks, [=](int row) {
    return sink && row < rows ? sink[head0 + (row0 + row) / queries] * 1.4426950408889634f : -infinity();
  });
  map(m, m, [=](float a) { return a * c; });
  map(top, m, sinks, [](float a, float b) { return a > b ? a : b > -infinity() ? b : 0.f; });
  map(factor, m, top, [](float a, float b) { return fast_exp2(a - b); });
  map(sinks, sinks, top, [](float a, float b) { return fast_exp2(a - b); });
  map(sum, sum, factor, [](float a, float b) { return a * b; });
  map(sum, sum, sinks, [](float a, float b) { return a + b; });
  map(factor, factor, sum, [](float a, float b) { return b == 0.f ? 0.f : a * fast_rcp(b); });
  map(top, top, sum, [](float a, float b) { return a + fast_log2(b); });
  map_row(o, factor, [](float x, float f) { return x * f; });
  if (p.splits > 1) {
    store(p.part + part * p.dim, p.dim, o, rows, p.dim);
    store(p.part_lse + part, top, rows);
    return;
  }
  elem *out = (elem *)p.out + t.batch * p.out_stride[0];
  int64_t query_stride = p.out_stride[1], head_stride = p.out_stride[2];
  store_rows<elem>(o, [=](int row) {
    int r = row0 + row;
    return row < rows ? out + r % queries * query_stride + (head0 + r / queries) * head_stride : (elem *)nullptr;
  }, p.dim);
  if (!p.lse) return;
  map(top, top, [](float a) { return a * 0.6931471805599453f; });
  store(p.lse + (int64_t)(t.batch * p.k_heads + t.head) * p.rows + row0, top, rows);
}

TILE void load_queries(const attention_decode_params &p, shared &s, const task &t, rv &slopes) {
  const elem *q = (const elem *)p.q + t.batch * p.q_stride[0];
  const float *slope = p.slopes ? p.slopes + t.batch * p.slope_stride : nullptr;
  int row0 = t.row0, rows = p.rows - row0, queries = p.queries, head0 = t.head * (p.q_heads / p.k_heads);
  int64_t query_stride = p.q_stride[1], head_stride = p.q_stride[2];
  // a warp writes the rows that its own products read, and these are over
  load_rows(s.q, [=](int row) {
    int r = row0 + row;
    return row < rows ? q + r % queries * query_stride + (head0 + r / queries) * head_stride : (const elem *)nullptr;
  }, p.dim);
  map_rows(slopes, [=](int row) {
    return slope && row < rows ? slope[head0 + (row0 + row) / queries] * 1.4426950408889634f : 0.f;
  });
  fence_async();
  wg_sync();
}

TILE void compute(const attention_decode_params &p, shared &s, int) {
  ring_pos at = {};
  float c = p.cap_log2 != 0.f || p.slopes ? 1.f : p.scale_log2;
  int next;
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    task t = numbers_of(p, next);
    if (count == 0) grid_wait();
    read_task(p, t);
    rt<float, BN> x;
    rt<elem, BN> probabilities;
    rt<float, D> o;
    rv m, alpha, slopes;
    rsum l;
    load_queries(p, s, t, slopes);                     // before the length is needed, which is on its way too
    set_keys(p, t);
    if (t.begin >= t.end && loads_ahead(p, t)) {       // for nothing
      ring_wait(s.k_ring, at);
      ring_release(s.k_ring, at);
      ring_wait(s.v_ring, at);
      ring_done(s.v_ring, at);
    }
    fill(m, -infinity());
    fill(l, 0.f);
    fill(o, 0.f);
    for (int j = t.begin; j < t.end; j += p.splits) {
      int key0 = j * BN;
      ring_wait(s.k_ring, at);
      mma_fence();
      mma_ABt<ZERO>(x, s.q, s.k[at.stage]);
      mma_commit();
      mma_wait<0>(x);
      ring_release(s.k_ring, at);
      adjust(x, p, t, slopes, key0);
      softmax(x, m, l, alpha, c);
      convert(probabilities, x);
      map_row(o, alpha, [](float a, float f) { return a * f; });
      ring_wait(s.v_ring, at);
      if (key0 < t.low || key0 + BN > t.high) {      // 0 times what lies there may be NaN
        clear_rows(s.v[at.stage], t.low - key0, t.high - key0);
        fence_async();
        wg_sync();
      }
      mma_fence();
      mma_AB<ACC>(o, probabilities, s.v[at.stage]);
      mma_commit();
      mma_wait<0>(o, probabilities);
      ring_done(s.v_ring, at);
    }
    finish(p, t, o, m, l, c);
    queue_release(s.queue, count);
  }
}

typedef block<attention_decode_params, shared, init, role<compute, WARPGROUP, 1, COMPUTE_REGS>,
              role<k_loader, THREAD, 1, LOAD_REGS>, role<v_loader, THREAD, 1, LOAD_REGS>, OCCUPANCY<PER_SM>,
              DEPENDENT> kernel;
ENTRY(kernel, 64, BN)
