// The accumulator's scope ends before the wait: what comes next may get its registers while the product still writes
// them.
// Known from: kernels cut into functions.
// Expected: lifetime on -
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap a; };
struct shared {
  st<elem, 64, 64> a;
  sem full;
};

TILE void init(shared &s) { sem_init(s.full, arrivals(1, 0, 0)); }

TILE void loader(const params &p, shared &s, int) {
  sem_expect(s.full, tile_bytes(s.a));
  tma_load(s.a, p.a, s.full, 0, 0, 0, 0);
}

TILE void warm_up(shared &s) {
  rt<float, 64> c;
  mma_fence();
  mma_ABt<ZERO>(c, s.a, s.a);
  mma_commit();
}   // BAD: mma_wait<0>(c) belongs here

TILE void compute(const params &, shared &s, int) {
  sem_wait(s.full, 0);
  warm_up(s);
  mma_wait<0>();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.a = example_tensor<elem>(1, 1, 60, 64))
