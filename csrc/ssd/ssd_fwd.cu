// Mamba-2 SSD forward (Dao & Gu 2024, section 6), one pass over the sequence in chunks of 64 steps, the state in
// registers throughout. With l_i = sum of dt_k a for k <= i, inside a chunk whose last step is e, and S the state
// before it:
//   y^T = e^(l_i) S c^T + x^T P^T,   P_ij = (c_i . b_j) e^(l_i - l_j) dt_j for j <= i, plus d on the diagonal
//   S   = e^(l_e) S + (x_j dt_j e^(l_e - l_j))^T b
// The products are transposed, so that the state is the register operand of its own product and never goes through
// shared memory. Steps past the end read as dt = 0: they add nothing and decay nothing.
// Roles: a loader thread; a scan warp, which makes each head's vectors of dt; a score warpgroup, which makes each
// head's P; GROUPS state warpgroups of HEADS heads.
#include "tile/tile.h"
#include "ssd/ssd.h"

enum { Q = 64, ALL = GROUPS * HEADS };   // Q: steps of a chunk. N (state), HEADS (1 or 2), GROUPS, PER_SM and *_REGS
                                         // come from the row

struct vectors { sv<Q> l, m, decay, weight; };   // base 2: l_i; l_j - log dt_j; e^(l_i); dt_j e^(l_e - l_j)
struct shared {
  st<elem, Q, N> b[2], c[2];
  st<elem, Q, 64> x[2][ALL], p[2][ALL], y[GROUPS];
  sm<Q, 4> dt[2];
  vectors v[2][ALL];
  ring<2> dt_ring, x_ring[ALL];
  ring<2, ASYNC_READS> bc_ring;
  ring<2, ASYNC_READS> v_ring;   // refilled by plain stores only, which need no fence
  sem p_full[2];                 // refilled behind v_ring, whose stage the scan warp fills only after every reader of p
                                 // has released it
};

TILE void init(shared &s) {
  ring_init(s.dt_ring, arrivals(1, 0, 0), arrivals(0, 1, 0));
  ring_init(s.bc_ring, arrivals(1, 0, 0), arrivals(0, 0, GROUPS + 1));
  ring_init(s.v_ring, arrivals(0, 1, 0), arrivals(0, 0, GROUPS + 1));
  for (int h = 0; h < ALL; h++) ring_init(s.x_ring[h], arrivals(1, 0, 0), arrivals(0, 0, 1));
  for (int i = 0; i < 2; i++) sem_init(s.p_full[i], arrivals(0, 0, 1));
}

struct task { int batch, head, group; };   // the block's first head; group of b and c
TILE task block_task(const ssd_fwd_params &p) {
  int blocks = p.heads / ALL;
  task t;
  t.batch = block_index() / blocks;
  t.head = (block_index() - t.batch * blocks) * ALL;
  t.group = t.head / p.group_heads;
  return t;
}

TILE void loader(const ssd_fwd_params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  for (int chunk = 0; chunk < p.chunks; chunk++) {
    int step = chunk * Q, i = at.stage;
    ring_acquire(s.dt_ring, at);
    ring_expect(s.dt_ring, at, sizeof s.dt[0]);
    tma_load(s.dt[i], p.dt, s.dt_ring.full[i], step, t.head & ~3, 0, t.batch);   // 4 heads: 16 bytes
    ROLLED for (int h = 0; h < ALL; h++) {
      ring_acquire(s.x_ring[h], at);
      ring_expect(s.x_ring[h], at, tile_bytes(s.x[0][0]));
      tma_load(s.x[i][h], p.x, s.x_ring[h].full[i], step, 0, t.head + h, t.batch);
    }
    ring_acquire(s.bc_ring, at);
    ring_expect(s.bc_ring, at, 2 * tile_bytes(s.b[0]));
    tma_load(s.c[i], p.c, s.bc_ring.full[i], step, 0, t.group, t.batch);
    tma_load(s.b[i], p.b, s.bc_ring.full[i], step, 0, t.group, t.batch);
    ring_next(s.bc_ring, at);
  }
}

TILE void scan(const ssd_fwd_params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  for (int chunk = 0; chunk < p.chunks; chunk++) {
    ring_wait(s.dt_ring, at);
    ring_acquire(s.v_ring, at);
    ROLLED for (int h = 0; h < ALL; h++) {
      vectors &v = s.v[at.stage][h];
      wv<Q> dt, l, out;
      float a = p.a[t.head + h] * 1.4426950408889634f;
      load_col(dt, s.dt[at.stage], (t.head & 3) + h);
      map(l, dt, dt, [=](float d, float) { return d * a; });
      cumsum(l);
      float end = last(l);
      store(v.l, l);
      map(out, l, dt, [](float x, float d) { return x - fast_log2(d); });
      store(v.m, out);
      map(out, l, dt, [](float x, float) { return fast_exp2(x); });
      store(v.decay, out);
      map(out, l, dt, [=](float x, float d) { return d * fast_exp2(end - x); });
      store(v.weight, out);
    }
    ring_release<WARP>(s.dt_ring, at);
    sem_arrive<WARP>(s.v_ring.full[at.stage]);
    ring_next(s.v_ring, at);
  }
}

