// The first fence stands in front of the loop, where the accumulator was filled. The later products follow barrier
// waits with no fence of their own.
// Known from: NVIDIA/Fuser#3680 (fences left out where a barrier wait precedes; the compiler put them in again and said
// so).
// Expected: mma-fence on -
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap a, b, out; int steps; };
struct shared {
  st<elem, 64, 64> a[STAGES], b[STAGES], out;
  ring<STAGES, ASYNC_READS> inputs;
};

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.steps; i++) {
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, 2 * tile_bytes(s.out));
    tma_load(s.a[at.stage], p.a, s.inputs.full[at.stage], 0, i * 64, 0, 0);
    tma_load(s.b[at.stage], p.b, s.inputs.full[at.stage], i * 64, 0, 0, 0);
    ring_next(s.inputs, at);
  }
}

TILE void compute(const params &p, shared &s, int) {
  ring_pos at = {};
  rt<float, 64> c;
  fill(c, 0.f);
  mma_fence();
  for (int i = 0; i < p.steps; i++) {
    ring_wait(s.inputs, at);   // BAD: mma_fence() belongs behind it
    mma_AB<ACC>(c, s.a[at.stage], s.b[at.stage]);
    mma_commit();
    mma_wait<0>(c);
    ring_release(s.inputs, at);
    ring_next(s.inputs, at);
  }
  store(s.out, c);
  fence_async();
  wg_sync();
  tma_store(p.out, s.out, 0, 0, 0, 0);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.a = example_tensor<elem>(1, 1, 60, 300); p.b = example_tensor<elem>(1, 1, 300, 64);
        p.out = example_tensor<elem>(1, 1, 60, 64); p.steps = 5)
