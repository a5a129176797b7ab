// Delta rules, the backward's pass over the sequence, from the last chunk of 64 steps to the first (the gated rule:
// Yang, Kautz, Hatamizadeh 2024). D, the gradient of the state behind the chunk, is in registers throughout. With l_i
// the sum of the log decays up to step i of a chunk whose last step is e, and M and P of delta_prepare.h:
//   z^T  = beta_j (e^(l_e - l_j) D^T k^T + dO^T P)
//   dV^T = z^T M
//   D^T  = e^(l_e) D^T + (scale e^(l_i) dO)^T q - (e^(l_i) dV)^T k
// All is transposed, so that the state and what comes out of it are the register operands of every product. D is kept
// as it is behind each chunk, rounded to the call's type: delta_grads.cu makes the other gradients of it.
// CHANNELS, a decay for each channel: e^(l_e - l_i) k, scale e^(l_i) q and e^(l_i) k come as tiles, and e^(l_e) as a
// vector.
// dO, where it meets P, and z are fp16 operands, as P and M are. A row of theirs is first multiplied with the
// reciprocal of its largest value: gradients may be 1e-20 or 1e30.
// Roles: a loader thread; a scan warp: gates -> vectors; a trim warp: clears what is another sequence's; GROUPS state
// warpgroups, each with 64 columns of v.
//
// Registers of a thread, N = 128   tiles that live together                                     the rest
//   state, 232 or 240              D 64, D^T k^T 32, dO^T P 32, copy of D 32, dO 16, dO or z 16   30
//   loader, scan, trim             -                                                              vectors of two each
#include "delta/delta_prepare.h"
#include "delta/delta_bwd.h"

// N (columns of D^T, those of K), GROUPS, CHANNELS and *_REGS come from the row.
enum { STAGES = 2, WIDE = CHANNELS ? 3 : 2 };
struct shared {
  st<elem, Q, N> k[STAGES], q[STAGES], w[CHANNELS ? STAGES : 0], d[GROUPS];
  st<elem, Q, 64> dout[STAGES][GROUPS], dv[GROUPS];
  square m[STAGES], p[STAGES];
  chunk_vectors v[STAGES];                       // CHANNELS: beta only
  sv<N> ends[CHANNELS ? STAGES : 0];
  ring<STAGES, ASYNC_READS> inputs;              // read into registers too, in front of advance()'s fence
  ring<STAGES, ASYNC_READS> v_ring;              // plain stores only, which need no fence
  sem last;                                      // tiles of a chunk that runs over are there, and to be cleared
};
typedef delta_back_params params;

TILE void init(shared &s) {
  ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, GROUPS));
  ring_init(s.v_ring, arrivals(0, 1, 0), arrivals(0, 0, GROUPS));
  sem_init(s.last, arrivals(1, 0, 0));
}

struct task { row_task r; int col; };            // col: the block's first column of v
TILE task block_task(const params &p) {
  int parts = (p.value_dim + 64 * GROUPS - 1) / (64 * GROUPS), unit = block_index() / parts;
  int row = unit / p.rows.heads;
  return {task_of(p.rows, row, unit - row * p.rows.heads), (block_index() - unit * parts) * 64 * GROUPS};
}

TILE void loader(const params &p, shared &s, int) {
  task b = block_task(p);
  const row_task &t = b.r;
  ring_pos at = {};
  for (int chunk = t.chunks - 1; chunk >= 0; chunk--) {
    int i = at.stage, step = t.first + chunk * Q, place = t.place + chunk;
    sem &full = runs_over(p.rows, step, t.end) ? s.last : s.inputs.full[i];
    ring_acquire(s.inputs, at);
    sem_expect(full, WIDE * tile_bytes(s.k[0]) + GROUPS * tile_bytes(s.dv[0]) + 2 * tile_bytes(s.m[0]) +
                         CHANNELS * N * 4);
    if (CHANNELS) {
      int64_t row = (int64_t)(t.batch * p.rows.heads + t.head) * p.rows.places + place;
      tma_load(s.w[i], p.w, full, place * Q, 0, t.head, t.batch);
      tma_load(s.k[i], p.k, full, place * Q, 0, t.head, t.batch);
      tma_load(s.q[i], p.q, full, place * Q, 0, t.head, t.batch);
      tma_load(s.ends[i], p.ends + row * N, full);
    } else {
      tma_load(s.k[i], p.k, full, step, 0, t.key_head, t.batch);
      tma_load(s.q[i], p.q, full, step, 0, t.key_head, t.batch);
    }
    ROLLED for (int g = 0; g < GROUPS; g++)
      tma_load(s.dout[i][g], p.dout, full, step, b.col + 64 * g, t.head, t.batch);
    tma_load(s.p[i], p.p, full, place * Q, 0, t.head, t.batch);
    tma_load(s.m[i], p.m, full, place * Q, 0, t.head, t.batch);
    ring_next(s.inputs, at);
  }
}

