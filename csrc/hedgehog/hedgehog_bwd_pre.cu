// What the kernels of Hedgehog's backward read, of each step alone. With out_i = N_i / d_i:
//   u_i = dout_i / d_i,  e_i = -u_i . out_i,  f_i = r [softmax(q_i Q), softmax(-q_i Q)],  g_i that of k_i, without r
// since the gradient of a weight a_ij of N_i and d_i is u_i . v_j + e_i. r is the ratio of the head's factors, of the
// linear part to the window; 1 where that is 0.
// A block has a run of chunks of one head. Roles: a loader thread; features: two warpgroups, of q and of k; gradients:
// u and e.
#include "tile/tile.h"
// D: columns of q, k and v, 64 or 128
#include "hedgehog/hedgehog_bwd.h"
#include "hedgehog/hedgehog_steps.h"

struct shared {
  st<elem, D, F> map[2];
  st<elem, Q, D> x[2][2], out[2], dout[2], u;
  st<elem, Q, F> f[2][2];
  sem maps;
  ring<2, ASYNC_READS> x_ring[2];
  ring<2> out_ring;
};
typedef hedgehog_bwd_pre_params params;

TILE void init(shared &s) {
  sem_init(s.maps, arrivals(1, 0, 0));
  for (int i = 0; i < 2; i++) ring_init(s.x_ring[i], arrivals(1, 0, 0), arrivals(0, 0, 1));
  ring_init(s.out_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
}

struct run { int batch, head, first, end; };     // steps first .. end - 1
TILE run block_run(const params &p) {
  int unit = block_index() / p.runs, first = (block_index() - unit * p.runs) * p.run * Q, end = first + p.run * Q;
  return {unit / p.heads, unit % p.heads, first, end < p.steps ? end : p.steps};
}

TILE void loader(const params &p, shared &s, int) {
  run t = block_run(p);
  ring_pos at = {};
  if (t.first >= t.end) return;
  sem_expect(s.maps, 2 * tile_bytes(s.map[0]));
  tma_load(s.map[0], p.q_map, s.maps, 0, 0, 0, t.head);
  tma_load(s.map[1], p.k_map, s.maps, 0, 0, 0, t.head);
  for (int step = t.first; step < t.end; step += Q) {
    for (int i = 0; i < 2; i++) {
      ring_acquire(s.x_ring[i], at);
      ring_expect(s.x_ring[i], at, tile_bytes(s.x[0][0]));
      tma_load(s.x[i][at.stage], i ? p.k : p.q, s.x_ring[i].full[at.stage], step, 0, t.head, t.batch);
    }
    ring_acquire(s.out_ring, at);
    ring_expect(s.out_ring, at, 2 * tile_bytes(s.out[0]));
    tma_load(s.out[at.stage], p.out, s.out_ring.full[at.stage], step, 0, t.head, t.batch);
    tma_load(s.dout[at.stage], p.dout, s.out_ring.full[at.stage], step, 0, t.head, t.batch);
    ring_next(s.out_ring, at);
  }
}

TILE void make_features(const params &p, shared &s, int i) {
  run t = block_run(p);
  ring_pos at = {};
  rt<float, F> f, g;
  float ratio = ratio_of(p.window_factor, p.linear_factor, t.head), factor = i || ratio == 0.f ? 1.f : ratio;
  if (t.first < t.end) sem_wait(s.maps, 0);
  for (int step = t.first; step < t.end; step += Q) {
    ring_wait(s.x_ring[i], at);
    features(f, g, s.x[i][at.stage], s.map[i], p.count, factor);
    ring_done(s.x_ring[i], at);
    tma_store_wait_read();
    wg_sync();
    store(s.f[i][0], f);
    store(s.f[i][1], g);
    fence_async();
    wg_sync();
    tma_store(i ? p.g : p.f, s.f[i][0], step, 0, t.head, t.batch);
    tma_store(i ? p.g : p.f, s.f[i][1], step, F, t.head, t.batch);
  }
  tma_store_wait_read();
}

TILE void make_gradients(const params &p, shared &s, int) {
  run t = block_run(p);
  ring_pos at = {};
  rt<float, D> out, dout;
  for (int step = t.first; step < t.end; step += Q) {
    int64_t first = ((int64_t)t.batch * p.heads + t.head) * p.steps + step;
    rv den, e;
    rsum sum;
    load(den, p.den + first, t.end - step, 1.f);
    map(den, den, [](float d) { return fast_rcp(d); });
    ring_wait(s.out_ring, at);
    load(out, s.out[at.stage]);
    load(dout, s.dout[at.stage]);
    ring_done(s.out_ring, at);
    map_row(dout, den, [](float x, float d) { return x * d; });
    fill(sum, 0.f);
    row_dot_add(sum, out, dout);
    reduce(e, sum);
    map(e, e, [](float x) { return -x; });
    store(p.e + first, e, t.end - step);
    tma_store_wait_read();
    wg_sync();
    store(s.u, dout);
    fence_async();
    wg_sync();
    tma_store(p.u, s.u, step, 0, t.head, t.batch);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<make_features, WARPGROUP, 2, 0>, role<make_gradients, WARPGROUP, 1, 0>,
              role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, Q, D)
