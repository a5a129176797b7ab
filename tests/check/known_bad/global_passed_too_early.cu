// The second of two blocks says that its half is in global memory before it has written it.
// Known from: split-K reductions; NVIDIA/Fuser#2391 (nothing held the writes in front of the release of the semaphore).
// Expected: global-race on -
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in; float *partial, *out; int *ready; };
struct shared {
  st<elem, 64, 64> tile;
  sem full;
};

TILE void init(shared &s) { sem_init(s.full, arrivals(1, 0, 0)); }

TILE void loader(const params &p, shared &s, int) {
  sem_expect(s.full, tile_bytes(s.tile));
  tma_load(s.tile, p.in, s.full, 0, block_index() * 64, 0, 0);
}

// Row sums of 128 columns, 64 by each of two blocks; the first adds.
TILE void compute(const params &p, shared &s, int) {
  rt<float, 64> x;
  rsum sum;
  rv rows, other;
  fill(sum, 0.f);
  sem_wait(s.full, 0);
  load(x, s.tile);
  row_sum_add(sum, x);
  reduce(rows, sum);
  if (block_index() == 1) {
    order_pass(p.ready, 1);   // BAD: belongs behind the store
    store(p.partial, rows, 64);
    return;
  }
  order_wait(p.ready, 1);
  load(other, p.partial, 64, 0.f);
  map(rows, rows, other, [](float a, float b) { return a + b; });
  store(p.out, rows, 64);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 2, p.in = example_tensor<elem>(1, 1, 60, 128); p.partial = example_words<float>(64);
        p.out = example_words<float>(64); p.ready = example_words<int>(1))
