// Gradients of linear_attention.cu's o, with S the state before the chunk and G that of the gradients behind it, G = sum of scale q_t do_t^T:
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

typedef st<elem, 64, D> rows;
// Scores of rows x with rows y, those of later steps (LATER) or of earlier ones, times scale.
template<int LATER> TILE void scores_of(rt<elem, 64> &scores, const rows &x, const rows &y, float scale) {
  rt<float, 64> t;
  mma_fence();
  mma_ABt<ZERO>(t, x, y);
  mma_commit();
  mma_wait<0>(t);
  if (LATER) triu(t, 0, 0.f);
  else tril(t, 0, 0.f);
  map(t, [=](float a) { return a * scale; });
  convert(scores, t);
}
// d += scores x, and out.
TILE void finish(const gmap &map, shared &s, const task &t, rt<float, D> &d, rt<elem, 64> &scores, const rows &x) {
  mma_fence();
  mma_AB<ACC>(d, scores, x);
  mma_commit();
  tma_store_wait_read();
  wg_sync();
  mma_wait<0>(d, scores);
  store(s.out, d);
  fence_async();
  wg_sync();
  tma_store(map, s.out, t.chunk * 64, 0, t.head, t.batch);
}

TILE void compute(const params &p, shared &s, int) {
  task t = block_task(p);
  float scale = p.scale;
  rt<elem, 64> scores;
  rt<float, D> d;
  sem_wait(s.full, 0);
  scores_of<0>(scores, s.dout, s.v, scale);
  mma_fence();
  mma_ABt<ZERO>(d, s.dout, s.state);
  mma_commit();
  mma_wait<0>(d);
  map(d, [=](float y) { return y * scale; });
  finish(p.dq, s, t, d, scores, s.k);

  scores_of<1>(scores, s.v, s.dout, scale);
  mma_fence();
  mma_ABt<ZERO>(d, s.v, s.dstate);
  mma_commit();
  mma_wait<0>(d);
  finish(p.dk, s, t, d, scores, s.q);

  scores_of<1>(scores, s.k, s.q, scale);
  mma_fence();
  mma_AB<ZERO>(d, s.k, s.dstate);
  mma_commit();
  mma_wait<0>(d);
  finish(p.dv, s, t, d, scores, s.dout);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, D)
