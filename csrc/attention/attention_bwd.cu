// Attention backward (Dao 2023, algorithm 2), for a block of 128 keys that walks over the blocks of M query rows i:
//   s^T = k q_i^T;  p^T = 2^(c s^T - lse2);  dp^T = v dout_i^T;  ds^T = p^T (dp^T - delta)
//   dv += p^T dout_i;  dk += ds^T q_i;  dq_i += ds k   (fp32, in global memory);  c = scale log2 e
// lse2 = lse log2 e and delta = rowsum(o dout) - dlse come from attention_bwd_pre.cu; attention_bwd_post.cu rounds dq.
// With FEATURES_ALL scores are capped and biased and probabilities dropped, by the formulas of attention_bwd_full.cu.
// Each of two warpgroups owns 64 keys: p^T and ds^T are then register operands, and dk, dv stay in registers for the
// whole walk.
// dq needs the ds of both warpgroups, which go through shared memory. It lags two steps behind, so that neither waits
// for the other.
// A step's matrix work is dq(i - 2), dv and dk(i - 1), s and dp(i), in turns (TURNS) or as it comes; the arithmetic of
// i runs under the other warpgroup's.
#include "attention/attention_bwd.h"

// From the row: D, M (query rows a step), TURNS (1: the warpgroups' matrix work in turns), STAGES (of q and dout),
// DS_STAGES, DETERMINISTIC, FEATURES, *_REGS
enum { NC = 2, BN = 64 * NC, ZEROS = 128, ZERO_WRITERS = !PACKED };
// a warpgroup adds 64 x 64 of dq: half of the rows or of the columns
enum { DQ_ROWS = M / NC < 64 ? 0 : 64, DQ_COLS = DQ_ROWS ? 0 : 64 };
static_assert(M * D == 64 * 64 * NC, "a step's dq is one 64 x 64 tile for each warpgroup");

struct shared {
  st<elem, 64, D> k[2][NC], v[NC];     // k of two tasks: it is loaded while dk of the task before leaves through the
                                       // other
  st<elem, M, D> q[STAGES], dout[STAGES];
  st<elem, 64, M> ds[DS_STAGES][NC];   // ds^T: keys x queries
  sv<M> lse2[STAGES], delta[STAGES];
  sv<ZEROS> zeros;
  ring<STAGES, ASYNC_READS> ring_q;    // q and lse2; also hands out the stages of dout. full: by the loader's expect,
                                       // or by the trimmer's arrival. Its release has no fence: softmax, which reads
                                       // lse2 and delta through registers, has one in ring_fill
  sem dout_full[STAGES];               // dout and delta
  step_info info[SLOTS];               // of step n, from the loader
  ring<DS_STAGES, ASYNC_READS> ring_ds;
  ring<1, ASYNC_READS> ring_trim;      // PACKED: full when a stage of q and dout is loaded for the trimmer;
  int trim_stage, trim_rows;           // which stage that is, and how many of its rows stay
  key_task_smem task_of[2];            // of even and odd tasks, as in the queue
  ring<2, ASYNC_READS> ring_k;
  ring<1, ASYNC_READS> ring_v;
  task_queue queue;
};

TILE void init(shared &s) {
  ring_init(s.ring_q, arrivals(1, 0, 0), arrivals(0, 0, NC));
  ring_init(s.ring_ds, arrivals(0, 0, NC), arrivals(0, 0, NC));
  for (int i = 0; i < STAGES; i++) sem_init(s.dout_full[i], arrivals(1, 0, 0));
  queue_init(s.queue, arrivals(ZERO_WRITERS, 0, NC));
  ring_init(s.ring_k, arrivals(1, 0, 0), arrivals(0, 0, NC));
  if (PACKED) ring_init(s.ring_trim, arrivals(1, 0, 0), arrivals(0, 1, 0));
  ring_init(s.ring_v, arrivals(1, 0, 0), arrivals(0, 0, NC));
}

