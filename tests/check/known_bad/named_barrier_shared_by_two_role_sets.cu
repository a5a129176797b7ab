// Two pairs of warpgroups exchange halves, each pair at a barrier of its own. Both use the same id, so that one of each
// pair can meet there.
// Known from: ThunderKittens' long convolution for 4096 (both warpgroups compute the id 4 from a warp number that is
// always below 4).
// Expected: barrier|uninitialised on -|part
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { float *out; int steps; };
struct shared {
  st<elem, 64, 64> part[4];
};

TILE void init(shared &) {}

// out[wg] = sum over steps of what the pair's two members have made
TILE void compute(const params &p, shared &s, int wg) {
  int pair = wg / 2;
  rt<float, 64> sum, x;
  fill(sum, 0.f);
  for (int i = 0; i < p.steps; i++) {
    fill(x, (float)i);
    map_rc(x, [=](float f, int row, int col) { return f * (float)(row + wg) - (float)col; });
    store(s.part[wg], x);
    bar_sync(1, 256);          // BAD: 1 + pair
    map(sum, x, [](float a, float b) { return a + b; });
    load(x, s.part[wg ^ 1]);
    map(sum, x, [](float a, float b) { return a + b; });
    bar_sync(3 + pair, 256);   // both have read
  }
  store(p.out + (int64_t)wg * 64 * 64, 64, sum, 64, 64);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 4, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.out = example_words<float>(4 * 64 * 64); p.steps = 3)
