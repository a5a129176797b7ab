// Attention backward (Dao 2023, algorithm 2), for a pair of blocks of 128 keys that walks over the blocks of 64 query
// rows i:
//   s^T = k q_i^T;  p^T = 2^(c s^T - lse2);  dp^T = v dout_i^T;  ds^T = p^T (dp^T - delta)
//   dv += p^T dout_i;  dk += ds^T q_i;  dq_i += ds k   (fp32, in global memory);  c = scale log2 e
// Each of two warpgroups owns 64 keys, as in attention_bwd.cu. p^T is a register operand, dk and dv stay in registers.
// ds^T is in shared memory for dq, and dk reads it there.
// Additions to dq are what the L2 can bear least. The two blocks of a cluster therefore exchange their ds, and each
// adds half of the columns of dq for the keys of both. Of q and dout each loads half of the columns for both.
// One 64 x 64 tile of dq a step: the warpgroups take turns at it, w has the steps n with n % 2 = w and their stages of
// ds. It lags two steps behind, so that the other block's ds has time to arrive.
// One turn of matrix work is dq(n - 2), dv and dk(n - 1), s and dp(n).
// The rows of this kernel are named _x2, for the two blocks.
#include "attention/attention_bwd.h"

// From the row: D, M (query rows a step), Q_STAGES, DOUT_STAGES, DETERMINISTIC, FEATURES (0), *_REGS
enum { PAIR = 2, NC = 2, KEYS = 64 * NC, BN = PAIR * KEYS, HALF = D / PAIR };
static_assert(M == 64 && HALF == 64, "a step's dq is one 64 x 64 tile for each block of the pair");
static_assert(Q_STAGES > DOUT_STAGES, "q of a step is loaded when dout of the step before is");

struct shared {
  st<elem, 64, D> k[NC], v[NC];
  st<elem, 64, HALF> k_other[NC];                  // the other block's keys, this one's columns
  st<elem, M, D> q[Q_STAGES], dout[DOUT_STAGES];
  st<elem, 64, M> ds[NC][NC], ds_other[NC][NC];    // of step n % NC: ds^T, keys x queries, here and in the other block
  sv<M> lse2[Q_STAGES], delta[DOUT_STAGES];
  ring<DOUT_STAGES, ASYNC_READS> ring_dout;        // with delta; also hands out the stages of q. Its release has no
                                                   // fence: softmax has one, in ring_fill
  sem q_full[Q_STAGES];                            // with lse2
  ring<NC, ASYNC_READS> ring_ds;                   // released by the warpgroup that makes dq, and by the other block's
                                                   // when its copy has arrived. dk reads it too, but only the
                                                   // warpgroup's own tile, before the same warpgroup writes it again
  ring<NC, ASYNC_READS> ring_other;                // full: ds_other of this block; empty: ds_other of the other block,
                                                   // which this one's sender writes
  step_info info[SLOTS];                           // of step n, from the loader
  key_task_smem now;                               // the loader's task,
  int row, head;                                   // and where it stands
  ring<1, ASYNC_READS> ring_k, ring_v;             // k: with k_other
  task_queue queue;
};

TILE void init(shared &s) {
  for (int i = 0; i < Q_STAGES; i++) sem_init(s.q_full[i], arrivals(1, 0, 0));
  cluster_ring_init<PAIR>(s.ring_dout, arrivals(1, 0, 0), arrivals(0, 0, NC));
  ring_init(s.ring_ds, arrivals(0, 0, NC), arrivals(0, 0, PAIR));
  ring_init(s.ring_other, arrivals(NC, 0, 0), arrivals(0, 0, 1));
  cluster_queue_init(s.queue, PAIR, arrivals(1, 0, NC));
  ring_init(s.ring_k, arrivals(1, 0, 0), arrivals(0, 0, NC));
  ring_init(s.ring_v, arrivals(1, 0, 0), arrivals(0, 0, NC));
}

// ---- what feeds the pair: loads, of which each block makes its half of q and dout for both, and the exchange of ds

// Has few registers: what it knows of its task and step is in shared memory. It acquires no stage of q. When it loads q
// of step n, it has acquired dout's stage of step n - 1. So step n - 1 - DOUT_STAGES is released, and with it all steps
// before, of which step n - Q_STAGES was in this stage of q.
TILE void loader(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next = 0;
  for (uint32_t count = 0; (next = cluster_queue_draw<PAIR>(s.queue, count, next, p.counter)) < p.tasks; count++) {
    put_task<BN>(s.now, p, task_at<M, BN>(p, next));
    for (int step = 0; step < get(s.now.steps); step++, n++) {
      ring_pos at = ring_at<Q_STAGES>(n), to = ring_at<DOUT_STAGES>(n);
      int head = head_of(s.now, p, step), block = block_of(s.now, step);
      put_step<M, BN>(s.info[n % SLOTS], p, s.now, head, block);
      put(s.row, block * M);
      put(s.head, head);
      sem_expect(s.q_full[at.stage], tile_bytes(s.q[0]) + M * 4);
      load_step_of_pair(s.q[at.stage], s.lse2[at.stage], p.q, s.q_full[at.stage], get(s.row), get(s.head),
                        get(s.now.batch), p.lse2, (int64_t)get(s.info[n % SLOTS].dq_block) * M);
      ring_acquire(s.ring_dout, to);
      ring_expect(s.ring_dout, to, tile_bytes(s.dout[0]) + M * 4);
      load_step_of_pair(s.dout[to.stage], s.delta[to.stage], p.dout, s.ring_dout.full[to.stage], get(s.row),
                        get(s.head), get(s.now.batch), p.delta, (int64_t)get(s.info[n % SLOTS].dq_block) * M);
    }
  }
}

