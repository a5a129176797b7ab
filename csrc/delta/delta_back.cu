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
// EARLY: gates forget (delta.h). Segments begin with 0 some chunks behind their last one, of which nothing is written.
// Roles: a loader thread; a scan warp: gates -> vectors; a trim warp: clears what is another sequence's; GROUPS state
// warpgroups, each with 64 columns of v. The chunks follow each other by a warpgroup's instructions more than by its
// products: where registers are left, AHEADS = 1, another warpgroup makes what does not wait for D.
//
// Registers of a thread, N = 128   tiles that live together                                     the rest
//   state, 232 or 240              D 64, D^T k^T 32, dO^T P 32, copy of D 32, dO 16, dO or z 16   30
//   ahead                          dO^T P 32, the same weighed 32, dO 16, as an operand 16        30
//   loader, scan, trim             -                                                              vectors of two each
#include "tile/mail.h"
#include "tile/numbers.h"
#include "delta/delta_early.h"
#include "delta/delta_gains.h"
#include "delta/delta_bwd.h"

// N (columns of D^T, those of K), GROUPS, AHEADS, CHANNELS, EARLY, STAGES, SOON and *_REGS come from the row.
static_assert(AHEADS == 0 || GROUPS == 1, "one for one");
enum { WIDE = CHANNELS ? 3 : 2, VECTORS = 3 };
struct shared {
  st<elem, Q, N> k[STAGES], q[STAGES], w[CHANNELS ? STAGES : 0], d[GROUPS];
  st<elem, Q, 64> dout[SOON][GROUPS], dv[GROUPS];
  square m[STAGES], p[SOON];
  chunk_vectors v[VECTORS];                      // CHANNELS: beta only
  sv<Q> gains[VECTORS];                          // of D^T k^T in z: beta, and the weight
  sv<N> ends[CHANNELS ? STAGES : 0];
  ring<SOON, ASYNC_READS> early;                 // dout, p. Read into registers too, in front of a fence
  ring<STAGES, ASYNC_READS> late;                // k, q, w, m, ends. The same
  ring<VECTORS, ASYNC_READS> v_ring;             // plain stores only, which need no fence
  mail<float, Q> sum[AHEADS];
  mail<elem, Q> weighed[AHEADS];                 // dO
  ring<1, ASYNC_READS> aheads;                   // both, by plain stores
  sem last;                                      // tiles of a chunk that runs over are there, and to be cleared
};
typedef delta_back_params params;

// What is behind this kernel is behind delta_keep, beside which it runs.
TILE bool is_done(const params &p) {
  if (EARLY || !is_taken(p.taken)) return false;
  grid_wait();
  return true;
}
TILE void init(shared &s) {
  ring_init(s.early, arrivals(1, 0, 0), arrivals(0, 0, GROUPS));
  ring_init(s.late, arrivals(1, 0, 0), arrivals(0, 0, GROUPS));
  ring_init(s.v_ring, arrivals(0, 1, 0), arrivals(0, 0, GROUPS + AHEADS));
  if (AHEADS) ring_init(s.aheads, arrivals(0, 0, 1), arrivals(0, 0, 1));
  sem_init(s.last, arrivals(2, 0, 0));
}

// col: the block's first column of v. own: chunks of r that are not behind the segment
struct task { row_task r; int col, segment, own; };
TILE task block_task(const params &p) {
  int parts = (p.value_dim + 64 * GROUPS - 1) / (64 * GROUPS), unit = block_index() / parts;
  int heads = p.rows.rows * p.rows.heads, segment = EARLY ? unit / heads : 0, matrix = unit - segment * heads;
  int row = matrix / p.rows.heads;
  task b = {task_of(p.rows, row, matrix - row * p.rows.heads), (block_index() - unit * parts) * 64 * GROUPS, segment,
            0};
  if (!EARLY) return b;
  row_task &t = b.r;
  int early = few_early(p.cut.early, p.cut.earlies);
  take_segment(t, segment, p.cut.segment);
  b.own = t.chunks;
  if (segment + 1 < p.cut.segments) {
    t.chunks += early;
    t.end += early * Q;
  }
  if (early == 0) t.chunks = 0;
  return b;
}

