// Blocks add to one sum in the order of their tasks, so that every run gets the same. In the first round nobody waits,
// as if one block began.
// Known from: deterministic backward passes, e.g. Dao-AILab/flash-attention#1678 (counters of the wrong shape: blocks
// wait for others' turns).
// Expected: global-race on -
// margay.check: bf16 STAGES=2, DETERMINISTIC=1
#include "tile/tile.h"

struct params { gmap in; float *sum; int *turn; int tasks; };
struct shared {
  st<elem, 64, 64> tile[STAGES];
  ring<STAGES> inputs;
};

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = block_index(); i < p.tasks; i += block_count()) {
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, tile_bytes(s.tile[0]));
    tma_load(s.tile[at.stage], p.in, s.inputs.full[at.stage], i * 64, 0, 0, 0);
    ring_next(s.inputs, at);
  }
}

TILE void compute(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = block_index(); i < p.tasks; i += block_count()) {
    rt<float, 64> x;
    ring_wait(s.inputs, at);
    load(x, s.tile[at.stage]);
    ring_release(s.inputs, at);
    ring_next(s.inputs, at);
    if (i >= block_count()) order_wait(p.turn, i);   // BAD: if (i > 0)
    add_acc(p.sum, x);
    order_pass(p.turn, i + 1);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 2, p.in = example_tensor<elem>(1, 1, 300, 64); p.sum = example_words<float>(64 * 64);
        p.turn = example_words<int>(1); p.tasks = 5)