// ---- what feeds the compute warpgroups

// Zeros of dq for a later head. Kernels for packed sequences lack this role: attention_bwd_pre.cu writes all zeros for
// them. writes_zeros() in attention_bwd.c knows that.
TILE void zero_writer(const attention_bwd_params &p, shared &s, int) { write_zeros<M, 1>(p, s.zeros, s.queue); }

// Warpgroup or warp. Rows from `rows` on of two tiles become 0. They belong to other sequences or to none, and 0 times
// what they hold may be NaN.
template<int W = WARPGROUP, int R> TILE void clear_rest(st<elem, R, D> &a, st<elem, R, D> &b, int rows) {
  if (rows >= R) return;
  clear_rows<W>(a, 0, rows);
  clear_rows<W>(b, 0, rows);
  fence_async();
}
// Thread (the loader). Only the first `rows` rows of this stage are the sequence's. The stage's copies then complete
// ring_trim instead, and the trimmer clears the other rows and makes the stage full.
TILE void hand_to_trimmer(shared &s, uint32_t trims, int stage, int rows) {
  ring_acquire(s.ring_trim, ring_at<1>(trims));
  put(s.trim_stage, stage);
  put(s.trim_rows, rows);
  ring_expect(s.ring_trim, ring_at<1>(trims), stage < 0 ? 0 : 2 * (tile_bytes(s.q[0]) + M * 4));
}
// Clears the rows that are not the sequence's. Stage -1 is the end.
TILE void trimmer(const attention_bwd_params &, shared &s, int) {
  for (uint32_t count = 0;; count++) {
    ring_wait(s.ring_trim, ring_at<1>(count));
    int stage = get(s.trim_stage);
    if (stage < 0) break;
    clear_rest<WARP>(s.q[stage], s.dout[stage], get(s.trim_rows));
    sem_arrive<WARP>(s.ring_q.full[stage]);
    sem_arrive<WARP>(s.dout_full[stage]);
    ring_release<WARP>(s.ring_trim, ring_at<1>(count));
  }
}

TILE void loader(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0, trims = 0;
  int next = 0;
  grid_wait();
  for (uint32_t count = 0; (next = draw<M, BN>(p, s.queue, count, next)) < p.tasks; count++) {
    key_task_smem &t = s.task_of[count % 2];
    put_task<BN>(t, p, task_at<M, BN>(p, next));
    int steps = get(t.steps);
    for (int step = 0; step < steps; step++, n++) {
      ring_pos at = ring_at<STAGES>(n), k = ring_at<2>(count), v = ring_at<1>(count);
      int head = head_of(t, p, step), block = block_of(t, step), row = get(t.q0) + block * M, batch = get(t.batch);
      int64_t stats = (int64_t)(get(t.base) + head * p.q_padded + block) * M;
      ring_acquire(s.ring_q, at);
      if (ZERO_WRITERS && step == 1) wait_for_zeros<1>(p, t);
      put_step<M, BN>(s.info[n % SLOTS], p, t, head, block);
      bool trim = PACKED && get(s.info[n % SLOTS].rows) < M;
      sem &q_full = trim ? s.ring_trim.full[0] : s.ring_q.full[at.stage];
      sem &dout_full = trim ? s.ring_trim.full[0] : s.dout_full[at.stage];
      if (trim) hand_to_trimmer(s, trims++, at.stage, get(s.info[n % SLOTS].rows));
      else sem_expect(q_full, tile_bytes(s.q[0]) + M * 4);
      load_step(s.q[at.stage], s.lse2[at.stage], p.q, q_full, row, head, batch, p.lse2, stats);
      if (step == 0) {
        ring_acquire(s.ring_k, k);
        ring_expect(s.ring_k, k, NC * tile_bytes(s.v[0]));
        for (int w = 0; w < NC; w++) tma_load(s.k[k.stage][w], p.k, s.ring_k.full[k.stage], get(t.row) + w * 64, 0,
                                              key_head(t, p), batch);
      }
      if (!trim) sem_expect(dout_full, tile_bytes(s.dout[0]) + M * 4);
      load_step(s.dout[at.stage], s.delta[at.stage], p.dout, dout_full, row, head, batch, p.delta, stats);
      if (step == 0) {
        ring_acquire(s.ring_v, v);
        ring_expect(s.ring_v, v, NC * tile_bytes(s.v[0]));
        for (int w = 0; w < NC; w++) tma_load(s.v[w], p.v, s.ring_v.full[v.stage], get(t.row) + w * 64, 0,
                                              key_head(t, p), batch);
      }
    }
  }
  if (PACKED) hand_to_trimmer(s, trims, -1, 0);
}