// The gates of the chunk in front are under way while this one's are worked on.
TILE void scan(const params &p, shared &s, int) {
  task b = block_task(p);
  const row_task &t = b.r;
  ring_pos at = {};
  given_steps next;
  if (t.chunks == 0) return;
  int last = t.first + (t.chunks - 1) * Q;
  if (t.chunks == 0) return;
  if (CHANNELS) load_beta(next.beta, p.rows, p.gates, t, last);
  else load_given(next, p.rows, p.gates, t, last);
  for (int chunk = t.chunks - 1; chunk >= 0; chunk--) {
    int before = t.first + (chunk > 0 ? chunk - 1 : 0) * Q;
    ring_acquire(s.v_ring, at);
    chunk_vectors &v = s.v[at.stage];
    if (CHANNELS) {
      put_beta(v.beta, next.beta, p.gates);
      load_beta(next.beta, p.rows, p.gates, t, before);
    } else {
      put_vectors(v, next, p.gates, t.head, p.scale);
      load_given(next, p.rows, p.gates, t, before);
    }
    sem_arrive<WARP>(s.v_ring.full[at.stage]);
    ring_next(s.v_ring, at);
  }
}

// Only a packed row's last chunk, the first that is worked on, runs over.
TILE void trim(const params &p, shared &s, int) {
  task b = block_task(p);
  const row_task &t = b.r;
  int steps = t.end - (t.first + (t.chunks - 1) * Q);
  if (t.chunks == 0 || !runs_over(p.rows, t.end - steps, t.end)) return;
  sem_wait(s.last, 0);
  if (!CHANNELS) {
    clear_rows<WARP>(s.k[0], 0, steps);
    clear_rows<WARP>(s.q[0], 0, steps);
  }
  ROLLED for (int g = 0; g < GROUPS; g++) clear_rows<WARP>(s.dout[0][g], 0, steps);
  fence_async();
  sem_arrive<WARP>(s.inputs.full[0]);
}

