// Attention backward (Dao 2023, algorithm 2) for values narrower than keys, for a block of 128 keys that walks over the blocks of 64 query rows i:
//   s^T = k q_i^T;  p^T = 2^(c s^T - lse2);  dp^T = v dout_i^T;  ds^T = p^T (dp^T - delta)
//   dv += p^T dout_i;  dk += ds^T q_i;  dq_i += ds k   (fp32, in global memory);  c = scale log2 e
// Each of two warpgroups owns 64 keys, as in attention_bwd.cu. Their dk and dv leave registers for one more 64 x 64 tile only, and for p: s, dp and dq
// follow each other there, and ds is an operand in shared memory. A step therefore waits for each of its products, while the other warpgroup's run; but
// dk of the step before runs under the exponentials, and dv under the additions to dq.
// dq's columns are one panel of 64 for each warpgroup and half of a third; it lags a step behind, so that the other's ds is there.
#include "tile/tile.h"
#include "kernels/attention.h"

enum { NC = 2, BN = 64 * NC, M = 64, BLOCKS = 1, ZEROS = 128, DS_STAGES = 2 };   // D (of q and k), DV (of v), Q_STAGES, DOUT_STAGES, DETERMINISTIC, FEATURES (0), *_REGS
#include "kernels/attention_features.h"
#include "kernels/attention_bwd_tasks.h"
static_assert(D == 3 * 64 && NC == 2, "a step's dq is one and a half 64 x 64 tiles for each warpgroup");
static_assert(Q_STAGES > DOUT_STAGES, "q of a step is loaded when dout of the step before is");

struct shared {
  st<elem, 64, D> k[NC];
  st<elem, 64, DV> v[NC];
  st<elem, M, D> q[Q_STAGES];
  st<elem, M, DV> dout[DOUT_STAGES];
  st<elem, 64, M> ds[DS_STAGES][NC];           // ds^T: keys x queries
  sv<M> lse2[Q_STAGES], delta[DOUT_STAGES];
  sv<ZEROS> zeros;
  ring<DOUT_STAGES, ASYNC_READS> ring_dout;    // with delta; also hands out the stages of q
  sem q_full[Q_STAGES];                        // with lse2
  place at[SLOTS];                             // of step n, from the loader,
  int task_of[SLOTS];                          // and which of the block's tasks it belongs to
  ring<DS_STAGES, ASYNC_READS> ring_ds;
  held now;                                    // the loader's task,
  int row, head;                               // and where it stands
  sem k_full, k_free, v_full, v_free;
  task_queue queue;
};

TILE void init(shared &s) {
  for (int i = 0; i < Q_STAGES; i++) sem_init(s.q_full[i], arrivals(1, 0, 0));
  ring_init(s.ring_dout, arrivals(1, 0, 0), arrivals(0, 0, NC));
  ring_init(s.ring_ds, arrivals(0, 0, NC), arrivals(0, 0, NC));
  queue_init(s.queue, arrivals(2, 0, NC));
  sem_init(s.k_full, arrivals(1, 0, 0));
  sem_init(s.k_free, arrivals(0, 0, NC));
  sem_init(s.v_full, arrivals(1, 0, 0));
  sem_init(s.v_free, arrivals(0, 0, NC));
}

#include "kernels/attention_bwd_zero.h"
#include "kernels/attention_bwd_narrow_loads.h"

struct state { rt<float, D> dk; rt<float, DV> dv; rt<elem, M> p; };
// A warpgroup's columns of dq of step n, over all keys of the block: a panel (N = 64), and then half of the last one (N = 32).
template<int N> TILE void dq_issue(rt<float, N> &dq, shared &s, uint32_t n, int wg) {
  int stage = ring_at<DS_STAGES>(n).stage, col = N == 64 ? wg * 64 : 128 + wg * 32;
  mma_fence();
  mma_AtB<ZERO>(dq, s.ds[stage][0], 0, s.k[0], col);
  mma_AtB<ACC>(dq, s.ds[stage][1], 0, s.k[1], col);
  mma_commit();
}
TILE void dq_add(const rt<float, 64> &dq, const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
  const place &at = s.at[n % SLOTS];
  int block = get(at.dq_block), turn = DETERMINISTIC ? get(at.turn) : -1;
  if (turn >= 0) order_wait(p.order + (int64_t)block * NC + wg, turn);
  add_acc(p.dq_acc + ((int64_t)block * (D / 64) + wg) * 64 * 64, dq);
}
// No product that reads ds of step n is left.
TILE void dq_rest(const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
  const place &at = s.at[n % SLOTS];
  rt<float, 32> dq;
  dq_issue(dq, s, n, wg);
  mma_wait<0>(dq);
  int block = get(at.dq_block), turn = DETERMINISTIC ? get(at.turn) : -1;
  ring_release(s.ring_ds, ring_at<DS_STAGES>(n));
  add_acc_cols(p.dq_acc + ((int64_t)block * (D / 64) + 2) * 64 * 64, wg * 32, dq);
  if (turn >= 0) order_pass(p.order + (int64_t)block * NC + wg, turn + 1);
}
// dk += ds^T q of step n
TILE void dk_issue(state &a, shared &s, uint32_t n, int wg) {
  mma_AB<ACC>(a.dk, s.ds[ring_at<DS_STAGES>(n).stage][wg], s.q[ring_at<Q_STAGES>(n).stage]);
  mma_commit();
}

