// A product of a^T and b takes 64 columns of a from column 32. The columns lie in panels of 64: the descriptor's
// address would be the panel's begin.
// Known from: operands that are cut as if they lay row by row.
// Expected: bounds on a
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap a, b; float *c; };
struct shared {
  st<elem, 64, 128> a;
  st<elem, 64, 64> b;
  sem full;
};

TILE void init(shared &s) { sem_init(s.full, arrivals(1, 0, 0)); }

TILE void loader(const params &p, shared &s, int) {
  sem_expect(s.full, tile_bytes(s.a) + tile_bytes(s.b));
  tma_load(s.a, p.a, s.full, 0, 0, 0, 0);
  tma_load(s.b, p.b, s.full, 0, 0, 0, 0);
}

TILE void compute(const params &p, shared &s, int) {
  rt<float, 64> c;
  sem_wait(s.full, 0);
  mma_fence();
  mma_AtB<ZERO>(c, s.a, 32, s.b, 0);   // BAD: a multiple of 64
  mma_commit();
  mma_wait<0>(c);
  store(p.c, 64, c, 64, 64);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.a = example_tensor<elem>(1, 1, 64, 128); p.b = example_tensor<elem>(1, 1, 64, 64);
        p.c = example_words<float>(64 * 64))
