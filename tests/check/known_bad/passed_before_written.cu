// One block tells another that its tile is in global memory when the store has only read shared memory: what it writes
// may not have arrived yet.
// Known from: HazyResearch/ThunderKittens#194 (a signal to other GPUs behind a wait for the store's reads).
// Expected: global-race on -
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in, between, out; int *ready; };
struct shared {
  st<elem, 64, 64> tile, out;
  sem go, full;
};

TILE void init(shared &s) {
  sem_init(s.go, arrivals(0, 0, 1));
  sem_init(s.full, arrivals(1, 0, 0));
}

TILE void loader(const params &p, shared &s, int) {
  bool first = block_index() == 0;
  if (!first) sem_wait(s.go, 0);
  sem_expect(s.full, tile_bytes(s.tile));
  tma_load(s.tile, first ? p.in : p.between, s.full, 0, 0, 0, 0);
}

// Block 0 doubles `in` into `between`, block 1 doubles `between` into `out`.
TILE void compute(const params &p, shared &s, int) {
  bool first = block_index() == 0;
  rt<float, 64> x;
  if (!first) {
    order_wait(p.ready, 1);
    fence_async();
    sem_arrive(s.go);
  }
  sem_wait(s.full, 0);
  load(x, s.tile);
  map(x, [](float a) { return a + a; });
  store(s.out, x);
  fence_async();
  wg_sync();
  tma_store(first ? p.between : p.out, s.out, 0, 0, 0, 0);
  tma_store_wait_read();   // BAD: tma_store_wait()
  if (first) order_pass(p.ready, 1);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 2, p.in = example_tensor<elem>(1, 1, 60, 64); p.between = example_tensor<elem>(1, 1, 60, 64);
        p.out = example_tensor<elem>(1, 1, 60, 64); p.ready = example_words<int>(1))
