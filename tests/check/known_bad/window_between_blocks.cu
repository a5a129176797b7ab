// A window of a shared tile begins at column 8. The instructions move blocks of 16 columns, whose addresses are only
// right at multiples of 16.
// Known from: windows of half a block, as for 8 columns of padding.
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
  rt<float, 64> x;
  rsum sum;
  rv rows;
  sem_wait(s.full, 0);
  load(x, s.tile, 8);   // BAD: a multiple of 16
  row_sum(sum, x);
  reduce(rows, sum);
  store(p.sums, rows, 64);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 128)
EXAMPLE(kernel, 1, p.in = example_tensor<elem>(1, 1, 64, 128); p.sums = example_words<float>(64))