TILE void score(const ssd_fwd_params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  rt<float, Q> products;
  rv l;
  for (int chunk = 0; chunk < p.chunks; chunk++) {
    ring_wait(s.bc_ring, at);
    mma_fence();
    mma_ABt<ZERO>(products, s.c[at.stage], s.b[at.stage]);
    mma_commit();
    ring_wait(s.v_ring, at);
    mma_wait<0>(products);
    ring_release(s.bc_ring, at);
    ROLLED for (int h = 0; h < ALL; h++) {
      vectors &v = s.v[at.stage][h];
      load(l, v.l);
      store_tril(s.p[at.stage][h], products, l, v.m, p.d[t.head + h],
                 [](float x, float li, float mj) { return x * fast_exp2(li - mj); });
    }
    fence_async();
    sem_arrive(s.p_full[at.stage]);
    ring_release(s.v_ring, at);
    ring_next(s.v_ring, at);
  }
}

// y = S c^T, 64 columns of the state at a time: so few registers hold its 16-bit copy.
TILE void read_state(rt<float, Q> &y, const rt<float, N> &state, const st<elem, Q, N> &c) {
  rt<elem, 64> part;
  convert_part(part, state, 0);
  mma_fence();
  mma_ABt_part<ZERO>(y, part, c, 0);
  mma_commit();
  mma_wait<0>(y, part);
  if (N > 64) {
    convert_part(part, state, N - 64);
    mma_fence();
    mma_ABt_part<ACC>(y, part, c, N - 64);
    mma_commit();
    mma_wait<0>(y, part);
  }
}

// One chunk of head h of the block. The state is scaled while no product is in flight.
TILE void advance(rt<float, N> &state, const ssd_fwd_params &p, shared &s, const task &t, ring_pos at, int chunk, int h,
                  int wg) {
  rt<float, Q> y;
  rt<elem, Q> x;
  vectors &v = s.v[at.stage][h];
  read_state(y, state, s.c[at.stage]);
  float decay = get(v.decay, Q - 1);
  map(state, [=](float f) { return f * decay; });
  map_col(y, v.decay, [](float f, float e) { return f * e; });
  ring_wait(s.x_ring[h], at);
  sem_wait(s.p_full[at.stage], at.phase);
  mma_fence();
  mma_AtBt<ACC>(y, s.x[at.stage][h], s.p[at.stage][h]);
  mma_commit();
  tma_store_wait_read();
  wg_sync();
  mma_wait<0>(y);
  store_t(s.y[wg], y);
  load_t(x, s.x[at.stage][h]);
  ring_release(s.x_ring[h], at);
  map_col(x, v.weight, [](float f, float w) { return f * w; });
  mma_fence();
  mma_AB<ACC>(state, x, s.b[at.stage]);
  mma_commit();
  fence_async();
  wg_sync();
  tma_store(p.y, s.y[wg], chunk * Q, 0, t.head + h, t.batch);
  mma_wait<0>(state, x);
}

TILE void keep_state(const ssd_fwd_params &p, const task &t, const rt<float, N> &state, int h) {
  int64_t first = (int64_t)(t.batch * p.heads + t.head + h) * p.head_dim * p.state_dim;
  store(p.state + first, p.state_dim, state, p.head_dim, p.state_dim);
}

TILE void run_state(const ssd_fwd_params &p, shared &s, int wg) {
  task t = block_task(p);
  ring_pos at = {};
  rt<float, N> s0, s1;      // by name, not an array: registers
  fill(s0, 0.f);            // as a value: the first use is a conversion, not a product
  if (HEADS == 2) fill(s1, 0.f);
  for (int chunk = 0; chunk < p.chunks; chunk++) {
    ring_wait(s.bc_ring, at);
    ring_wait(s.v_ring, at);
    advance(s0, p, s, t, at, chunk, wg * HEADS, wg);
    if (HEADS == 2) advance(s1, p, s, t, at, chunk, wg * HEADS + 1, wg);
    ring_release(s.bc_ring, at);
    ring_release(s.v_ring, at);
    ring_next(s.v_ring, at);
  }
  keep_state(p, t, s0, wg * HEADS);
  if (HEADS == 2) keep_state(p, t, s1, wg * HEADS + 1);
  tma_store_wait_read();
}

typedef block<ssd_fwd_params, shared, init, role<run_state, WARPGROUP, GROUPS, STATE_REGS>,
              role<score, WARPGROUP, 1, SCORE_REGS>,
              role<loader, THREAD, 1, LOAD_REGS>, role<scan, WARP, 1, LOAD_REGS>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, Q, ALL)
