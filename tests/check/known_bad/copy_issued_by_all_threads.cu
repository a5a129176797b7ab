// A warpgroup fetches its tiles itself. The operations are a thread's: all 128 threads expect the bytes and issue the
// copy.
// Known from: mlc-ai/TIRx-kernels#202 (copies issued by a whole warp instead of one thread).
// Expected: elected on -
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in, out; int tasks; };
struct shared {
  st<elem, 64, 64> tile, out;
  sem full;
};

TILE void init(shared &s) { sem_init(s.full, arrivals(1, 0, 0)); }

TILE void compute(const params &p, shared &s, int) {
  for (int i = 0; i < p.tasks; i++) {
    rt<float, 64> x;
    sem_expect(s.full, tile_bytes(s.tile));            // BAD: both belong in a role of width THREAD
    tma_load(s.tile, p.in, s.full, i * 64, 0, 0, 0);
    sem_wait(s.full, i & 1);
    load(x, s.tile);
    fence_async();
    tma_store_wait_read();
    wg_sync();
    store(s.out, x);
    fence_async();
    wg_sync();
    tma_store(p.out, s.out, i * 64, 0, 0, 0);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.in = example_tensor<elem>(1, 1, 300, 64); p.out = example_tensor<elem>(1, 1, 300, 64); p.tasks = 5)
