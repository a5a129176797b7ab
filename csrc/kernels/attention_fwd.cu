// Attention forward:  o = softmax(scale q k^T) v,  lse = log sum exp(scale q k^T)
// online over blocks of keys (Milakov & Gimelshein 2018; Dao 2023, algorithm 1), for each row with running maximum m and sum l:
//   x = q k_j^T;  m' = max(m, max x);  p = 2^(c (x - m'));  l = l 2^(c (m - m')) + sum p;  o = o 2^(c (m - m')) + p v_j,  c = scale log2 e
// A block owns 64 NC query rows of one head, a warpgroup 64 of them, and walks from the last key block that it sees to the first. The scores of key block j - 1 are issued before the product with v_j,
// so that softmax of j - 1 runs under that product; warpgroups take turns with matrix work, so that one's softmax runs under the others'.
#include "tile/tile.h"
#include "kernels/attention.h"

enum { BM = 64 * NC };   // D, BN (keys a block), NC (compute warpgroups), STAGES, O_IN_Q (o leaves through q's tile), FEATURES, *_REGS
#include "kernels/attention_features.h"
#include "kernels/attention_fwd_tasks.h"

struct shared {
  st<elem, 64, D> q[NC];
  st<elem, BN, D> k[STAGES], v[STAGES];
  st<elem, 64, D> o[O_IN_Q ? 0 : NC];
  ring<STAGES, ASYNC_READS> k_ring, v_ring;
  sem q_full[NC], q_free[NC];
  task_queue queue;
};

TILE void init(shared &s) {
  ring_init(s.k_ring, arrivals(1, 0, 0), arrivals(0, 0, NC));
  ring_init(s.v_ring, arrivals(1, 0, 0), arrivals(0, 0, NC));
  queue_init(s.queue, arrivals(0, 0, NC));
  for (int w = 0; w < NC; w++) {
    sem_init(s.q_full[w], arrivals(1, 0, 0));
    sem_init(s.q_free[w], arrivals(0, 0, 1));
  }
}

TILE void load_k(const attention_fwd_params &p, shared &s, const task &t, ring_pos &at, int j) {
  ring_acquire(s.k_ring, at);
  ring_expect(s.k_ring, at, tile_bytes(s.k[0]));
  tma_load(s.k[at.stage], p.k, s.k_ring.full[at.stage], t.seq.k0 + j * BN, 0, t.head / p.group, in_memory(p, t));
  ring_next(s.k_ring, at);
}
TILE void load_v(const attention_fwd_params &p, shared &s, const task &t, ring_pos &at, int j) {
  ring_acquire(s.v_ring, at);
  ring_expect(s.v_ring, at, tile_bytes(s.v[0]));
  tma_load(s.v[at.stage], p.v, s.v_ring.full[at.stage], t.seq.k0 + j * BN, 0, t.head / p.group, in_memory(p, t));
  ring_next(s.v_ring, at);
}

TILE void loader(const attention_fwd_params &p, shared &s, int) {
  ring_pos k_at = {}, v_at = {};
  int next = 0;
  for (uint32_t count = 0; (next = draw(p, s.queue, count, next)) < p.tasks; count++) {
    task t = task_at(p, next);
    int j = t.first + t.steps - 1;
    for (int w = 0; w < NC; w++) {
      sem_wait(s.q_free[w], ~count & 1);   // free at first, like a ring's stage
      sem_expect(s.q_full[w], tile_bytes(s.q[w]));
      tma_load(s.q[w], p.q, s.q_full[w], t.seq.q0 + t.row0 + w * 64, 0, t.head, in_memory(p, t));
      if (w == 0) load_k(p, s, t, k_at, j);   // right behind its q: the first warpgroup can begin
    }
    for (; j > t.first; j--) {
      load_k(p, s, t, k_at, j - 1);
      load_v(p, s, t, v_at, j);
    }
    load_v(p, s, t, v_at, j);
  }
}

// Scores to probabilities; alpha = 2^(c (m - m')).
TILE void softmax(rt<float, BN> &x, rv &m, rsum &l, rv &alpha, float c) {
  rv old = m, top;
  row_max(m, x);
  map(top, m, [=](float a) { return a == -infinity() ? 0.f : a * c; });
  map(alpha, old, top, [=](float a, float b) { return fast_exp2(fused(a, c, -b)); });
  map_row(x, top, [=](float a, float b) { return fast_exp2(fused(a, c, -b)); });
  scale(l, alpha);
  row_sum_add(l, x);
}

