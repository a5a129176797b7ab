// Gradients of linear attention (ssd/ssd_fwd.cu), each by one sweep over the sequence in chunks of 64 steps, the state
// in registers throughout. With l_i the sum of g up to step i of a chunk whose last step is e:
// forwards, for dq: b = v, c = dout, x = k and S the state in front of the chunk
//   y^T = scale e^(l_i) S c^T + x^T P^T,   P_ij = scale (c_i . b_j) e^(l_i - l_j) for j <= i
//   S   = e^(l_e) S + (x_j e^(l_e - l_j))^T b
// BACKWARDS, from the last chunk to the first, S the gradient of the state behind the chunk, without the factor scale
//   y^T = scale e^(l_e - l_j) S c^T + x^T P^T,   P_ji = scale (c_j . b_i) e^(l_i - l_j) for i >= j
//   S   = e^(l_e) S + (x_i e^(l_i))^T b
// for dk with b = dout, c = v and x = q, for dv with b = q, c = k and x = dout.
//
// The gradient of g (DOTS) needs no states in memory. Since g_t decays what goes from a step j < t to a step i >= t,
//   dg_t = sum over i >= t of (q_i . dq_i - k_i . dk_i) + <dS, S> behind the last step
// where the products are summed from dq and dk before these are rounded. (FLA's simple GLA has it so, of rounded ones.)
// Errors of these sums would add up over the sequence; so the sums are such that nothing but float32's rounding does:
// - The pairs of a chunk are in both with the same rounded weights P, and cancel.
// - Between chunks, with G the gradient behind a chunk, dg of its first step is
//     D = X + sum of (q_i e^(l_i))^ . S dout_i,   X = e^(l_e) <G, S> = D' - sum of (k_j e^(l_e - l_j))^ . G v_j
//   with D' that of the chunk behind. The operands are rounded (^) as those that the other sweep makes its state of,
//   and S and G are read in two parts, 16 bits each. Then D' and D are <G, S> of the very states that the sweeps carry.
// - Inside of a chunk, with row_i = q_i . dq_i, col_i = k_i . dk_i and out_i the part of col_i that comes from G,
//     dg_t = X + sum over i >= t of (row_i - col_i + out_i) + sum over j < t of out_j
//
// Roles: a loader thread; a scan warp: g -> vectors; a score warpgroup: P; GROUPS state warpgroups, each with 64 rows
// of the state; with DOTS a collect warp: sums of products -> memory or dg.
//
// Registers of a thread, N = 128, GROUPS = 2   tiles that live together                                the rest
//   state, 184                                 S 64, y 32, z 16, sums of columns 16; or S 64, y 32,    30
//                                              two parts of 64 columns of S 32
//   score, 104                                 products 32                                             30
//   loader, scan, collect, 40                  -                                                       vectors of two
#include "tile/tile.h"
#include "linear_attention/linear_attention.h"
#include "ssd/ssd_fwd.h"

// Q: steps of a chunk. N (columns of the state), GROUPS, BACKWARDS, DOTS, PER_SM and *_REGS come from the row.
enum { Q = 64, TILES = GROUPS * (1 + DOTS), NEXT = BACKWARDS ? -1 : 1 };

// e^(l_i), e^(l_e - l_i); what P's exponent is made of, for rows minus columns
struct vectors { sv<Q> decay, tail, row, col; };
// Parts of the sums of y z over a step: all of it, and what comes from the state; of the latter with the rounded
// operand, over a row
struct found { sv<4 * Q> all[GROUPS], carried[GROUPS]; sv<Q> between[GROUPS]; };
struct shared {
  st<elem, Q, N> b[2], c[2];
  st<elem, Q, 64> x[2][TILES], p[2], y[GROUPS];      // x: then z
  vectors v[2];
  found f[2];
  sv<Q> ends[GROUPS];                            // rows of <G, S> behind the segment
  ring<2, ASYNC_READS> x_ring[GROUPS];           // read into registers too, in front of advance()'s fence
  ring<2, ASYNC_READS> bc_ring;
  ring<2, ASYNC_READS> v_ring, f_ring;           // plain stores only, which need no fence
  sem p_full[2];                                 // refilled behind v_ring
  sem last;                                      // as in ssd_fwd.cu
};
typedef linear_attention_sweep_params params;

