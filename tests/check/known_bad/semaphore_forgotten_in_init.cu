// A role arrives at a semaphore that the block's init does not initialise.
// Known from: every kernel that got one more semaphore.
// Expected: init on done
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap out; };
struct shared {
  st<elem, 64, 64> out;
  sem ready, done;
};

TILE void init(shared &s) { sem_init(s.ready, arrivals(0, 0, 1)); }   // BAD: done is missing

TILE void compute(const params &p, shared &s, int) {
  rt<float, 64> x;
  fill(x, 1.f);
  store(s.out, x);
  fence_async();
  sem_arrive(s.ready);
  sem_wait(s.ready, 0);
  wg_sync();
  tma_store(p.out, s.out, 0, 0, 0, 0);
  tma_store_wait_read();
  sem_arrive(s.done);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.out = example_tensor<elem>(1, 1, 60, 64))
