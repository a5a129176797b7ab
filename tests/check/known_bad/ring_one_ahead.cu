// The producer turns its parity one step too late: at every new round it takes the first stage for free before its readers have released it.
// Known from: parities written out by hand; tile-ai/tilelang#3087 waited for one that had long been complete, and the copies ran into the readers.
// Expected: count on full
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap in, out; int tasks; };
struct shared {
  st<elem, 64, 64> tile[STAGES], out;
  sem full[STAGES], empty[STAGES];
};

TILE void init(shared &s) {
  for (int i = 0; i < STAGES; i++) {
    sem_init(s.full[i], arrivals(1, 0, 0));
    sem_init(s.empty[i], arrivals(0, 0, 1));
  }
}

TILE void loader(const params &p, shared &s, int) {
  for (int i = 0; i < p.tasks; i++) {
    int stage = i % STAGES, round = (i - 1) / STAGES;   // BAD: round = i / STAGES
    sem_wait(s.empty[stage], ~round & 1);
    sem_expect(s.full[stage], tile_bytes(s.out));
    tma_load(s.tile[stage], p.in, s.full[stage], i * 64, 0, 0, 0);
  }
}

TILE void compute(const params &p, shared &s, int) {
  for (int i = 0; i < p.tasks; i++) {
    int stage = i % STAGES, round = i / STAGES;
    rt<float, 64> x;
    sem_wait(s.full[stage], round & 1);
    load(x, s.tile[stage]);
    fence_async();
    sem_arrive(s.empty[stage]);
    tma_store_wait_read();
    wg_sync();
    store(s.out, x);
    fence_async();
    wg_sync();
    tma_store(p.out, s.out, i * 64, 0, 0, 0);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.in = example_tensor<elem>(1, 1, 300, 64); p.out = example_tensor<elem>(1, 1, 300, 64); p.tasks = 5)
