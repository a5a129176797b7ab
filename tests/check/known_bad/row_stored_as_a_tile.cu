// A tile is stored from a register tile, then read row by row. A thread of load_row has columns of all rows, one of store
// has a few rows: they are not the same threads.
// Known from: mixing two layouts of registers over one buffer, each of which is safe without a sync.
// Expected: elected on x
// margay.check: bf16
#include "tile/tile.h"

struct params { float *out; };
struct shared { st<elem, 64, 256> x; };

TILE void init(shared &) {}

TILE void compute(const params &p, shared &s, int) {
  rt<float, 256> t;
  gv<256> v;
  fill(t, 1.f);
  store(s.x, t);
  load_row(v, s.x, 0);   // BAD: wg_sync() in between
  store_row(s.x, 0, v);
  load_row(v, s.x, 0);
  store(p.out, 1, v, 256);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.out = example_words<float>(256))
