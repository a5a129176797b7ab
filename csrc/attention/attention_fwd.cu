// Attention forward:  o = softmax(scale q k^T) v,  lse = log sum exp(scale q k^T)
// online over blocks of keys (Milakov & Gimelshein 2018; Dao 2023, algorithm 1), for each row with some m near the
// maximum of c x so far and sum l:
//   x = q k_j^T;  p = 2^(c x - m);  l = l + sum p;  o = o + p v_j,  c = scale log2 e
// Any m gives the same o / l and lse = ln 2 (m + log2 l), as long as nothing leaves the numbers' range. So m is not
// found anew in every block: where p came out large, m is raised to m' = max c x, l and o are multiplied by 2^(m - m'),
// and this block's p are made again.
// Where |c x| passes 2^14, the rounding of m shows in p, and takes it out of range at last. Such a row has
// p = 2^(c (x - x_max)) with x_max = max x, and m = -infinity, so that every block's p come out infinite or NaN at
// first, and are made again. See maximum() in attention_fwd.h.
// A block owns 64 NC query rows of one head, a warpgroup 64 of them, and walks from the last key block that it sees to
// the first. The scores of key block j - 1 are issued before the product with v_j. Warpgroups with large blocks take
// turns with matrix work, so that one's exponentials run under the others'; many with small blocks are better off
// without.
#include "attention/attention_fwd.h"

// From the row: D (columns of q and k), DV (of v and o), BN (keys a block), NC (compute warpgroups), TURNS (1: matrix
// work in turns), STAGES (of k and v), O_COLS (columns of o that leave at a time: fewer take less shared memory),
// FEATURES, *_REGS
enum { X_MAX_SHARED = FEATURES == FEATURES_PACKED && NC == 4 };   // four warpgroups have no registers for x_max

// The last warpgroup begins with key blocks that the first does not see. So far are they apart in the rings.
static_assert(STAGES > (64 * (NC - 1) + BN - 1) / BN,
              "stages for the key blocks between the first and the last warpgroup");
