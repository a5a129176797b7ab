// The ring is declared as if only matrix instructions read its stages, so that its release carries no fence: but the
// stage is read into registers, and the next copy may overtake these reads.
// Known from: deepseek-ai/DeepEP#642, NVIDIA/TransformerEngine#2695.
// Expected: fence-read on tile
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in, out; int tasks; };
struct shared {
  st<elem, 64, 64> tile[STAGES], out;
  ring<STAGES, ASYNC_READS> inputs;   // BAD: ring<STAGES>
};

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks; i++) {
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, tile_bytes(s.out));
    tma_load(s.tile[at.stage], p.in, s.inputs.full[at.stage], i * 64, 0, 0, 0);
    ring_next(s.inputs, at);
  }
}

TILE void compute(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks; i++) {
    rt<float, 64> x;
    ring_wait(s.inputs, at);
    load(x, s.tile[at.stage]);
    ring_release(s.inputs, at);
    ring_next(s.inputs, at);
    map(x, [](float a) { return a > 0.f ? a : 0.f; });
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