TILE void init(shared &s) {
  ring_init(s.bc_ring, arrivals(1, 0, 0), arrivals(0, 0, GROUPS + 1));
  ring_init(s.v_ring, arrivals(0, 1, 0), arrivals(0, 0, GROUPS + 1));
  if (DOTS) ring_init(s.f_ring, arrivals(0, 0, GROUPS), arrivals(0, 1, 0));
  for (int i = 0; i < GROUPS; i++) ring_init(s.x_ring[i], arrivals(1, 0, 0), arrivals(0, 0, 1));
  for (int i = 0; i < 2; i++) sem_init(s.p_full[i], arrivals(0, 0, 1));
  sem_init(s.last, arrivals(GROUPS + 1, 0, 0));
}

// Steps first .. end - 1 of the batch, of `chunks` chunks; place: of the first chunk, among those of all rows.
struct task { int row, batch, head, segment, first, end, chunks, place; };
TILE task block_task(const params &p) {
  int unit = block_index() / p.segments, segment = block_index() - unit * p.segments, row = unit / p.heads;
  task t = {row, row, unit - row * p.heads, segment, segment * p.segment, (segment + 1) * p.segment};
  t.place = t.first / Q;
  if (segment + 1 == p.segments) t.end = p.steps;
  if (p.starts) {
    int first = p.starts[row], end = p.starts[row + 1];
    t.batch = 0;
    t.first = first > 0 ? first : 0;
    t.end = end < p.steps ? end : p.steps;
    t.place = t.first / Q + row;
  }
  t.chunks = t.end > t.first ? (t.end - t.first + Q - 1) / Q : 0;
  return t;
}
// Chunks in their order.
TILE int first_chunk(const task &t) { return BACKWARDS ? t.chunks - 1 : 0; }
TILE bool is_chunk(const task &t, int chunk) { return chunk >= 0 && chunk < t.chunks; }
// Steps of the next packed row are in this chunk, the last of its row.
TILE bool runs_over(const params &p, const task &t, int step) { return p.starts && t.end - step < Q; }

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  for (int chunk = first_chunk(t); is_chunk(t, chunk); chunk += NEXT) {
    int i = at.stage, step = t.first + chunk * Q;
    bool over = runs_over(p, t, step);
    ROLLED for (int g = 0; g < GROUPS; g++) {
      sem &full = over ? s.last : s.x_ring[g].full[i];
      ring_acquire(s.x_ring[g], at);
      sem_expect(full, (1 + DOTS) * tile_bytes(s.x[0][0]));
      tma_load(s.x[i][g], p.x, full, step, g * 64, t.head, t.batch);
      if (DOTS) tma_load(s.x[i][TILES - GROUPS + g], p.z, full, step, g * 64, t.head, t.batch);
    }
    sem &full = over ? s.last : s.bc_ring.full[i];
    ring_acquire(s.bc_ring, at);
    sem_expect(full, 2 * tile_bytes(s.b[0]));
    tma_load(s.c[i], p.c, full, step, 0, t.head, t.batch);
    tma_load(s.b[i], p.b, full, step, 0, t.head, t.batch);
    ring_next(s.bc_ring, at);
  }
}

// Fills the stages of a chunk that runs over: no row of x and b is another sequence's then.
TILE void clear_behind(shared &s, ring_pos at, int steps) {
  sem_wait(s.last, 0);
  clear_rows<WARP>(s.b[at.stage], 0, steps);
  ROLLED for (int g = 0; g < GROUPS; g++) clear_rows<WARP>(s.x[at.stage][g], 0, steps);
  fence_async();
  sem_arrive<WARP>(s.bc_ring.full[at.stage]);
  ROLLED for (int g = 0; g < GROUPS; g++) sem_arrive<WARP>(s.x_ring[g].full[at.stage]);
}

