// The loop goes on without the result where nothing has to be stored, and leaves the accumulator's scope while the
// product still writes it: the registers are something else's by then.
// Known from: epilogues that are skipped outside of the matrix.
// Expected: lifetime on -
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap a, b; float *c; int rows, cols; };
struct shared {
  st<elem, 64, 64> a;
  st<elem, 64, 256> b;
  sem full;
};

TILE void init(shared &s) { sem_init(s.full, arrivals(1, 0, 0)); }

TILE void loader(const params &p, shared &s, int) {
  sem_expect(s.full, tile_bytes(s.a) + tile_bytes(s.b));
  tma_load(s.a, p.a, s.full, 0, 0, 0, 0);
  tma_load(s.b, p.b, s.full, 0, 0, 0, 0);
}

TILE void compute(const params &p, shared &s, int) {
  sem_wait(s.full, 0);
  for (int col = 0; col < 256; col += 64) {
    rt<float, 64> c;
    mma_fence();
    mma_AB_cols<ZERO>(c, s.a, s.b, col);
    mma_commit();
    if (col >= p.cols) continue;   // BAD: belongs in front of the product, or behind the wait
    mma_wait<0>(c);
    store(p.c + col, p.cols, c, p.rows, p.cols - col);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 256)
EXAMPLE(kernel, 1, p.a = example_tensor<elem>(1, 1, 60, 64); p.b = example_tensor<elem>(1, 1, 64, 150);
        p.c = example_words<float>(60 * 150); p.rows = 60; p.cols = 150)
