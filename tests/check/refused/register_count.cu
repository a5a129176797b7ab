// 100 registers: setmaxnreg takes multiples of 8 from 24 to 240.
// Refused: registers of a role: 0, or a multiple of 8 from 24 to 240
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in, out; int tasks; };
struct shared {
  st<elem, 64, 64> tile[STAGES];
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
  for (int i = 0; i < p.tasks; i++) {
    ring_wait(s.inputs, at);
    ring_release(s.inputs, at);
    ring_next(s.inputs, at);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 100>, role<loader, THREAD, 1, 40>> kernel;   // BAD: 104
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.in = example_tensor<elem>(1, 1, 300, 64); p.out = example_tensor<elem>(1, 1, 300, 64); p.tasks = 5)
