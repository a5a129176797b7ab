// A semaphore is initialised for one arrival, but a warpgroup arrives by its four warps. Nobody waits on it yet, so
// nothing shows until somebody does.
// Known from: kernels whose role grew from a thread to a warpgroup.
// Expected: count on done
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap out; };
struct shared {
  st<elem, 64, 64> out;
  sem done;
};

TILE void init(shared &s) { sem_init(s.done, arrivals(1, 0, 0)); }   // BAD: arrivals(0, 0, 1)

TILE void compute(const params &p, shared &s, int) {
  rt<float, 64> x;
  fill(x, 1.f);
  store(s.out, x);
  fence_async();
  wg_sync();
  tma_store(p.out, s.out, 0, 0, 0, 0);
  tma_store_wait_read();
  sem_arrive(s.done);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.out = example_tensor<elem>(1, 1, 60, 64))
