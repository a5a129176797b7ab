// A thread counts that zeros are in global memory when their copies have only been issued: who is told may add to what
// was there.
// Expected: global-race on -
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { float *sums; int *ready; };
struct shared {
  sv<64> zeros;
  sem go;
};

TILE void init(shared &s) { sem_init(s.go, arrivals(1, 0, 0)); }

// Block 0 writes zeros, block 1 writes one there.
TILE void clearer(const params &p, shared &s, int) {
  if (block_index() == 0) {
    clear(s.zeros);
    fence_async();
    tma_store(p.sums, s.zeros);
    order_count<THREAD>(p.ready);   // BAD: belongs behind the wait
    tma_store_wait<0, THREAD>();
  } else {
    order_wait<THREAD>(p.ready, 1);
    sem_arrive<THREAD>(s.go);
  }
}
TILE void compute(const params &p, shared &s, int) {
  rv one;
  if (block_index() == 0) return;
  fill(one, 1.f);
  sem_wait(s.go, 0);
  store(p.sums, one, 64);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<clearer, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 2, p.sums = example_words<float>(64); p.ready = example_words<int>(1))
