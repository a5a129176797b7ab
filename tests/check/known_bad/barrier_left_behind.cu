// Two warpgroups hand a turn to each other. The one that passes it on last passes it to nobody: the barrier keeps its
// arrivals.
// Known from: ping-pong schedules; the next use of the id, by another kernel's role, would find the barrier half full.
// Expected: barrier on -
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap out; int steps; };
struct shared {
  st<elem, 64, 64> out[2];
};

TILE void init(shared &) {}

TILE void compute(const params &p, shared &s, int wg) {
  rt<float, 64> x;
  fill(x, 0.f);
  turn_begin<2>(wg);
  for (int i = 0; i < p.steps; i++) {
    turn_wait<2>(wg);
    map(x, [=](float f) { return f + 1.f; });
    turn_pass<2>(wg);
  }
  // BAD: turn_end<2>(wg) is missing
  store(s.out[wg], x);
  fence_async();
  wg_sync();
  tma_store(p.out, s.out[wg], wg * 64, 0, 0, 0);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 2, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.out = example_tensor<elem>(1, 1, 128, 64); p.steps = 3)
