// A warpgroup fills the stages that another one multiplies, and does not wait for a free one. It finds its own last
// writes there, too, but a wg_sync would not help: the report is to name the reader.
// Known from: chains of warpgroups in which the last link has a ring and the first forgets it.
// Expected: overwrite|elected|count|phase on tile|inputs
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { float *sums; int tasks; };
struct shared {
  st<elem, 64, 64> tile[STAGES];
  ring<STAGES> inputs;
};

TILE void init(shared &s) { ring_init(s.inputs, arrivals(0, 0, 1), arrivals(0, 0, 1)); }

TILE void producer(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks; i++) {
    rt<float, 64> x;
    fill(x, 1.f);
    store(s.tile[at.stage], x);   // BAD: ring_acquire(s.inputs, at) is missing in front of it
    ring_fill(s.inputs, at);
    ring_next(s.inputs, at);
  }
}

TILE void consumer(const params &p, shared &s, int) {
  ring_pos at = {};
  rsum sum;
  rv rows;
  fill(sum, 0.f);
  for (int i = 0; i < p.tasks; i++) {
    rt<float, 64> x;
    ring_wait(s.inputs, at);
    load(x, s.tile[at.stage]);
    ring_release(s.inputs, at);
    ring_next(s.inputs, at);
    row_sum_add(sum, x);
  }
  reduce(rows, sum);
  store(p.sums, rows, 64);
}

typedef block<params, shared, init, role<producer, WARPGROUP, 1, 0>, role<consumer, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.sums = example_words<float>(64); p.tasks = 5)
