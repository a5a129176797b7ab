// Before attention backward, for each block of 64 query rows:
//   delta = rowsum(o * dout) - dlse      (Dao 2023, algorithm 2, line 4; the gradient of lse enters as -dlse)
//   lse2 = lse log2 e, +inf for rows without keys and for padding, so that the main kernel's 2^(x - lse2) is 0 there
// and zeros in dq's accumulator and the main kernel's counters.
#include "tile/tile.h"
#include "kernels/attention.h"

enum { DQ_TILES = D / 64 };

struct shared {
  st<elem, 64, D> o, dout;
  sem full, free;
};

TILE void init(shared &s) {
  sem_init(s.full, arrivals(1, 0, 0));
  sem_init(s.free, arrivals(0, 0, 1));
}

TILE void loader(const attention_bwd_pre_params &p, shared &s, int) {
  uint32_t phase = 0;
  for (int i = block_index(); i < p.tasks; i += block_count()) {
    int bh = i / p.q_blocks, row0 = (i - bh * p.q_blocks) * 64, batch = bh / p.q_heads;
    sem_wait(s.free, phase ^ 1);
    sem_expect(s.full, tile_bytes(s.o) + tile_bytes(s.dout));
    tma_load(s.o, p.o, s.full, row0, 0, bh - batch * p.q_heads, batch);
    tma_load(s.dout, p.dout, s.full, row0, 0, bh - batch * p.q_heads, batch);
    phase ^= 1;
  }
}

TILE void compute(const attention_bwd_pre_params &p, shared &s, int) {
  uint32_t phase = 0;
  if (block_index() == 0) zero_words(p.counters, p.counter_words);
  for (int i = block_index(); i < p.tasks; i += block_count()) {
    int bh = i / p.q_blocks, row0 = (i - bh * p.q_blocks) * 64, rows = p.q_rows - row0;
    int64_t at = (int64_t)bh * p.q_rows + row0;
    rv lse, dlse, delta;
    rsum dot;
    rt<float, 32> x, y;
    load(lse, p.lse + at, rows, infinity());
    fill(dlse, 0.f);
    if (p.dlse) load(dlse, p.dlse + at, rows, 0.f);
    for (int c = 0; c < DQ_TILES && rows > 0; c++) zero_acc<64>(p.dq_acc + ((int64_t)i * DQ_TILES + c) * 64 * 64);
    fill(dot, 0.f);
    sem_wait(s.full, phase);
    phase ^= 1;
    for (int c = 0; c < D; c += 32) {
      load(x, s.o, c);
      load(y, s.dout, c);
      row_dot_add(dot, x, y);
    }
    fence_async();
    sem_arrive(s.free);
    reduce(delta, dot);
    map(delta, delta, dlse, [](float a, float b) { return a - b; });
    map(lse, lse, [](float x) { return x == -infinity() ? infinity() : x * 1.4426950408889634f; });
    store(p.lse2 + (int64_t)i * 64, lse, 64);
    store(p.delta + (int64_t)i * 64, delta, 64);
  }
}

typedef block<attention_bwd_pre_params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>, OCCUPANCY<BLOCKS>> kernel;
ENTRY(kernel, 64, D)
