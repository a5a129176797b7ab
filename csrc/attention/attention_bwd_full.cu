// Attention backward with all features for wide heads (Dao 2023, algorithm 2), for a block of 64 keys that walks over
// the blocks of 64 query rows i:
//   x = cap(q_i k^T) - slope |distance|;  p = 2^(c x - lse2);  dp = keep * dout_i v^T
//   ds = p (dp - delta) cap'(q_i k^T);  dv += (keep * p)^T dout_i;  dk += ds^T q_i
//   dq_i += ds k   (fp32, in global memory);  c = scale log2 e;  keep: 0 or 1 / (1 - dropout)
// dk and dv of 64 keys fill the registers of two warpgroups: each owns half of the columns of dk, dv and dq, and
// computes p and ds for half of the keys, which both then read from shared memory.
#include "attention/attention_bwd.h"

// From the row: D (256), DETERMINISTIC, FEATURES (3), *_REGS
enum { NC = 2, BN = 64, M = 64, STAGES = 2, HALF = D / NC, KEYS = BN / NC };

struct shared {
  st<elem, BN, D> k, v;
  st<elem, M, D> q[STAGES], dout[STAGES];
  st<elem, M, BN> p[2], ds[2];         // of even and odd steps
  sv<M> lse2[STAGES], delta[STAGES];
  ring<STAGES, ASYNC_READS> ring_q;    // q and lse2 (read before the fence in softmax); also hands out the stages of
                                       // dout
  sem dout_full[STAGES];               // dout and delta
  step_info info[SLOTS];               // of step n, from the loader
  key_task_smem task_of[2];            // of even and odd tasks, as in the queue
  ring<1, ASYNC_READS> ring_kv;
  task_queue queue;
};

TILE void init(shared &s) {
  ring_init(s.ring_q, arrivals(1, 0, 0), arrivals(0, 0, NC));
  for (int i = 0; i < STAGES; i++) sem_init(s.dout_full[i], arrivals(1, 0, 0));
  queue_init(s.queue, arrivals(0, 0, NC));
  ring_init(s.ring_kv, arrivals(1, 0, 0), arrivals(0, 0, 1));
}

TILE void loader(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next = 0;
  for (uint32_t count = 0; (next = draw<M, BN>(p, s.queue, count, next)) < p.tasks; count++) {
    key_task_smem &t = s.task_of[count % 2];
    put_task<BN>(t, p, task_at<M, BN>(p, next));
    int steps = get(t.steps), batch = get(t.batch);
    ring_pos kv = ring_at<1>(count);
    ring_acquire(s.ring_kv, kv);
    ring_expect(s.ring_kv, kv, tile_bytes(s.k) + tile_bytes(s.v));
    tma_load(s.k, p.k, s.ring_kv.full[0], get(t.row), 0, key_head(t, p), batch);
    tma_load(s.v, p.v, s.ring_kv.full[0], get(t.row), 0, key_head(t, p), batch);
    for (int step = 0; step < steps; step++, n++) {
      ring_pos at = ring_at<STAGES>(n);
      int head = head_of(t, p, step), block = block_of(t, step), row = get(t.q0) + block * M;
      int64_t stats = (int64_t)(get(t.base) + head * p.q_padded + block) * M;
      ring_acquire(s.ring_q, at);
      put_step<M, BN>(s.info[n % SLOTS], p, t, head, block);
      ring_expect(s.ring_q, at, tile_bytes(s.q[0]) + M * 4);
      load_step(s.q[at.stage], s.lse2[at.stage], p.q, s.ring_q.full[at.stage], row, head, batch, p.lse2, stats);
      sem_expect(s.dout_full[at.stage], tile_bytes(s.dout[0]) + M * 4);
      load_step(s.dout[at.stage], s.delta[at.stage], p.dout, s.dout_full[at.stage], row, head, batch, p.delta, stats);
    }
  }
}

