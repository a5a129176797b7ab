// Attention backward (Dao 2023, algorithm 2) for values narrower than keys, for a block of 128 keys that walks over the
// blocks of 64 query rows i:
//   s^T = k q_i^T;  p^T = 2^(c s^T - lse2);  dp^T = v dout_i^T;  ds^T = p^T (dp^T - delta)
//   dv += p^T dout_i;  dk += ds^T q_i;  dq_i += ds k   (fp32, in global memory);  c = scale log2 e
// Each of two warpgroups owns 64 keys, as in attention_bwd.cu. Their dk and dv leave registers for one more 64 x 64
// tile only, and for p: s, dp and dq follow each other there, and ds is an operand in shared memory. A step therefore
// waits for each of its products, while the other warpgroup's run; but dk of the step before runs under the
// exponentials, and dv under the additions to dq.
// dq's columns are one panel of 64 for each warpgroup and half of a third; it lags a step behind, so that the other's
// ds is there.
#include "attention/attention_bwd.h"

// From the row: D (of q and k), DV (of v), Q_STAGES, DOUT_STAGES, DETERMINISTIC, FEATURES (0), *_REGS
enum { NC = 2, BN = 64 * NC, M = 64, ZEROS = 128, DS_STAGES = 2 };
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
  step_info info[SLOTS];                       // of step n, from the loader,
  int task_of[SLOTS];                          // and which of the block's tasks it belongs to
  ring<DS_STAGES, ASYNC_READS> ring_ds;
  key_task_smem now;                           // the loader's task,
  int row, head;                               // and where it stands
  ring<1, ASYNC_READS> ring_k, ring_v;
  task_queue queue;
};

TILE void init(shared &s) {
  for (int i = 0; i < Q_STAGES; i++) sem_init(s.q_full[i], arrivals(1, 0, 0));
  ring_init(s.ring_dout, arrivals(1, 0, 0), arrivals(0, 0, NC));
  ring_init(s.ring_ds, arrivals(0, 0, NC), arrivals(0, 0, NC));
  queue_init(s.queue, arrivals(2, 0, NC));
  ring_init(s.ring_k, arrivals(1, 0, 0), arrivals(0, 0, NC));
  ring_init(s.ring_v, arrivals(1, 0, 0), arrivals(0, 0, NC));
}

// ---- what feeds the compute warpgroups

TILE void zero_writer(const attention_bwd_params &p, shared &s, int) { write_zeros<M, 1>(p, s.zeros, s.queue); }

// Has few registers: where it stands is in shared memory. It acquires no stage of q. When it loads q of step n, it has
// acquired dout's stage of step n - 1. So step n - 1 - DOUT_STAGES is released, and with it all steps before, of which
// step n - Q_STAGES was in this stage of q.
TILE void loader(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next = 0;
  grid_wait();
  for (uint32_t count = 0; (next = queue_draw(s.queue, count, next, p.counter)) < p.tasks; count++) {
    const key_task_smem &t = s.now;
    put_task<BN>(s.now, p, task_at<M, BN>(p, next));
    for (int step = 0; step < get(t.steps); step++, n++) {
      ring_pos at = ring_at<Q_STAGES>(n), to = ring_at<DOUT_STAGES>(n);
      int head = head_of(t, p, step), block = block_of(t, step);
      if (step == 1) wait_for_zeros<1>(p, t);
      put_step<M, BN>(s.info[n % SLOTS], p, t, head, block);
      put(s.task_of[n % SLOTS], count);
      put(s.row, block * M);
      put(s.head, head);
      sem_expect(s.q_full[at.stage], tile_bytes(s.q[0]) + M * 4);
      // load_step would hold all numbers at once
      tma_load(s.q[at.stage], p.q, s.q_full[at.stage], get(s.row), 0, get(s.head), get(t.batch));
      tma_load(s.lse2[at.stage], p.lse2 + (int64_t)get(s.info[n % SLOTS].dq_block) * M, s.q_full[at.stage]);
      ring_acquire(s.ring_dout, to);
      ring_expect(s.ring_dout, to, tile_bytes(s.dout[0]) + M * 4);
      tma_load(s.dout[to.stage], p.dout, s.ring_dout.full[to.stage], get(s.row), 0, get(s.head), get(t.batch));
      tma_load(s.delta[to.stage], p.delta + (int64_t)get(s.info[n % SLOTS].dq_block) * M, s.ring_dout.full[to.stage]);
    }
  }
}
TILE void key_loader(const attention_bwd_params &p, shared &s, int) {
  int next;
  grid_wait();
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    key_task t = task_at<M, BN>(p, next);
    ring_pos kv = ring_at<1>(count);
    int head = t.part / p.parts;
    ring_acquire(s.ring_v, kv);
    ring_expect(s.ring_v, kv, NC * tile_bytes(s.v[0]));
    for (int w = 0; w < NC; w++) tma_load(s.v[w], p.v, s.ring_v.full[0], t.key0 + w * 64, 0, head, t.batch);
    ring_acquire(s.ring_k, kv);
    ring_expect(s.ring_k, kv, NC * tile_bytes(s.k[0]));
    for (int w = 0; w < NC; w++) tma_load(s.k[w], p.k, s.ring_k.full[0], t.key0 + w * 64, 0, head, t.batch);
    queue_release<THREAD>(s.queue, count);
  }
}