TILE void finish(const attention_fwd_params &p, shared &s, const task &t, rt<float, D> &o, rv &m, rv &sum, float c, int wg) {
  st<elem, 64, D> &out = O_IN_Q ? s.q[wg] : s.o[wg];
  int row0 = t.row0 + wg * 64;
  rv inverse, lse;
  if (!O_IN_Q) {   // else the last task's store has been waited for at its end
    tma_store_wait_read();
    wg_sync();
  }
  map(m, m, [=](float a) { return a * c; });
  fill(inverse, 1.f);
  if (FEATURES == ALL_FEATURES) add_sink(p.features, t.head, m, sum, inverse);
  map(inverse, inverse, sum, [](float f, float l) { return l == 0.f ? 0.f : f * fast_rcp(l); });
  map_row(o, inverse, [](float x, float f) { return x * f; });
  if (FEATURES && p.features.q_start && row0 + 64 > t.seq.rows)   // the next sequence's rows follow
    store_first((elem *)p.out + (t.seq.q0 + row0) * p.out_row + t.head * p.out_head, p.out_row, o, t.seq.rows - row0, p.out_columns);
  else {
    store(out, o);
    fence_async();
    wg_sync();
    tma_store(p.o, out, t.seq.q0 + row0, 0, t.head, in_memory(p, t));
  }
  if (p.lse) {
    map(lse, m, sum, [=](float a, float l) { return (a + fast_log2(l)) * 0.6931471805599453f; });
    store(p.lse + (int64_t)(in_memory(p, t) * p.q_heads + t.head) * p.q_rows + t.seq.q0 + row0, lse, t.seq.rows - row0);
  }
  if (O_IN_Q) {
    tma_store_wait_read();
    sem_arrive(s.q_free[wg]);
  }
}

// The scores with a key block are there: its stage, and after the last one q, may be filled again.
TILE void scores_done(shared &s, ring_pos &k_at, bool last, int wg) {
  ring_release(s.k_ring, k_at);
  ring_next(s.k_ring, k_at);
  if (!O_IN_Q && last) sem_arrive(s.q_free[wg]);
}
// Probabilities of a key block that begins at col0, from its scores.
TILE void probabilities_of(rt<float, BN> &x, const attention_fwd_params &p, const task &t, rv &m, rsum &l, rv &alpha, float c, int row0, int col0) {
  if (FEATURES == ALL_FEATURES && changes_scores(p.features)) {
    cap_scores(x, p.features, p.scale_log2);
    bias_scores(x, slope_of(p.features, t.batch, t.head), row0 + t.seq.keys - t.seq.rows - col0);
  }
  mask(x, t, row0, col0);
  softmax(x, m, l, alpha, c);
  if (FEATURES == ALL_FEATURES && p.features.drop_below) drop(x, p.features, t.batch * p.q_heads + t.head, row0, col0);
}

TILE void compute(const attention_fwd_params &p, shared &s, int wg) {
  ring_pos k_at = {}, v_at = {};
  turn_begin<NC>(wg);
  int next;
  float c = FEATURES == ALL_FEATURES && changes_scores(p.features) ? 1.f : p.scale_log2;
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    task t = task_at(p, next);
    rt<float, BN> x;
    rt<elem, BN> probabilities;
    rt<float, D> o;
    rv m, alpha, sum;
    rsum l;
    int row0 = t.row0 + wg * 64, j = t.first + t.steps - 1;
    fill(m, -infinity());
    fill(l, 0.f);
    sem_wait(s.q_full[wg], count & 1);
    ring_wait(s.k_ring, k_at);
    mma_fence();
    mma_ABt<ZERO>(x, s.q[wg], s.k[k_at.stage]);
    mma_commit();
    mma_wait<0>(x);
    scores_done(s, k_at, j == t.first, wg);
    probabilities_of(x, p, t, m, l, alpha, c, row0, j * BN);
    convert(probabilities, x);
    fill(o, 0.f);
    if (j > t.first) ring_wait(s.k_ring, k_at);
    for (j--; j >= t.first; j--) {   // x: scores with key block j; probabilities and v: block j + 1
      turn_wait<NC>(wg);
      mma_fence();
      mma_ABt<ZERO>(x, s.q[wg], s.k[k_at.stage]);
      mma_commit();
      ring_wait(s.v_ring, v_at);
      mma_fence();
      mma_AB<ACC>(o, probabilities, s.v[v_at.stage]);
      mma_commit();
      turn_pass<NC>(wg);
      mma_wait<1>(x);
      scores_done(s, k_at, j == t.first, wg);
      probabilities_of(x, p, t, m, l, alpha, c, row0, j * BN);
      if (j > t.first) ring_wait(s.k_ring, k_at);   // here, so that the wait for p v stays below softmax (see mma_wait)
      mma_wait<0>(o, probabilities);
      ring_release(s.v_ring, v_at);
      ring_next(s.v_ring, v_at);
      convert(probabilities, x);
      map_row(o, alpha, [](float a, float f) { return a * f; });
    }
    ring_wait(s.v_ring, v_at);
    mma_fence();
    mma_AB<ACC>(o, probabilities, s.v[v_at.stage]);
    mma_commit();
    reduce(sum, l);
    mma_wait<0>(o, probabilities);
    ring_release(s.v_ring, v_at);
    ring_next(s.v_ring, v_at);
    finish(p, s, t, o, m, sum, c, wg);
    queue_release(s.queue, count);
  }
  turn_end<NC>(wg);
  tma_store_wait_read();
}

typedef block<attention_fwd_params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>> kernel;
ENTRY(kernel, BM, BN)
