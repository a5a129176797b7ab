// What each segment but the last adds to the state of hedgehog_fwd.cu: the sum of g_j [v_j, 1]^T over the steps j in
// front of the next segment's chunk before the first, g the features of k.
// Roles: a loader thread; features: g and the sums of its columns; sums, a warp: the last column; state: the others.
#include "tile/tile.h"
// D: columns of k and v, 64 or 128. STAGES
#include "hedgehog/hedgehog_steps.h"

struct shared {
  st<elem, D, F> k_map;
  st<elem, Q, D> k[STAGES], v[STAGES];
  st<elem, Q, F> g[2][2];
  sv<4 * F> parts[2][2];
  sem maps;
  ring<STAGES, ASYNC_READS> k_ring, v_ring;
  ring<2, ASYNC_READS> g_ring;
};
typedef hedgehog_cuts_params params;

TILE void init(shared &s) {
  sem_init(s.maps, arrivals(1, 0, 0));
  ring_init(s.k_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
  ring_init(s.v_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
  ring_init(s.g_ring, arrivals(0, 0, 1), arrivals(0, 1, 1));
}

// Chunks of this segment and the one in front of it, without its own last one.
TILE task block_task(const params &p) {
  int unit = block_index() / p.cut;
  task t = task_of(p.steps, unit, block_index() - unit * p.cut);
  if (t.before) t.first -= Q;
  else t.chunks--;
  return t;
}

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  sem_expect(s.maps, tile_bytes(s.k_map));
  tma_load(s.k_map, p.k_map, s.maps, 0, 0, 0, t.head);
  for (int i = 0; i < t.chunks; i++) {
    ring_acquire(s.k_ring, at);
    ring_expect(s.k_ring, at, tile_bytes(s.k[0]));
    tma_load(s.k[at.stage], p.k, s.k_ring.full[at.stage], t.first + i * Q, 0, t.head, t.batch);
    ring_acquire(s.v_ring, at);
    ring_expect(s.v_ring, at, tile_bytes(s.v[0]));
    tma_load(s.v[at.stage], p.v, s.v_ring.full[at.stage], t.first + i * Q, 0, t.head, t.batch);
    ring_next(s.k_ring, at);
  }
}

TILE void make_features(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos k = {}, to = {};
  rt<float, F> f, g;
  sem_wait(s.maps, 0);
  for (int i = 0; i < t.chunks; i++) {
    ring_wait(s.k_ring, k);
    features(f, g, s.k[k.stage], s.k_map, p.count, 1.f);
    ring_release(s.k_ring, k);
    ring_acquire(s.g_ring, to);
    sum_columns(s.parts[to.stage][0], f);
    sum_columns(s.parts[to.stage][1], g);
    store(s.g[to.stage][0], f);
    store(s.g[to.stage][1], g);
    ring_fill(s.g_ring, to);
    ring_next(s.k_ring, k);
    ring_next(s.g_ring, to);
  }
}

TILE float *cut_of(const params &p, const task &t) {
  int64_t i = ((int64_t)t.row * p.cut_stride + t.segment) * p.steps.heads + t.head;
  return p.cuts + i * 2 * p.count * (p.value_dim + 1);
}

TILE void add_up(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  sums z;
  fill(z.f, 0.f);
  fill(z.g, 0.f);
  for (int i = 0; i < t.chunks; i++) {
    ring_wait(s.g_ring, at);
    add_parts(z.f, s.parts[at.stage][0]);
    add_parts(z.g, s.parts[at.stage][1]);
    ring_release<WARP>(s.g_ring, at);
    ring_next(s.g_ring, at);
  }
  store_sums(cut_of(p, t), z, p.count, p.value_dim);
}

TILE void run_state(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos g = {}, v = {};
  rt<float, D> s0, s1;
  fill(s0, 0.f);
  fill(s1, 0.f);
  for (int i = 0; i < t.chunks; i++) {
    ring_wait(s.g_ring, g);
    ring_wait(s.v_ring, v);
    mma_fence();
    mma_AtB<ACC>(s0, s.g[g.stage][0], 0, s.v[v.stage], 0);
    mma_AtB<ACC>(s1, s.g[g.stage][1], 0, s.v[v.stage], 0);
    mma_commit();
    mma_wait<0>(s0, s1);
    ring_done(s.g_ring, g);
    ring_done(s.v_ring, v);
  }
  int64_t ld = p.value_dim + 1;
  float *to = cut_of(p, t);
  store(to, ld, s0, p.count, p.value_dim);
  store(to + p.count * ld, ld, s1, p.count, p.value_dim);
}

typedef block<params, shared, init, role<run_state, WARPGROUP, 1, 0>, role<make_features, WARPGROUP, 1, 0>,
              role<loader, THREAD, 1, 0>, role<add_up, WARP, 1, 0>> kernel;
ENTRY(kernel, Q, D)
