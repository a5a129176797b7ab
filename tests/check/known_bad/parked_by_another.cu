// Two warpgroups exchange row sums through a parked vector, whose parts only the thread that wrote them may read.
// Known from: per-thread scratch in shared memory used as if it were laid out by rows (the rows of two threads' parts differ).
// Expected: race on aside
// margay.check: bf16
#include "tile/tile.h"

struct params { float *out; };
struct shared { parked aside; };

TILE void init(shared &) {}

TILE void compute(const params &p, shared &s, int wg) {
  rv v;
  fill(v, (float)wg);
  if (wg == 0) store(s.aside, v);
  else load(v, s.aside);   // BAD: an sv<64>, with an arrival in between
  store(p.out + wg * 64, v, 64);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 2, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.out = example_words<float>(128))
