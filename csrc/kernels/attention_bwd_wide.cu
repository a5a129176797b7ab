// Attention backward for wide heads (Dao 2023, algorithm 2), for a pair of blocks of 64 keys that walks over the blocks of 64 query rows i:
//   s^T = k q_i^T;  p^T = 2^(c s^T - lse2);  dp^T = v dout_i^T;  ds^T = p^T (dp^T - delta)
//   dv += p^T dout_i;  dk += ds^T q_i;  dq_i += ds k   (fp32, in global memory);  c = scale log2 e
// dk and dv of 64 keys fill the registers of two warpgroups: one computes p and dv, the other ds and dk. p^T and ds^T are register operands
// where they are made; p^T goes to the other warpgroup through shared memory, and ds^T takes its place there.
// Additions to dq are what the L2 can bear least. The two blocks of a cluster therefore exchange their ds, and each adds half of the columns
// of dq for the keys of both. Of q and dout each loads half of the columns for both.
#include "tile/tile.h"
#include "kernels/attention.h"

enum { PAIR = 2, BLOCKS = PAIR, ZEROS = 128, KEYS = 64, BN = PAIR * KEYS, M = 64, STAGES = 2, HALF = D / PAIR };   // D, DETERMINISTIC, FEATURES (0), *_REGS
#include "kernels/attention_features.h"
#include "kernels/attention_bwd_tasks.h"
static_assert(HALF == 2 * 64, "a step's dq is one 64 x 64 tile for each warpgroup of the pair");

struct shared {
  st<elem, KEYS, D> k, v;
  st<elem, KEYS, HALF> k_other;        // the other block's keys, this one's columns
  st<elem, M, D> q[STAGES], dout[STAGES];
  st<elem, KEYS, M> ds, ds_other;      // p^T, then ds^T in its place; the other block's ds^T
  sv<M> lse2[STAGES], delta[STAGES];
  sv<ZEROS> zeros;
  ring<STAGES, ASYNC_READS> ring_q, ring_dout;   // with lse2 and delta, which are read before the fence of an arrival
  sem p_full, ds_full, other_full;     // these five: one phase a step
  sem ds_free, other_free;             // ds may be written here; ds_other in the other block
  place at[SLOTS];                     // of step n, from the loader
  held now;                            // the loader's task
  sem k_full, v_full, k_read, k_free, v_free;   // k_read: by all products
  task_queue queue;
};

TILE void init(shared &s) {
  cluster_ring_init<PAIR>(s.ring_q, arrivals(1, 0, 0), arrivals(0, 0, 1));
  cluster_ring_init<PAIR>(s.ring_dout, arrivals(1, 0, 0), arrivals(0, 0, 2));
  sem_init(s.p_full, arrivals(0, 0, 1));
  sem_init(s.ds_full, arrivals(0, 0, 1));
  sem_init(s.other_full, arrivals(1, 0, 0));
  sem_init(s.ds_free, arrivals(1, 0, 2));
  sem_init(s.other_free, arrivals(0, 0, 2));
  cluster_queue_init(s.queue, PAIR, arrivals(2, 0, 2));
  sem_init(s.k_full, arrivals(1, 0, 0));
  sem_init(s.v_full, arrivals(1, 0, 0));
  sem_init(s.k_read, arrivals(0, 0, 2));
  sem_init(s.k_free, arrivals(0, 0, 1));
  sem_init(s.v_free, arrivals(0, 0, 1));
}

#include "kernels/attention_bwd_zero.h"
#include "kernels/attention_bwd_pair.h"

// 64 columns of dq of step n, for the keys of both blocks; `also`: what else is in flight.
template<class... Tile> TILE void dq_step(rt<float, 64> &dq, shared &s, uint32_t n, int wg, Tile &...also) {
  sem_wait(s.ds_full, n & 1);
  sem_wait(s.other_full, n & 1);
  mma_fence();
  mma_AtB<ZERO>(dq, s.ds, 0, s.k, cluster_rank() * HALF + wg * 64);
  mma_AtB<ACC>(dq, s.ds_other, 0, s.k_other, wg * 64);
  mma_commit();
  mma_wait<0>(dq, also...);
  sem_arrive(s.ds_free);
  sem_arrive_at(s.other_free, other_rank());
}
// Additions leave a multiprocessor at 16 bytes a clock, and a warp waits until its own have left. Those of `values` are made where nobody waits
// for it: when the next step's p is handed on and dv is running. In `keys` the registers do not suffice for that.
TILE void dq_add(rt<float, 64> &dq, const attention_bwd_params &p, shared &s, uint32_t n, int wg) {
  const place &at = s.at[n % SLOTS];
  int turn = DETERMINISTIC ? get(at.turn) : 0;   // of padding, where nothing depends on the order: -1, which is never waited for
  int64_t tile = (int64_t)get(at.dq_block) * (D / 64) + cluster_rank() * 2 + wg;
  if (DETERMINISTIC) order_wait(p.order + tile, turn);
  add_acc(p.dq_acc + tile * 64 * 64, dq);
  if (DETERMINISTIC) order_pass(p.order + tile, turn + 1);
}

