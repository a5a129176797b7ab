// A thread that only stores: it takes over finished tiles. tma_store is a warpgroup's, and elects the group's first
// thread, which this one is not: nothing would be stored, and the wait would wait for nothing.
// Known from: NVIDIA/cutlass's epilogues with a warp of their own for stores, whose operations are other ones.
// Expected: elected on -
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap out; int tasks; };
struct shared {
  st<elem, 64, 64> tile[STAGES];
  ring<STAGES> done;
};

TILE void init(shared &s) { ring_init(s.done, arrivals(0, 0, 1), arrivals(1, 0, 0)); }

TILE void compute(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks; i++) {
    rt<float, 64> x;
    fill(x, 1.f);
    ring_acquire(s.done, at);
    store(s.tile[at.stage], x);
    ring_fill(s.done, at);
    ring_next(s.done, at);
  }
}

TILE void storer(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks; i++) {
    ring_wait(s.done, at);
    tma_store(p.out, s.tile[at.stage], i * 64, 0, 0, 0);   // BAD: belongs in compute
    tma_store_wait_read();
    ring_release<THREAD>(s.done, at);
    ring_next(s.done, at);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<storer, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.out = example_tensor<elem>(1, 1, 300, 64); p.tasks = 5)