// BEFORE: the task has a step n - 1, whose dk and dq are still to be computed.
template<bool BEFORE> TILE void step(state &a, const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
  ring_pos at = ring_at<Q_STAGES>(n), from = ring_at<DOUT_STAGES>(n), to = ring_at<DS_STAGES>(n);
  rt<float, M> x;
  OVERLAY(float, M, dp, x);
  sem_wait(s.q_full[at.stage], at.phase);
  int keys = get(s.at[n % SLOTS].keys) - wg * 64, diagonal = get(s.at[n % SLOTS].diagonal) - wg * 64;
  float c = p.scale;
  mma_fence();
  mma_ABt<ZERO>(x, s.k[wg], s.q[at.stage]);
  mma_commit();
  if constexpr (BEFORE) dk_issue(a, s, n - 1, wg);
  mma_wait<BEFORE>(x);
  if (diagonal < 63) triu(x, -diagonal, -infinity());
  if (keys < 64) map_rc(x, [=](float y, int key, int) { return key < keys ? y : -infinity(); });
  map_col(x, s.lse2[at.stage], [=](float y, float l) { return fast_exp2(fused(y, c, -l)); });
  convert(a.p, x);
  ring_wait(s.ring_dout, from);
  mma_fence();
  mma_ABt<ZERO>(dp, s.v[wg], s.dout[from.stage]);
  mma_commit();
  ring_acquire(s.ring_ds, to);
  mma_wait<0>(dp, a.dk);
  if constexpr (BEFORE) ring_release(s.ring_dout, ring_at<DOUT_STAGES>(n - 1));
  map_col(dp, a.p, s.delta[from.stage], [f = p.ds_scale](float d, float prob, float delta) { return prob * fused(d, f, -delta); });
  store(s.ds[to.stage][wg], dp);
  ring_fill(s.ring_ds, to);
  wg_sync();   // its ds is written, for dk
  if constexpr (BEFORE) {
    rt<float, 64> dq;
    ring_wait(s.ring_ds, ring_at<DS_STAGES>(n - 1));
    dq_issue(dq, s, n - 1, wg);
    mma_AB<ACC>(a.dv, a.p, s.dout[from.stage]);
    mma_commit();
    mma_wait<1>(dq);
    dq_add(dq, p, s, n - 1, wg);
    mma_wait<0>(a.dv, a.p);
    dq_rest(p, s, n - 1, wg);
  } else {
    mma_fence();
    mma_AB<ZERO>(a.dv, a.p, s.dout[from.stage]);
    mma_commit();
    mma_wait<0>(a.dv, a.p);
  }
}

// Where it goes is worked out again each time, rather than kept in registers.
template<int C> TILE void leave(const attention_grad &to, st<elem, 64, C> &tile, const rt<float, C> &x, const attention_bwd_params &p, shared &s, uint32_t count, int wg) {
  task t = task_at(p, queue_again(s.queue, count));
  leave(to, tile, x, t.key0 + wg * 64, t.k_head / p.parts, t.batch, acc_block(p, t.batch, t.k_head, t.key0) + wg, 64);
}
// The last products of a task whose steps end before n, and its results.
TILE void finish(state &a, const attention_bwd_params &p, shared &s, uint32_t n, uint32_t count, int wg) {
  float scale = p.out_scale;
  rt<float, 64> dq;
  mma_fence();
  dk_issue(a, s, n - 1, wg);
  mma_wait<0>(a.dk);
  ring_release(s.ring_dout, ring_at<DOUT_STAGES>(n - 1));
  leave(p.dv, s.v[wg], a.dv, p, s, count, wg);   // only this warpgroup reads this v
  ring_wait(s.ring_ds, ring_at<DS_STAGES>(n - 1));
  dq_issue(dq, s, n - 1, wg);
  mma_wait<0>(dq);
  dq_add(dq, p, s, n - 1, wg);
  dq_rest(p, s, n - 1, wg);
  scale_gradient(a.dk, scale);
  tma_store_wait_read();
  sem_arrive(s.v_free);
  bar_sync(NC + 1, 128 * NC);   // both have done with k
  leave(p.dk, s.k[wg], a.dk, p, s, count, wg);
  tma_store_wait_read();
  sem_arrive(s.k_free);
  queue_release(s.queue, count);
}

TILE void compute(const attention_bwd_params &p, shared &s, int wg) {
  uint32_t n = 0;
  grid_wait();
  int next;
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    state a;
    sem_wait(s.k_full, count & 1);
    sem_wait(s.v_full, count & 1);
    uint32_t end = n + task_at(p, next).steps;
    fill(a.dk, 0.f);   // which step has its first product is not known where that is issued
    step<false>(a, p, s, n++, wg);
    for (; n < end; n++) step<true>(a, p, s, n, wg);
    count = get(s.task_of[(n - 1) % SLOTS]);   // rather than kept in a register
    finish(a, p, s, n, count, wg);
  }
}

typedef block<attention_bwd_params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<key_loader, THREAD, 1, LOAD_REGS>, role<cleaner, THREAD, 1, LOAD_REGS>, DEPENDENT> kernel;
ENTRY(kernel, M, BN)
