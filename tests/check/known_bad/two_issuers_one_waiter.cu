// Two warpgroups change a stage in place and store their halves of it from there. Only the first waits for its store
// before it hands the stage back for both: a wait covers the stores of the thread that waits, not those of the block.
// Known from: bulk groups belong to a thread, NVIDIA/TransformerEngine#3417 lists kernels that waited in another one
// than the issuer.
// Expected: overwrite on tile
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in, out; int tasks; };
struct shared {
  st<elem, 64, 64> tile[STAGES][2];
  ring<STAGES> stages;
};

TILE void init(shared &s) { ring_init(s.stages, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks; i++) {
    ring_acquire(s.stages, at);
    ring_expect(s.stages, at, 2 * tile_bytes(s.tile[0][0]));
    for (int w = 0; w < 2; w++) tma_load(s.tile[at.stage][w], p.in, s.stages.full[at.stage], i * 128 + w * 64, 0, 0, 0);
    ring_next(s.stages, at);
  }
}

TILE void compute(const params &p, shared &s, int wg) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks; i++) {
    st<elem, 64, 64> &tile = s.tile[at.stage][wg];
    rt<float, 64> x;
    ring_wait(s.stages, at);
    load(x, tile);
    map(x, [](float a) { return a > 0.f ? a : 0.f; });
    wg_sync();
    store(tile, x);
    fence_async();
    wg_sync();
    tma_store(p.out, tile, i * 128 + wg * 64, 0, 0, 0);
    if (wg == 0) tma_store_wait_read();   // BAD: both have to
    bar_sync(1, 256);                     // both halves are stored
    if (wg == 0) ring_release(s.stages, at);
    ring_next(s.stages, at);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 2, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 128, 64)
EXAMPLE(kernel, 1, p.in = example_tensor<elem>(1, 1, 600, 64); p.out = example_tensor<elem>(1, 1, 600, 64); p.tasks = 5)
