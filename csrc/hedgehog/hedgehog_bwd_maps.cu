// dx_t += map dy_t, and shares of dmap = sum of x_t dy_t^T, of q (kind 0) and of k (kind 1), where dy is the gradient
// of x map. A block has a run of chunks of one head. Roles: a loader thread; a warpgroup that multiplies.
#include "tile/tile.h"
// D: columns of q and k, 64 or 128
#include "hedgehog/hedgehog_bwd.h"
#include "hedgehog/hedgehog_steps.h"

struct shared {
  st<elem, D, F> map;
  st<elem, Q, D> x[2], dx[2], out;
  st<elem, Q, F> dy[2];
  sem full;
  ring<2> ring_x;                // with dx and dy
};
typedef hedgehog_bwd_maps_params params;

TILE void init(shared &s) {
  sem_init(s.full, arrivals(1, 0, 0));
  ring_init(s.ring_x, arrivals(1, 0, 0), arrivals(0, 0, 1));
}

struct run { int kind, batch, head, part, first, end; };     // steps first .. end - 1
TILE run block_run(const params &p) {
  int kind = block_index() % 2, at = block_index() / 2, unit = at / p.runs, i = at - unit * p.runs;
  int first = i * p.run * Q, end = first + p.run * Q;
  return {kind, unit / p.heads, unit % p.heads, unit / p.heads * p.runs + i, first, end < p.steps ? end : p.steps};
}

TILE void loader(const params &p, shared &s, int) {
  run t = block_run(p);
  ring_pos at = {};
  if (t.first >= t.end) return;
  sem_expect(s.full, tile_bytes(s.map));
  tma_load(s.map, p.map[t.kind], s.full, 0, 0, 0, t.head);
  for (int step = t.first; step < t.end; step += Q) {
    sem &full = s.ring_x.full[at.stage];
    ring_acquire(s.ring_x, at);
    ring_expect(s.ring_x, at, 2 * tile_bytes(s.x[0]) + tile_bytes(s.dy[0]));
    tma_load(s.x[at.stage], p.x[t.kind], full, step, 0, t.head, t.batch);
    tma_load(s.dx[at.stage], p.dx[t.kind], full, step, 0, t.head, t.batch);
    tma_load(s.dy[at.stage], p.dy[t.kind], full, step, 0, t.head, t.batch);
    ring_next(s.ring_x, at);
  }
}

TILE void multiply(const params &p, shared &s, int) {
  run t = block_run(p);
  ring_pos at = {};
  rt<float, F> low, high;        // of the map: rows 0 to 63, and the others
  rt<float, D> dx;
  fill(low, 0.f);
  fill(high, 0.f);
  if (t.first < t.end) sem_wait(s.full, 0);
  for (int step = t.first; step < t.end; step += Q) {
    ring_wait(s.ring_x, at);
    load(dx, s.dx[at.stage]);
    mma_fence();
    mma_ABt<ACC>(dx, s.dy[at.stage], s.map);
    mma_AtB<ACC>(low, s.x[at.stage], 0, s.dy[at.stage], 0);
    if (D > F) mma_AtB<ACC>(high, s.x[at.stage], D - F, s.dy[at.stage], 0);
    mma_commit();
    tma_store_wait_read();
    wg_sync();
    mma_wait<0>(dx, low, high);
    ring_done(s.ring_x, at);
    store(s.out, dx);
    fence_async();
    wg_sync();
    tma_store(p.dx[t.kind], s.out, step, 0, t.head, t.batch);
  }
  int64_t share = ((int64_t)t.kind * p.batches * p.runs + t.part) * p.heads + t.head;
  float *to = p.parts + share * p.key_dim * p.count;
  store(to, p.count, low, p.key_dim, p.count);
  if (D > F) store(to + F * p.count, p.count, high, p.key_dim - F, p.count);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<multiply, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, Q, D)
