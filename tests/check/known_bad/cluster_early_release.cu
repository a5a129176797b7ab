// Two blocks copy into each other's stages, but take a stage for free as soon as their own consumers have released it:
// the peer may still multiply from its copy.
// Known from: inclusionAI/humming#56 (the leader of a cluster reused memory behind its own epilogue only; wrong
// elements on H100 and H200).
// Expected: overwrite|race on b
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap a, b; float *c; int steps; };
struct shared {
  st<elem, 64, 64> a[STAGES], b[STAGES];
  ring<STAGES, ASYNC_READS> inputs;
};

// BAD, with the release below: cluster_ring_init<2>
TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

// Each block loads its own rows of a, and half of their common b for both.
TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  int rank = cluster_rank();
  for (int i = 0; i < p.steps; i++) {
    sem &full = s.inputs.full[at.stage];
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, tile_bytes(s.a[0]) + tile_bytes(s.b[0]));
    tma_load(s.a[at.stage], p.a, full, rank * 64, i * 64, 0, 0);
    tma_load_rows_multicast<32>(s.b[at.stage], rank * 32, p.b, full, i * 64 + rank * 32, 0, 0, 0, 3);
    ring_next(s.inputs, at);
  }
}

TILE void compute(const params &p, shared &s, int) {
  ring_pos at = {};
  rt<float, 64> c;
  fill(c, 0.f);
  for (int i = 0; i < p.steps; i++) {
    ring_wait(s.inputs, at);
    mma_fence();
    mma_AB<ACC>(c, s.a[at.stage], s.b[at.stage]);
    mma_commit();
    mma_wait<0>(c);
    ring_release(s.inputs, at);   // BAD: cluster_ring_release<2>
    ring_next(s.inputs, at);
  }
  store(p.c + cluster_rank() * 64 * 64, 64, c, 64, 64);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>, CLUSTER<2>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 2, p.a = example_tensor<elem>(1, 1, 128, 300); p.b = example_tensor<elem>(1, 1, 300, 64);
        p.c = example_words<float>(2 * 64 * 64); p.steps = 5)