// Loads a task's k and v, then hands ds of every step to the other block.
TILE void sender(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next;
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    key_task t = task_at<M, BN>(p, next);
    ring_pos kv = ring_at<1>(count);
    int head = t.part / p.parts;
    uint32_t end = n + t.steps;
    ring_acquire(s.ring_v, kv);
    ring_expect(s.ring_v, kv, NC * tile_bytes(s.v[0]));
    for (int w = 0; w < NC; w++) tma_load(s.v[w], p.v, s.ring_v.full[0], t.key0 + cluster_rank() * KEYS + w * 64, 0,
                                          head, t.batch);
    ring_acquire(s.ring_k, kv);
    ring_expect(s.ring_k, kv, NC * (tile_bytes(s.k[0]) + tile_bytes(s.k_other[0])));
    for (int w = 0; w < NC; w++) {
      tma_load(s.k[w], p.k, s.ring_k.full[0], t.key0 + cluster_rank() * KEYS + w * 64, 0, head, t.batch);
      tma_load(s.k_other[w], p.k, s.ring_k.full[0], t.key0 + other_rank() * KEYS + w * 64, first_column(), head,
               t.batch);
    }
    for (; n < end; n++) {
      ring_pos at = ring_at<NC>(n);
      ring_wait(s.ring_ds, at);
      ring_acquire(s.ring_other, at);
      for (int w = 0; w < NC; w++) tma_send(s.ds_other[at.stage][w], s.ds[at.stage][w], s.ring_other.full[at.stage],
                                            other_rank());
    }
    cluster_queue_release<THREAD>(s.queue, count);
  }
}

// ---- steps

struct state { rt<float, D> dk, dv; rt<float, M> s, dp; rt<elem, M> p; };

// s to p, dp to ds; ds also to shared memory. The fence of ring_fill orders the reads of lse2 and delta before their
// stages are released.
TILE void softmax(state &a, const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
  ring_pos to = ring_at<NC>(n);
  int key0 = cluster_rank() * KEYS + wg * 64, keys = get(s.info[n % SLOTS].keys) - key0,
      diagonal = get(s.info[n % SLOTS].diagonal) - key0;
  float c = p.scale_log2;
  mma_wait<1>(a.s);
  probabilities(a.s, s.lse2[ring_at<Q_STAGES>(n).stage], c, keys, diagonal);
  ring_acquire(s.ring_ds, to);   // here, so that the wait for dp stays below the exponentials (see mma_wait)
  mma_wait<0>(a.dp);
  score_gradient(a.dp, a.s, s.delta[ring_at<DOUT_STAGES>(n).stage], p.ds_scale);
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
  sem_arrive_at(s.ring_ds.empty[at.stage], other_rank());   // the copy of the other block's ds is here
  mma_fence();
  mma_AtB<ACC>(dq, s.ds_other[at.stage][0], 0, s.k_other[0], 0);
  mma_AtB<ACC>(dq, s.ds_other[at.stage][1], 0, s.k_other[1], 0);
  mma_commit();
}
TILE void dq_add(rt<float, HALF> &dq, const attention_bwd_params &p, shared &s, uint32_t n) {
  ring_pos at = ring_at<NC>(n);
  int64_t tile = (int64_t)get(s.info[n % SLOTS].dq_block) * PAIR + cluster_rank();
  int position = position_of(s.info[n % SLOTS]);
  sem_arrive_at(s.ring_other.empty[at.stage], other_rank());
  ring_release(s.ring_ds, at);
  add_dq(p, tile, position, dq);
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

// The matrix work of step n. BEFORE: the task has a step n - 1; DQ: it has a step n - 2, whose dq is this warpgroup's.
// dq's registers are then dp's.
template<bool BEFORE, int A, bool DQ>
TILE void matrix_work(state &a, const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
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

// A warpgroup's 64 keys of dk or dv. Where they go is worked out again, rather than kept in registers.
TILE void leave(const attention_grad &to, st<elem, 64, D> &tile, const rt<float, D> &x, const attention_bwd_params &p,
                shared &s, uint32_t count, int wg) {
  leave(to, tile, x, p, task_at<M, BN>(p, queue_again(s.queue, count)), cluster_rank() * NC + wg);
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
  ring_release(s.ring_v, ring_at<1>(count));
  scale_gradient(a.dk, scale);
  bar_sync(NC + 1, 128 * NC);   // both have done with k
  leave(p.dk, s.k[wg], a.dk, p, s, count, wg);
  tma_store_wait_read();
  ring_release(s.ring_k, ring_at<1>(count));
  cluster_queue_release(s.queue, count);
}

TILE void compute(const attention_bwd_params &p, shared &s, int wg) {
  uint32_t n = 0;
  turn_begin<NC>(wg);
  int next;
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    state a;
    uint32_t begin = n, end = n + task_at<M, BN>(p, next).steps;
    ring_wait(s.ring_k, ring_at<1>(count));
    ring_wait(s.ring_v, ring_at<1>(count));
    for (; n < end; n++) {
      if (n == begin) matrix_work<false, ZERO, false>(a, p, s, n, wg);
      else if (n == begin + 1) matrix_work<true, ZERO, false>(a, p, s, n, wg);
      else if ((n ^ wg) & 1) matrix_work<true, ACC, false>(a, p, s, n, wg);
      else matrix_work<true, ACC, true>(a, p, s, n, wg);
      softmax(a, p, s, n, wg);
    }
    finish(a, p, s, n, count, wg);
  }
  turn_end<NC>(wg);
}

typedef block<attention_bwd_params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>,
              role<loader, THREAD, 1, LOAD_REGS>, role<sender, THREAD, 1, LOAD_REGS>, CLUSTER<PAIR>> kernel;
ENTRY(kernel, M, BN)
