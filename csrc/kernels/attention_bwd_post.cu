// After attention backward: dq = scale * accumulator, rounded, for each block of 64 query rows.
#include "tile/tile.h"
#include "kernels/attention.h"

enum { DQ_TILES = D / 64 };

struct shared {
  st<elem, 64, D> dq;
};

TILE void init(shared &) {}

TILE void compute(const attention_bwd_post_params &p, shared &s, int) {
  float scale = p.scale;
  for (int i = block_index(); i < p.tasks; i += block_count()) {
    int bh = i / p.q_blocks, block = i - bh * p.q_blocks, batch = bh / p.q_heads;
    const float *acc = p.dq_acc + ((int64_t)bh * p.acc_blocks + block) * DQ_TILES * 64 * 64;
    rt<float, 64> x;
    tma_store_wait_read();
    wg_sync();
    for (int c = 0; c < DQ_TILES; c++) {
      load_acc(x, acc + c * 64 * 64);
      map(x, [=](float a) { return a * scale; });
      store(s.dq, x, c * 64);
    }
    fence_async();
    wg_sync();
    tma_store(p.dq, s.dq, block * 64, 0, bh - batch * p.q_heads, batch);
  }
  tma_store_wait_read();
}

typedef block<attention_bwd_post_params, shared, init, role<compute, WARPGROUP, 1, 0>, OCCUPANCY<BLOCKS>> kernel;
ENTRY(kernel, 64, D)
