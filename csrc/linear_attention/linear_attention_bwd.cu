// Gradients of linear_attention.cu's o. S is the state before the chunk, G = sum of scale q_t do_t^T over the steps
// behind it:
//   dq_i = scale (S do_i + sum over j <= i of (do_i . v_j) k_j)
//   dk_j = G v_j + scale sum over i >= j of (v_j . do_i) q_i
//   dv_j = G^T k_j + scale sum over i >= j of (k_j . q_i) do_i
// A block computes one chunk of 64 steps of one head, one gradient after the other.
#include "tile/tile.h"
#include "linear_attention/linear_attention.h"

struct shared {             // D: columns of q, k and v, 64 or 128
  st<elem, 64, D> q, k, v, dout, out;
  st<elem, D, D> state, dstate;
  sem full;
};
typedef linear_attention_bwd_params params;

TILE void init(shared &s) { sem_init(s.full, arrivals(1, 0, 0)); }

struct task { int batch, head, chunk; };
TILE task block_task(const params &p) {
  int matrix = block_index() / p.chunks;
  return {matrix / p.heads, matrix % p.heads, block_index() % p.chunks};
}

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  int step = t.chunk * 64, matrix = t.batch * p.heads + t.head;
  sem_expect(s.full, 4 * tile_bytes(s.q) + 2 * tile_bytes(s.state));
  tma_load(s.q, p.q, s.full, step, 0, t.head, t.batch);
  tma_load(s.k, p.k, s.full, step, 0, t.head, t.batch);
  tma_load(s.v, p.v, s.full, step, 0, t.head, t.batch);
  tma_load(s.dout, p.dout, s.full, step, 0, t.head, t.batch);
  tma_load(s.state, p.states, s.full, 0, 0, t.chunk, matrix);
  tma_load(s.dstate, p.dstates, s.full, 0, 0, t.chunk, matrix);
}

// One gradient: a times a state (not `turned`: its transpose), plus the scores of a's steps with b's, times x. `later`:
// b's steps from the same one on, else up to it. `dstate` has the factor scale already; `state`, which dq uses, has
// not.
typedef st<elem, 64, D> rows;
TILE void gradient(const gmap &out, shared &s, const task &t, float scale, const rows &a, const rows &b, const rows &x,
                   const st<elem, D, D> &state, bool later, bool turned) {
  rt<float, 64> y;
  rt<elem, 64> scores;
  rt<float, D> d;
  mma_fence();
  mma_ABt<ZERO>(y, a, b);
  if (turned) mma_AB<ZERO>(d, a, state);
  else mma_ABt<ZERO>(d, a, state);
  mma_commit();
  mma_wait<0>(y, d);
  if (later) triu(y, 0, 0.f);
  else tril(y, 0, 0.f);
  map(y, [=](float f) { return f * scale; });
  if (!later) map(d, [=](float f) { return f * scale; });
  convert(scores, y);
  mma_fence();
  mma_AB<ACC>(d, scores, x);
  mma_commit();
  if (later) {                // the gradient before has left
    tma_store_wait_read();
    wg_sync();
  }
  mma_wait<0>(d, scores);
  store(s.out, d);
  fence_async();
  wg_sync();
  tma_store(out, s.out, t.chunk * 64, 0, t.head, t.batch);
}

TILE void compute(const params &p, shared &s, int) {
  task t = block_task(p);
  float scale = p.scale;
  sem_wait(s.full, 0);
  gradient(p.dq, s, t, scale, s.dout, s.v, s.k, s.state, false, false);
  gradient(p.dk, s, t, scale, s.v, s.dout, s.q, s.dstate, true, false);
  gradient(p.dv, s, t, scale, s.k, s.q, s.dout, s.dstate, true, true);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, D)
