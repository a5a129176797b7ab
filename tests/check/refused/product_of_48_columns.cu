// A product of 48 columns, which no matrix instruction of the library has.
// Refused: a product has 16, 32, 64, 80, 96, 128, 160, 176, 192 or 256 columns
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in, out; int tasks; };
struct shared {
  st<elem, 64, 64> tile[STAGES];
  st<elem, 48, 64> b;
  ring<STAGES> inputs;
};

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks; i++) {
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, tile_bytes(s.tile[0]));
    tma_load(s.tile[at.stage], p.in, s.inputs.full[at.stage], i * 64, 0, 0, 0);
    ring_next(s.inputs, at);
  }
}

TILE void compute(const params &p, shared &s, int) {
  ring_pos at = {};
  rt<float, 48> x;   // BAD
  for (int i = 0; i < p.tasks; i++) {
    ring_wait(s.inputs, at);
    mma_fence();
    mma_ABt<ZERO>(x, s.tile[at.stage], s.b);
    mma_commit();
    mma_wait<0>(x);
    ring_release(s.inputs, at);
    ring_next(s.inputs, at);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.in = example_tensor<elem>(1, 1, 300, 64); p.out = example_tensor<elem>(1, 1, 300, 64); p.tasks = 5)
