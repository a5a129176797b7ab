// A tile of 128 columns is read in windows of 48, of which the last goes beyond its edge.
// Known from: HazyResearch/ThunderKittens#95 (copies beyond a tile's bounds) and every window that does not divide its
// tile.
// Expected: bounds on tile
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in; float *sums; };
struct shared {
  st<elem, 64, 128> tile;
  sem full;
};

TILE void init(shared &s) { sem_init(s.full, arrivals(1, 0, 0)); }

TILE void loader(const params &p, shared &s, int) {
  sem_expect(s.full, tile_bytes(s.tile));
  tma_load(s.tile, p.in, s.full, 0, 0, 0, 0);
}

TILE void compute(const params &p, shared &s, int) {
  rsum sum;
  rv rows;
  fill(sum, 0.f);
  sem_wait(s.full, 0);
  for (int c = 0; c < 128; c += 48) {   // BAD: a width that divides 128
    rt<float, 48> x;
    load(x, s.tile, c);
    row_sum_add(sum, x);
  }
  reduce(rows, sum);
  store(p.sums, rows, 64);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 128)
EXAMPLE(kernel, 1, p.in = example_tensor<elem>(1, 1, 60, 128); p.sums = example_words<float>(64))