// One chunk. D is scaled while no product is in flight: ptxas would wait for it.
TILE void advance(rt<float, N> &d, const params &p, shared &s, const task &b, ring_pos at, int chunk, int wg) {
  const row_task &t = b.r;
  int i = at.stage, step = t.first + chunk * Q;
  bool over = runs_over(p.rows, step, t.end);
  const chunk_vectors &v = s.v[i];
  const st<elem, Q, N> &weights = CHANNELS ? s.w[i] : s.k[i];
  rt<float, Q> x, y;
  rt<elem, 64> part, rest;
  rt<elem, Q> dout;
  rt<inner, Q> z;
  rv up, down;
  convert_part(part, d, 0);
  if (N > 64) convert_part(rest, d, N - 64);
  ring_wait(s.v_ring, at);
  if (CHANNELS) map_col(d, s.ends[i], [](float x, float f) { return x * f; });
  else {
    float decay = fast_exp2(get(v.l, Q - 1));
    map(d, [=](float x) { return x * decay; });
  }
  mma_fence();
  mma_ABt_part<ZERO>(x, part, weights, 0);
  if (N > 64) mma_ABt_part<ACC>(x, rest, weights, N - 64);
  load_t(dout, s.dout[i][wg]);
  fill(y, 0.f);
  map_col(y, dout, v.beta, [](float, float x, float) { return x; });
  row_factors(up, down, y);
  map_row(y, up, [](float x, float f) { return x * f; });
  convert(z, y);
  mma_fence();
  mma_ABt<ZERO>(y, z, s.p[i]);
  mma_commit();
  if (!CHANNELS) {
    map_col(dout, v.read, [](float x, float f) { return x * f; });
    mma_fence();
  }
  mma_AB<ACC>(d, dout, s.q[i]);
  mma_commit();
  tma_store_wait_read();
  wg_sync();
  if (N > 64) mma_wait<1>(x, y, z, part, rest);
  else mma_wait<1>(x, y, z, part);
  map_row(y, down, [](float x, float f) { return x * f; });
  if (CHANNELS) map(x, y, [](float a, float b) { return a + b; });
  else map_col(x, y, v.weight, [](float a, float b, float f) { return fused(a, f, b); });
  map_col(x, v.beta, [](float x, float f) { return x * f; });
  row_factors(up, down, x);
  map_row(x, up, [](float x, float f) { return x * f; });
  convert(z, x);
  mma_fence();
  mma_ABt<ZERO>(x, z, s.m[i]);
  mma_commit();
  store(s.d[wg], part, 0);
  if (N > 64) store(s.d[wg], rest, N - 64);
  mma_wait<0>(d, dout, x, z);
  map_row(x, down, [](float x, float f) { return x * f; });
  store_t(s.dv[wg], x);
  if (CHANNELS) map(x, [](float x) { return -x; });
  else map_col(x, v.decay, [](float x, float f) { return -x * f; });
  convert(dout, x);
  mma_fence();
  mma_AB<ACC>(d, dout, s.k[i]);
  mma_commit();
  fence_async();
  wg_sync();
  tma_store(p.dstates, s.d[wg], b.col + wg * 64, 0, t.place + chunk, t.batch * p.rows.heads + t.head);
  if (!over) tma_store(p.dv, s.dv[wg], step, b.col + wg * 64, t.head, t.batch);
  mma_wait<0>(d, dout);
  if (over) {
    elem *to = (elem *)p.dv_data + step * p.dv_step + t.head * p.dv_head + b.col + wg * 64;
    int64_t ld = p.dv_step;
    int steps = t.end - step;
    load(x, s.dv[wg]);
    store_rows<elem>(x, [=](int r) { return r < steps ? to + r * ld : (elem *)nullptr; },
                     p.value_dim - b.col - wg * 64);
  }
}

TILE int64_t first_of(const params &p, const task &b, int wg, ssd_order o) {
  return ((int64_t)b.r.row * p.rows.heads + b.r.head) * o.matrix + (b.col + 64 * wg) * o.row;
}
// Steps behind the last packed row are in no sequence.
TILE void clear_rest(const params &p, const task &b, int wg) {
  const row_task &t = b.r;
  if (!p.rows.starts || t.row + 1 < p.rows.rows) return;
  int col = b.col + 64 * wg;
  int64_t ld = p.dv_step;
  elem *dv = (elem *)p.dv_data + t.head * p.dv_head + col;
  rt<float, Q> zero;
  fill(zero, 0.f);
  for (int step = t.end; step < p.rows.steps; step += Q) {
    elem *to = dv + step * ld;
    int steps = p.rows.steps - step;
    store_rows<elem>(zero, [=](int i) { return i < steps ? to + i * ld : (elem *)nullptr; }, p.value_dim - col);
  }
}

TILE void run_state(const params &p, shared &s, int wg) {
  task b = block_task(p);
  const row_task &t = b.r;
  ring_pos at = {};
  rt<float, N> d;
  int rows = p.value_dim - b.col - wg * 64;
  ssd_order in = p.initial_order, out = p.final_order;
  if (p.initial) load(d, p.initial + first_of(p, b, wg, in), in.row, in.col, rows, p.key_dim);
  else fill(d, 0.f);
  for (int chunk = t.chunks - 1; chunk >= 0; chunk--) {
    ring_wait(s.inputs, at);
    advance(d, p, s, b, at, chunk, wg);
    ring_release(s.v_ring, at);
    ring_done(s.inputs, at);
  }
  if (p.final) store(p.final + first_of(p, b, wg, out), out.row, out.col, d, rows, p.key_dim);
  clear_rest(p, b, wg);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<run_state, WARPGROUP, GROUPS, STATE_REGS>,
              role<loader, THREAD, 1, LOAD_REGS>, role<scan, WARP, 1, LOAD_REGS>,
              role<trim, WARP, 1, LOAD_REGS>> kernel;
ENTRY(kernel, Q, 64 * GROUPS)
