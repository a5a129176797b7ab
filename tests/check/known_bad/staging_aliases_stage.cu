// The result leaves through a stage of the ring, "which is free now": but the loader runs ahead and may be filling it
// for the next task.
// Known from: ThunderKittens (lcf.cuh: the memory of the finish step lies over the input ring), inclusionAI/humming#56.
// Expected: overwrite|race on tile
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in, out; int tasks, steps; };
struct shared {
  st<elem, 64, 64> tile[STAGES];
  ring<STAGES> inputs;
};

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks * p.steps; i++) {
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, tile_bytes(s.tile[0]));
    tma_load(s.tile[at.stage], p.in, s.inputs.full[at.stage], i / p.steps * 64, i % p.steps * 64, 0, 0);
    ring_next(s.inputs, at);
  }
}

TILE void compute(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int task = 0; task < p.tasks; task++) {
    rt<float, 64> sum, x;
    ring_pos last = at;
    fill(sum, 0.f);
    for (int i = 0; i < p.steps; i++) {
      last = at;
      ring_wait(s.inputs, at);
      load(x, s.tile[at.stage]);
      ring_release(s.inputs, at);
      ring_next(s.inputs, at);
      map(sum, x, [](float a, float b) { return a + b; });
    }
    wg_sync();
    store(s.tile[last.stage], sum);   // BAD: a tile of its own, or the last release behind the store
    fence_async();
    wg_sync();
    tma_store(p.out, s.tile[last.stage], task * 64, 0, 0, 0);
    tma_store_wait_read();
    wg_sync();
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.in = example_tensor<elem>(1, 1, 300, 192); p.out = example_tensor<elem>(1, 1, 300, 64);
        p.tasks = 5; p.steps = 3)