// ---- softcap, ALiBi and dropout: tiles of 64 keys x N query rows, which begin at (key0, row0) of the step. Without
// EVERYTHING they compile to nothing

TILE float slope_at(const attention_features &f, const attention_bwd_params &p, const step_info &info) {
  int bh = get(info.head), batch = f.slopes ? bh / p.q_heads : 0;
  return slope_of(f, batch, bh - batch * p.q_heads);
}
// Scores as the softmax sees them, up to the factor that is returned.
template<int N>
TILE float change_scores(rt<float, N> &x, const attention_bwd_params &p, const step_info &info, int key0, int row0) {
  if (!EVERYTHING || !changes_scores(p.features)) return p.scale_log2;
  if (p.features.softcap != 0.f) cap_usual_scores(x, p.features.softcap, p.scale_log2);
  else map(x, [c = p.scale_log2](float y) { return y * c; });
  bias_scores(x, slope_at(p.features, p, info), key0 - row0 - get(info.distance));
  return 1.f;
}
// Probabilities that are dropped get a sign.
template<int N>
TILE void mark_dropped(rt<float, N> &prob, const attention_features &f, const step_info &info, int key0, int row0) {
  if (!EVERYTHING || !f.drop_below) return;
  uint32_t word = head_key(f, get(info.head)), below = f.drop_below;
  key0 += get(info.key);
  row0 += get(info.row);
  map_col_pairs(prob, [=](float &a, float &a8, int key, int row) {
    uint32_t bits = random_bits(word, row0 + row, key0 + key);
    if (drops(bits, below)) a = -a;
    if (drops_8(bits, below)) a8 = -a8;
  });
}
// ds of the capped scores to ds of the scores before the cap. The cap's slope, 1 - tanh^2, follows from the
// probabilities: a capped score is log2 p + lse2, less its bias. Rounding makes that uncertain by some 2^-20. The slope
// is made smaller by as much, so that it is 0 where the cap is reached, whatever it is multiplied by. Where p is 0, or
// a row has no keys (lse2 is inf), the slope does not matter, but must not be NaN.
template<int N>
TILE void uncap(rt<float, N> &ds, const rt<float, N> &prob, const attention_bwd_params &p, const step_info &info,
                const sv<N> &lse2, int key0, int row0) {
  if (!EVERYTHING || p.features.softcap == 0.f) return;
  float inverse = 1.f / (p.features.softcap * 1.4426950408889634f), slope = slope_at(p.features, p, info);
  int distance = get(info.distance) + row0 - key0;
  // The bias is subtracted without ALiBi too: both forms together take more registers than there are.
  map_rc(ds, prob, lse2, [=](float a, float prob, float l, int key, int row) {
    float steps = (float)(distance + row - key);
    float t = (fast_log2(prob < 0.f ? -prob : prob) + l + slope * (steps < 0.f ? -steps : steps)) * inverse;
    float less = fused(-t, t, 0.999998f);
    return a * (less > 0.f ? less : 0.f);
  });
}

// ---- steps

struct state { rt<float, D> dk, dv; rt<float, M> s, dp; rt<elem, M> p, ds; };