TILE void load_gates(wv<Q> &given, const params &p, const task &t, int chunk) {
  int step = t.first + chunk * Q;
  load_given(given, p.gates, ((int64_t)t.batch * p.steps + step) * p.heads + t.head, p.heads,
             is_chunk(t, chunk) ? t.end - step : 0);
}
// The next chunk's g is under way while this one's is worked on. Behind the last step b and x are 0: any factor does.
TILE void scan(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  wv<Q> given, next, l, out;
  float log_scale = p.log_scale;
  load_gates(next, p, t, first_chunk(t));
  for (int chunk = first_chunk(t); is_chunk(t, chunk); chunk += NEXT) {
    vectors &v = s.v[at.stage];
    log_decays(given, l, next, p.gates, t.head);
    load_gates(next, p, t, chunk + NEXT);
    float end = last(l);
    ring_acquire(s.v_ring, at);
    // Both sweeps make a pair's exponent of the same two numbers: their P are equal.
    map(out, l, l, [=](float x, float) { return BACKWARDS ? -x : x + log_scale; });
    store(v.row, out);
    map(out, l, l, [=](float x, float) { return BACKWARDS ? -(x + log_scale) : x; });
    store(v.col, out);
    map(out, l, l, [](float x, float) { return fast_exp2(x); });
    store(v.decay, out);
    map(out, l, l, [=](float x, float) { return fast_exp2(end - x); });
    store(v.tail, out);
    sem_arrive<WARP>(s.v_ring.full[at.stage]);
    int step = t.first + chunk * Q;
    if (runs_over(p, t, step)) clear_behind(s, at, t.end - step);
    ring_next(s.v_ring, at);
  }
}

TILE void score(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  rt<float, Q> products;
  rv row;
  for (int chunk = first_chunk(t); is_chunk(t, chunk); chunk += NEXT) {
    ring_wait(s.bc_ring, at);
    mma_fence();
    mma_ABt<ZERO>(products, s.c[at.stage], s.b[at.stage]);
    mma_commit();
    ring_wait(s.v_ring, at);
    mma_wait<0>(products);
    ring_release(s.bc_ring, at);
    vectors &v = s.v[at.stage];
    load(row, v.row);
    auto decayed = [](float x, float row, float col) { return x * fast_exp2(row - col); };
    if (BACKWARDS) store_triu(s.p[at.stage], products, row, v.col, 0.f, decayed);
    else store_tril(s.p[at.stage], products, row, v.col, 0.f, decayed);
    fence_async();
    sem_arrive(s.p_full[at.stage]);
    ring_release(s.v_ring, at);
    ring_next(s.v_ring, at);
  }
}

// y = S c^T, 64 columns of the state at a time: so few registers hold its 16-bit copy, with DOTS in two parts. The
// first has the 8 leading bits, as (1 + 2^16) S - 2^16 S, of which only the sum is rounded.
TILE void read_panel(rt<float, Q> &y, const rt<float, N> &state, const st<elem, Q, N> &c, int col) {
  rt<float, N> wide;
  rt<elem, 64> part, rest;
  if (DOTS) {
    fill(wide, 0.f);
    map(wide, state, [](float, float x) { return fused(x, 65536.f, x) - 65536.f * x; });
    convert_part(part, wide, col);
    map(wide, state, [](float most, float x) { return x - most; });
    convert_part(rest, wide, col);
  } else convert_part(part, state, col);
  mma_fence();
  if (col == 0) mma_ABt_part<ZERO>(y, part, c, col);
  else mma_ABt_part<ACC>(y, part, c, col);
  if (DOTS) mma_ABt_part<ACC>(y, rest, c, col);
  mma_commit();
  if (DOTS) mma_wait<0>(y, part, rest);
  else mma_wait<0>(y, part);
}

