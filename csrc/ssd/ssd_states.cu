// States of Mamba-2's SSD (Dao & Gu 2024, section 6) in front of each chunk of 64 steps. With l_i = sum of dt_k a for k <= i inside a chunk that ends
// with step e:
//   S <- e^(l_e) S + sum of (w_j a_j) b_j^T
//   forwards    a = x, b = b, w_j = dt_j e^(l_e - l_j)
//   backwards   a = dy, b = c, w_j = e^(l_j), from the last chunk to the first: the gradient of the state behind each chunk
// A block keeps 64 rows of the state for each of its WG warpgroups in registers; these share b. Steps past the end have dt = 0: they add nothing.
// Roles: a loader thread; a scan warp: dt -> the weights; WG state warpgroups.
//
// Registers of a thread, N = 128: state 64, a's weighted chunk 16, addresses and the rest 30.
#include "tile/tile.h"
#include "ssd/ssd_bwd.h"
#include "ssd/ssd_steps.h"

// N: columns of the state, 64, 128 or 256. WG, STAGES, PER_SM
struct vectors { sv<64> weight, decay; };
struct shared {
  st<elem, 64, N> b[STAGES], state[WG];
  st<elem, 64, 64> a[STAGES][WG];
  vectors v[STAGES][WG];
  ring<STAGES> inputs;      // full: the bytes, and the scan warp's vectors
};
typedef ssd_states_params params;

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 1, 0), arrivals(0, 0, WG)); }

// Units are the 64-row blocks of a group's heads; a block has WG of them.
TILE int parts(const params &p) { return (p.head_dim + 63) / 64; }
struct task { int batch, group, unit; };
TILE task block_task(const params &p) {
  int blocks = p.group_heads * parts(p) / WG, matrix = block_index() / blocks;
  return {matrix / p.groups, matrix % p.groups, block_index() % blocks * WG};
}
TILE int head_of(const params &p, task t, int wg) { return t.group * p.group_heads + (t.unit + wg) / parts(p); }
TILE int row_of(const params &p, task t, int wg) { return (t.unit + wg) % parts(p) * 64; }
TILE int chunk_of(const params &p, int i) { return p.backwards ? p.chunks - 1 - i : i; }   // in the segment

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  for (int i = 0; i < p.chunks; i++) {
    sem &full = s.inputs.full[at.stage];
    int step = (p.first + chunk_of(p, i)) * 64;
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, tile_bytes(s.b[0]) + WG * tile_bytes(s.a[0][0]));
    for (int wg = 0; wg < WG; wg++) tma_load(s.a[at.stage][wg], p.a, full, step, row_of(p, t, wg), head_of(p, t, wg), t.batch);
    tma_load(s.b[at.stage], p.b, full, step, 0, t.group, t.batch);
    ring_next(s.inputs, at);
  }
}

// The next chunk's dt is under way while this one's is worked on.
TILE void scan(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  wv<64> raw[WG], dt, l, out;
  UNROLLED for (int wg = 0; wg < WG; wg++) {
    if (p.chunks) load_steps(raw[wg], p.steps, t.batch, p.first + chunk_of(p, 0), head_of(p, t, wg));
  }
  for (int i = 0; i < p.chunks; i++) {
    ring_acquire(s.inputs, at);
    UNROLLED for (int wg = 0; wg < WG; wg++) {
      vectors &v = s.v[at.stage][wg];
      int head = head_of(p, t, wg);
      make_steps(dt, raw[wg], p.steps, head);
      if (i + 1 < p.chunks) load_steps(raw[wg], p.steps, t.batch, p.first + chunk_of(p, i + 1), head);
      log_decays(l, dt, p.steps, head);
      float end = last(l);
      map(out, l, dt, [](float x, float) { return fast_exp2(x); });
      store(v.decay, out);
      if (!p.backwards) map(out, l, dt, [=](float x, float d) { return d * fast_exp2(end - x); });
      store(v.weight, out);
    }
    sem_arrive<WARP>(s.inputs.full[at.stage]);
    ring_next(s.inputs, at);
  }
}

TILE void run_state(const params &p, shared &s, int wg) {
  task t = block_task(p);
  ring_pos at = {};
  int head = head_of(p, t, wg), row0 = row_of(p, t, wg), matrix = t.batch * p.steps.heads + head, rows = p.head_dim - row0;
  int64_t first = ((int64_t)matrix * p.head_dim + row0) * p.state_dim;
  rt<float, N> state;
  rt<elem, 64> a;
  if (p.initial) load(state, p.initial + first, p.state_dim, rows, p.state_dim);
  else fill(state, 0.f);
  for (int i = 0; i < p.chunks; i++) {
    int chunk = chunk_of(p, i);
    if (p.starts && chunk && chunk % p.every == 0) {
      int64_t segment = chunk / p.every - 1, size = (int64_t)block_count() * WG / parts(p) * p.head_dim * p.state_dim;
      store(p.starts + segment * size + first, p.state_dim, state, rows, p.state_dim);
    }
    if (p.keep) {
      tma_store_wait_read();
      wg_sync();
      store(s.state[wg], state);
      fence_async();
      wg_sync();
      tma_store(p.states, s.state[wg], row0, 0, chunk, matrix);
    }
    ring_wait(s.inputs, at);
    vectors &v = s.v[at.stage][wg];
    load_t(a, s.a[at.stage][wg]);
    map_col(a, v.weight, [](float x, float w) { return x * w; });
    float decay = get(v.decay, 63);
    map(state, [=](float x) { return x * decay; });
    mma_fence();
    mma_AB<ACC>(state, a, s.b[at.stage]);
    mma_commit();
    mma_wait<0>(state, a);
    ring_done(s.inputs, at);
  }
  if (p.final) store(p.final + first, p.state_dim, state, rows, p.state_dim);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<run_state, WARPGROUP, WG, 0>, role<loader, THREAD, 1, 0>, role<scan, WARP, 1, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, 64, WG)
