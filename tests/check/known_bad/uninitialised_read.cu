// Only the left half of p is written, because the rows of v that the right half meets are zeros: but zero times what
// happens to lie there can be NaN.
// Known from: ThunderKittens' long convolution (blocks of shared memory that a short batch leaves unwritten, multiplied
// by zeros).
// Expected: uninitialised on p
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap v, out; };
struct shared {
  st<elem, 64, 64> p, v, out;
  sem v_full;
};

TILE void init(shared &s) { sem_init(s.v_full, arrivals(1, 0, 0)); }

TILE void loader(const params &p, shared &s, int) {
  sem_expect(s.v_full, tile_bytes(s.v));
  tma_load(s.v, p.v, s.v_full, 0, 0, 0, 0);   // 32 rows, and zeros below
}

TILE void compute(const params &p, shared &s, int) {
  rt<float, 32> left;
  rt<float, 64> o;
  fill(left, 1.f);
  store(s.p, left, 0);   // BAD: columns 32 to 63 have to be zeros too
  fence_async();
  wg_sync();
  sem_wait(s.v_full, 0);
  mma_fence();
  mma_AB<ZERO>(o, s.p, s.v);
  mma_commit();
  mma_wait<0>(o);
  store(s.out, o);
  fence_async();
  wg_sync();
  tma_store(p.out, s.out, 0, 0, 0, 0);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.v = example_tensor<elem>(1, 1, 32, 64); p.out = example_tensor<elem>(1, 1, 64, 64))