// Sums of y z over the warpgroup's rows, for each step; or over the steps, of z with factors and rounded.
TILE void put_products(sv<4 * Q> &d, const rt<float, Q> &y, const st<elem, Q, 64> &from, const sv<Q> &any) {
  rt<elem, Q> z;
  rt<float, Q> wide;
  csum<Q> sum;
  load_t(z, from);
  fill(wide, 0.f);
  map_col(wide, z, any, [](float, float x, float) { return x; });
  clear(sum);
  each<Q>([](int, int, float x, float y, float &sum) { sum = fused(x, y, sum); }, (const rt<float, Q> &)wide, y, sum);
  store(d, sum);
}
TILE void put_between(sv<Q> &d, rt<float, Q> &y, const st<elem, Q, 64> &from, const sv<Q> &factor, int steps) {
  rt<elem, Q> z;
  rt<float, Q> wide;
  rsum sum;
  rv rows;
  load_t(z, from);
  map_col(z, factor, [](float x, float f) { return x * f; });
  fill(wide, 0.f);
  map_col(wide, z, factor, [](float, float x, float) { return x; });
  if (steps < Q) {               // the next packed row's may be NaN
    auto there = [=](float x, int, int i) { return i < steps ? x : 0.f; };
    map_rc(wide, there);
    map_rc(y, there);
  }
  fill(sum, 0.f);
  row_dot_add(sum, wide, y);
  reduce(rows, sum);
  store(d, rows);
}

// One chunk. The state is scaled while no product is in flight.
TILE void advance(rt<float, N> &state, const params &p, shared &s, const task &t, ring_pos at, int chunk, int wg) {
  rt<float, Q> y;
  rt<elem, Q> x;
  vectors &v = s.v[at.stage];
  found &f = s.f[at.stage];
  const sv<Q> &reads = BACKWARDS ? v.tail : v.decay, &writes = BACKWARDS ? v.decay : v.tail;
  const st<elem, Q, 64> &other = s.x[at.stage][TILES - GROUPS + wg];
  int step = t.first + chunk * Q;
  bool over = runs_over(p, t, step);
  read_panel(y, state, s.c[at.stage], 0);
  if (N > 64) read_panel(y, state, s.c[at.stage], 64);
  float decay = get(v.decay, Q - 1), scale = p.scale;
  map(state, [=](float x) { return x * decay; });
  ring_wait(s.x_ring[wg], at);
  if (DOTS) {
    ring_acquire(s.f_ring, at);
    put_between(f.between[wg], y, other, reads, over ? t.end - step : Q);
  }
  map_col(y, reads, [=](float x, float f) { return x * (f * scale); });
  if (DOTS && BACKWARDS) put_products(f.carried[wg], y, other, reads);
  sem_wait(s.p_full[at.stage], at.phase);
  mma_fence();
  mma_AtBt<ACC>(y, s.x[at.stage][wg], s.p[at.stage]);
  mma_commit();
  tma_store_wait_read();
  wg_sync();
  mma_wait<0>(y);
  store_t(s.y[wg], y);
  if (DOTS) {
    put_products(f.all[wg], y, other, reads);
    sem_arrive(s.f_ring.full[at.stage]);
  }
  load_t(x, s.x[at.stage][wg]);
  map_col(x, writes, [](float x, float f) { return x * f; });
  mma_fence();
  mma_AB<ACC>(state, x, s.b[at.stage]);
  mma_commit();
  fence_async();                 // behind the reads of x and z and the writes of y
  ring_release(s.x_ring[wg], at);
  wg_sync();
  if (!over) tma_store(p.y, s.y[wg], step, wg * 64, t.head, t.batch);
  mma_wait<0>(state, x);
  if (over) {
    elem *to = (elem *)p.y_data + step * p.y_step + t.head * p.y_head + wg * 64;
    int64_t ld = p.y_step;
    int steps = t.end - step;
    load(y, s.y[wg]);
    store_rows<elem>(y, [=](int i) { return i < steps ? to + i * ld : (elem *)nullptr; }, p.head_dim - wg * 64);
  }
}

