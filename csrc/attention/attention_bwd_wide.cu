// Attention backward for wide heads (Dao 2023, algorithm 2), for a pair of blocks of 64 keys that walks over the blocks
// of 64 query rows i:
//   s^T = k q_i^T;  p^T = 2^(c s^T - lse2);  dp^T = v dout_i^T;  ds^T = p^T (dp^T - delta)
//   dv += p^T dout_i;  dk += ds^T q_i;  dq_i += ds k   (fp32, in global memory);  c = scale log2 e
// dk and dv of 64 keys fill the registers of two warpgroups: one computes p and dv, the other ds and dk. p^T and ds^T
// are register operands where they are made; p^T goes to the other warpgroup through shared memory, and ds^T takes its
// place there.
// Additions to dq are what the L2 can bear least. The two blocks of a cluster therefore exchange their ds, and each
// adds half of the columns of dq for the keys of both. Of q and dout each loads half of the columns for both.
#include "attention/attention_bwd.h"

// From the row: D (256), DETERMINISTIC, FEATURES (0), *_REGS
enum { PAIR = 2, ZEROS = 128, KEYS = 64, BN = PAIR * KEYS, M = 64, STAGES = 2, HALF = D / PAIR };
static_assert(HALF == 2 * 64, "a step's dq is one 64 x 64 tile for each warpgroup of the pair");

struct shared {
  st<elem, KEYS, D> k, v;
  st<elem, KEYS, HALF> k_other;        // the other block's keys, this one's columns
  st<elem, M, D> q[STAGES], dout[STAGES];
  st<elem, KEYS, M> ds, ds_other;      // p^T, then ds^T in its place; the other block's ds^T
  sv<M> lse2[STAGES], delta[STAGES];
  sv<ZEROS> zeros;
  // With lse2 and delta, which are read through registers before a fence (of p_full, of ring_ds). `keys` alone releases
  // q: when it has p of a step, `values` has read q and lse2.
  ring<STAGES, ASYNC_READS> ring_q, ring_dout;
  sem p_full;                          // one phase a step: p^T is in ds
  ring<1, ASYNC_READS> ring_ds;        // acquired by `values` for p^T, filled by `keys` with ds^T. Released by both
                                       // after dq, and by the other block when its copy has arrived
  ring<1, ASYNC_READS> ring_other;     // full: ds_other of this block; empty: ds_other of the other block, which this
                                       // one's sender writes
  step_info info[SLOTS];               // of step n, from the loader
  key_task_smem now;                   // the loader's task
  ring<1, ASYNC_READS> ring_k, ring_v; // k: with k_other
  sem k_read;                          // one phase a task: by all products
  task_queue queue;
};

TILE void init(shared &s) {
  cluster_ring_init<PAIR>(s.ring_q, arrivals(1, 0, 0), arrivals(0, 0, 1));
  cluster_ring_init<PAIR>(s.ring_dout, arrivals(1, 0, 0), arrivals(0, 0, 2));
  sem_init(s.p_full, arrivals(0, 0, 1));
  ring_init(s.ring_ds, arrivals(0, 0, 1), arrivals(1, 0, 2));
  ring_init(s.ring_other, arrivals(1, 0, 0), arrivals(0, 0, 2));
  cluster_queue_init(s.queue, PAIR, arrivals(2, 0, 2));
  ring_init(s.ring_k, arrivals(1, 0, 0), arrivals(0, 0, 1));
  ring_init(s.ring_v, arrivals(1, 0, 0), arrivals(0, 0, 1));
  sem_init(s.k_read, arrivals(0, 0, 2));
}

// ---- what feeds the pair: loads, of which each block makes its half of q and dout for both, and the exchange of ds

TILE void zero_writer(const attention_bwd_params &p, shared &s, int) { write_zeros<M, PAIR>(p, s.zeros, s.queue); }

