// States of Mamba-2's SSD (Dao & Gu 2024, section 6) in front of each chunk of 64 steps. With l_i the sum of dt_k a
// for k <= i inside a chunk that ends with step e:
//   S <- e^(l_e) S + sum of (w_j a_j) b_j^T
//   forwards    a = x, b = b, w_j = dt_j e^(l_e - l_j)
//   backwards   a = dy, b = c, w_j = e^(l_j), from the last chunk to the first: the gradient of the state behind each
//     without y's factor
// A block keeps 64 rows of the state for each of its WG warpgroups in registers; these share b. Steps past the end have
// dt = 0: they add nothing. Where the next packed row follows in memory, the scan warps clear its steps in a and b
// before products read them.
// Roles: a loader thread; a scan warp for each warpgroup: dt -> the weights; WG state warpgroups.
//
// Registers of a thread: state N / 2, a's weighted chunk 16, addresses and the rest 30.
#include "tile/tile.h"
#include "ssd/ssd_steps.h"

// N: columns of the state, 64, 128 or 256. WG, STAGES, PER_SM
struct vectors { sv<64> weight, decay; };
struct shared {
  st<elem, 64, N> b[STAGES], state[WG];
  st<elem, 64, 64> a[STAGES][WG];
  vectors v[STAGES][WG];
  ring<STAGES> inputs;      // full: the bytes, and the scan warps' vectors
  sem last;                 // the tiles of a chunk that runs over are there, and to be cleared behind its end
};
typedef ssd_states_params params;

TILE void init(shared &s) {
  ring_init(s.inputs, arrivals(1, WG, 0), arrivals(0, 0, WG));
  sem_init(s.last, arrivals(1, 0, 0));
}

// Units are the 64-row blocks of a group's heads; a block has WG of them. `place`: of its first chunk in `states`.
TILE int parts(const params &p) { return (p.head_dim + 63) / 64; }
struct task { int row, batch, group, unit, first, end, place, chunks; };
TILE task block_task(const params &p) {
  int blocks = p.group_heads * parts(p) / WG, at = block_index() / p.passes, matrix = at / blocks,
      row = matrix / p.groups;
  task t = {row, row, matrix % p.groups, at % blocks * WG, p.first * 64, p.steps.count, 0, p.chunks};
  if (p.steps.starts) {
    t.batch = 0;
    t.first = row_start(p.steps, row);
    t.end = row_start(p.steps, row + 1);
    t.place = first_chunk(p.steps, row);
    t.chunks = t.end > t.first ? (t.end - t.first + 63) / 64 : 0;
  }
  return t;
}
TILE const ssd_pass &pass_of(const params &p) { return p.pass[block_index() % p.passes]; }
TILE int head_of(const params &p, const task &t, int wg) { return t.group * p.group_heads + (t.unit + wg) / parts(p); }
TILE int row_of(const params &p, const task &t, int wg) { return (t.unit + wg) % parts(p) * 64; }
TILE int chunk_of(const ssd_pass &q, const task &t, int i) { return q.backwards ? t.chunks - 1 - i : i; }

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  const ssd_pass &q = pass_of(p);
  ring_pos at = {};
  for (int i = 0; i < t.chunks; i++) {
    int step = t.first + chunk_of(q, t, i) * 64;
    sem &full = runs_over(p.steps, step, t.end) ? s.last : s.inputs.full[at.stage];
    ring_acquire(s.inputs, at);
    sem_expect(full, tile_bytes(s.b[0]) + WG * tile_bytes(s.a[0][0]));
    for (int wg = 0; wg < WG; wg++)
      tma_load(s.a[at.stage][wg], q.a, full, step, row_of(p, t, wg), head_of(p, t, wg), t.batch);
    tma_load(s.b[at.stage], q.b, full, step, 0, t.group, t.batch);
    ring_next(s.inputs, at);
  }
}

