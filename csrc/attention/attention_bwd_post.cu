// After attention backward: dq = scale * accumulator, rounded, for each block of 64 query rows; zeros in gradients
// behind the last packed sequence.
#include "tile/tile.h"
#include "attention/attention_rows.h"

enum { DQ_TILES = D / 64 };

struct shared {
  st<elem, 64, D> dq;
};

TILE void init(shared &) {}

TILE void compute(const attention_bwd_post_params &p, shared &s, int) {
  float scale = p.scale;
  grid_wait();
  for (int i = block_index(); i < p.tasks; i += block_count()) {
    int bh = i / p.q_blocks, block = i - bh * p.q_blocks, batch = bh / p.q_heads, head = bh - batch * p.q_heads,
        row0 = block * 64, rows = 64;
    const float *acc = p.dq_acc + (int64_t)(blocks_of(p.packed, batch, head, p.q_heads, p.acc_blocks).first + block)
      * DQ_TILES * 64 * 64;
    rt<float, 64> x;
    if (p.packed.start) {
      rows = p.packed.start[batch + 1] - p.packed.start[batch] - row0;
      row0 += p.packed.start[batch];
      batch = 0;
      if (rows <= 0) continue;
    }
    elem *out = (elem *)p.out + row0 * p.out_row + head * p.out_head;   // used where the next sequence's rows follow
    tma_store_wait_read();
    wg_sync();
    for (int c = 0; c < DQ_TILES; c++) {
      load_acc(x, acc + c * 64 * 64);
      scale_gradient(x, scale);
      if (rows < 64) store_first(out + c * 64, p.out_row, x, rows, p.columns - c * 64);
      else store(s.dq, x, c * 64);
    }
    fence_async();
    wg_sync();
    if (rows >= 64) tma_store(p.dq, s.dq, row0, 0, head, batch);
  }
  tma_store_wait_read();
  for (int i = 0; i < 3; i++) clear_behind<elem>(p.behind[i], nullptr, block_index(), block_count());
}

typedef block<attention_bwd_post_params, shared, init, role<compute, WARPGROUP, 1, 0>, OCCUPANCY<PER_SM>,
              DEPENDENT> kernel;
ENTRY(kernel, 64, D)
