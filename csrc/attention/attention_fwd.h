// What the kernels of attention forward share: how they walk over queries and keys, and what a block of scores goes
// through. A task (query_task) is a block of BM = 64 NC query rows of one (batch, head). Each of NC warpgroups has 64
// of these rows. A task's steps are the blocks of BN keys that its rows see. D, BN, NC, TURNS and FEATURES come from
// the row.
#pragma once
#include "attention/attention_features.h"

enum { BM = 64 * NC };
struct query_task {
  int batch, head, row0;       // row0 and keys count in the sequence
  int first, steps;            // key blocks first .. first + steps - 1
  int rounds;                  // the most key blocks that a warpgroup's rows see
  sequence seq;
};
// Of a packed sequence that is shorter than the longest: nothing is left for this task.
TILE bool is_empty(const query_task &t) { return PACKED && t.row0 >= t.seq.rows; }
// Key blocks up to the last that rows before `end` see, and the first that row `row` sees.
TILE int blocks_seen(const sequence &q, int end) {
  int keys = end + q.diagonal < q.keys ? end + q.diagonal : q.keys;
  return keys > 0 ? (keys + BN - 1) / BN : 0;
}
TILE int first_block(const sequence &q, int row) { return WINDOWS && row + q.lower > 0 ? (row + q.lower) / BN : 0; }

// A warpgroup's own part of a task's key blocks: low to seen - 1. Blocks from `closed` on that end at key `open` or
// before it need no mask: all of its rows see all of their keys.
struct key_range { int low, seen, open, closed; };
TILE key_range key_range_of(const query_task &t, int row0) {
  key_range a;
  int last = t.first + t.steps - 1, see = row0 + t.seq.diagonal + 1;
  a.low = first_block(t.seq, row0) < last ? first_block(t.seq, row0) : last;
  a.seen = blocks_seen(t.seq, row0 + 64) > a.low ? blocks_seen(t.seq, row0 + 64) : a.low + 1;
  a.open = see < t.seq.keys ? see : t.seq.keys;
  a.closed = WINDOWS && row0 + 63 + t.seq.lower > 0 ? (row0 + 63 + t.seq.lower + BN - 1) / BN : a.low;
  return a;
}

// Heads go in sections; the row blocks with most keys of a section first.
TILE query_task task_at(const attention_fwd_params &p, int i) {
  query_task t;
  int section = i / (p.l2_heads * p.q_blocks), r = i - section * p.l2_heads * p.q_blocks,
      left = p.batch * p.q_heads - section * p.l2_heads;
  int heads = left < p.l2_heads ? left : p.l2_heads, block = p.q_blocks - 1 - r / heads,
      bh = section * p.l2_heads + r % heads;
  t.batch = bh / p.q_heads;
  t.head = bh - t.batch * p.q_heads;
  t.row0 = block * BM;
  t.seq = {0, 0, p.q_total, p.k_rows, p.diagonal, -UNMASKED};
  if (WINDOWS) t.seq = sequence_of(p.features, PACKED, t.batch, p.q_total, p.k_rows, p.diagonal);
  t.first = first_block(t.seq, t.row0);
  int blocks = blocks_seen(t.seq, t.row0 + BM) - t.first;
  t.steps = blocks > 1 ? blocks : 1;   // at least one block, all masked where a row block sees no key
  t.rounds = t.steps;
  if (TURNS && WINDOWS) {
    t.rounds = 1;
    for (int w = 0; w < NC; w++) {
      key_range r = key_range_of(t, t.row0 + w * 64);
      if (r.seen - r.low > t.rounds) t.rounds = r.seen - r.low;
    }
  }
  return t;
}
// Thread: the next task's number, and what it is.
TILE int next_task(const attention_fwd_params &p, uint32_t count, int i, query_task &t) {
  return next_task(count, i, p.counter, [&](int i) {
    if (i < p.tasks) t = task_at(p, i);
    return i < p.tasks && is_empty(t);
  });
}
// batch of the maps
TILE int in_memory(const attention_fwd_params &p, const query_task &t) {
  return PACKED && p.features.q_start ? 0 : t.batch;
}

