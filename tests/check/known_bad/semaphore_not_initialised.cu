// Two warpgroups have a semaphore each for their tile, init sets up the first.
// Known from: kernels that get a second warpgroup later.
// Expected: init on x_full
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap x; float *sums; };
struct shared {
  st<elem, 64, 64> x[2];
  sem x_full[2];
};

TILE void init(shared &s) { sem_init(s.x_full[0], arrivals(1, 0, 0)); }   // BAD: both

TILE void loader(const params &p, shared &s, int) {
  for (int w = 0; w < 2; w++) {
    sem_expect(s.x_full[w], tile_bytes(s.x[w]));
    tma_load(s.x[w], p.x, s.x_full[w], w * 64, 0, 0, 0);
  }
}

TILE void compute(const params &p, shared &s, int wg) {
  rt<float, 64> x;
  rsum sum;
  rv rows;
  fill(sum, 0.f);
  sem_wait(s.x_full[wg], 0);
  load(x, s.x[wg]);
  row_sum_add(sum, x);
  reduce(rows, sum);
  store(p.sums + wg * 64, rows, 64);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 2, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 128, 64)
EXAMPLE(kernel, 1, p.x = example_tensor<elem>(1, 1, 120, 64); p.sums = example_words<float>(128))