// The state where the segment begins: forwards that in front of it, backwards the gradient behind it. Of states that
// are cut, the n-th is where the n-th segment ends that the sweep comes to.
TILE int cut_of(const params &p, const task &t) { return (BACKWARDS ? p.segments - 1 - t.segment : t.segment) - 1; }
TILE int64_t first_of(const params &p, const task &t, int64_t i, int wg, ssd_order o) {
  return (i * p.heads + t.head) * o.matrix + wg * 64 * o.row;
}
TILE void begin_state(const params &p, const task &t, rt<float, N> &state, int wg) {
  int cut = cut_of(p, t);
  const float *from = cut < 0 ? p.initial : p.cuts;
  ssd_order o = cut < 0 ? p.order : p.cut_order;
  if (!from) return fill(state, 0.f);      // as a value: the first use is a conversion, not a product
  from += first_of(p, t, cut < 0 ? t.row : (int64_t)t.row * p.cut_stride + cut, wg, o);
  load(state, from, o.row, o.col, p.head_dim - wg * 64, p.state_dim);
  float factor = cut < 0 && BACKWARDS ? 1.f / p.scale : 1.f;
  if (BACKWARDS) map(state, [=](float x) { return x * factor; });
}
// S behind a segment, from the sweep forwards to the other one.
TILE float *end_of(const params &p, const task &t, int wg) {
  return p.ends + first_of(p, t, (int64_t)t.row * p.end_stride + t.segment, wg, p.cut_order);
}
TILE void put_end(const params &p, sv<Q> &d, const task &t, const rt<float, N> &state, int wg) {
  rt<float, N> other;
  rsum sum;
  rv rows;
  load(other, end_of(p, t, wg), p.state_dim, p.head_dim - wg * 64, p.state_dim);
  fill(sum, 0.f);
  row_dot_add(sum, state, other);
  reduce(rows, sum);
  store(d, rows);
}
TILE void end_state(const params &p, const task &t, rt<float, N> &state, int wg) {
  if (DOTS && !BACKWARDS && p.ends)
    store(end_of(p, t, wg), p.state_dim, state, p.head_dim - wg * 64, p.state_dim);
  if (!p.final || t.segment != (BACKWARDS ? 0 : p.segments - 1)) return;
  float scale = p.scale;
  if (BACKWARDS) map(state, [=](float x) { return x * scale; });
  store(p.final + first_of(p, t, t.row, wg, p.order), p.order.row, p.order.col, state, p.head_dim - wg * 64,
        p.state_dim);
}

// Steps behind the last packed row are in no sequence.
TILE int rest_of(const params &p, const task &t) { return p.starts && t.row + 1 == p.rows ? p.steps - t.end : 0; }
TILE void clear_rest(const params &p, const task &t, int wg) {
  elem *y = (elem *)p.y_data + t.head * p.y_head + wg * 64;
  int64_t ld = p.y_step;
  rt<float, Q> zero;
  fill(zero, 0.f);
  for (int steps = rest_of(p, t); steps > 0; steps -= Q) {
    elem *to = y + (p.steps - steps) * ld;
    store_rows<elem>(zero, [=](int i) { return i < steps ? to + i * ld : (elem *)nullptr; }, p.head_dim - wg * 64);
  }
}

TILE void run_state(const params &p, shared &s, int wg) {
  task t = block_task(p);
  ring_pos at = {};
  rt<float, N> state;
  begin_state(p, t, state, wg);
  if (DOTS && BACKWARDS && p.ends) put_end(p, s.ends[wg], t, state, wg);
  for (int chunk = first_chunk(t); is_chunk(t, chunk); chunk += NEXT) {
    ring_wait(s.bc_ring, at);
    ring_wait(s.v_ring, at);
    advance(state, p, s, t, at, chunk, wg);
    ring_release(s.bc_ring, at);
    ring_release(s.v_ring, at);
    ring_next(s.v_ring, at);
  }
  end_state(p, t, state, wg);
  clear_rest(p, t, wg);
  tma_store_wait_read();
}