// Scores to probabilities. Where scores are capped, g becomes the cap's slope.
TILE void probabilities(rt<float, KEYS> &x, rt<float, KEYS> &g, const attention_bwd_params &p, const step_info &info,
                        const rv &lse2, int key0) {
  const attention_features &f = p.features;
  int keys = get(info.keys) - key0, diagonal = get(info.diagonal) - key0, lower = get(info.lower) - key0;
  float c = p.scale_log2;
  if (changes_scores(f)) {
    float to_cap = fast_rcp(f.softcap);   // c x / (softcap log2 e) times 2 log2 e is c x to_cap 2
    int bh = get(info.head), batch = bh / p.q_heads;
    if (f.softcap != 0.f) map(g, x, [=](float, float y) {   // 1 - tanh^2, which is 0 far out
      float e = fast_exp2(-2.f * fabsf(y * c * to_cap)), r = fast_rcp(1.f + e);
      return 4.f * e * r * r;
    });
    cap_scores(x, f, c);
    bias_scores(x, slope_of(f, batch, bh - batch * p.q_heads), get(info.distance) - key0);
    c = 1.f;
  }
  if (diagonal < KEYS - 1) tril(x, diagonal, -infinity());
  if (lower > -M) triu(x, lower, -infinity());
  if (keys < KEYS) map_rc(x, [=](float a, int, int key) { return key < keys ? a : -infinity(); });
  map_row(x, lse2, [=](float a, float l) { return fast_exp2(fused(a, c, -l)); });
}

// Rows from `rows` on of two tiles become 0, each warpgroup clears one. They belong to other sequences or to none, and
// 0 times what they hold may be NaN.
TILE void clear_both(st<elem, 64, D> &a, st<elem, 64, D> &b, int rows, int wg) {
  clear_rows(wg == 0 ? a : b, 0, rows);
  fence_async();
  bar_sync(1, 128 * NC);
}

// p and ds of step n for this warpgroup's keys, to shared memory.
TILE void softmax(const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
  rt<float, KEYS> x, dp, g;
  rv lse2, delta;
  ring_pos at = ring_at<STAGES>(n);
  const step_info &info = s.info[n % SLOTS];
  const attention_features &f = p.features;
  int key0 = wg * KEYS;
  ring_wait(s.ring_q, at);
  if (get(info.rows) < M) {
    sem_wait(s.dout_full[at.stage], at.phase);
    clear_both(s.q[at.stage], s.dout[at.stage], get(info.rows), wg);
  }
  mma_fence();
  mma_ABt_rows<ZERO>(x, s.q[at.stage], s.k, key0);
  mma_commit();
  sem_wait(s.dout_full[at.stage], at.phase);
  mma_fence();
  mma_ABt_rows<ZERO>(dp, s.dout[at.stage], s.v, key0);
  mma_commit();
  load(lse2, s.lse2[at.stage]);
  load(delta, s.delta[at.stage]);
  fill(g, 1.f);
  mma_wait<1>(x);
  probabilities(x, g, p, info, lse2, key0);
  mma_wait<0>(dp);
  if (f.drop_below) {   // what is dropped gets a sign
    uint32_t word = head_key(f, get(info.head)), below = f.drop_below;
    int row0 = get(info.row), col0 = get(info.key) + key0;
    float keep = f.keep_scale;
    map_row_pairs(x, [=](float &a, float &a8, int row, int col) {
      uint32_t bits = random_bits(word, row0 + row, col0 + col);
      if (drops(bits, below)) a = -a;
      if (drops_8(bits, below)) a8 = -a8;
    });
    map(dp, x, [=](float a, float prob) { return prob < 0.f ? 0.f : a * keep; });
  }
  map_row(dp, delta, [f = p.ds_scale](float a, float d) { return fused(a, f, -d); });
  map(dp, x, [](float a, float prob) { return a * (prob < 0.f ? -prob : prob); });
  map(dp, g, [](float a, float slope) { return a * slope; });
  if (f.drop_below) map(x, [](float a) { return a > 0.f ? a : 0.f; });
  store(s.p[n % 2], x, key0);
  store(s.ds[n % 2], dp, key0);
  fence_async();
  bar_sync(1, 128 * NC);   // both halves are there; and both warpgroups have read those of the step before
}

