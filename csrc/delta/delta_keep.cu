// Delta rules, the backward's first pass, over the sequence in chunks of 64 steps, the state in registers throughout.
// With l_i the sum of the log decays up to step i of a chunk whose last step is e, S the state before it, and M of
// delta_prepare.h:
//   R^T = (v^T - e^(l_i) S^T k^T) M^T
//   S^T = e^(l_e) S^T + (beta_i R_i e^(l_e - l_i))^T k
// The states in front of chunks, rounded to the call's type, and R, the errors v_i - S_(i-1)^T k_i, are written: the
// forward's pass (delta_sweep.cu) without its output. delta_back.cu may run beside it.
// CHANNELS, a decay for each channel: e^(l_i) k and e^(l_e - l_i) k come as tiles, e^(l_e) as a vector.
// The register operand with M is fp16, as M is: a row of it, a column of v, is first multiplied with the reciprocal of
// its largest value.
// EARLY: gates forget (delta.h). Segments begin with 0 some chunks early, of which nothing is written.
// Roles: a loader thread; a scan warp: gates -> vectors; a trim warp: clears what is another sequence's; GROUPS state
// warpgroups, each with 64 columns of v.
//
// Registers of a thread, D = 128   tiles that live together                       the rest
//   state, 232 or 240              S 64, S^T k^T 32, copy of S 32, v 16, fp16 16  30
//   loader, scan, trim             -                                              vectors of two each
#include "tile/numbers.h"
#include "delta/delta_early.h"
#include "delta/delta_gains.h"

// D (columns of S^T, those of K), GROUPS, CHANNELS, EARLY, STAGES and *_REGS come from the row.
enum { VECTORS = 3 };
struct shared {
  st<elem, Q, D> k[STAGES], w[CHANNELS ? STAGES : 0], states[GROUPS];
  st<elem, Q, 64> v[STAGES][GROUPS], errors[GROUPS];
  square m[STAGES];
  chunk_vectors vec[VECTORS];                    // CHANNELS: beta only
  sv<Q> gains[VECTORS];                          // of R in what is added to S: beta, and the weight
  sv<D> ends[CHANNELS ? STAGES : 0];
  ring<STAGES, ASYNC_READS> inputs;              // read into registers too, in front of advance()'s fence
  ring<VECTORS, ASYNC_READS> vec_ring;           // plain stores only, which need no fence
  sem last;                                      // tiles of a chunk that runs over are there, and to be cleared
};
typedef delta_sweep_params params;

TILE bool is_done(const params &p) { return !EARLY && is_taken(p.taken); }
TILE void init(shared &s) {
  ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, GROUPS));
  ring_init(s.vec_ring, arrivals(0, 1, 0), arrivals(0, 0, GROUPS));
  sem_init(s.last, arrivals(1, 0, 0));
}

// col: the block's first column of v. early: chunks of r in front of the segment
struct task { row_task r; int col, segment, early; };
TILE task block_task(const params &p) {
  int parts = (p.value_dim + 64 * GROUPS - 1) / (64 * GROUPS), unit = block_index() / parts;
  int heads = p.rows.rows * p.rows.heads, segment = EARLY ? unit / heads : 0, matrix = unit - segment * heads;
  int row = matrix / p.rows.heads;
  task b = {task_of(p.rows, row, matrix - row * p.rows.heads), (block_index() - unit * parts) * 64 * GROUPS, segment,
            0};
  if (!EARLY) return b;
  take_segment(b.r, segment, p.cut.segment);
  b.early = begin_early(b.r, segment, few_early(p.cut.early, p.cut.earlies));
  return b;
}

