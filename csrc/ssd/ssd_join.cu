// The states of ssd_cuts.cu, each from the one before its segment: cuts[i] += decays[i] cuts[i - 1]. A block has 64 rows and COLS columns of a head.
#include "tile/tile.h"
#include "ssd/ssd.h"

struct shared { int unused; };
typedef ssd_join_params params;

TILE void init(shared &) {}

TILE void compute(const params &p, shared &, int) {
  int down = (p.head_dim + 63) / 64, across = (p.state_dim + COLS - 1) / COLS, matrix = block_index() / (down * across);
  int tile = block_index() % (down * across), row = tile / across * 64, col = tile % across * COLS, batch = matrix / p.heads, head = matrix % p.heads;
  rt<float, COLS> before, here;
  for (int i = 0; i < p.cut; i++) {
    int64_t at = ((int64_t)batch * p.cut_stride + i) * p.heads + head;
    float *g = p.cuts + (at * p.head_dim + row) * p.state_dim + col, decay = p.decays[at];
    load(here, g, p.state_dim, p.head_dim - row, p.state_dim - col);
    if (i) {
      map(here, before, [=](float x, float y) { return fused(decay, y, x); });
      store(g, p.state_dim, here, p.head_dim - row, p.state_dim - col);
    }
    map(before, here, [](float, float y) { return y; });
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 64, COLS)