TILE void loader(const params &p, shared &s, int) {
  task b = block_task(p);
  const row_task &t = b.r;
  ring_pos soon = {}, at = {};
  for (int chunk = t.chunks - 1; chunk >= 0; chunk--) {
    int i = at.stage, step = t.first + chunk * Q, place = t.place + chunk;
    bool over = runs_over(p.rows, step, t.end);
    sem &first = over ? s.last : s.early.full[soon.stage], &full = over ? s.last : s.late.full[i];
    ring_acquire(s.early, soon);
    sem_expect(first, GROUPS * tile_bytes(s.dv[0]) + tile_bytes(s.p[0]));
    ROLLED for (int g = 0; g < GROUPS; g++)
      tma_load(s.dout[soon.stage][g], p.dout, first, step, b.col + 64 * g, t.head, t.batch);
    tma_load(s.p[soon.stage], p.p, first, place * Q, 0, t.head, t.batch);
    ring_next(s.early, soon);
    ring_acquire(s.late, at);
    sem_expect(full, WIDE * tile_bytes(s.k[0]) + tile_bytes(s.m[0]) + CHANNELS * N * 4);
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
    tma_load(s.m[i], p.m, full, place * Q, 0, t.head, t.batch);
    ring_next(s.late, at);
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
  load_gates(next, p.rows, p.gates, t, last);
  for (int chunk = t.chunks - 1; chunk >= 0; chunk--) {
    int before = t.first + (chunk > 0 ? chunk - 1 : 0) * Q;
    ring_acquire(s.v_ring, at);
    scan_chunk(s.v[at.stage], s.gains[at.stage], next, p.rows, p.gates, t, p.scale, before);
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
  ROLLED for (int g = 0; g < GROUPS; g++) clear_rows<WARP>(s.dout[0][g], 0, steps);
  if (!CHANNELS) {
    clear_rows<WARP>(s.k[0], 0, steps);
    clear_rows<WARP>(s.q[0], 0, steps);
  }
  fence_async();
  sem_arrive<WARP>(s.late.full[0]);
  sem_arrive<WARP>(s.early.full[0]);
}

// dO as an operand of dO^T P, and what its rows were multiplied with. any: some vector that may be read
TILE void look_ahead(rt<inner, Q> &z, rv &down, const st<elem, Q, 64> &given, const sv<Q> &any) {
  rt<elem, Q> dout;
  rt<float, Q> wide;
  rv up;
  load_t(dout, given);
  fill(wide, 0.f);
  map_col(wide, dout, any, [](float, float x, float) { return x; });
  row_factors(up, down, wide);
  map_row(wide, up, [](float x, float f) { return x * f; });
  convert(z, wide);
}
TILE void load_dout(rt<elem, Q> &dout, const st<elem, Q, 64> &given, const chunk_vectors &v) {
  load_t(dout, given);
  if (!CHANNELS) map_col(dout, v.read, [](float x, float f) { return x * f; });
}

// dO^T P and its factors of rows, as they are added, times beta.
TILE void finish(rt<float, Q> &sum, const rt<float, Q> &y, const rv &down, const chunk_vectors &v) {
  fill(sum, 0.f);
  map_row(sum, y, down, [](float x, float f) { return x * f; });
  map_col(sum, v.beta, [](float x, float f) { return x * f; });
}

// What a chunk has from before its turn: beta_j dO^T P and scale e^(l_i) dO.
struct ahead {
  rt<float, Q> sum;
  rt<elem, Q> dout;
};
TILE void make_ahead(ahead &a, shared &s, ring_pos soon, ring_pos with, int wg) {
  const chunk_vectors &v = s.v[with.stage];
  const st<elem, Q, 64> &dout = s.dout[soon.stage][wg];
  rt<float, Q> y;
  rt<inner, Q> z;
  rv down;
  ring_wait(s.v_ring, with);
  ring_wait(s.early, soon);
  look_ahead(z, down, dout, v.beta);
  mma_fence();
  mma_ABt<ZERO>(y, z, s.p[soon.stage]);
  mma_commit();
  load_dout(a.dout, dout, v);
  mma_wait<0>(y, z);
  finish(a.sum, y, down, v);
}
TILE void run_ahead(const params &p, shared &s, int wg) {
  int chunks = block_task(p).r.chunks;
  ring_pos soon = {}, with = {}, to = {};
  for (int chunk = 0; chunk < chunks; chunk++) {
    ahead a;
    make_ahead(a, s, soon, with, wg);
    fence_async();                        // dout has been read
    ring_release(s.early, soon);
    ring_release(s.v_ring, with);
    ring_acquire(s.aheads, to);
    mail_put(s.sum[0], a.sum);
    mail_put(s.weighed[0], a.dout);
    sem_arrive(s.aheads.full[to.stage]);
    ring_next(s.early, soon);
    ring_next(s.v_ring, with);
    ring_next(s.aheads, to);
  }
}
TILE void take_ahead(ahead &a, shared &s, ring_pos from) {
  ring_wait(s.aheads, from);
  mail_take(a.dout, s.weighed[0]);
  mail_take(a.sum, s.sum[0]);
  ring_release(s.aheads, from);
}

// One chunk. What does not wait for D is done under products: that of the chunk in front, too; the last one does its
// own again. D is scaled while no product is in flight: ptxas would wait for it. ptxas leaves arithmetic under a
// product where a branch stands behind it; a product with another behind it in the queue is waited for there.
TILE void advance(rt<float, N> &d, ahead &a, const params &p, shared &s, const task &b, ring_pos soon, ring_pos at,
                  ring_pos with, ring_pos from, int chunk, int wg) {
  const row_task &t = b.r;
  int i = at.stage, step = t.first + chunk * Q;
  bool over = !EARLY && runs_over(p.rows, step, t.end), more = chunk > 0, is_own = !EARLY || chunk < b.own;
  const chunk_vectors &v = s.v[with.stage];
  const st<elem, Q, N> &weights = CHANNELS ? s.w[i] : s.k[i];
  ring_pos next = soon, later = with;
  if (more) {
    ring_next(s.early, next);
    ring_next(s.v_ring, later);
  }
  rt<float, Q> x, y;
  rt<elem, 64> part, rest;
  rt<elem, Q> back;
  rt<inner, Q> z, ahead_z;
  rv up, down, ahead_down;
  convert_part(part, d, 0);
  if (N > 64) convert_part(rest, d, N - 64);
  ring_wait(s.late, at);
  if (AHEADS) ring_wait(s.v_ring, with);  // else what is ahead has done so
  if (CHANNELS) map_col(d, s.ends[i], [](float x, float f) { return x * f; });
  else {
    float decay = fast_exp2(get(v.l, Q - 1));
    map(d, [=](float x) { return x * decay; });
  }
  mma_fence();
  mma_ABt_part<ZERO>(x, part, weights, 0);
  if (N > 64) mma_ABt_part<ACC>(x, rest, weights, N - 64);
  mma_commit();
  store(s.d[wg], part, 0);
  if (N > 64) store(s.d[wg], rest, N - 64);
  if (AHEADS) take_ahead(a, s, from);
  fence_async();
  tma_store_wait_read();                  // dv of the chunk behind
  wg_sync();
  if (is_own) tma_store(p.dstates, s.d[wg], b.col + wg * 64, 0, t.place + chunk, t.batch * p.rows.heads + t.head);
  if (AHEADS) mma_fence();
  else if (more) ring_release(s.early, soon);
  mma_AB<ACC>(d, a.dout, s.q[i]);
  mma_commit();
  if (N > 64) mma_wait<1>(x, part, rest);
  else mma_wait<1>(x, part);
  map_col(x, a.sum, s.gains[with.stage], [](float x, float y, float f) { return fused(x, f, y); });
  row_factors(up, down, x);
  map_row(x, up, [](float x, float f) { return x * f; });
  convert(z, x);
  mma_fence();
  mma_ABt<ZERO>(x, z, s.m[i]);
  mma_commit();
  if (AHEADS) mma_wait<0>(x, z, d, a.dout);
  else {
    ring_wait(s.early, next);
    look_ahead(ahead_z, ahead_down, s.dout[next.stage][wg], v.beta);
    ring_wait(s.v_ring, later);
    mma_fence();
    mma_ABt<ZERO>(y, ahead_z, s.p[next.stage]);
    mma_commit();
    mma_wait<1>(x, z);
  }
  map_row(x, down, [](float x, float f) { return x * f; });
  store_t(s.dv[wg], x);
  if (CHANNELS) map(x, [](float x) { return -x; });
  else map_col(x, v.decay, [](float x, float f) { return -x * f; });
  convert(back, x);
  if (!AHEADS) mma_wait<0>(d, a.dout, y, ahead_z);
  mma_fence();
  mma_AB<ACC>(d, back, s.k[i]);
  mma_commit();
  if (!AHEADS) load_dout(a.dout, s.dout[next.stage][wg], s.v[later.stage]);
  fence_async();
  tma_store_wait_read();                  // D
  if (!AHEADS) finish(a.sum, y, ahead_down, s.v[later.stage]);
  wg_sync();
  if (!over && is_own) tma_store(p.dv, s.dv[wg], step, b.col + wg * 64, t.head, t.batch);
  mma_wait<0>(d, back);
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

// EARLY, cut i: D in front of segment i + 1, or, from the last segment's number on, what segment i began with.
TILE float *cut_of(const params &p, const task &b, int wg, int i) {
  return early_state(p.cut, p.rows, b.r, i, b.col / 64 + wg, N);
}
TILE void run_state(const params &p, shared &s, int wg) {
  task b = block_task(p);
  const row_task &t = b.r;
  if (EARLY && block_index() == 0 && wg == 0) tell_taken(p.cut.takes, t.chunks > 0);
  if (EARLY && t.chunks == 0) return grid_wait();
  ring_pos soon = {}, at = {}, with = {}, from = {};
  rt<float, N> d;
  ahead a;
  int rows = p.value_dim - b.col - wg * 64;
  ssd_order in = p.initial_order, out = p.final_order;
  if (p.initial && (!EARLY || b.segment + 1 == p.cut.segments))
    load(d, p.initial + first_of(p, b, wg, in), in.row, in.col, rows, p.key_dim);
  else fill(d, 0.f);
  if (!AHEADS && t.chunks) make_ahead(a, s, soon, with, wg);
  for (int chunk = t.chunks - 1; chunk >= 0; chunk--) {
    if (EARLY && t.chunks > b.own && chunk == b.own - 1)
      store_acc(cut_of(p, b, wg, p.cut.segments - 1 + b.segment), d);
    advance(d, a, p, s, b, soon, at, with, from, chunk, wg);
    ring_next(s.aheads, from);
    ring_next(s.early, soon);
    ring_done(s.v_ring, with);
    ring_done(s.late, at);
  }
  if (EARLY && b.segment > 0) store_acc(cut_of(p, b, wg, b.segment - 1), d);
  else if (p.final) store(p.final + first_of(p, b, wg, out), out.row, out.col, d, rows, p.key_dim);
  if (!EARLY) clear_rest(p, b, wg);
  tma_store_wait_read();
  grid_wait();                            // what is behind this kernel is behind delta_keep, beside which it runs
}

typedef block<params, shared, init, role<run_state, WARPGROUP, GROUPS, STATE_REGS>,
              role<run_ahead, WARPGROUP, AHEADS, AHEAD_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<scan, WARP, 1, LOAD_REGS>, role<trim, WARP, 1, LOAD_REGS>, UNLESS<is_done>> kernel;
ENTRY(kernel, Q, 64 * GROUPS)