// The first scan warp clears b and then stands in for the loader.
TILE void clear_behind(shared &s, ring_pos at, int wg, int steps) {
  sem_wait(s.last, 0);
  clear_rows<WARP>(s.a[at.stage][wg], 0, steps);
  if (wg == 0) clear_rows<WARP>(s.b[at.stage], 0, steps);
  fence_async();
  if (wg == 0) sem_arrive<WARP>(s.inputs.full[at.stage]);
}

// The next chunk's dt is under way while this one's is worked on.
TILE void scan(const params &p, shared &s, int wg) {
  task t = block_task(p);
  const ssd_pass &q = pass_of(p);
  ring_pos at = {};
  wv<64> raw, dt, l, out, changes;
  int head = head_of(p, t, wg);
  if (t.chunks) load_steps(raw, p.steps, t.batch, t.first + chunk_of(q, t, 0) * 64, t.end, head);
  for (int i = 0; i < t.chunks; i++) {
    int step = t.first + chunk_of(q, t, i) * 64;
    log_decays(dt, l, raw, p.steps.dt, head);
    if (i + 1 < t.chunks) load_steps(raw, p.steps, t.batch, t.first + chunk_of(q, t, i + 1) * 64, t.end, head);
    count_changes(changes, p.steps, t.batch, step, t.end);
    decays_from_begin(out, l, changes);
    ring_acquire(s.inputs, at);
    vectors &v = s.v[at.stage][wg];
    store(v.decay, out);
    if (!q.backwards) {
      decays_to_end(out, l, changes);
      map(out, out, dt, [](float e, float d) { return e * d; });
    }
    store(v.weight, out);
    if (runs_over(p.steps, step, t.end)) clear_behind(s, at, wg, t.end - step);
    sem_arrive<WARP>(s.inputs.full[at.stage]);
    ring_next(s.inputs, at);
  }
}

// A part of the i-th segment's fp32 states, to and from memory.
TILE int64_t place_of(const params &p, const task &t, int wg, int i) {
  int64_t matrix = ((int64_t)i * p.steps.rows + t.row) * p.steps.heads + head_of(p, t, wg);
  return matrix * p.order.matrix + row_of(p, t, wg) * p.order.row;
}
TILE void put(const params &p, const task &t, int wg, float *g, int i, const rt<float, N> &state) {
  int rows = p.head_dim - row_of(p, t, wg);
  store(g + place_of(p, t, wg, i), p.order.row, p.order.col, state, rows, p.state_dim);
}

TILE void run_state(const params &p, shared &s, int wg) {
  task t = block_task(p);
  const ssd_pass &q = pass_of(p);
  ring_pos at = {};
  int head = head_of(p, t, wg), row0 = row_of(p, t, wg), rows = p.head_dim - row0;
  rt<float, N> state;
  rt<elem, 64> a;
  if (q.initial) load(state, q.initial + place_of(p, t, wg, 0), p.order.row, p.order.col, rows, p.state_dim);
  else fill(state, 0.f);
  float factor = q.backwards ? 1.f / p.scale : 1.f;
  map(state, [=](float x) { return x * factor; });
  for (int i = 0; i < t.chunks; i++) {
    int chunk = chunk_of(q, t, i);
    if (q.starts && chunk && chunk % p.every == 0) put(p, t, wg, q.starts, chunk / p.every - 1, state);
    if (q.keep) {
      tma_store_wait_read();
      wg_sync();
      store(s.state[wg], state);
      fence_async();
      wg_sync();
      tma_store(q.states, s.state[wg], row0, 0, t.place + chunk, t.batch * p.steps.heads + head);
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
  if (q.final) {
    float scale = q.backwards ? p.scale : 1.f;
    map(state, [=](float x) { return x * scale; });
    put(p, block_task(p), wg, q.final, 0, state);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<run_state, WARPGROUP, WG, 0>, role<loader, THREAD, 1, 0>,
              role<scan, WARP, WG, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, 64, WG)