TILE void loader(const params &p, shared &s, int) {
  task b = block_task(p);
  const row_task &t = b.r;
  ring_pos at = {};
  for (int chunk = 0; chunk < t.chunks; chunk++) {
    int i = at.stage, step = t.first + chunk * Q, place = t.place + chunk;
    sem &full = runs_over(p.rows, step, t.end) ? s.last : s.inputs.full[i];
    ring_acquire(s.inputs, at);
    sem_expect(full, (1 + CHANNELS) * tile_bytes(s.k[0]) + GROUPS * tile_bytes(s.errors[0]) + tile_bytes(s.m[0]) +
                         CHANNELS * D * 4);
    if (CHANNELS) {
      int64_t row = (int64_t)(t.batch * p.rows.heads + t.head) * p.rows.places + place;
      tma_load(s.k[i], p.k, full, place * Q, 0, t.head, t.batch);
      tma_load(s.w[i], p.w, full, place * Q, 0, t.head, t.batch);
      tma_load(s.ends[i], p.ends + row * D, full);
    } else {
      tma_load(s.k[i], p.k, full, step, 0, t.key_head, t.batch);
    }
    ROLLED for (int g = 0; g < GROUPS; g++)
      tma_load(s.v[i][g], p.v, full, step, b.col + 64 * g, t.head, t.batch);
    tma_load(s.m[i], p.m, full, place * Q, 0, t.head, t.batch);
    ring_next(s.inputs, at);
  }
}

// The next chunk's gates are under way while this one's are worked on.
TILE void scan(const params &p, shared &s, int) {
  task b = block_task(p);
  const row_task &t = b.r;
  ring_pos at = {};
  given_steps next;
  load_gates(next, p.rows, p.gates, t, t.first);
  for (int chunk = 0; chunk < t.chunks; chunk++) {
    int behind = t.first + (chunk + 1) * Q;
    ring_acquire(s.vec_ring, at);
    scan_chunk(s.vec[at.stage], s.gains[at.stage], next, p.rows, p.gates, t, p.scale, behind);
    sem_arrive<WARP>(s.vec_ring.full[at.stage]);
    ring_next(s.vec_ring, at);
  }
}

// Only a packed row's last chunk runs over.
TILE void trim(const params &p, shared &s, int) {
  task b = block_task(p);
  const row_task &t = b.r;
  if (t.chunks == 0) return;
  ring_pos at = ring_at<STAGES>(t.chunks - 1);
  int steps = t.end - (t.first + (t.chunks - 1) * Q);
  if (!runs_over(p.rows, t.end - steps, t.end)) return;
  sem_wait(s.last, 0);
  if (!CHANNELS) clear_rows<WARP>(s.k[at.stage], 0, steps);
  ROLLED for (int g = 0; g < GROUPS; g++) clear_rows<WARP>(s.v[at.stage][g], 0, steps);
  fence_async();
  sem_arrive<WARP>(s.inputs.full[at.stage]);
}

