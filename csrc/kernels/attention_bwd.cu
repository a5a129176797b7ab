// Attention backward (Dao 2023, algorithm 2), for a block of 128 keys that walks over the blocks of M query rows i:
//   s^T = k q_i^T;  p^T = 2^(c s^T - lse2);  dp^T = v dout_i^T;  ds^T = p^T (dp^T - delta)
//   dv += p^T dout_i;  dk += ds^T q_i;  dq_i += ds k   (fp32, in global memory);  c = scale log2 e
// With FEATURES=3 scores are capped and biased and probabilities dropped, as attention_bwd_full.cu's head has it.
// Each of two warpgroups owns 64 keys: p^T and ds^T are then register operands, and dk, dv stay in registers for the whole walk.
// dq needs the ds of both warpgroups, which go through shared memory; it lags two steps behind, so that neither waits for the other.
// A step's matrix work is dq(i - 2), dv and dk(i - 1), s and dp(i), in turns (TURNS) or as it comes; the arithmetic of i runs under the other warpgroup's.
#include "tile/tile.h"
#include "kernels/attention.h"

enum { NC = 2, BN = 64 * NC, BLOCKS = 1, ZEROS = 128, CLEANERS = FEATURES < 2 };   // D, M (query rows a step), TURNS (0 or 1), STAGES, DS_STAGES, DETERMINISTIC, FEATURES (0 to 3), *_REGS
enum { DQ_ROWS = M / NC < 64 ? 0 : 64, DQ_COLS = DQ_ROWS ? 0 : 64 };   // a warpgroup adds 64 x 64 of dq: half of the rows or of the columns
#include "kernels/attention_features.h"
#include "kernels/attention_bwd_tasks.h"
#include "kernels/attention_bwd_features.h"
static_assert(M * D == 64 * 64 * NC, "a step's dq is one 64 x 64 tile for each warpgroup");

struct shared {
  st<elem, 64, D> k[2][NC], v[NC];     // k of even and odd tasks: it is loaded while dk of the task before leaves through the other
  st<elem, M, D> q[STAGES], dout[STAGES];
  st<elem, 64, M> ds[DS_STAGES][NC];   // ds^T: keys x queries
  sv<M> lse2[STAGES], delta[STAGES];
  sv<ZEROS> zeros;
  ring<STAGES, ASYNC_READS> ring_q;    // q and lse2; also hands out the stages of dout
  sem dout_full[STAGES];               // dout and delta
  place at[SLOTS];                     // of step n, from the loader
  ring<DS_STAGES, ASYNC_READS> ring_ds;
  sem trim_full, trim_free;            // PACKED: a stage that is loaded for the trimmer
  int trim_stage, trim_rows;
  held task_of[2];
  sem k_full[2], k_free[2], v_full, v_free;
  task_queue queue;
};

TILE void init(shared &s) {
  ring_init(s.ring_q, arrivals(1, 0, 0), arrivals(0, 0, NC));
  ring_init(s.ring_ds, arrivals(0, 0, NC), arrivals(0, 0, NC));
  for (int i = 0; i < STAGES; i++) sem_init(s.dout_full[i], arrivals(1, 0, 0));
  queue_init(s.queue, arrivals(CLEANERS, 0, NC));
  for (int i = 0; i < 2; i++) {
    sem_init(s.k_full[i], arrivals(1, 0, 0));
    sem_init(s.k_free[i], arrivals(0, 0, NC));
  }
  if (PACKED) {
    sem_init(s.trim_full, arrivals(1, 0, 0));
    sem_init(s.trim_free, arrivals(0, 1, 0));
  }
  sem_init(s.v_full, arrivals(1, 0, 0));
  sem_init(s.v_free, arrivals(0, 0, NC));
}

#include "kernels/attention_bwd_zero.h"
#include "kernels/attention_bwd_loads.h"

struct state { rt<float, D> dk, dv; rt<float, M> s, dp; rt<elem, M> p, ds; };

