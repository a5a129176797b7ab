// The kernel begins before the one in front of it in the stream is over, and only the loader waits for that.
// Known from: programmatic dependent launches, where the epilogue adds to what the kernel before wrote.
// Expected: grid on -
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap a; float *lse; };
struct shared {
  st<elem, 64, 64> a;
  sem full;
};

TILE void init(shared &s) { sem_init(s.full, arrivals(1, 0, 0)); }

TILE void loader(const params &p, shared &s, int) {
  grid_wait();
  sem_expect(s.full, tile_bytes(s.a));
  tma_load(s.a, p.a, s.full, 0, 0, 0, 0);
}

TILE void compute(const params &p, shared &s, int) {
  rv lse;
  load(lse, p.lse, 60, 0.f);   // BAD: needs a grid_wait of its own
  sem_wait(s.full, 0);
  map(lse, lse, [](float a) { return a + 1.f; });
  store(p.lse, lse, 60);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>, DEPENDENT> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.a = example_tensor<elem>(1, 1, 60, 64); p.lse = example_words<float>(60))