TILE void loader(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next = 0;
  grid_wait();
  for (uint32_t count = 0; (next = cluster_queue_draw<PAIR>(s.queue, count, next, p.counter)) < p.tasks; count++) {
    key_task_smem &t = s.now;
    put_task<BN>(t, p, task_at<M, BN>(p, next));
    int steps = get(t.steps), key0 = get(t.key0), batch = get(t.batch), k_head = key_head(t, p);
    for (int step = 0; step < steps; step++, n++) {
      ring_pos at = ring_at<STAGES>(n), kv = ring_at<1>(count);
      int head = head_of(t, p, step), block = block_of(t, step);
      int64_t stats = (int64_t)(get(t.base) + head * p.q_padded + block) * M;
      ring_acquire(s.ring_q, at);
      if (step == 1) wait_for_zeros<PAIR>(p, t);
      put_step<M, BN>(s.info[n % SLOTS], p, t, head, block);
      ring_expect(s.ring_q, at, tile_bytes(s.q[0]) + M * 4);
      load_step_of_pair(s.q[at.stage], s.lse2[at.stage], p.q, s.ring_q.full[at.stage], block * M, head, batch, p.lse2,
                        stats);
      if (step == 0) {
        ring_acquire(s.ring_k, kv);
        ring_expect(s.ring_k, kv, tile_bytes(s.k) + tile_bytes(s.k_other));
        tma_load(s.k, p.k, s.ring_k.full[0], key0 + cluster_rank() * KEYS, 0, k_head, batch);
        tma_load(s.k_other, p.k, s.ring_k.full[0], key0 + other_rank() * KEYS, first_column(), k_head, batch);
        ring_acquire(s.ring_v, kv);
        ring_expect(s.ring_v, kv, tile_bytes(s.v));
        tma_load(s.v, p.v, s.ring_v.full[0], key0 + cluster_rank() * KEYS, 0, k_head, batch);
      }
      ring_acquire(s.ring_dout, at);
      ring_expect(s.ring_dout, at, tile_bytes(s.dout[0]) + M * 4);
      load_step_of_pair(s.dout[at.stage], s.delta[at.stage], p.dout, s.ring_dout.full[at.stage], block * M, head,
                        batch, p.delta, stats);
    }
  }
}

// Hands ds of every step to the other block.
TILE void sender(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next;
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    uint32_t end = n + task_at<M, BN>(p, next).steps;
    for (; n < end; n++) {
      ring_pos at = ring_at<1>(n);
      ring_wait(s.ring_ds, at);
      ring_acquire(s.ring_other, at);
      tma_send(s.ds_other, s.ds, s.ring_other.full[0], other_rank());
      ring_wait(s.ring_other, at);
      sem_arrive_at<THREAD>(s.ring_ds.empty[0], other_rank());   // the copy of the other block's ds is here
    }
    cluster_queue_release<THREAD>(s.queue, count);
  }
}

// ---- steps

// 64 columns of dq of step n, for the keys of both blocks; `also`: what else is in flight.
template<class... Tile> TILE void dq_step(rt<float, 64> &dq, shared &s, uint32_t n, int wg, Tile &...also) {
  ring_pos at = ring_at<1>(n);
  ring_wait(s.ring_ds, at);
  ring_wait(s.ring_other, at);
  mma_fence();
  mma_AtB<ZERO>(dq, s.ds, 0, s.k, first_column() + wg * 64);
  mma_AtB<ACC>(dq, s.ds_other, 0, s.k_other, wg * 64);
  mma_commit();
  mma_wait<0>(dq, also...);
  ring_release(s.ring_ds, at);
  sem_arrive_at(s.ring_other.empty[0], other_rank());
}
// Additions leave a multiprocessor at 16 bytes a clock, and a warp waits until its own have left. `values` adds when
// the next step's p is handed on and dv is running: nobody waits for it then. `keys` has no registers to do the same.
TILE void dq_add(rt<float, 64> &dq, const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
  const step_info &info = s.info[n % SLOTS];
  int position = position_of(info);
  int64_t tile = (int64_t)get(info.dq_block) * (D / 64) + cluster_rank() * 2 + wg;
  // As add_dq, which first asks whether there is an order; here that would cost instructions. For padding, whose
  // position is -1, the wait passes at once and nobody waits for what is passed on.
  if (DETERMINISTIC) order_wait(p.order + tile, position);
  add_acc(p.dq_acc + tile * 64 * 64, dq);
  if (DETERMINISTIC) order_pass(p.order + tile, position + 1);
}

// s^T or dp^T of step n: keys by queries.
TILE void issue(rt<float, M> &x, const st<elem, KEYS, D> &keys, const st<elem, M, D> (&rows)[STAGES], ring<STAGES,
                ASYNC_READS> &r, uint32_t n) {
  ring_pos at = ring_at<STAGES>(n);
  ring_wait(r, at);
  mma_fence();
  mma_ABt<ZERO>(x, keys, rows[at.stage]);
  mma_commit();
}
TILE void softmax(rt<elem, M> &prob, rt<float, M> &x, const attention_bwd_params &p, shared &s, uint32_t n) {
  int key0 = cluster_rank() * KEYS, keys = get(s.info[n % SLOTS].keys) - key0,
      diagonal = get(s.info[n % SLOTS].diagonal) - key0;
  float c = p.scale_log2;
  probabilities(x, s.lse2[ring_at<STAGES>(n).stage], c, keys, diagonal);
  convert(prob, x);
}
// A result of task `count` leaves through the tile of k or v, which is free then.
TILE void leave(const attention_grad &to, st<elem, KEYS, D> &tile, const rt<float, D> &x,
                const attention_bwd_params &p, shared &s, uint32_t count, ring<1, ASYNC_READS> &of_tile) {
  key_task t = task_at<M, BN>(p, queue_again(s.queue, count));
  leave(to, tile, x, t.key0 + cluster_rank() * KEYS, t.part / p.parts, t.batch,
        acc_block(p, t.batch, t.part, t.key0) + cluster_rank(), KEYS);
  tma_store_wait_read();
  ring_release(of_tile, ring_at<1>(count));
  cluster_queue_release(s.queue, count);
}

