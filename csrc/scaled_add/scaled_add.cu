// out = a + scale b
// A loader thread copies tiles of a and b into a ring of stages. A warpgroup adds them in registers and stores the sum
// from a third tile.
#include "tile/tile.h"
#include "scaled_add/scaled_add.h"

typedef st<elem, 64, 64> tile;
struct shared {
  tile a[STAGES], b[STAGES], out;
  ring<STAGES> inputs;      // read into registers: a release fences, so that the next copy comes after the reads
};

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

TILE int row_of(const scaled_add_params &p, int task) { return task / p.col_blocks * 64; }
TILE int col_of(const scaled_add_params &p, int task) { return task % p.col_blocks * 64; }

TILE void loader(const scaled_add_params &p, shared &s, int) {
  ring_pos at = {};
  for (int task = block_index(); task < p.tasks; task += block_count()) {
    sem &full = s.inputs.full[at.stage];
    ring_acquire(s.inputs, at);                                             // the stage's last readers are done
    ring_expect(s.inputs, at, 2 * tile_bytes(s.out));
    tma_load(s.a[at.stage], p.a, full, row_of(p, task), col_of(p, task), 0, 0);   // zeros outside of the tensor
    tma_load(s.b[at.stage], p.b, full, row_of(p, task), col_of(p, task), 0, 0);
    ring_next(s.inputs, at);
  }
}

TILE void compute(const scaled_add_params &p, shared &s, int) {
  ring_pos at = {};
  float scale = p.scale;
  for (int task = block_index(); task < p.tasks; task += block_count()) {
    rt<float, 64> a, b;
    ring_wait(s.inputs, at);
    load(a, s.a[at.stage]);
    load(b, s.b[at.stage]);
    ring_release(s.inputs, at);
    ring_next(s.inputs, at);
    map(a, b, [=](float x, float y) { return fused(scale, y, x); });
    tma_store_wait_read();                                                  // the last store has read `out` ...
    wg_sync();                                                              // ... and everybody knows
    store(s.out, a);
    fence_async();                                                          // the store below sees these writes
    wg_sync();
    tma_store(p.out, s.out, row_of(p, task), col_of(p, task), 0, 0);        // nothing outside is written
  }
  tma_store_wait_read();
}

typedef block<scaled_add_params, shared, init, role<compute, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>,
              OCCUPANCY<2>> kernel;
ENTRY(kernel, 64, 64)
