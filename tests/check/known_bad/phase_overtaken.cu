// One warpgroup tells another of every part that is ready, through one semaphore and with nothing that comes back. If
// it gets two parts ahead, the other waits for a parity that has been and gone.
// Known from: flags turned into mbarriers: a parity tells two neighbouring phases apart, no more.
// Expected: phase on ready
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

enum { PARTS = 4 };
struct params { float *sums; };
struct shared {
  st<elem, 64, 64> part[PARTS];
  sem ready;
};

TILE void init(shared &s) { sem_init(s.ready, arrivals(0, 0, 1)); }   // BAD: one semaphore for each part

TILE void write(const params &, shared &s, int) {
  rt<float, 64> x;
  for (int i = 0; i < PARTS; i++) {
    fill(x, (float)i);
    store(s.part[i], x);
    sem_arrive(s.ready);
  }
}

TILE void add_parts(const params &p, shared &s, int) {
  rt<float, 64> x;
  rsum sum;
  rv rows;
  fill(sum, 0.f);
  for (int i = 0; i < PARTS; i++) {
    sem_wait(s.ready, i & 1);
    load(x, s.part[i]);
    row_sum_add(sum, x);
  }
  reduce(rows, sum);
  store(p.sums, rows, 64);
}

typedef block<params, shared, init, role<write, WARPGROUP, 1, 0>, role<add_parts, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.sums = example_words<float>(64))