// A quarter of dq of step n: 64 columns from col.
TILE void dq_add(const attention_bwd_params &p, shared &s, uint32_t n, int col) {
  rt<float, 64> dq;
  const step_info &info = s.info[n % SLOTS];
  int position = position_of(info);
  int64_t tile = (int64_t)get(info.dq_block) * (D / 64) + col / 64;
  mma_fence();
  mma_AB_cols<ZERO>(dq, s.ds[n % 2], s.k, col);
  mma_commit();
  mma_wait<0>(dq);
  add_dq(p, tile, position, dq);
}

TILE void finish(const attention_bwd_params &p, shared &s, uint32_t count, rt<float, HALF> &dk, rt<float, HALF> &dv,
                 int wg) {
  const key_task_smem &t = s.task_of[count % 2];
  float scale = p.out_scale, keep = p.features.drop_below ? p.features.keep_scale : 1.f;
  int row = get(t.row), head = key_head(t, p), keys = get(t.keys), col = wg * HALF;
  bool whole = !p.features.q_start || keys >= BN;   // else the next sequence's keys follow
  scale_gradient(dk, scale);
  map(dv, [=](float x) { return x * keep; });
  if (!whole) {
    store_first((elem *)p.dk.data + row * p.dk.row + head * p.dk.head + col, p.dk.row, dk, keys, p.dk.columns - col);
    store_first((elem *)p.dv.data + row * p.dv.row + head * p.dv.head + col, p.dv.row, dv, keys, p.dv.columns - col);
  }
  // all warps' products have read this half of k and v; since softmax's barrier the other warpgroup reads its own only
  wg_sync();
  store(s.k, dk, col);
  store(s.v, dv, col);
  fence_async();
  bar_sync(1, 128 * NC);
  if (wg != 0) return;
  if (whole) {
    tma_store(p.dk.map, s.k, row, 0, head, get(t.batch));
    tma_store(p.dv.map, s.v, row, 0, head, get(t.batch));
  }
  tma_store_wait_read();
  ring_release(s.ring_kv, ring_at<1>(count));
}

TILE void compute(const attention_bwd_params &p, shared &s, int wg) {
  uint32_t n = 0;
  for (uint32_t count = 0; queue_take(s.queue, count) < p.tasks; count++) {
    rt<float, HALF> dk, dv;
    ring_wait(s.ring_kv, ring_at<1>(count));
    if (get(s.task_of[count % 2].own) < BN) clear_both(s.k, s.v, get(s.task_of[count % 2].own), wg);
    fill(dk, 0.f);
    fill(dv, 0.f);
    uint32_t end = n + get(s.task_of[count % 2].steps);
    for (; n < end; n++) {
      ring_pos at = ring_at<STAGES>(n);
      softmax(p, s, n, wg);
      mma_fence();
      mma_AtB<ACC>(dv, s.p[n % 2], 0, s.dout[at.stage], wg * HALF);
      mma_AtB<ACC>(dk, s.ds[n % 2], 0, s.q[at.stage], wg * HALF);
      mma_commit();
      mma_wait<0>(dv, dk);
      for (int col = 0; col < HALF; col += 64) dq_add(p, s, n, wg * HALF + col);
      ring_release(s.ring_q, at);
    }
    finish(p, s, count, dk, dv, wg);
    queue_release(s.queue, count);
  }
}

typedef block<attention_bwd_params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>,
              role<loader, THREAD, 1, LOAD_REGS>> kernel;
ENTRY(kernel, M, BN)