// From p of step n to p of the next.
template<int A, bool MORE>
TILE void value_step(rt<float, D> &dv, rt<elem, M> &prob, rt<float, 64> &dq, const attention_bwd_params &p, shared &s,
                     uint32_t n) {
  ring_pos at = ring_at<STAGES>(n);
  rt<float, M> x;
  ring_acquire(s.ring_ds, ring_at<1>(n));
  store(s.ds, prob);
  fence_async();
  sem_arrive(s.p_full);
  ring_wait(s.ring_dout, at);
  mma_fence();
  mma_AB<A>(dv, prob, s.dout[at.stage]);
  mma_commit();
  if (A == ACC) dq_add(dq, p, s, n - 1, 0);
  if (MORE) issue(x, s.k, s.q, s.ring_q, n + 1);
  if (MORE) mma_wait<0>(dv, prob, x); else mma_wait<0>(dv, prob);
  cluster_ring_release<PAIR>(s.ring_dout, at);
  if (MORE) softmax(prob, x, p, s, n + 1);
  dq_step(dq, s, n, 0);
}
TILE void first_softmax(rt<elem, M> &prob, const attention_bwd_params &p, shared &s, uint32_t n) {
  rt<float, M> x;
  issue(x, s.k, s.q, s.ring_q, n);
  mma_wait<0>(x);
  softmax(prob, x, p, s, n);
}
TILE void values(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next;
  grid_wait();
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    rt<float, D> dv;
    rt<elem, M> prob;
    rt<float, 64> dq;
    uint32_t last = n + task_at<M, BN>(p, next).steps - 1;
    ring_wait(s.ring_k, ring_at<1>(count));
    first_softmax(prob, p, s, n);
    value_step<ZERO, true>(dv, prob, dq, p, s, n++);
    for (; n < last; n++) value_step<ACC, true>(dv, prob, dq, p, s, n);
    value_step<ACC, false>(dv, prob, dq, p, s, n++);
    dq_add(dq, p, s, n - 1, 0);
    sem_arrive(s.k_read);
    leave(p.dv, s.v, dv, p, s, count, s.ring_v);   // v is free: dq_step has seen ds of the last step, so its dp is done
  }
}

template<int A, bool MORE>
TILE void key_step(rt<float, D> &dk, rt<float, M> &dp, const attention_bwd_params &p, shared &s, uint32_t n) {
  ring_pos at = ring_at<STAGES>(n);
  rt<float, M> prob;
  rt<elem, M> ds;
  rt<float, 64> dq;
  sem_wait(s.p_full, ring_at<1>(n).phase);
  load(prob, s.ds);
  score_gradient(dp, prob, s.delta[at.stage], p.ds_scale);
  convert(ds, dp);
  wg_sync();   // all of p is read
  store(s.ds, ds);
  ring_fill(s.ring_ds, ring_at<1>(n));
  cluster_ring_release<PAIR>(s.ring_dout, at);
  mma_fence();
  mma_AB<A>(dk, ds, s.q[at.stage]);
  mma_commit();
  if (MORE) issue(dp, s.v, s.dout, s.ring_dout, n + 1);
  mma_wait<MORE>(dk, ds);
  cluster_ring_release<PAIR>(s.ring_q, at);
  dq_step(dq, s, n, 1, dp);
  dq_add(dq, p, s, n, 1);
}
TILE void keys(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next;
  grid_wait();
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    rt<float, D> dk;
    rt<float, M> dp;
    uint32_t last = n + task_at<M, BN>(p, next).steps - 1;
    float scale = p.out_scale;
    ring_wait(s.ring_v, ring_at<1>(count));   // not for ring_k: `values` has waited for it before its first p
    issue(dp, s.v, s.dout, s.ring_dout, n);
    mma_wait<0>(dp);
    key_step<ZERO, true>(dk, dp, p, s, n++);
    for (; n < last; n++) key_step<ACC, true>(dk, dp, p, s, n);
    key_step<ACC, false>(dk, dp, p, s, n++);
    scale_gradient(dk, scale);
    sem_arrive(s.k_read);
    sem_wait(s.k_read, ring_at<1>(count).phase);
    leave(p.dk, s.k, dk, p, s, count, s.ring_k);
  }
}

typedef block<attention_bwd_params, shared, init, role<values, WARPGROUP, 1, COMPUTE_REGS>,
              role<keys, WARPGROUP, 1, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<sender, THREAD, 1, LOAD_REGS>, role<zero_writer, THREAD, 1, LOAD_REGS>, CLUSTER<PAIR>, DEPENDENT>
    kernel;
ENTRY(kernel, M, BN)