typedef ring<STAGES, ASYNC_READS> kv_ring;
struct shared {
  st<elem, 64, D> q[NC];
  st<elem, BN, D> k[STAGES];
  st<elem, BN, DV> v[STAGES];
  st<elem, 64, O_COLS> o[NC];
  parked x_max[NC];            // X_MAX_SHARED: of rows with scores so large that they have no m
  kv_ring k_ring, v_ring;
  ring<NC, ASYNC_READS> q_ring;
  sem v_clean[2];              // as in a ring of two stages, one a task: no other sequence's rows in v
  sem draw;                    // one phase a task: the next one may be drawn
  query_task_smem task_of[2];  // of even and odd tasks, as in the queue
  task_queue queue;
};
struct kv_pos { ring_pos k, v; };   // a role's positions in the two rings
TILE void init(shared &s) {
  ring_init(s.k_ring, arrivals(1, 0, 0), arrivals(0, 0, NC));
  ring_init(s.v_ring, arrivals(1, 0, 0), arrivals(0, 0, NC));
  queue_init(s.queue, arrivals(2, 0, NC));
  sem_init(s.draw, arrivals(1, 0, 0));
  for (int i = 0; PACKED && i < 2; i++) sem_init(s.v_clean[i], arrivals(0, 0, 1));
  ring_init(s.q_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
}

// ---- what feeds the compute warpgroups

template<int C>
TILE void load(const gmap &m, st<elem, BN, C> (&tiles)[STAGES], kv_ring &r, ring_pos &at, int row, int head,
               int batch) {
  ring_acquire(r, at);
  ring_expect(r, at, tile_bytes(tiles[0]));
  tma_load(tiles[at.stage], m, r.full[at.stage], row, 0, head, batch);
  ring_next(r, at);
}
// Draws a task while the last two key blocks of the one before are loaded: early enough to hide the counter's latency,
// not so early that blocks which are done wait for tasks that others hold.
TILE void scheduler(const attention_fwd_params &p, shared &s, int) {
  query_task t;
  int next = next_task(p, 0, 0, t);
  for (uint32_t count = 0; hand_out(p, s.queue, s.task_of, count, next, t); count++) {
    sem_wait(s.draw, ring_at<1>(count).phase);
    next = next_task(p, count + 1, next, t);
  }
}
// This role is apart from the loader, because a warpgroup frees its q only with its last scores. The next task's keys
// and values need not wait for that.
TILE void query_loader(const attention_fwd_params &p, shared &s, int) {
  for (uint32_t count = 0; queue_take(s.queue, count) < p.tasks; count++) {
    query_task t = get_task(s.task_of[count % 2], p);
    for (int w = 0; w < NC; w++) {
      ring_pos q = q_stage(count, w);
      ring_acquire(s.q_ring, q);
      ring_expect(s.q_ring, q, tile_bytes(s.q[w]));
      tma_load(s.q[w], p.q, s.q_ring.full[w], t.seq.q0 + t.row0 + w * 64, 0, t.head, in_memory(p, t));
    }
    queue_release<THREAD>(s.queue, count);
  }
}
TILE void loader(const attention_fwd_params &p, shared &s, int) {
  kv_pos at = {};
  for (uint32_t count = 0; queue_take(s.queue, count) < p.tasks; count++) {
    query_task t = get_task(s.task_of[count % 2], p);
    int j = t.first + t.steps - 1, k_head = t.head / p.group, batch = in_memory(p, t);
    load(p.k, s.k, s.k_ring, at.k, t.seq.k0 + j * BN, k_head, batch);
    if (t.steps == 1) sem_arrive<THREAD>(s.draw);
    for (; j > t.first; j--) {
      if (j == t.first + 1) sem_arrive<THREAD>(s.draw);
      load(p.k, s.k, s.k_ring, at.k, t.seq.k0 + (j - 1) * BN, k_head, batch);
      load(p.v, s.v, s.v_ring, at.v, t.seq.k0 + j * BN, k_head, batch);
    }
    load(p.v, s.v, s.v_ring, at.v, t.seq.k0 + j * BN, k_head, batch);
    queue_release<THREAD>(s.queue, count);
  }
}

// A task's first key block may have rows of the next sequence, or of none, and 0 times what they hold may be NaN. The
// first warpgroup clears them in v, while no tile is in its registers. All wait for it before their first product with
// v.
TILE void clear_tail(const attention_fwd_params &p, shared &s, const kv_pos &at, const query_task &t, uint32_t count) {
  int keys = t.seq.keys - (t.first + t.steps - 1) * BN;
  if (p.features.q_start && keys < BN) {
    ring_wait(s.v_ring, at.v);
    clear_rows(s.v[at.v.stage], 0, keys);
    fence_async();
  }
  sem_arrive(s.v_clean[ring_at<2>(count).stage]);
}

// ---- blocks of scores

// y, exponentials of scores, to probabilities and their sums.
TILE void sum_up(rt<elem, BN> &probabilities, rsum &sum, rt<float, BN> &y, const attention_fwd_params &p,
                 const query_task &t, int row0, int col0) {
  row_sum(sum, y);
  drop(y, p, t, row0, col0);
  convert(probabilities, y);
}
TILE void exponentials(rt<elem, BN> &probabilities, rsum &sum, const rt<float, BN> &x, const rv &m,
                       const attention_fwd_params &p, const query_task &t, int row0, int col0) {
  rt<float, BN> y;
  float c = exponent(p);
  map_row(y, x, m, [=](float a, float b) { return fast_exp2(fused(a, c, -b)); });
  sum_up(probabilities, sum, y, p, t, row0, col0);
}
// The same from the scores' own origin; x is lost.
TILE void exponentials(rt<elem, BN> &probabilities, rsum &sum, rt<float, BN> &x, const rv &base, const rv &top,
                       const attention_fwd_params &p, const query_task &t, int row0, int col0) {
  float c = exponent(p);
  map_row(x, base, [](float a, float b) { return a - b; });
  map_row(x, top, [=](float a, float b) { return fast_exp2(fused(a, c, -b)); });
  sum_up(probabilities, sum, x, p, t, row0, col0);
}

TILE void raise_maximum(const attention_fwd_params &p, shared &s, const rt<float, BN> &x, rv &m, rv &x_max, rv &base,
                        rv &top, rv &alpha, int wg) {
  if constexpr (X_MAX_SHARED) maximum(x, m, base, top, alpha, s.x_max[wg], exponent(p), 0.f, 8.f);
  else maximum(x, m, base, top, alpha, x_max, exponent(p), 0.f, 8.f);
}

TILE void finish(const attention_fwd_params &p, shared &s, uint32_t count, rt<float, DV> &o, rv &m, const rv &x_max,
                 const rsum &l, int wg) {
  query_task t = get_task(s.task_of[count % 2], p);   // again, rather than in registers for the whole task
  int row0 = t.row0 + wg * 64, batch = in_memory(p, t);
  rv sum, inverse, lse;
  reduce(sum, l);
  if constexpr (X_MAX_SHARED) rows_maxima(m, s.x_max[wg], exponent(p));
  else rows_maxima(m, x_max, exponent(p));
  fill(inverse, EVERYTHING && p.features.drop_below ? p.features.keep_scale : 1.f);
  if (PACKED) add_sink(p.features, t.head, m, sum, inverse);
  map(inverse, inverse, sum, [](float f, float l) { return l == 0.f ? 0.f : f * fast_rcp(l); });
  map_row(o, inverse, [](float x, float f) { return x * f; });
  if (PACKED && p.features.q_start && row0 + 64 > t.seq.rows)   // the next sequence's rows follow
    store_first((elem *)p.out + (t.seq.q0 + row0) * p.out_row + t.head * p.out_head, p.out_row, o, t.seq.rows - row0,
                p.out_columns);
  else store_output(p.o, s.o[wg], o, t.seq.q0 + row0, t.head, batch);
  if (p.lse) {
    log_sum(lse, m, sum);
    store(p.lse + (int64_t)(batch * p.q_heads + t.head) * p.q_total + t.seq.q0 + row0, lse, t.seq.rows - row0);
  }
}

TILE void scores(shared &s, kv_pos &at, rt<float, BN> &x, int wg) {   // the key block is there
  mma_fence();
  mma_ABt<ZERO>(x, s.q[wg], s.k[at.k.stage]);
  mma_commit();
}
TILE void product(shared &s, kv_pos &at, rt<float, DV> &o, rt<elem, BN> &probabilities) {
  ring_wait(s.v_ring, at.v);
  mma_fence();
  mma_AB<ACC>(o, probabilities, s.v[at.v.stage]);
  mma_commit();
}

// The scores with a key block are there: its stage, and after the last one q, may be filled again.
TILE void scores_done(shared &s, kv_pos &at, bool last, int wg) {
  ring_done(s.k_ring, at.k);
  if (last) ring_release(s.q_ring, {wg, 0});   // whichever the phase is
}
// A key block that this warpgroup's rows do not see.
TILE void pass_over(shared &s, kv_pos &at) {
  ring_wait(s.k_ring, at.k);
  ring_done(s.k_ring, at.k);
  ring_wait(s.v_ring, at.v);
  ring_done(s.v_ring, at.v);
}
// x: scores with key block j; probabilities and v: block j + 1
TILE void step(const attention_fwd_params &p, shared &s, kv_pos &at, const query_task_smem &h, rt<float, BN> &x,
               rt<elem, BN> &probabilities, rt<float, DV> &o, rv &m, rv &x_max, rsum &l, int j, int low, int masked,
               int wg) {
  rsum sum;
  query_task t = {};
  if (EVERYTHING) t = get_task(h, p);
  int row0 = t.row0 + wg * 64;
  my_turn(wg);
  scores(s, at, x, wg);
  product(s, at, o, probabilities);
  next_turn(wg);
  mma_wait<1>(x);
  scores_done(s, at, j == low, wg);
  change_scores(x, p, t, row0, j * BN);
  if (masked) mask(x, p, h, j * BN, wg);
  if (j > low) ring_wait(s.k_ring, at.k);   // here: it keeps the wait for o below the mask, see mma_wait
  mma_wait<0>(o, probabilities);
  ring_done(s.v_ring, at.v);
  exponentials(probabilities, sum, x, m, p, t, row0, j * BN);
  if (exceeds(sum, 16384.f)) {   // fp16 ends at 65504. NaN, too: where m is -infinity
    rv base, top, alpha;
    raise_maximum(p, s, x, m, x_max, base, top, alpha, wg);
    scale_rows(o, alpha);
    scale(l, alpha);
    exponentials(probabilities, sum, x, base, top, p, t, row0, j * BN);
  }
  add(l, sum);
}

TILE void compute(const attention_fwd_params &p, shared &s, int wg) {
  kv_pos at = {};
  if (PACKED && p.features.q_start)   // here, not behind the tasks: that took registers from them
    clear_behind<elem>({p.out, p.out_row, p.out_head, p.out_columns, p.q_heads, p.q_total,
                       p.features.q_start + p.batch}, p.lse, block_index() * NC + wg, block_count() * NC);
  if (TURNS) turn_begin<NC>(wg);
  for (uint32_t count = 0; queue_take(s.queue, count) < p.tasks; count++) {
    const query_task_smem &h = s.task_of[count % 2];
    query_task t = get_task(h, p);
    int row0 = t.row0 + wg * 64, j = t.first + t.steps - 1;
    key_range mine = get_key_range(h, wg);
    rt<float, BN> x;
    rt<elem, BN> probabilities;
    rt<float, DV> o;
    rv m, x_max, base, top, alpha;   // x_max: where it is not in s.x_max
    rsum l;
    if (PACKED && wg == 0) clear_tail(p, s, at, t, count);
    int idle = TURNS ? t.rounds - (mine.seen - mine.low) : 0;
    for (; j >= mine.seen; j--) {
      if (idle > 0) skip_turn(wg), idle--;
      pass_over(s, at);
    }
    if (WINDOWS) for (; idle > 0; idle--) skip_turn(wg);
    ring_wait(s.q_ring, q_stage(count, wg));
    ring_wait(s.k_ring, at.k);
    scores(s, at, x, wg);
    mma_wait<0>(x);
    scores_done(s, at, j == mine.low, wg);
    fill(m, -infinity());
    if (X_MAX_SHARED) store(s.x_max[wg], m);
    x_max = m;
    fill(o, 0.f);
    change_scores(x, p, t, row0, j * BN);
    mask(x, p, h, j * BN, wg);
    raise_maximum(p, s, x, m, x_max, base, top, alpha, wg);
    exponentials(probabilities, l, x, m, p, t, row0, j * BN);
    if (exceeds(l, 16384.f)) exponentials(probabilities, l, x, base, top, p, t, row0, j * BN);
    if (j > mine.low) ring_wait(s.k_ring, at.k);
    if (PACKED) sem_wait(s.v_clean[ring_at<2>(count).stage], ring_at<2>(count).phase);
    j--;
    do {   // windows have masked blocks at both ends
      for (; j >= mine.low && ((j + 1) * BN > mine.open || (WINDOWS && j < mine.closed)); j--)
        step(p, s, at, h, x, probabilities, o, m, x_max, l, j, mine.low, 1, wg);
      for (; j >= mine.closed && (j + 1) * BN <= mine.open; j--)
        step(p, s, at, h, x, probabilities, o, m, x_max, l, j, mine.low, 0, wg);
    } while (WINDOWS && j >= mine.low);
    product(s, at, o, probabilities);
    mma_wait<0>(o, probabilities);
    ring_done(s.v_ring, at.v);
    if (WINDOWS) for (; j >= t.first; j--) pass_over(s, at);
    finish(p, s, count, o, m, x_max, l, wg);
    queue_release(s.queue, count);
  }
  if (TURNS) turn_end<NC>(wg);
  tma_store_wait_read();
}

typedef block<attention_fwd_params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>,
              role<loader, THREAD, 1, LOAD_REGS>, role<query_loader, THREAD, 1, LOAD_REGS>,
              role<scheduler, THREAD, 1, LOAD_REGS>> kernel;
ENTRY(kernel, BM, BN)