// A task as the roles read it from shared memory. Taking its number apart again would cost each role a third of a
// microsecond.
struct query_task_smem { int batch, head, row0, first, steps, rounds, q0, k0, rows, keys, diagonal, lower;
    key_range ranges[NC]; };
TILE void put_task(query_task_smem &h, const query_task &t) {
  put(h.batch, t.batch);
  put(h.head, t.head);
  put(h.row0, t.row0);
  put(h.first, t.first);
  put(h.steps, t.steps);
  put(h.rounds, t.rounds);
  if (WINDOWS) {
    put(h.q0, t.seq.q0);
    put(h.k0, t.seq.k0);
    put(h.rows, t.seq.rows);
    put(h.keys, t.seq.keys);
    put(h.diagonal, t.seq.diagonal);
    put(h.lower, t.seq.lower);
  }
  for (int w = 0; w < NC; w++) {
    key_range a = key_range_of(t, t.row0 + w * 64);
    put(h.ranges[w].low, a.low);
    put(h.ranges[w].seen, a.seen);
    put(h.ranges[w].open, a.open);
    put(h.ranges[w].closed, a.closed);
  }
}
TILE query_task get_task(const query_task_smem &h, const attention_fwd_params &p) {
  query_task t = {get(h.batch), get(h.head), get(h.row0), get(h.first), get(h.steps), get(h.rounds),
      {0, 0, p.q_total, p.k_rows, p.diagonal, -UNMASKED}};
  if (WINDOWS) t.seq = {get(h.q0), get(h.k0), get(h.rows), get(h.keys), get(h.diagonal), get(h.lower)};
  return t;
}
TILE key_range get_key_range(const query_task_smem &h, int wg) {
  return {get(h.ranges[wg].low), get(h.ranges[wg].seen), get(h.ranges[wg].open), get(h.ranges[wg].closed)};
}

// The ring of q has a stage for each warpgroup, and every task fills all of them.
TILE ring_pos q_stage(uint32_t count, int wg) { return {wg, ring_at<1>(count).phase}; }

// Thread: hands out task number `next`, which t describes. False behind the last task.
TILE bool hand_out(const attention_fwd_params &p, task_queue &q, query_task_smem (&task_of)[2], uint32_t count,
                   int next, const query_task &t) {
  queue_acquire(q, count);
  if (next < p.tasks) put_task(task_of[count % 2], t);
  queue_give(q, count, next);
  return next < p.tasks;
}

// Where the row says TURNS=1, the warpgroups issue their matrix work one after the other (pipe.h). All take the same
// number of turns in a task, so one that has nothing to issue skips its turn.
TILE void my_turn(int wg) {
  if (TURNS) turn_wait<NC>(wg);
}
TILE void next_turn(int wg) {
  if (TURNS) turn_pass<NC>(wg);
}
TILE void skip_turn(int wg) {
  my_turn(wg);
  next_turn(wg);
}

// Masks the scores with the keys from col0 on. It reads the task again: kept in registers, it would cost every step.
TILE void mask(rt<float, BN> &x, const attention_fwd_params &p, const query_task_smem &h, int col0, int wg) {
  int row0 = get(h.row0) + wg * 64 - col0, keys = (WINDOWS ? get(h.keys) : p.k_rows) - col0;
  int diagonal = row0 + (WINDOWS ? get(h.diagonal) : p.diagonal), lower = WINDOWS ? row0 + get(h.lower) : 0;
  if (WINDOWS && lower > -64) triu(x, lower, -infinity());
  if (diagonal < BN - 1) tril(x, diagonal, -infinity());
  if (keys < BN) map_rc(x, [=](float a, int, int col) { return col < keys ? a : -infinity(); });
}
// The row's features: what they do to scores, in front of the mask, and to probabilities. Capped or biased scores are
// in units of log 2.
TILE float exponent(const attention_fwd_params &p) {
  return EVERYTHING && changes_scores(p.features) ? 1.f : p.scale_log2;
}
TILE void change_scores(rt<float, BN> &x, const attention_fwd_params &p, const query_task &t, int row0, int col0) {
  if (!EVERYTHING || !changes_scores(p.features)) return;
  cap_scores(x, p.features, p.scale_log2);
  bias_scores(x, slope_of(p.features, t.batch, t.head), row0 + t.seq.keys - t.seq.rows - col0);
}
TILE void drop(rt<float, BN> &x, const attention_fwd_params &p, const query_task &t, int row0, int col0) {
  if (EVERYTHING && p.features.drop_below) drop(x, p.features, t.batch * p.q_heads + t.head, row0, col0);
}

