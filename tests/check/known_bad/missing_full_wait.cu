// The tile that stays for the whole task has a semaphore of its own, and nobody waits for it: the products may read q
// before it has arrived.
// Known from: compilers that place waits, e.g. tile-ai/tilelang#2166 (one of several loaded tiles is read in front of
// the wait).
// Expected: race on q
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap q, k, out; int tasks; };
struct shared {
  st<elem, 64, 64> q, k[STAGES], out;
  ring<STAGES, ASYNC_READS> k_ring;
  sem q_full;
};

TILE void init(shared &s) {
  ring_init(s.k_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
  sem_init(s.q_full, arrivals(1, 0, 0));
}

TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  sem_expect(s.q_full, tile_bytes(s.q));
  tma_load(s.q, p.q, s.q_full, 0, 0, 0, 0);
  for (int i = 0; i < p.tasks; i++) {
    ring_acquire(s.k_ring, at);
    ring_expect(s.k_ring, at, tile_bytes(s.k[0]));
    tma_load(s.k[at.stage], p.k, s.k_ring.full[at.stage], i * 64, 0, 0, 0);
    ring_next(s.k_ring, at);
  }
}

TILE void compute(const params &p, shared &s, int) {
  ring_pos at = {};
  rt<float, 64> x;
  for (int i = 0; i < p.tasks; i++) {
    ring_wait(s.k_ring, at);   // BAD: sem_wait(s.q_full, 0) belongs in front of the loop
    mma_fence();
    mma_ABt<ZERO>(x, s.q, s.k[at.stage]);
    mma_commit();
    mma_wait<0>(x);
    ring_release(s.k_ring, at);
    ring_next(s.k_ring, at);
    tma_store_wait_read();
    wg_sync();
    store(s.out, x);
    fence_async();
    wg_sync();
    tma_store(p.out, s.out, 0, i * 64, 0, 0);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.q = example_tensor<elem>(1, 1, 60, 64); p.k = example_tensor<elem>(1, 1, 300, 64);
        p.out = example_tensor<elem>(1, 1, 60, 300); p.tasks = 5)
