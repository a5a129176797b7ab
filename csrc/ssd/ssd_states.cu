// States of Mamba-2's SSD (Dao & Gu 2024, section 6) in front of each chunk of 64 steps. With l_i the sum of dt_k a
// for k <= i inside a chunk that ends with step e:
//   S <- e^(l_e) S + sum of (w_j a_j) b_j^T
//   forwards    a = x, b = b, w_j = dt_j e^(l_e - l_j)
//   backwards   a = dy, b = c, w_j = e^(l_j), from the last chunk to the first: the gradient of the state behind each
//     without y's factor
// A block keeps 64 rows of the state for each of its WG warpgroups in registers; these share b. Steps past the end have
// dt = 0: they add nothing. Where the next packed row follows in memory, the scan warps clear its steps in a and b
// before products read them.
// Where few heads would leave multiprocessors idle, the chunks are cut into parts: a first launch makes of each part
// what a state becomes from 0, and by what one before it decays; ssd_join.cu adds them up; a second one begins there.
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
// `from`: how many parts come before this one in the pass's order, `to` how many behind it
struct task { int row, batch, group, unit, first, end, place, chunks, from, to; };
TILE const ssd_pass &pass_of(const params &p) { return p.pass[block_index() % p.passes]; }
TILE task block_task(const params &p) {
  int blocks = p.group_heads * parts(p) / WG, at = block_index() / p.passes, part = at % p.parts;
  at /= p.parts;
  int matrix = at / blocks, row = matrix / p.groups, place = part * p.part, before = p.first / p.part + part,
      behind = p.all_parts - 1 - before, chunks = p.chunks - place < p.part ? p.chunks - place : p.part;
  bool back = pass_of(p).backwards;
  task t = {row, row, matrix % p.groups, at % blocks * WG, (p.first + place) * 64, p.steps.count, place, chunks,
            back ? behind : before, back ? before : behind};
  if (p.cut_stride == 0) t.from = t.to = 0;
  if (p.local && t.to == 0) t.chunks = 0;
  if (p.steps.starts) {
    t.batch = 0;
    t.first = row_start(p.steps, row);
    t.end = row_start(p.steps, row + 1);
    t.place = first_chunk(p.steps, row);
    t.chunks = t.end > t.first ? (t.end - t.first + 63) / 64 : 0;
  }
  return t;
}
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

// A part of fp32 states, to and from memory, those of all heads the i-th.
TILE int64_t place_of(const params &p, const task &t, int wg, int64_t i, ssd_order o) {
  int64_t matrix = i * p.steps.heads + head_of(p, t, wg);
  return matrix * o.matrix + row_of(p, t, wg) * o.row;
}
TILE int64_t cut_of(const params &p, const task &t, int i) { return (int64_t)t.row * p.cut_stride + i; }
TILE void begin_state(const params &p, const ssd_pass &q, const task &t, int wg, rt<float, N> &state) {
  bool cut = t.from > 0;
  const float *from = p.local ? nullptr : cut ? q.cuts : q.initial;
  if (!from) return fill(state, 0.f);
  ssd_order o = p.order;
  if (cut) o = {p.state_dim, 1, p.head_dim * p.state_dim};
  from += place_of(p, t, wg, cut ? cut_of(p, t, t.from - 1) : t.row, o);
  load(state, from, o.row, o.col, p.head_dim - row_of(p, t, wg), p.state_dim);
  float factor = q.backwards && !cut ? 1.f / p.scale : 1.f;
  map(state, [=](float x) { return x * factor; });
}
TILE void put(const params &p, const task &t, int wg, float *g, int64_t i, const rt<float, N> &state, ssd_order o) {
  store(g + place_of(p, t, wg, i, o), o.row, o.col, state, p.head_dim - row_of(p, t, wg), p.state_dim);
}

TILE void run_state(const params &p, shared &s, int wg) {
  task t = block_task(p);
  const ssd_pass &q = pass_of(p);
  ring_pos at = {};
  int head = head_of(p, t, wg), row0 = row_of(p, t, wg);
  float decays = 1.f;
  rt<float, N> state;
  rt<elem, 64> a;
  begin_state(p, q, t, wg, state);
  for (int i = 0; i < t.chunks;) {
    int end = q.starts && i + p.every < t.chunks ? i + p.every : t.chunks;
    for (; i < end; i++) {
      if (q.keep) {
        tma_store_wait_read();
        wg_sync();
        store(s.state[wg], state);
        fence_async();
        wg_sync();
        tma_store(q.states, s.state[wg], row0, 0, t.place + chunk_of(q, t, i), t.batch * p.steps.heads + head);
      }
      ring_wait(s.inputs, at);
      vectors &v = s.v[at.stage][wg];
      load_t(a, s.a[at.stage][wg]);
      map_col(a, v.weight, [](float x, float w) { return x * w; });
      float decay = get(v.decay, 63);
      decays *= decay;
      map(state, [=](float x) { return x * decay; });
      mma_fence();
      mma_AB<ACC>(state, a, s.b[at.stage]);
      mma_commit();
      mma_wait<0>(state, a);
      ring_done(s.inputs, at);
    }
    if (i < t.chunks) put(p, t, wg, q.starts, (int64_t)(i / p.every - 1) * p.steps.rows + t.row, state, p.order);
  }
  t = block_task(p);          // again, for registers in the loop
  if (p.local && t.to > 0) {
    put(p, t, wg, q.cuts, cut_of(p, t, t.from), state, {p.state_dim, 1, p.head_dim * p.state_dim});
    rv one;
    fill(one, decays);
    if (row0 == 0) store(q.decays + cut_of(p, t, t.from) * p.steps.heads + head, one, 1);
  }
  if (q.final && !p.local && t.to == 0) {
    float scale = q.backwards ? p.scale : 1.f;
    map(state, [=](float x) { return x * scale; });
    put(p, t, wg, q.final, t.row, state, p.order);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<run_state, WARPGROUP, WG, 0>, role<loader, THREAD, 1, 0>,
              role<scan, WARP, WG, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, 64, WG)