// s^T or dp^T of step n: keys by queries.
TILE void issue(rt<float, M> &x, const st<elem, KEYS, D> &keys, const st<elem, M, D> (&rows)[STAGES], ring<STAGES, ASYNC_READS> &r, uint32_t n) {
  ring_pos at = ring_at<STAGES>(n);
  ring_wait(r, at);
  mma_fence();
  mma_ABt<ZERO>(x, keys, rows[at.stage]);
  mma_commit();
}
TILE void softmax(rt<elem, M> &prob, rt<float, M> &x, const attention_bwd_params &p, shared &s, uint32_t n) {
  int key0 = cluster_rank() * KEYS, keys = get(s.at[n % SLOTS].keys) - key0, diagonal = get(s.at[n % SLOTS].diagonal) - key0;
  float c = p.scale;
  if (diagonal < KEYS - 1) triu(x, -diagonal, -infinity());
  if (keys < KEYS) map_rc(x, [=](float a, int key, int) { return key < keys ? a : -infinity(); });
  map_col(x, s.lse2[ring_at<STAGES>(n).stage], [=](float a, float l) { return fast_exp2(fused(a, c, -l)); });
  convert(prob, x);
}
// A result of task `count` leaves through the tile of k or v.
TILE void leave(const attention_grad &to, st<elem, KEYS, D> &tile, const rt<float, D> &x, const attention_bwd_params &p, shared &s, uint32_t count, sem &tile_free) {
  task t = task_at(p, queue_again(s.queue, count));
  leave(to, tile, x, first_key(t), t.k_head / p.parts, t.batch, acc_block(p, t.batch, t.k_head, t.key0) + cluster_rank(), KEYS);
  tma_store_wait_read();
  sem_arrive(tile_free);
  cluster_queue_release(s.queue, count);
}

// From p of step n to p of the next.
template<int A, bool MORE>
TILE void value_step(rt<float, D> &dv, rt<elem, M> &prob, rt<float, 64> &dq, const attention_bwd_params &p, shared &s, uint32_t n) {
  ring_pos at = ring_at<STAGES>(n);
  rt<float, M> x;
  sem_wait(s.ds_free, ~n & 1);
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
    uint32_t last = n + task_at(p, next).steps - 1;
    sem_wait(s.k_full, count & 1);
    first_softmax(prob, p, s, n);
    value_step<ZERO, true>(dv, prob, dq, p, s, n++);
    for (; n < last; n++) value_step<ACC, true>(dv, prob, dq, p, s, n);
    value_step<ACC, false>(dv, prob, dq, p, s, n++);
    dq_add(dq, p, s, n - 1, 0);
    sem_arrive(s.k_read);
    leave(p.dv, s.v, dv, p, s, count, s.v_free);   // the last dp is done: its ds was there
  }
}

template<int A, bool MORE> TILE void key_step(rt<float, D> &dk, rt<float, M> &dp, const attention_bwd_params &p, shared &s, uint32_t n) {
  ring_pos at = ring_at<STAGES>(n);
  rt<float, M> prob;
  rt<elem, M> ds;
  rt<float, 64> dq;
  sem_wait(s.p_full, n & 1);
  load(prob, s.ds);
  map_col(dp, prob, s.delta[at.stage], [f = p.ds_scale](float a, float b, float d) { return b * fused(a, f, -d); });
  convert(ds, dp);
  wg_sync();   // all of p is read
  store(s.ds, ds);
  fence_async();
  sem_arrive(s.ds_full);
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
    uint32_t last = n + task_at(p, next).steps - 1;
    float scale = p.out_scale;
    sem_wait(s.v_full, count & 1);   // k's is known to who sees the first p
    issue(dp, s.v, s.dout, s.ring_dout, n);
    mma_wait<0>(dp);
    key_step<ZERO, true>(dk, dp, p, s, n++);
    for (; n < last; n++) key_step<ACC, true>(dk, dp, p, s, n);
    key_step<ACC, false>(dk, dp, p, s, n++);
    scale_gradient(dk, scale);
    sem_arrive(s.k_read);
    sem_wait(s.k_read, count & 1);
    leave(p.dk, s.k, dk, p, s, count, s.k_free);
  }
}

typedef block<attention_bwd_params, shared, init, role<values, WARPGROUP, 1, COMPUTE_REGS>, role<keys, WARPGROUP, 1, COMPUTE_REGS>,
              role<loader, THREAD, 1, LOAD_REGS>, role<sender, THREAD, 1, LOAD_REGS>,
              role<cleaner, THREAD, 1, LOAD_REGS>, CLUSTER<PAIR>, DEPENDENT> kernel;
ENTRY(kernel, M, BN)
