// A warp adds up the tile by itself. Register tiles belong to a warpgroup: the warp holds a quarter of the rows, and
// nobody the others.
// Known from: helpers for a warpgroup that are called behind a test of the warp's number.
// Expected: elected on -
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in; float *sums; };
struct shared {
  st<elem, 64, 64> tile;
  sem full;
};

TILE void init(shared &s) { sem_init(s.full, arrivals(1, 0, 0)); }

TILE void loader(const params &p, shared &s, int) {
  sem_expect(s.full, tile_bytes(s.tile));
  tma_load(s.tile, p.in, s.full, 0, 0, 0, 0);
}

TILE void adder(const params &p, shared &s, int) {
  rt<float, 64> x;
  rsum sum;
  rv rows;
  sem_wait(s.full, 0);
  load(x, s.tile);   // BAD: of a warpgroup
  row_sum(sum, x);
  reduce(rows, sum);
  store(p.sums, rows, 64);
}

typedef block<params, shared, init, role<adder, WARP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.in = example_tensor<elem>(1, 1, 64, 64); p.sums = example_words<float>(64))
