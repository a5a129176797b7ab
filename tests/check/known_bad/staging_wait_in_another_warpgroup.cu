// Two warpgroups write a staging tile each, one thread of the first issues both stores. All threads wait for their
// stores, but only that thread has any, and the others overwrite the tiles without having heard from it.
// Known from: fast.cu (examples/matmul/matmul_11.cuh: wait at 492, the one issuer at 527);
// NVIDIA/TransformerEngine#3417.
// Expected: race|overwrite on c
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in, out; int tasks; };
struct shared {
  st<elem, 64, 64> tile[STAGES][2], c[2];
  ring<STAGES> inputs;
};

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 2)); }

TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks; i++) {
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, 2 * tile_bytes(s.c[0]));
    for (int w = 0; w < 2; w++) tma_load(s.tile[at.stage][w], p.in, s.inputs.full[at.stage], i * 128 + w * 64, 0, 0, 0);
    ring_next(s.inputs, at);
  }
}

TILE void compute(const params &p, shared &s, int wg) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks; i++) {
    rt<float, 64> x;
    ring_wait(s.inputs, at);
    load(x, s.tile[at.stage][wg]);
    ring_release(s.inputs, at);
    ring_next(s.inputs, at);
    map(x, [](float a) { return a > 0.f ? a : 0.f; });
    tma_store_wait_read();   // BAD: bar_sync(2, 256) belongs behind it
    store(s.c[wg], x);
    fence_async();
    bar_sync(1, 256);
    if (wg == 0)
      for (int w = 0; w < 2; w++) tma_store(p.out, s.c[w], i * 128 + w * 64, 0, 0, 0);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 2, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 128, 64)
EXAMPLE(kernel, 1, p.in = example_tensor<elem>(1, 1, 600, 64); p.out = example_tensor<elem>(1, 1, 600, 64); p.tasks = 5)
