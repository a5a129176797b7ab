// Two warpgroups release every stage, the semaphore counts one of them: a stage is free as soon as the first has done
// with it.
// Known from: tile-ai/tilelang#2360 (review): semaphores for one arrival that whole warps arrive at, so that a slot is
// free too early.
// Expected: phase|race on inputs|tile
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in, out; int tasks; };
struct shared {
  st<elem, 64, 64> tile[STAGES], out[2];
  ring<STAGES> inputs;
};

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }   // BAD: arrivals(0, 0, 2)

TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks; i++) {
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, tile_bytes(s.tile[0]));
    tma_load(s.tile[at.stage], p.in, s.inputs.full[at.stage], i * 64, 0, 0, 0);
    ring_next(s.inputs, at);
  }
}

// Each warpgroup writes a scaled copy of its own.
TILE void compute(const params &p, shared &s, int wg) {
  ring_pos at = {};
  float scale = wg == 0 ? 1.f : -1.f;
  for (int i = 0; i < p.tasks; i++) {
    rt<float, 64> x;
    ring_wait(s.inputs, at);
    load(x, s.tile[at.stage]);
    ring_release(s.inputs, at);
    ring_next(s.inputs, at);
    map(x, [=](float a) { return a * scale; });
    tma_store_wait_read();
    wg_sync();
    store(s.out[wg], x);
    fence_async();
    wg_sync();
    tma_store(p.out, s.out[wg], i * 64, 0, wg, 0);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 2, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.in = example_tensor<elem>(1, 1, 300, 64); p.out = example_tensor<elem>(1, 2, 300, 64); p.tasks = 5)