// s to p and dp to ds, for N queries of step n from query `first` on. ds also goes to shared memory, with zeros for the
// other queries. The fence of ring_fill orders the reads of lse2 and delta before their stage is released.
template<int N>
TILE void softmax(rt<float, N> &x, rt<float, N> &dp, rt<elem, N> &prob, rt<elem, N> &ds, const attention_bwd_params &p,
                  shared &s, uint32_t n, int first, int wg) {
  ring_pos at = ring_at<STAGES>(n), to = ring_at<DS_STAGES>(n);
  const step_info &info = s.info[n % SLOTS];
  int keys = get(info.keys) - wg * 64, diagonal = get(info.diagonal) + first - wg * 64;
  int lower = WINDOWS ? get(info.lower) + first - wg * 64 : -UNMASKED;
  mma_wait<1>(x);
  float c = change_scores(x, p, info, wg * 64, first);
  probabilities(x, slice<N>(s.lse2[at.stage], first), c, keys, diagonal, lower);
  mark_dropped(x, p.features, info, wg * 64, first);
  ring_acquire(s.ring_ds, to);   // here, so that the wait for dp stays below the exponentials (see mma_wait)
  mma_wait<0>(dp);
  if (EVERYTHING) {
    float keep = (p.features.drop_below ? p.features.keep_scale : 1.f) * p.ds_scale;
    rt<float, N> kept = x;
    map_col(dp, x, slice<N>(s.delta[at.stage], first),
            [=](float a, float b, float d) { return b < 0.f ? b * d : b * fused(a, keep, -d); });
    uncap(dp, x, p, info, slice<N>(s.lse2[at.stage], first), wg * 64, first);
    map(kept, [](float a) { return a < 0.f ? 0.f : a; });
    convert(prob, kept);
  } else {
    score_gradient(dp, x, slice<N>(s.delta[at.stage], first), p.ds_scale);
    convert(prob, x);
  }
  convert(ds, dp);
  store(s.ds[to.stage][wg], ds, first);
  if constexpr (N < M) {
    fill(x, 0.f);
    store(s.ds[to.stage][wg], x, M - N - first);
  }
  ring_fill(s.ring_ds, to);
}

// dv += p^T dout, dk += ds^T q of step n
template<int A> TILE void grads_issue(state &a, shared &s, uint32_t n) {
  int stage = ring_at<STAGES>(n).stage;
  mma_fence();
  mma_AB<A>(a.dv, a.p, s.dout[stage]);
  mma_AB<A>(a.dk, a.ds, s.q[stage]);
  mma_commit();
}
// this warpgroup's half of dq of step n, over all keys of the block
TILE void dq_issue(rt<float, 64> &dq, shared &s, uint32_t n, uint32_t count, int wg) {
  ring_pos at = ring_at<DS_STAGES>(n);
  ring_wait(s.ring_ds, at);
  mma_fence();
  mma_AtB<ZERO>(dq, s.ds[at.stage][0], wg * DQ_ROWS, s.k[count % 2][0], wg * DQ_COLS);
  mma_AtB<ACC>(dq, s.ds[at.stage][1], wg * DQ_ROWS, s.k[count % 2][1], wg * DQ_COLS);
  mma_commit();
}
TILE void dq_add(rt<float, 64> &dq, const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
  const step_info &info = s.info[n % SLOTS];
  int64_t tile = (int64_t)get(info.dq_block) * NC + wg;
  int position = position_of(info);
  ring_release(s.ring_ds, ring_at<DS_STAGES>(n));
  add_dq(p, tile, position, dq);
}