// The rows' maxima: p = 2^(c (x - base) - top). A row has m or x_max, and -infinity for the other; it has neither
// where it has seen no key. `base` is x_max, or 0 without it; `top` is m, or 0 without it. m is c max x - below when it
// is found, and is raised by more than `slack` only, which saves scalings of o. l and o are to be multiplied by alpha.
// x_max is in registers, or in shared memory where a kernel has none to spare: hardly any block needs it.
TILE void finite(rv &v) { map(v, v, [](float x) { return x == -infinity() ? 0.f : x; }); }
TILE void load(rv &v, const rv &t) { v = t; }
TILE void store(rv &t, const rv &v) { t = v; }
template<int N, class T>
TILE void maximum(const rt<float, N> &x, rv &m, rv &base, rv &top, rv &alpha, T &x_max, float c, float below,
                  float slack) {
  load(base, x_max);
  map(alpha, m, base, [=](float m, float t) { return m == -infinity() ? t : 0.f; });
  top = m;
  finite(top);
  row_max(base, x);
  map(m, m, base, [=](float m, float h) {
    float peak = h * c - below, limit = 16384.f;
    return m > -infinity() && !(peak > m + slack) ? m : peak < limit && peak > -limit ? peak : -infinity();
  });
  map(base, m, base, [](float m, float h) { return m == -infinity() ? h : -infinity(); });
  store(x_max, base);
  finite(base);
  map(alpha, alpha, base, [=](float before, float now) { return (before - now) * c; });
  map(alpha, alpha, top, [](float x, float y) { return x + y; });
  top = m;
  finite(top);
  map(alpha, alpha, top, [](float x, float y) { return fast_exp2(x - y); });
}
// At the end: m of the rows that have x_max.
template<class T> TILE void rows_maxima(rv &m, const T &x_max, float c) {
  rv t;
  load(t, x_max);
  map(m, m, t, [=](float m, float t) { return m == -infinity() ? t * c : m; });
}

// At the end: m, the rows' maxima in units of log 2, and the sums of 2^(x - m) with the sink; o is to be multiplied by
// `factor`, too.
TILE void add_sink(const attention_features &f, int head, rv &m, rv &sum, rv &factor) {
  if (!f.sink) return;
  float sink = f.sink[head] * 1.4426950408889634f;
  rv old = m, grown;
  map(m, m, [=](float a) { return a > sink ? a : sink; });
  map(grown, old, m, [](float a, float b) { return b == -infinity() ? 1.f : fast_exp2(a - b); });
  map(factor, factor, grown, [](float f, float g) { return f * g; });
  map(sum, sum, grown, [](float l, float g) { return l * g; });
  map(old, m, [=](float b) { return b == -infinity() ? 0.f : fast_exp2(sink - b); });
  map(sum, sum, old, [](float l, float g) { return l + g; });
}

// ---- results

// Rounds 64 rows of o and stores them, C columns at a time, through a tile. The last store is not waited for.
template<typename T, int C, int N>
TILE void store_output(const gmap &map, st<T, 64, C> &tile, const rt<float, N> &o, int row, int head, int batch) {
  UNROLLED for (int col = 0; col < N; col += C) {
    rt<T, C> part;
    convert_part(part, o, col);
    tma_store_wait_read();
    wg_sync();
    store(tile, part);
    fence_async();
    wg_sync();
    tma_store(map, tile, row, col, head, batch);
  }
}
// lse = ln 2 (m + log2 sum)
TILE void log_sum(rv &lse, const rv &m, const rv &sum) {
  map(lse, m, sum, [](float a, float l) { return (a + fast_log2(l)) * 0.6931471805599453f; });
}
