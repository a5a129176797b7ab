// The producer turns its parity one step too late: at every new round it takes the first stage for free before its
// readers have released it.
// Known from: parities written out by hand; tile-ai/tilelang#3087 waited for one that had long been complete, and the
// copies ran into the readers.
// Expected: phase|count on inputs
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in, out; int tasks; };
struct shared {
  st<elem, 64, 64> tile[STAGES], out;
  ring<STAGES> inputs;
};

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

TILE void loader(const params &p, shared &s, int) {
  for (int i = 0; i < p.tasks; i++) {
    ring_pos at = {i % STAGES, (uint32_t)((i - 1) / STAGES & 1)};   // BAD: i / STAGES, as in ring_at<STAGES>(i)
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, tile_bytes(s.out));
    tma_load(s.tile[at.stage], p.in, s.inputs.full[at.stage], i * 64, 0, 0, 0);
  }
}

TILE void compute(const params &p, shared &s, int) {
  for (int i = 0; i < p.tasks; i++) {
    ring_pos at = ring_at<STAGES>(i);
    rt<float, 64> x;
    ring_wait(s.inputs, at);
    load(x, s.tile[at.stage]);
    ring_release(s.inputs, at);
    tma_store_wait_read();
    wg_sync();
    store(s.out, x);
    fence_async();
    wg_sync();
    tma_store(p.out, s.out, i * 64, 0, 0, 0);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.in = example_tensor<elem>(1, 1, 300, 64); p.out = example_tensor<elem>(1, 1, 300, 64); p.tasks = 5)
