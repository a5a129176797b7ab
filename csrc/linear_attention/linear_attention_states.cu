// S_c = S_0 + scale sum of a_t b_t^T over the steps t before chunk c (Katharopoulos et al. 2020, equation 18).
// Backwards in time the sum is over the steps behind it.
// A block owns 64 rows of one head's state and keeps them in registers. A loader thread
// copies the chunks of a and b into a ring; a warpgroup writes the state, rounded, and adds the chunk. Steps past the
// end read as zeros and add nothing.
#include "tile/tile.h"
#include "linear_attention/linear_attention.h"

// D: columns of b, 64 or 128, and rows of the state in blocks of 64. STAGES
struct shared {
  st<elem, 64, 64> a[STAGES];
  st<elem, 64, D> b[STAGES];
  st<elem, 64, D> state;
  ring<STAGES, ASYNC_READS> inputs;
};
typedef linear_attention_states_params params;

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

struct task { int batch, head, row0; };   // of the state
TILE task block_task(const params &p) {
  int matrix = block_index() / (D / 64);
  return {matrix / p.heads, matrix % p.heads, block_index() % (D / 64) * 64};
}
TILE int chunk_of(const params &p, int i) { return p.backwards ? p.chunks - 1 - i : i; }

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  for (int i = 0; i < p.chunks; i++) {
    sem &full = s.inputs.full[at.stage];
    int step = chunk_of(p, i) * 64;
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, tile_bytes(s.a[0]) + tile_bytes(s.b[0]));
    tma_load(s.a[at.stage], p.a, full, step, t.row0, t.head, t.batch);
    tma_load(s.b[at.stage], p.b, full, step, 0, t.head, t.batch);
    ring_next(s.inputs, at);
  }
}

TILE void compute(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  float scale = p.scale;
  rt<float, D> state, chunk;
  int matrix = t.batch * p.heads + t.head, rows = p.a_dim - t.row0;
  int64_t first = ((int64_t)matrix * p.a_dim + t.row0) * p.b_dim;
  if (p.initial) load(state, p.initial + first, p.b_dim, rows, p.b_dim);
  else fill(state, 0.f);
  for (int i = 0; i < p.chunks; i++) {
    ring_wait(s.inputs, at);
    mma_fence();
    mma_AtB<ZERO>(chunk, s.a[at.stage], 0, s.b[at.stage], 0);
    mma_commit();
    tma_store_wait_read();
    wg_sync();
    store(s.state, state);
    fence_async();
    wg_sync();
    tma_store(p.states, s.state, t.row0, 0, chunk_of(p, i), matrix);
    mma_wait<0>(chunk);
    ring_done(s.inputs, at);
    map(state, chunk, [=](float x, float y) { return fused(scale, y, x); });
  }
  if (p.final) store(p.final + first, p.b_dim, state, rows, p.b_dim);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, D)