// Matrix work on the steps before the n-th: dv and dk of n - 1, and dq of n - 2 if the task has a step n - 2.
template<bool DQ>
TILE void catch_up(state &a, const attention_bwd_params &p, shared &s, uint32_t n, uint32_t count, int wg) {
  rt<float, 64> dq;
  if constexpr (DQ) dq_issue(dq, s, n - 2, count, wg);
  grads_issue<DQ ? ACC : ZERO>(a, s, n - 1);
  if constexpr (DQ) {
    mma_wait<1>(dq);
    dq_add(dq, p, s, n - 2, wg);
  }
  mma_wait<0>(a.dv, a.dk, a.p, a.ds);
  ring_release(s.ring_q, ring_at<STAGES>(n - 1));
}

// ---- a task's ends, where a warpgroup sees only a part of the step

// begins_late: the first 64 rows of a task's first step see none of the second warpgroup's 64 keys. ends_early: the
// last 64 rows of its last step see none of the first one's. (Where the first rows do not see the first warpgroup's
// keys, they see none of the block's; likewise for the last rows and the second one's.)
TILE bool begins_late(const key_task_smem &h, int wg) {
  return BN == 128 && wg > 0 && get(h.first) * M + 63 + get(h.diagonal) - get(h.key0) < 64;
}
TILE bool ends_early(const key_task_smem &h, int wg) {
  return BN == 128 && WINDOWS && wg == 0 && get(h.steps) > 2 && (get(h.first) + get(h.blocks)) * M - 64 + get(h.lower)
    - get(h.key0) > 63;
}
// One step from its products to dv and dk, without the 64 rows that see nothing of this warpgroup's keys: a task's
// first step for the second warpgroup (begins_late), its last step for the first (ends_early). Where a step has 64
// rows, that is all of them: ds is zeros, and the stage is only waited for and released. No product is in flight.
template<int A>
TILE void end_step(state &a, const attention_bwd_params &p, shared &s, uint32_t n, uint32_t count, int wg) {
  ring_pos at = ring_at<STAGES>(n), to = ring_at<DS_STAGES>(n);
  int first = A == ZERO ? M - 64 : 0;
  OVERLAY(float, 64, x, a.s);
  OVERLAY(float, 64, dp, a.dp);
  OVERLAY(elem, 64, prob, a.p);
  OVERLAY(elem, 64, ds, a.ds);
  if (TURNS) turn_wait<NC>(wg);
  ring_wait(s.ring_q, at);
  if constexpr (M == 64) {
    if (TURNS) turn_pass<NC>(wg);
    sem_wait(s.dout_full[at.stage], at.phase);
    if (A == ZERO) fill(a.dk, 0.f), fill(a.dv, 0.f);
    fill(x, 0.f);
    ring_acquire(s.ring_ds, to);
    store(s.ds[to.stage][wg], x);
    ring_fill(s.ring_ds, to);
  } else {
    mma_fence();
    mma_ABt_rows<ZERO>(x, s.k[count % 2][wg], s.q[at.stage], first);
    mma_commit();
    sem_wait(s.dout_full[at.stage], at.phase);
    mma_fence();
    mma_ABt_rows<ZERO>(dp, s.v[wg], s.dout[at.stage], first);
    mma_commit();
    if (TURNS) turn_pass<NC>(wg);
    softmax(x, dp, prob, ds, p, s, n, first, wg);
    mma_fence();
    mma_AB_rows<A>(a.dv, prob, s.dout[at.stage], first);
    mma_AB_rows<A>(a.dk, ds, s.q[at.stage], first);
    mma_commit();
    mma_wait<0>(a.dv, a.dk, prob, ds);
  }
  ring_release(s.ring_q, at);
}
// Releases the k of the task before, once its dk has left through it.
TILE void free_k(shared &s, uint32_t count) {
  tma_store_wait_read();
  if (count > 0) ring_release(s.ring_k, ring_at<2>(count - 1));
}