// s to p, dp to ds, for N queries of step n from the first on; ds also to shared memory, with zeros for the other queries. The fence of ring_fill orders the
// reads of lse2 and delta before their stage is released.
template<int N>
TILE void softmax(rt<float, N> &x, rt<float, N> &dp, rt<elem, N> &prob, rt<elem, N> &ds, const attention_bwd_params &p, shared &s, uint32_t n, int first, int wg) {
  ring_pos at = ring_at<STAGES>(n), to = ring_at<DS_STAGES>(n);
  const place &here = s.at[n % SLOTS];
  int keys = get(here.keys) - wg * 64, diagonal = get(here.diagonal) + first - wg * 64, lower = WINDOWS ? get(here.lower) + first - wg * 64 : -UNMASKED;
  mma_wait<1>(x);
  float c = change_scores(x, p, here, wg * 64, first);
  if (diagonal < 63) triu(x, -diagonal, -infinity());
  if (WINDOWS && lower > -N) tril(x, -lower, -infinity());
  if (keys < 64) map_rc(x, [=](float a, int key, int) { return key < keys ? a : -infinity(); });
  map_col(x, slice<N>(s.lse2[at.stage], first), [=](float a, float l) { return fast_exp2(fused(a, c, -l)); });
  mark_dropped(x, p.features, here, wg * 64, first);
  ring_acquire(s.ring_ds, to);   // here, so that the wait for dp stays below the exponentials (see mma_wait)
  mma_wait<0>(dp);
  if (EVERYTHING) {
    float keep = (p.features.drop_below ? p.features.keep_scale : 1.f) * p.ds_scale;
    rt<float, N> kept = x;
    map_col(dp, x, slice<N>(s.delta[at.stage], first), [=](float a, float b, float d) { return b < 0.f ? b * d : b * fused(a, keep, -d); });
    uncap(dp, x, p, here, slice<N>(s.lse2[at.stage], first), wg * 64, first);
    map(kept, [](float a) { return a < 0.f ? 0.f : a; });
    convert(prob, kept);
  } else {
    map_col(dp, x, slice<N>(s.delta[at.stage], first), [f = p.ds_scale](float a, float b, float d) { return b * fused(a, f, -d); });
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
  mma_AtB<ZERO>(dq, s.ds[at.stage][0], wg * DQ_ROWS, s.k[count & 1][0], wg * DQ_COLS);
  mma_AtB<ACC>(dq, s.ds[at.stage][1], wg * DQ_ROWS, s.k[count & 1][1], wg * DQ_COLS);
  mma_commit();
}
TILE void dq_add(rt<float, 64> &dq, const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
  const place &at = s.at[n % SLOTS];
  int64_t tile = (int64_t)get(at.dq_block) * NC + wg;
  int turn = DETERMINISTIC ? get(at.turn) : -1;
  ring_release(s.ring_ds, ring_at<DS_STAGES>(n));
  if (turn >= 0) order_wait(p.order + tile, turn);
  add_acc(p.dq_acc + tile * 64 * 64, dq);
  if (turn >= 0) order_pass(p.order + tile, turn + 1);
}

// Matrix work on the steps before the n-th: dv and dk of n - 1, and dq of n - 2 if the task has a step n - 2.
template<bool DQ> TILE void catch_up(state &a, const attention_bwd_params &p, shared &s, uint32_t n, uint32_t count, int wg) {
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

#include "kernels/attention_bwd_ends.h"

// The last products of a task whose steps end before n, and its results; early: the n-th is an end_step. The store of dk is left running.
TILE void finish(state &a, const attention_bwd_params &p, shared &s, uint32_t n, uint32_t count, bool early, int wg) {
  rt<float, 64> dq;
  const held &t = s.task_of[count & 1];
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
  sem_arrive(s.v_free);
  bar_sync(NC + 1, 128 * NC);   // both have done with k
  leave(p.dk, s.k[count & 1][wg], a.dk, row, head, batch, acc, keys);
  queue_release(s.queue, count);
}
TILE void compute(const attention_bwd_params &p, shared &s, int wg) {
  uint32_t n = 0;
  grid_wait();
  if (TURNS) turn_begin<NC>(wg);
  for (uint32_t count = 0; queue_take(s.queue, count) < p.tasks; count++) {
    state a;
    sem_wait(s.k_full[count & 1], (count / 2) & 1);
    sem_wait(s.v_full, count & 1);
    const held &t = s.task_of[count & 1];
    // Its own keys. ring_ds orders that for the other, which reads k for dq.
    if (PACKED) {
      clear_rest(s.k[count & 1][wg], s.v[wg], get(t.own) - wg * 64);
      if (!TURNS) wg_sync();   // else the turn's barrier does
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
      mma_ABt<ZERO>(a.s, s.k[count & 1][wg], s.q[at.stage]);
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

typedef block<attention_bwd_params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<cleaner, THREAD, CLEANERS, LOAD_REGS>, role<trimmer, WARP, PACKED, LOAD_REGS>, DEPENDENT> kernel;
ENTRY(kernel, M, BN)
