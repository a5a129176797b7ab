// Before attention backward, for each block of 64 query rows:
//   delta = ds_scale (rowsum(o * dout) - dlse)   (Dao 2023, algorithm 2, line 4; the gradient of lse enters as -dlse)
//   lse2 = lse log2 e, +inf for rows without keys and for padding, so that the main kernel's 2^(x - lse2) is 0 there.
//          From 2^24 on its rounding exceeds one power of two. Then more than that is added, so that 2^(x - lse2) stays
//          below 1 and finite.
// and zeros in dq's accumulator and the main kernel's counters.
#include "tile/tile.h"
#include "attention/attention_rows.h"

enum { DQ_TILES = D / 64 };   // D (of q and k), DV (of v and o), STAGES, PER_SM

struct shared {
  st<elem, 64, DV> o[STAGES], dout[STAGES];
  ring<STAGES> loaded;
};

TILE void init(shared &s) {
  ring_init(s.loaded, arrivals(1, 0, 0), arrivals(0, 0, 1));
}

// block of the workspace; row of lse and its map; rows from there on
struct task { int batch, head, row0, rows; int64_t block, row; };
TILE bool task_at(task &t, const attention_bwd_pre_params &p, int i) {
  int bh = i / p.q_padded, block = i - bh * p.q_padded;
  t.batch = bh / p.q_heads;
  t.head = bh - t.batch * p.q_heads;
  row_blocks all = blocks_of(p.packed, t.batch, t.head, p.q_heads, p.q_padded);
  t.block = all.first + block;
  t.row0 = block * 64;
  t.rows = p.q_total - t.row0;
  if (p.packed.start) {
    t.rows = p.packed.start[t.batch + 1] - p.packed.start[t.batch] - t.row0;
    t.row0 += p.packed.start[t.batch];
    t.batch = 0;
  }
  t.row = (int64_t)(t.batch * p.q_heads + t.head) * p.q_total + t.row0;
  return block < all.count;
}

TILE void loader(const attention_bwd_pre_params &p, shared &s, int) {
  ring_pos at = {};
  task t;
  for (int i = block_index(); i < p.tasks; i += block_count()) {
    if (!task_at(t, p, i)) continue;
    ring_acquire(s.loaded, at);
    ring_expect(s.loaded, at, tile_bytes(s.o[0]) + tile_bytes(s.dout[0]));
    tma_load(s.o[at.stage], p.o, s.loaded.full[at.stage], t.row0, 0, t.head, t.batch);
    tma_load(s.dout[at.stage], p.dout, s.loaded.full[at.stage], t.row0, 0, t.head, t.batch);
    ring_next(s.loaded, at);
  }
}

TILE void compute(const attention_bwd_pre_params &p, shared &s, int) {
  ring_pos at = {};
  if (block_index() == 0) zero_words(p.counters, p.counter_words);
  task t;
  for (int i = block_index(); i < p.tasks; i += block_count()) {
    if (!task_at(t, p, i)) continue;
    rv lse, dlse, delta;
    rsum dot;
    rt<float, 32> x, y;
    load(lse, p.lse + t.row, t.rows, infinity());
    fill(dlse, 0.f);
    if (p.dlse) load(dlse, p.dlse + t.row, t.rows, 0.f);
    for (int c = 0; c < DQ_TILES && t.rows > 0 && p.zero_blocks > t.block; c++)
      zero_acc<64>(p.dq_acc + (t.block * DQ_TILES + c) * 64 * 64);
    fill(dot, 0.f);
    ring_wait(s.loaded, at);
    for (int c = 0; c < DV; c += 32) {
      load(x, s.o[at.stage], c);
      load(y, s.dout[at.stage], c);
      row_dot_add(dot, x, y);
    }
    ring_done(s.loaded, at);
    reduce(delta, dot);
    map(delta, delta, dlse, [f = p.ds_scale](float a, float b) { return (a - b) * f; });
    map(lse, lse, [](float x) {
      float y = x == -infinity() ? infinity() : x * 1.4426950408889634f, size = y < 0.f ? -y : y;
      return y + (size > 2.4e7f ? size * 4.8e-7f : 0.f);
    });
    // o of padding may be anything
    map(delta, delta, lse, [](float d, float l) { return l == infinity() ? 0.f : d; });
    store(p.lse2 + t.block * 64, lse, 64);
    store(p.delta + t.block * 64, delta, 64);
  }
}

typedef block<attention_bwd_pre_params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>,
              OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, 64, D)