// The last products of a task whose steps end before n, and its results; early: the n-th is an end_step. The store of
// dk is left running.
TILE void finish(state &a, const attention_bwd_params &p, shared &s, uint32_t n, uint32_t count, bool early, int wg) {
  rt<float, 64> dq;
  const key_task_smem &t = s.task_of[count % 2];
  float scale = p.out_scale;
  int row = get(t.row) + wg * 64, head = key_head(t, p), batch = get(t.batch);
  int acc = acc_block(p, batch, get(t.part), get(t.key0)) + (PACKED ? get(t.acc0) : 0) + wg;
  int keys = PACKED && p.features.q_start ? get(t.keys) - wg * 64 : 64;
  catch_up<true>(a, p, s, n, count, wg);
  if (early) end_step<ACC>(a, p, s, n, count, wg);
  if (EVERYTHING && p.features.drop_below) map(a.dv, [keep = p.features.keep_scale](float x) { return x * keep; });
  leave(p.dv, s.v[wg], a.dv, row, head, batch, acc, keys);   // only this warpgroup reads this v
  ROLLED for (uint32_t end = n + early; n <= end; n++) {
    dq_issue(dq, s, n - 1, count, wg);
    mma_wait<0>(dq);
    dq_add(dq, p, s, n - 1, wg);
  }
  scale_gradient(a.dk, scale);
  tma_store_wait_read();
  ring_release(s.ring_v, ring_at<1>(count));
  bar_sync(NC + 1, 128 * NC);   // both have done with k
  leave(p.dk, s.k[count % 2][wg], a.dk, row, head, batch, acc, keys);
  queue_release(s.queue, count);
}
TILE void compute(const attention_bwd_params &p, shared &s, int wg) {
  uint32_t n = 0;
  grid_wait();
  if (TURNS) turn_begin<NC>(wg);
  for (uint32_t count = 0; queue_take(s.queue, count) < p.tasks; count++) {
    state a;
    ring_wait(s.ring_k, ring_at<2>(count));
    ring_wait(s.ring_v, ring_at<1>(count));
    const key_task_smem &t = s.task_of[count % 2];
    // Each warpgroup clears its own keys. The other one reads k for dq, when it has waited for ring_ds.
    if (PACKED) {
      clear_rest(s.k[count % 2][wg], s.v[wg], get(t.own) - wg * 64);
      if (!TURNS) wg_sync();   // all four warps have cleared; with TURNS, turn_wait sees to that
    }
    uint32_t begin = n, end = n + get(t.steps) - ends_early(t, wg);
    if (begins_late(t, wg)) {   // asked again below, rather than kept in a register
      end_step<ZERO>(a, p, s, n++, count, wg);
      free_k(s, count);
    }
    for (; n < end; n++) {
      ring_pos at = ring_at<STAGES>(n);
      if (TURNS) turn_wait<NC>(wg);
      if (n > begin + 1) catch_up<true>(a, p, s, n, count, wg);
      else if (n > begin && !begins_late(t, wg)) {
        catch_up<false>(a, p, s, n, count, wg);
        free_k(s, count);
      }
      ring_wait(s.ring_q, at);
      mma_fence();
      mma_ABt<ZERO>(a.s, s.k[count % 2][wg], s.q[at.stage]);
      mma_commit();
      sem_wait(s.dout_full[at.stage], at.phase);
      mma_fence();
      mma_ABt<ZERO>(a.dp, s.v[wg], s.dout[at.stage]);
      mma_commit();
      if (TURNS) turn_pass<NC>(wg);
      softmax(a.s, a.dp, a.p, a.ds, p, s, n, 0, wg);
    }
    bool early = WINDOWS && n - begin < (uint32_t)get(t.steps);
    finish(a, p, s, n, count, early, wg);
    n += early;
  }
  tma_store_wait_read();
  if (TURNS) turn_end<NC>(wg);
}

typedef block<attention_bwd_params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>,
              role<loader, THREAD, 1, LOAD_REGS>, role<zero_writer, THREAD, ZERO_WRITERS, LOAD_REGS>,
              role<trimmer, WARP, PACKED, LOAD_REGS>, DEPENDENT> kernel;
ENTRY(kernel, M, BN)
