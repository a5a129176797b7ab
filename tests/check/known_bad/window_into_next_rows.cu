// A window of 64 columns begins at column 96 of 128: half of it is the next row's beginning.
// Known from: column offsets counted in the wrong unit.
// Expected: bounds on a
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
  tma_load(s.after, p.a, s.full, 64, 0, 0, 0);
}

TILE void compute(const params &p, shared &s, int) {
  rt<float, 64> x;
  rsum l;
  rv sums;
  sem_wait(s.full, 0);
  load(x, s.a, 96);   // BAD: 64
  fill(l, 0.f);
  row_sum_add(l, x);
  reduce(sums, l);
  store(p.sums, sums, 64);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.a = example_tensor<elem>(1, 1, 128, 128); p.sums = example_words<float>(64))
