// Two warpgroups write, a third stores what they wrote. It counts all three at the barrier, the writers count
// themselves only.
// Known from: kernels that get one more role later.
// Expected: barrier on -
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap out; int tasks; };
struct shared {
  st<elem, 64, 64> part[2];
};

TILE void init(shared &) {}

TILE void write(const params &p, shared &s, int wg) {
  rt<float, 64> x;
  for (int i = 0; i < p.tasks; i++) {
    fill(x, (float)(2 * i + wg));
    if (i > 0) bar_sync(2, 384);   // the stores have read the parts
    store(s.part[wg], x);
    fence_async();
    bar_arrive(1, 256);            // BAD: 384
  }
}

TILE void drain(const params &p, shared &s, int) {
  for (int i = 0; i < p.tasks; i++) {
    bar_sync(1, 384);
    for (int w = 0; w < 2; w++) tma_store(p.out, s.part[w], i * 128 + w * 64, 0, 0, 0);
    tma_store_wait_read();
    if (i + 1 < p.tasks) bar_arrive(2, 384);
  }
}

typedef block<params, shared, init, role<write, WARPGROUP, 2, 0>, role<drain, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 128, 64)
EXAMPLE(kernel, 1, p.out = example_tensor<elem>(1, 1, 600, 64); p.tasks = 5)