// ---- steps

struct state { rt<float, D> dk; rt<float, DV> dv; rt<elem, M> p; };
// A warpgroup's columns of dq of step n, over all keys of the block: a panel (N = 64), and then half of the last one (N
// = 32).
template<int N> TILE void dq_issue(rt<float, N> &dq, shared &s, uint32_t n, int wg) {
  int stage = ring_at<DS_STAGES>(n).stage, col = N == 64 ? wg * 64 : 128 + wg * 32;
  mma_fence();
  mma_AtB<ZERO>(dq, s.ds[stage][0], 0, s.k[0], col);
  mma_AtB<ACC>(dq, s.ds[stage][1], 0, s.k[1], col);
  mma_commit();
}
TILE void dq_add(const rt<float, 64> &dq, const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
  const step_info &info = s.info[n % SLOTS];
  int block = get(info.dq_block), position = position_of(info);
  if (position >= 0) order_wait(p.order + (int64_t)block * NC + wg, position);
  add_acc(p.dq_acc + ((int64_t)block * (D / 64) + wg) * 64 * 64, dq);
}
// No product that reads ds of step n is left.
TILE void dq_rest(const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
  const step_info &info = s.info[n % SLOTS];
  rt<float, 32> dq;
  dq_issue(dq, s, n, wg);
  mma_wait<0>(dq);
  int block = get(info.dq_block), position = position_of(info);
  ring_release(s.ring_ds, ring_at<DS_STAGES>(n));
  add_acc_cols(p.dq_acc + ((int64_t)block * (D / 64) + 2) * 64 * 64, wg * 32, dq);
  if (position >= 0) order_pass(p.order + (int64_t)block * NC + wg, position + 1);
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
  int keys = get(s.info[n % SLOTS].keys) - wg * 64, diagonal = get(s.info[n % SLOTS].diagonal) - wg * 64;
  float c = p.scale_log2;
  mma_fence();
  mma_ABt<ZERO>(x, s.k[wg], s.q[at.stage]);
  mma_commit();
  if constexpr (BEFORE) dk_issue(a, s, n - 1, wg);
  mma_wait<BEFORE>(x);
  probabilities(x, s.lse2[at.stage], c, keys, diagonal);
  convert(a.p, x);
  ring_wait(s.ring_dout, from);
  mma_fence();
  mma_ABt<ZERO>(dp, s.v[wg], s.dout[from.stage]);
  mma_commit();
  ring_acquire(s.ring_ds, to);
  mma_wait<0>(dp, a.dk);
  if constexpr (BEFORE) ring_release(s.ring_dout, ring_at<DOUT_STAGES>(n - 1));
  score_gradient(dp, a.p, s.delta[from.stage], p.ds_scale);
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

// A warpgroup's 64 keys of dk or dv. Where they go is worked out again each time, rather than kept in registers.
template<int C>
TILE void leave(const attention_grad &to, st<elem, 64, C> &tile, const rt<float, C> &x, const attention_bwd_params &p,
                shared &s, uint32_t count, int wg) {
  leave(to, tile, x, p, task_at<M, BN>(p, queue_again(s.queue, count)), wg);
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
  ring_release(s.ring_v, ring_at<1>(count));
  bar_sync(NC + 1, 128 * NC);   // both have done with k
  leave(p.dk, s.k[wg], a.dk, p, s, count, wg);
  tma_store_wait_read();
  ring_release(s.ring_k, ring_at<1>(count));
  queue_release(s.queue, count);
}

TILE void compute(const attention_bwd_params &p, shared &s, int wg) {
  uint32_t n = 0;
  grid_wait();
  int next;
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    state a;
    ring_wait(s.ring_k, ring_at<1>(count));
    ring_wait(s.ring_v, ring_at<1>(count));
    uint32_t end = n + task_at<M, BN>(p, next).steps;
    fill(a.dk, 0.f);   // which step has its first product is not known where that is issued
    step<false>(a, p, s, n++, wg);
    for (; n < end; n++) step<true>(a, p, s, n, wg);
    count = get(s.task_of[(n - 1) % SLOTS]);   // rather than kept in a register
    finish(a, p, s, n, count, wg);
  }
}

typedef block<attention_bwd_params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>,
              role<loader, THREAD, 1, LOAD_REGS>, role<key_loader, THREAD, 1, LOAD_REGS>,
              role<zero_writer, THREAD, 1, LOAD_REGS>, DEPENDENT> kernel;
ENTRY(kernel, M, BN)