// One chunk. The state is scaled while no product of it is in flight.
TILE void advance(rt<float, D> &state, const params &p, shared &s, const task &b, ring_pos at, ring_pos with,
                  int chunk, int wg) {
  const row_task &t = b.r;
  int i = at.stage, step = t.first + chunk * Q, col = b.col + 64 * wg;
  bool over = !EARLY && runs_over(p.rows, step, t.end);
  const chunk_vectors &v = s.vec[with.stage];
  rt<float, Q> x;
  rt<elem, 64> low, high;
  rt<elem, Q> part;
  rt<inner, Q> factor;
  rv up, down;
  convert_part(low, state, 0);
  if (D > 64) convert_part(high, state, D - 64);
  ring_wait(s.inputs, at);
  mma_fence();
  mma_ABt_part<ZERO>(x, low, s.k[i], 0);
  if (D > 64) mma_ABt_part<ACC>(x, high, s.k[i], D - 64);
  mma_commit();
  load_t(part, s.v[i][wg]);
  store(s.states[wg], low, 0);
  if (D > 64) store(s.states[wg], high, D - 64);
  fence_async();
  tma_store_wait_read();                  // the errors of the chunk before
  wg_sync();
  if (!EARLY || chunk >= b.early)
    tma_store(p.states, s.states[wg], col, 0, t.place + chunk, t.batch * p.rows.heads + t.head);
  ring_wait(s.vec_ring, with);
  if (D > 64) mma_wait<0>(x, low, high);
  else mma_wait<0>(x, low);
  if (CHANNELS) map_col(x, part, v.beta, [](float a, float b, float) { return b - a; });
  else map_col(x, part, v.decay, [](float a, float b, float e) { return b - a * e; });
  row_factors(up, down, x);
  map_row(x, up, [](float f, float m) { return f * m; });
  convert(factor, x);
  mma_fence();
  mma_AB<ZERO>(x, factor, s.m[i]);
  mma_commit();
  if (CHANNELS) map_col(state, s.ends[i], [](float f, float e) { return f * e; });
  else {
    float decay = fast_exp2(get(v.l, Q - 1));
    map(state, [=](float f) { return f * decay; });
  }
  mma_wait<0>(x, factor);
  map_row(x, down, [](float f, float m) { return f * m; });
  store_t(s.errors[wg], x);
  map_col(x, s.gains[with.stage], [](float f, float g) { return f * g; });
  convert(part, x);
  mma_fence();
  mma_AB<ACC>(state, part, CHANNELS ? s.w[i] : s.k[i]);
  mma_commit();
  fence_async();
  tma_store_wait_read();                  // the state
  wg_sync();
  if (!over && (!EARLY || chunk >= b.early))
    tma_store(p.errors, s.errors[wg], p.rows.starts ? step : step - p.rows.from, col, t.head, t.batch);
  mma_wait<0>(state, part);
  if (over) {
    elem *to = (elem *)p.o_data + step * p.o_step + t.head * p.o_head + col;
    int64_t ld = p.o_step;
    int steps = t.end - step;
    load(x, s.errors[wg]);
    store_rows<elem>(x, [=](int r) { return r < steps ? to + r * ld : (elem *)nullptr; }, p.value_dim - col);
  }
}

TILE int64_t first_of(const params &p, const task &b, int wg, ssd_order o) {
  return ((int64_t)b.r.row * p.rows.heads + b.r.head) * o.matrix + (b.col + 64 * wg) * o.row;
}

// EARLY, cut i: the state behind segment i, or, from the last segment's number on, what a later one began with.
TILE float *cut_of(const params &p, const task &b, int wg, int i) {
  return early_state(p.cut, p.rows, b.r, i, b.col / 64 + wg, D);
}
TILE void run_state(const params &p, shared &s, int wg) {
  task b = block_task(p);
  ring_pos at = {}, with = {};
  rt<float, D> state;                     // S^T: 64 columns of v by K
  int cols = p.value_dim - b.col - 64 * wg;
  ssd_order in = p.initial_order, out = p.final_order;
  if (EARLY && block_index() == 0 && wg == 0) tell_taken(p.cut.takes, b.r.chunks > 0);
  if (EARLY && b.r.chunks == 0) return;
  if (p.initial && b.segment == 0) load(state, p.initial + first_of(p, b, wg, in), in.row, in.col, cols, p.key_dim);
  else fill(state, 0.f);
  for (int chunk = 0; chunk < b.r.chunks; chunk++) {
    if (EARLY && b.early && chunk == b.early)
      store_acc(cut_of(p, b, wg, p.cut.segments - 2 + b.segment), state);
    advance(state, p, s, b, at, with, chunk, wg);
    ring_done(s.vec_ring, with);
    ring_done(s.inputs, at);
  }
  if (EARLY && b.segment + 1 < p.cut.segments) store_acc(cut_of(p, b, wg, b.segment), state);
  else if (p.final) store(p.final + first_of(p, b, wg, out), out.row, out.col, state, cols, p.key_dim);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<run_state, WARPGROUP, GROUPS, STATE_REGS>,
              role<loader, THREAD, 1, LOAD_REGS>, role<scan, WARP, 1, LOAD_REGS>, role<trim, WARP, 1, LOAD_REGS>,
              FOLLOWED, UNLESS<is_done>> kernel;
ENTRY(kernel, Q, 64 * GROUPS)
