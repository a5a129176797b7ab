// Attention backward (Dao 2023, algorithm 2), for a pair of blocks of 128 keys that walks over the blocks of 64 query rows i:
//   s^T = k q_i^T;  p^T = 2^(c s^T - lse2);  dp^T = v dout_i^T;  ds^T = p^T (dp^T - delta)
//   dv += p^T dout_i;  dk += ds^T q_i;  dq_i += ds k   (fp32, in global memory);  c = scale log2 e
// Each of two warpgroups owns 64 keys, as in attention_bwd.cu: p^T and ds^T are register operands, dk and dv stay in registers.
// Additions to dq are what the L2 can bear least. The two blocks of a cluster therefore exchange their ds, and each adds half of the columns
// of dq for the keys of both. Of q and dout each loads half of the columns for both.
// One 64 x 64 tile of dq a step: the warpgroups take turns at it, w has the steps n with n % 2 = w and their stages of ds. It lags two steps
// behind, which is what the exchange needs. One turn of matrix work is dq(n - 2), dv and dk(n - 1), s and dp(n).
#include "tile/tile.h"
#include "kernels/attention.h"

enum { PAIR = 2, NC = 2, KEYS = 64 * NC, BN = PAIR * KEYS, HALF = D / PAIR };   // D, M, Q_STAGES, DOUT_STAGES, DETERMINISTIC, FEATURES (0), *_REGS
#include "kernels/attention_features.h"
#include "kernels/attention_bwd_tasks.h"
static_assert(M == 64 && HALF == 64, "a step's dq is one 64 x 64 tile for each block of the pair");
static_assert(Q_STAGES > DOUT_STAGES, "q of a step is loaded when dout of the step before is");

struct shared {
  st<elem, 64, D> k[NC], v[NC];
  st<elem, 64, HALF> k_other[NC];                  // the other block's keys, this one's columns
  st<elem, M, D> q[Q_STAGES], dout[DOUT_STAGES];
  st<elem, 64, M> ds[NC][NC], ds_other[NC][NC];    // of step n % NC: ds^T, keys x queries, here and in the other block
  sv<M> lse2[Q_STAGES], delta[DOUT_STAGES];
  ring<DOUT_STAGES, ASYNC_READS> ring_dout;        // with delta, which is read before the fence of an arrival; also hands out the stages of q
  sem q_full[Q_STAGES];                            // with lse2
  ring<NC, ASYNC_READS> ring_ds;
  ring<NC, ASYNC_READS> ring_other;                // full: ds_other here; empty: ds_other in the other block
  place at[SLOTS];                                 // of step n, from the loader
  held now;                                        // the loader's task,
  int row, head;                                   // and where it stands
  sem k_full, v_full, k_free, v_free;
  task_queue queue;
};

TILE void init(shared &s) {
  for (int i = 0; i < Q_STAGES; i++) sem_init(s.q_full[i], arrivals(1, 0, 0));
  cluster_ring_init<PAIR>(s.ring_dout, arrivals(1, 0, 0), arrivals(0, 0, NC));
  ring_init(s.ring_ds, arrivals(0, 0, NC), arrivals(0, 0, PAIR));
  ring_init(s.ring_other, arrivals(NC, 0, 0), arrivals(0, 0, 1));
  cluster_queue_init(s.queue, PAIR, arrivals(1, 0, NC));
  sem_init(s.k_full, arrivals(1, 0, 0));
  sem_init(s.v_full, arrivals(1, 0, 0));
  sem_init(s.k_free, arrivals(0, 0, NC));
  sem_init(s.v_free, arrivals(0, 0, NC));
}

#include "kernels/attention_bwd_exchange.h"

struct state { rt<float, D> dk, dv; rt<float, M> s, dp; rt<elem, M> p; };

// s to p, dp to ds; ds also to shared memory. The fence of ring_fill orders the reads of lse2 and delta before their stages are released.
TILE void softmax(state &a, const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
  ring_pos to = ring_at<NC>(n);
  int key0 = cluster_rank() * KEYS + wg * 64, keys = get(s.at[n % SLOTS].keys) - key0, diagonal = get(s.at[n % SLOTS].diagonal) - key0;
  float c = p.scale;
  mma_wait<1>(a.s);
  if (diagonal < 63) triu(a.s, -diagonal, -infinity());
  if (keys < 64) map_rc(a.s, [=](float x, int key, int) { return key < keys ? x : -infinity(); });
  map_col(a.s, s.lse2[ring_at<Q_STAGES>(n).stage], [=](float x, float l) { return fast_exp2(fused(x, c, -l)); });
  ring_acquire(s.ring_ds, to);   // here, so that the wait for dp stays below the exponentials (see mma_wait)
  mma_wait<0>(a.dp);
  map_col(a.dp, a.s, s.delta[ring_at<DOUT_STAGES>(n).stage], [f = p.ds_scale](float dp, float prob, float d) { return prob * fused(dp, f, -d); });
  convert(a.p, a.s);
  store(s.ds[to.stage][wg], a.dp);
  ring_fill(s.ring_ds, to);
}