// ---- the collect warp
TILE void plus(wv<Q> &a, const wv<Q> &b) { map(a, a, b, [](float x, float y) { return x + y; }); }
// What is not there may be NaN.
TILE void clear_from(wv<Q> &v, int n) {
  wv<Q> there;
  map_index(there, [=](int i) { return i < n ? 1.f : 0.f; });
  map(v, v, there, [](float x, float y) { return y > 0.f ? x : 0.f; });
}
// What the warpgroups have of n steps.
TILE void add_parts(wv<Q> &sum, const sv<4 * Q> (&f)[GROUPS], int n) {
  wv<Q> part;
  fill(sum, 0.f);
  UNROLLED for (int i = 0; i < 4 * GROUPS; i++) {
    load(part, slice<Q>(f[i / 4], i % 4 * Q));
    plus(sum, part);
  }
  clear_from(sum, n);
}
TILE float add_rows(const sv<Q> (&f)[GROUPS]) {
  wv<Q> part, sum;
  fill(sum, 0.f);
  UNROLLED for (int g = 0; g < GROUPS; g++) {
    load(part, f[g]);
    plus(sum, part);
  }
  return sum_of(sum);
}
// row: of the sweep forwards, becomes dg. x: the X of above
TILE void make_dg(wv<Q> &row, const found &f, float x, int n) {
  wv<Q> sum, carried;
  add_parts(sum, f.all, n);
  map(row, row, sum, [](float y, float z) { return y - z; });
  add_parts(carried, f.carried, n);
  plus(row, carried);
  cumsum_down(row);
  sum = carried;
  cumsum(sum);
  map(sum, sum, carried, [=](float y, float z) { return y - z + x; });
  plus(row, sum);
}
TILE void put_one(float *g, float x) {
  wv<Q> v;
  fill(v, x);
  store(g, 1, v, 1);
}
TILE void collect(const params &p, shared &s, int) {
  if (!DOTS) return;
  task t = block_task(p);
  ring_pos at = {};
  wv<Q> row, between;
  float later = 0.f;             // D' of above
  float *products = p.products + ((int64_t)t.batch * p.heads + t.head) * (p.steps + p.chunks);
  for (int chunk = first_chunk(t); is_chunk(t, chunk); chunk += NEXT) {
    int step = t.first + chunk * Q, n = t.end - step;
    float *whole = products + p.steps + t.place + chunk;
    found &f = s.f[at.stage];
    if (BACKWARDS) {
      load(row, products + step, 1, n, 0.f);
      load(between, whole, 1, 1, 0.f);
    }
    ring_wait(s.f_ring, at);
    float sum = p.scale * add_rows(f.between);
    if (BACKWARDS) {
      if (p.ends && chunk == first_chunk(t)) later = p.scale * add_rows(s.ends);
      later -= sum;
      make_dg(row, f, later, n);
      later += sum_of(between);
    } else add_parts(row, f.all, n);
    ring_release<WARP>(s.f_ring, at);
    ring_next(s.f_ring, at);
    if (BACKWARDS) {
      if (p.dg) store(p.dg + ((int64_t)t.batch * p.steps + step) * p.heads + t.head, p.heads, row, n);
      clear_from(row, n);
      if (p.sums) put_one(p.sums + ((int64_t)t.batch * 3 * p.chunks + t.place + chunk) * p.heads + t.head, sum_of(row));
    } else {
      store(products + step, 1, row, n);
      put_one(whole, sum);
    }
  }
  fill(row, 0.f);
  for (int steps = BACKWARDS && p.dg ? rest_of(p, t) : 0; steps > 0; steps -= Q)
    store(p.dg + ((int64_t)t.batch * p.steps + p.steps - steps) * p.heads + t.head, p.heads, row, steps);
}

typedef block<params, shared, init, role<run_state, WARPGROUP, GROUPS, STATE_REGS>,
              role<score, WARPGROUP, 1, SCORE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<scan, WARP, 1, LOAD_REGS>, role<collect, WARP, 1, LOAD_REGS>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, Q, 64 * GROUPS)
