// Two warpgroups park in one place, as if each thread had a part of its own in the whole block; it has one in its
// warpgroup.
// Known from: per-thread scratch in shared memory used as if it were laid out by rows (the rows of two threads' parts
// differ).
// Expected: overwrite on aside
// margay.check: bf16
#include "tile/tile.h"

struct params { float *out; };
struct shared { parked aside; };

TILE void init(shared &) {}

TILE void compute(const params &p, shared &s, int wg) {
  rv v;
  fill(v, (float)wg);
  store(s.aside, v);   // BAD: s.aside[wg]
  load(v, s.aside);
  store(p.out + wg * 64, v, 64);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 2, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.out = example_words<float>(128))