// 64 columns of dq of step n, for the keys of both blocks
TILE void dq_issue(rt<float, HALF> &dq, shared &s, uint32_t n) {
  ring_pos at = ring_at<NC>(n);
  ring_wait(s.ring_ds, at);
  mma_fence();
  mma_AtB<ZERO>(dq, s.ds[at.stage][0], 0, s.k[0], first_column());
  mma_AtB<ACC>(dq, s.ds[at.stage][1], 0, s.k[1], first_column());
  ring_wait(s.ring_other, at);
  sem_arrive_at(s.ring_ds.empty[at.stage], other_rank());   // its copy is here
  mma_fence();
  mma_AtB<ACC>(dq, s.ds_other[at.stage][0], 0, s.k_other[0], 0);
  mma_AtB<ACC>(dq, s.ds_other[at.stage][1], 0, s.k_other[1], 0);
  mma_commit();
}
TILE void dq_add(rt<float, HALF> &dq, const attention_bwd_params &p, shared &s, uint32_t n) {
  ring_pos at = ring_at<NC>(n);
  int64_t tile = (int64_t)get(s.at[n % SLOTS].dq_block) * PAIR + cluster_rank();
  int turn = DETERMINISTIC ? get(s.at[n % SLOTS].turn) : -1;
  sem_arrive_at(s.ring_other.empty[at.stage], other_rank());
  ring_release(s.ring_ds, at);
  if (turn >= 0) order_wait(p.order + tile, turn);
  add_acc(p.dq_acc + tile * 64 * 64, dq);
  if (turn >= 0) order_pass(p.order + tile, turn + 1);
}

// dv += p^T dout, dk += ds^T q of step n
template<int A> TILE void grads_issue(state &a, shared &s, uint32_t n, int wg) {
  mma_fence();
  mma_AB<A>(a.dv, a.p, s.dout[ring_at<DOUT_STAGES>(n).stage]);
  mma_AB<A>(a.dk, s.ds[ring_at<NC>(n).stage][wg], s.q[ring_at<Q_STAGES>(n).stage]);
  mma_commit();
}
TILE void grads_release(shared &s, uint32_t n) {
  ring_pos at = ring_at<DOUT_STAGES>(n);
  ring_release(s.ring_dout, at);
  sem_arrive_at(s.ring_dout.empty[at.stage], other_rank());
}

// The turn of step n. BEFORE: the task has a step n - 1; DQ: it has a step n - 2, whose dq is this warpgroup's. dq's registers are then dp's.
template<bool BEFORE, int A, bool DQ> TILE void turn(state &a, const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
  ring_pos at = ring_at<Q_STAGES>(n), to = ring_at<DOUT_STAGES>(n);
  rt<float, HALF> dq;
  turn_wait<NC>(wg);
  if constexpr (DQ) dq_issue(dq, s, n - 2);
  if constexpr (BEFORE) grads_issue<A>(a, s, n - 1, wg);
  sem_wait(s.q_full[at.stage], at.phase);
  mma_fence();
  mma_ABt<ZERO>(a.s, s.k[wg], s.q[at.stage]);
  mma_commit();
  if constexpr (DQ) {
    mma_wait<2>(dq);
    dq_add(dq, p, s, n - 2);
  }
  ring_wait(s.ring_dout, to);
  mma_fence();
  mma_ABt<ZERO>(a.dp, s.v[wg], s.dout[to.stage]);
  mma_commit();
  turn_pass<NC>(wg);
  if constexpr (BEFORE) {
    mma_wait<2>(a.dv, a.dk, a.p);
    grads_release(s, n - 1);
  }
}

TILE void leave(const attention_grad &to, st<elem, 64, D> &tile, const rt<float, D> &x, const attention_bwd_params &p, shared &s, uint32_t count, int wg) {
  task t = task_at(p, queue_again(s.queue, count));
  int block = cluster_rank() * NC + wg;
  leave(to, tile, x, t.key0 + block * 64, t.k_head / p.parts, t.batch, acc_block(p, t.batch, t.k_head, t.key0) + block, 64);
}

// The last products of a task whose steps end before n, and its results.
TILE void finish(state &a, const attention_bwd_params &p, shared &s, uint32_t n, uint32_t count, int wg) {
  rt<float, HALF> dq;
  uint32_t last = n - 2 + ((n ^ wg) & 1);   // this warpgroup's last step of dq
  float scale = p.out_scale;
  wg_sync();   // all of ds is written: elsewhere, the turn's barrier
  grads_issue<ACC>(a, s, n - 1, wg);
  mma_wait<0>(a.dv, a.dk, a.p);
  grads_release(s, n - 1);
  leave(p.dv, s.v[wg], a.dv, p, s, count, wg);   // only this warpgroup reads this v
  dq_issue(dq, s, last);
  mma_wait<0>(dq);
  dq_add(dq, p, s, last);
  tma_store_wait_read();
  sem_arrive(s.v_free);
  scale_gradient(a.dk, scale);
  bar_sync(NC + 1, 128 * NC);   // both have done with k
  leave(p.dk, s.k[wg], a.dk, p, s, count, wg);
  tma_store_wait_read();
  sem_arrive(s.k_free);
  cluster_queue_release(s.queue, count);
}

TILE void compute(const attention_bwd_params &p, shared &s, int wg) {
  uint32_t n = 0;
  turn_begin<NC>(wg);
  int next;
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    state a;
    uint32_t begin = n, end = n + task_at(p, next).steps;
    sem_wait(s.k_full, count & 1);
    sem_wait(s.v_full, count & 1);
    for (; n < end; n++) {
      if (n == begin) turn<false, ZERO, false>(a, p, s, n, wg);
      else if (n == begin + 1) turn<true, ZERO, false>(a, p, s, n, wg);
      else if ((n ^ wg) & 1) turn<true, ACC, false>(a, p, s, n, wg);
      else turn<true, ACC, true>(a, p, s, n, wg);
      softmax(a, p, s, n, wg);
    }
    finish(a, p, s, n, count, wg);
  }
  turn_end<NC>(wg);
}

typedef block<attention_bwd_params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<sender, THREAD, 1, LOAD_REGS>, CLUSTER<PAIR>> kernel;
ENTRY(kernel, M, BN)
