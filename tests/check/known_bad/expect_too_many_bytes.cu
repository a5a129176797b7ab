// More bytes are expected than the stage's copies bring: it never becomes full.
// Known from: a copy that is taken out of a stage later, or shared with another block; facebookexperimental/triton#908
// has the same wait for bytes.
// Expected: deadlock on inputs
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap a, b, out; int tasks; };
struct shared {
  st<elem, 64, 64> a[STAGES], b[STAGES], out;
  ring<STAGES> inputs;
};

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks; i++) {
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, 3 * tile_bytes(s.out));   // BAD: 2 * tile_bytes
    tma_load(s.a[at.stage], p.a, s.inputs.full[at.stage], i * 64, 0, 0, 0);
    tma_load(s.b[at.stage], p.b, s.inputs.full[at.stage], i * 64, 0, 0, 0);
    ring_next(s.inputs, at);
  }
}

TILE void compute(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.tasks; i++) {
    rt<float, 64> a, b;
    ring_wait(s.inputs, at);
    load(a, s.a[at.stage]);
    load(b, s.b[at.stage]);
    ring_release(s.inputs, at);
    ring_next(s.inputs, at);
    map(a, b, [](float x, float y) { return x + y; });
    tma_store_wait_read();
    wg_sync();
    store(s.out, a);
    fence_async();
    wg_sync();
    tma_store(p.out, s.out, i * 64, 0, 0, 0);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.a = example_tensor<elem>(1, 1, 300, 64); p.b = example_tensor<elem>(1, 1, 300, 64);
        p.out = example_tensor<elem>(1, 1, 300, 64); p.tasks = 5)
