// A copy begins at column 100 of a tensor map, 200 bytes from the row's beginning: the copy engine takes multiples of
// 16.
// Known from: a test of our own, which the GPU ended as an illegal instruction.
// Expected: bounds on after
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap a; float *sums; };
struct shared {
  st<elem, 64, 128> a, after;
  sem full;
};

TILE void init(shared &s) { sem_init(s.full, arrivals(1, 0, 0)); }

TILE void loader(const params &p, shared &s, int) {
  sem_expect(s.full, 2 * tile_bytes(s.a));
  tma_load(s.a, p.a, s.full, 0, 0, 0, 0);
  tma_load(s.after, p.a, s.full, 64, 100, 0, 0);   // BAD: 96
}

TILE void compute(const params &p, shared &s, int) {
  rt<float, 64> x;
  rsum l;
  rv sums;
  sem_wait(s.full, 0);
  load(x, s.a, 64);
  fill(l, 0.f);
  row_sum_add(l, x);
  reduce(sums, l);
  store(p.sums, sums, 64);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.a = example_tensor<elem>(1, 1, 128, 128); p.sums = example_words<float>(64))
