// A persistent loop starts its ring anew at every task. The semaphores do not: after a number of steps that is no
// multiple of two rounds the parities are wrong, and both sides pass waits that they should not pass.
// Known from: tile-ai/tilelang#2674, where a pipelined loop under a persistent one was right only if its length was a
// multiple of two rounds.
// Expected: phase on inputs
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in, out; int tasks, steps; };
struct shared {
  st<elem, 64, 64> tile[STAGES], out;
  ring<STAGES> inputs;
};

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

TILE void loader(const params &p, shared &s, int) {
  for (int task = block_index(); task < p.tasks; task += block_count()) {
    ring_pos at = {};   // BAD: belongs in front of the loop over tasks
    for (int i = 0; i < p.steps; i++) {
      ring_acquire(s.inputs, at);
      ring_expect(s.inputs, at, tile_bytes(s.out));
      tma_load(s.tile[at.stage], p.in, s.inputs.full[at.stage], task * 64, i * 64, 0, 0);
      ring_next(s.inputs, at);
    }
  }
}

TILE void compute(const params &p, shared &s, int) {
  for (int task = block_index(); task < p.tasks; task += block_count()) {
    ring_pos at = {};   // BAD: belongs in front of the loop over tasks
    rt<float, 64> sum, x;
    fill(sum, 0.f);
    for (int i = 0; i < p.steps; i++) {
      ring_wait(s.inputs, at);
      load(x, s.tile[at.stage]);
      ring_release(s.inputs, at);
      ring_next(s.inputs, at);
      map(sum, x, [](float a, float b) { return a + b; });
    }
    tma_store_wait_read();
    wg_sync();
    store(s.out, sum);
    fence_async();
    wg_sync();
    tma_store(p.out, s.out, task * 64, 0, 0, 0);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.in = example_tensor<elem>(1, 1, 300, 192); p.out = example_tensor<elem>(1, 1, 300, 64);
        p.tasks = 5; p.steps = 3)
