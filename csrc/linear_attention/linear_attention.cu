// o_i = scale (q_i S + sum over j <= i of the chunk of (q_i . k_j) v_j), S the sum of k_t v_t^T over the chunks before
// (Katharopoulos et al. 2020; in chunks: Yang et al. 2024, equation 2). A block computes one chunk of 64 steps of one
// head.
#include "tile/tile.h"
#include "linear_attention/linear_attention.h"

struct shared {             // D: columns of q, k and v, 64 or 128
  st<elem, 64, D> q, k, v, out;
  st<elem, D, D> state;
  sem full;
};
typedef linear_attention_params params;

TILE void init(shared &s) { sem_init(s.full, arrivals(1, 0, 0)); }

struct task { int batch, head, chunk; };
TILE task block_task(const params &p) {
  int matrix = block_index() / p.chunks;
  return {matrix / p.heads, matrix % p.heads, block_index() % p.chunks};
}

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  sem_expect(s.full, 3 * tile_bytes(s.q) + tile_bytes(s.state));
  tma_load(s.q, p.q, s.full, t.chunk * 64, 0, t.head, t.batch);
  tma_load(s.k, p.k, s.full, t.chunk * 64, 0, t.head, t.batch);
  tma_load(s.v, p.v, s.full, t.chunk * 64, 0, t.head, t.batch);
  tma_load(s.state, p.states, s.full, 0, 0, t.chunk, t.batch * p.heads + t.head);
}

TILE void compute(const params &p, shared &s, int) {
  task t = block_task(p);
  float scale = p.scale;
  rt<float, 64> x;
  rt<elem, 64> scores;
  rt<float, D> o;
  sem_wait(s.full, 0);
  mma_fence();
  mma_ABt<ZERO>(x, s.q, s.k);
  mma_AB<ZERO>(o, s.q, s.state);
  mma_commit();
  mma_wait<0>(x, o);
  tril(x, 0, 0.f);
  convert(scores, x);
  mma_fence();
  mma_AB<ACC>(o, scores, s.v);
  mma_commit();
  mma_wait<0>(o, scores);
  map(o, [=](float y) { return y * scale; });
  store(s.out, o);
  fence_async();
  wg_sync();
  tma_store(p.out, s.out, t.chunk * 64, 0, t.head, t.batch);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, D)
