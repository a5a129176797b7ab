// The linear part's gradients, a pass over the sequence. With u_i, e_i, f_i (which has the factor r) and g_j of
// hedgehog_bwd_pre.cu:
//   forwards   S = sum of g_j [v_j, 1]^T,   df_i = r S [u_i, e_i],   dr = sum of x_i / r,  x_i = f_i . df_i / r
//   BACKWARDS  S = sum of f_i [u_i, e_i]^T, dg_j = S [v_j, 1],       dv_j = S^T g_j
// over the chunks in front of the window of i's, or behind that of j's, which begin one chunk further on. Then, where h
// = softmax(y) or softmax(-y), dy = +-h (dh - h . dh). Where LOCAL, S does not have all of the linear part: some of it
// lies in two chunks whose products are masked. Backwards, S begins with the gradient of the final state, which has all
// chunks but the last. Over the window and the linear part, the gradients of weights times these add up to 0. They do
// not quite, because e_i comes of the rounded out_i; so x_i is put right, of which dr adds up many.
// Chunks count in the order of the pass. Positions count those of the state's side from the one in front of the first;
// the reader's chunk i meets positions i and i + 1, and S has the positions before i.
// Roles: a loader thread; state: S of position i to shared memory, then + position i; readers: the gradients.
// only_state: the state alone, behind a segment's last position.
//
// Registers of a thread, D = 128   tiles that live together                              the rest
//   state, 240                     S 128, column sums 32, a tile of features 32          rows 6
//   readers, 240                   dh 64, h 64; or dh 64, products 32 and their copy 16; dv 64   rows 10
#include "tile/tile.h"
// D: columns of q, k and v, 64 or 128. LOCAL: a window of any kind. BACKWARDS
#include "hedgehog/hedgehog_bwd.h"
#include "hedgehog/hedgehog_steps.h"

struct shared {
  st<elem, Q, F> a[2][2], r[2][2], dy;
  st<elem, Q, D> b[2], u[2], dv;
  st<elem, F, D> state[2];
  sv<4 * F> parts[2];            // of S's last column
  sv<F> begin[2];                // what it began with
  sv<Q> e;
  ring<2> a_ring;                // with b
  ring<2> r_ring;                // with u
  ring<1, ASYNC_READS> state_ring;
  ring<1, ASYNC_READS> dv_ring;  // the release of r_ring, in front of its own, fences
};
typedef hedgehog_bwd_scan_params params;

TILE void init(shared &s) {
  ring_init(s.a_ring, arrivals(1, 0, 0), arrivals(0, 0, 1 + LOCAL));
  ring_init(s.r_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
  ring_init(s.state_ring, arrivals(0, 0, 1), arrivals(0, 0, 1));
  if (BACKWARDS) ring_init(s.dv_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
}

// `first` and `end` are the row's; `all` of its chunks, of which the block's first is `begin` in the order of the pass.
struct pass { task t; int all, begin; bool last; };
TILE pass block_pass(const params &p) {
  int segments = p.only_state ? p.steps.segments - 1 : p.steps.segments;
  int unit = block_index() / segments, segment = block_index() - unit * segments;
  task t = task_of(p.steps, unit, 0);
  int all = t.end > t.first ? (t.end - t.first + Q - 1) / Q : 0, begin = segment * p.steps.segment;
  bool last = segment + 1 == p.steps.segments;
  t.segment = segment;
  t.before = segment > 0;
  t.chunks = last ? all - begin : p.steps.segment;
  return {t, all, begin, last};
}
// Position 0 lies in front of the block's first chunk. Where there is none, copies read zeros.
TILE int step_at(const params &p, const pass &x, int position) {
  int i = x.begin + position - 1;
  if (i < 0) return p.steps.count;
  return x.t.first + (BACKWARDS ? x.all - 1 - i : i) * Q;
}
TILE bool finishes(const params &p, const pass &x) { return BACKWARDS && p.final && x.last && !p.only_state; }
TILE bool begins_late(const params &p, const pass &x) { return BACKWARDS && p.initial && !x.t.before && !p.only_state; }

TILE void loader(const params &p, shared &s, int) {
  pass x = block_pass(p);
  const task &t = x.t;
  int positions = t.chunks + ((LOCAL && !p.only_state) || finishes(p, x));
  if (t.chunks == 0) return;
  for (int i = 0; i < positions; i++) {
    int step = step_at(p, x, i);
    ring_pos at = ring_at<2>(i), one = ring_at<1>(i);
    ring_acquire(s.a_ring, at);
    ring_expect(s.a_ring, at, 2 * tile_bytes(s.a[0][0]) + tile_bytes(s.b[0]));
    tma_load(s.a[at.stage][0], p.a, s.a_ring.full[at.stage], step, 0, t.head, t.batch);
    tma_load(s.a[at.stage][1], p.a, s.a_ring.full[at.stage], step, F, t.head, t.batch);
    tma_load(s.b[at.stage], p.b, s.a_ring.full[at.stage], step, 0, t.head, t.batch);
    if (p.only_state || i >= t.chunks) continue;
    step = step_at(p, x, i + 1);
    ring_acquire(s.r_ring, at);
    ring_expect(s.r_ring, at, 2 * tile_bytes(s.r[0][0]) + tile_bytes(s.u[0]));
    tma_load(s.r[at.stage][0], p.r, s.r_ring.full[at.stage], step, 0, t.head, t.batch);
    tma_load(s.r[at.stage][1], p.r, s.r_ring.full[at.stage], step, F, t.head, t.batch);
    tma_load(s.u[at.stage], p.u, s.r_ring.full[at.stage], step, 0, t.head, t.batch);
    if (!BACKWARDS) continue;
    ring_acquire(s.dv_ring, one);
    if (runs_over(p.steps, t, step)) {                 // only the row's own steps may be read
      sem_arrive<THREAD>(s.dv_ring.full[0]);
      continue;
    }
    ring_expect(s.dv_ring, one, tile_bytes(s.dv));
    tma_load(s.dv, p.dv, s.dv_ring.full[0], step, 0, t.head, t.batch);
  }
}

// ---- the state
TILE int64_t state_size(const params &p) { return (int64_t)2 * p.count * (p.value_dim + 1); }
TILE float *state_at(const params &p, const task &t, float *states, int64_t i) {
  return states + (i * p.steps.heads + t.head) * state_size(p);
}
TILE const float *initial_of(const params &p, const task &t) {
  if (p.only_state) return nullptr;
  if (t.segment) return state_at(p, t, p.cuts, (int64_t)t.row * p.cut_stride + t.segment - 1);
  return p.initial ? p.initial + ((int64_t)t.row * p.steps.heads + t.head) * state_size(p) : nullptr;
}
TILE void load_state(rt<float, D> &s0, rt<float, D> &s1, const params &p, const float *from) {
  int64_t ld = p.value_dim + 1;
  load(s0, from, ld, p.count, p.value_dim);
  load(s1, from + p.count * ld, ld, p.count, p.value_dim);
}
// The last column of half a state.
TILE void load_column(rv &z, const params &p, const float *from, int half) {
  int64_t ld = p.value_dim + 1;
  rt<float, 16> x;
  rsum sum;
  load(x, from + half * p.count * ld + p.value_dim, ld, p.count, 1);
  row_sum(sum, x);
  reduce(z, sum);
}
TILE void store_column(const params &p, float *to, int half, const rv &z) {
  int64_t ld = p.value_dim + 1;
  rt<float, 16> x;
  fill(x, 0.f);
  map_row(x, z, [](float, float y) { return y; });
  store(to + half * p.count * ld + p.value_dim, ld, x, p.count, 1);
}
TILE const float *e_of(const params &p, const task &t, int step) {
  return p.e + ((int64_t)t.batch * p.steps.heads + t.head) * p.steps.count + step;
}
// A chunk at the end of a packed row: behind it the next one's steps follow.
TILE void clear_behind(shared &s, int stage, int steps) {
  clear_rows(s.a[stage][0], 0, steps);
  clear_rows(s.a[stage][1], 0, steps);
  clear_rows(s.b[stage], 0, steps);
  fence_async();
  wg_sync();
}

TILE void add_features(csum<F> &z, const st<elem, Q, F> &a, const rv &weight) {
  rt<float, F> x;
  load(x, a);
  each<F>([](int, int, float y, float w, float &c) { c = fused(y, w, c); }, x, weight, z);
}
TILE void add_position(rt<float, D> &s0, rt<float, D> &s1, csum<F> &z0, csum<F> &z1, const params &p, shared &s,
                       const pass &x, int position, int stage) {
  int step = step_at(p, x, position), steps = x.t.end - step;
  rv weight;
  if (BACKWARDS) load(weight, e_of(p, x.t, step), steps, 0.f);
  else fill(weight, 1.f);
  if (BACKWARDS && !LOCAL && runs_over(p.steps, x.t, step)) clear_behind(s, stage, steps);
  mma_fence();
  mma_AtB<ACC>(s0, s.a[stage][0], 0, s.b[stage], 0);
  mma_AtB<ACC>(s1, s.a[stage][1], 0, s.b[stage], 0);
  mma_commit();
  add_features(z0, s.a[stage][0], weight);
  add_features(z1, s.a[stage][1], weight);
  mma_wait<0>(s0, s1);
}

TILE void keep_state(const rt<float, D> &s0, const rt<float, D> &s1, const csum<F> &z0, const csum<F> &z1,
                     const params &p, shared &s, const float *initial, float *to) {
  int64_t ld = p.value_dim + 1;
  store(to, ld, s0, p.count, p.value_dim);
  store(to + p.count * ld, ld, s1, p.count, p.value_dim);
  store(s.parts[0], z0);
  store(s.parts[1], z1);
  wg_sync();
  for (int half = 0; half < 2; half++) {
    rv z, x;
    if (initial) load_column(z, p, initial, half);
    else fill(z, 0.f);
    UNROLLED for (int i = 0; i < 4; i++) {
      load(x, slice<F>(s.parts[half], F * i));
      map(z, z, x, [](float a, float b) { return a + b; });
    }
    store_column(p, to, half, z);
  }
}

TILE void run_state(const params &p, shared &s, int) {
  pass x = block_pass(p);
  const task &t = x.t;
  ring_pos a = {}, to = {};
  rt<float, D> s0, s1;
  csum<F> z0, z1;
  const float *initial = initial_of(p, t);
  // Backwards, f has no factor where that is 0, and is not to be added.
  bool adds = !BACKWARDS || ratio_of(p.window_factor, p.linear_factor, t.head) != 0.f, late = begins_late(p, x);
  clear(z0);
  clear(z1);
  fill(s0, 0.f);
  fill(s1, 0.f);
  if (initial && (!late || t.chunks <= 1)) load_state(s0, s1, p, initial);
  for (int i = 0; i < t.chunks; i++) {
    if (late && i == 1) load_state(s0, s1, p, initial);
    if (!p.only_state) {
      ring_acquire(s.state_ring, to);
      if (late && i == 0 && t.chunks <= 1) {           // the last chunk is not in the final state
        rt<float, F> none;
        fill(none, 0.f);
        UNROLLED for (int c = 0; c < D; c += F) {
          store(s.state[0], none, c);
          store(s.state[1], none, c);
        }
      } else {
        store(s.state[0], s0);
        store(s.state[1], s1);
      }
      store(s.parts[0], z0);
      store(s.parts[1], z1);
      ring_fill(s.state_ring, to);
      ring_next(s.state_ring, to);
    }
    ring_wait(s.a_ring, a);
    if ((i > 0 || t.before) && adds) add_position(s0, s1, z0, z1, p, s, x, i, a.stage);
    if (LOCAL && p.only_state) ring_release(s.a_ring, a);      // for the readers, who have ended
    ring_done(s.a_ring, a);
  }
  if (finishes(p, x)) {
    if (t.chunks) {
      ring_acquire(s.state_ring, to);                  // the parts have been read, and what readers clear is cleared
      if (!LOCAL) ring_wait(s.a_ring, a);              // else readers have waited
      if (adds) add_position(s0, s1, z0, z1, p, s, x, t.chunks, a.stage);
    }
    keep_state(s0, s1, z0, z1, p, s, initial, state_at(p, t, p.final, t.row));
  }
  if (p.only_state)
    keep_state(s0, s1, z0, z1, p, s, initial, state_at(p, t, p.cuts, (int64_t)t.row * p.cut_stride + t.segment));
  clear_rest(p.steps, t, p.dy_data, p.dy_stride[0], p.dy_stride[1], F);
}

// ---- readers
// dh += weight z, with z in four parts and what it began with.
TILE void add_column(rt<float, F> &dh, const rv &weight, const sv<4 * F> &z, const sv<F> &begin, bool begun) {
  each<F>([](int, int, float &x, float w, float a, float b, float c, float d) {
    x = fused(w, (a + b) + (c + d), x);
  }, dh, weight, slice<F>(z, 0), slice<F>(z, F), slice<F>(z, 2 * F), slice<F>(z, 3 * F));
  if (begun) each<F>([](int, int, float &x, float w, float z) { x = fused(w, z, x); }, dh, weight, begin);
}

// What x_i is where the sums over the window and over the linear part are 0 together, and adds it to `all`. d_i is the
// window's weights + r f_i . z.
TILE void put_right(rv &all, const rsum &sum, const params &p, int64_t row, int steps, float ratio) {
  rv x, window, weights, den;
  reduce(x, sum);
  load(window, p.window_sums + row, steps, 0.f);
  load(weights, p.window_weights + row, steps, 1.f);
  load(den, p.den + row, steps, 1.f);
  map(weights, weights, den, [](float a, float d) { return a * fast_rcp(d); });
  if (ratio != 0.f) {
    float size = fast_rcp(ratio);
    map(window, window, weights, [=](float y, float a) { return (1.f - a) * y * size; });
    map(x, x, weights, [](float y, float a) { return a * y; });
    map(x, x, window, [](float y, float z) { return y - z; });
  }
  map(all, all, x, [](float a, float b) { return a + b; });
}

// Which pairs of a reader's row and a column of the state's side are linear, of two chunks: `other` is the state's in
// front of the reader's in the order of the pass.
TILE bool far(int row, int col, bool other, int w, bool sliding) {
  if (!BACKWARDS) return col - (other ? Q : 0) < window_begin(row, w, sliding);
  return row - (other ? Q : 0) < window_begin(col, w, sliding);
}
// The linear part of one such chunk: what of dh and dv it gives.
TILE void add_local(rt<float, F> &d0, rt<float, F> &d1, rt<float, D> &dv, const params &p, shared &s, const rv &e,
                    int r, int a, bool other) {
  int w = p.steps.window;
  bool sliding = p.steps.sliding;
  rt<float, Q> x;
  rt<elem, Q> weights;
  mma_fence();
  mma_ABt<ZERO>(x, s.u[r], s.b[a]);
  mma_commit();
  mma_wait<0>(x);
  if (BACKWARDS) map_rc(x, e, s.e, [=](float y, float, float c, int row, int col) {
    return far(row, col, other, w, sliding) ? y + c : 0.f;
  });
  else map_rc(x, e, [=](float y, float c, int row, int col) { return far(row, col, other, w, sliding) ? y + c : 0.f; });
  convert(weights, x);
  mma_fence();
  mma_AB<ACC>(d0, weights, s.a[a][0]);
  mma_AB<ACC>(d1, weights, s.a[a][1]);
  mma_commit();
  mma_wait<0>(d0, d1, weights);
  if (!BACKWARDS) return;
  mma_fence();
  mma_ABt<ZERO>(x, s.r[r][0], s.a[a][0]);
  mma_ABt<ACC>(x, s.r[r][1], s.a[a][1]);
  mma_commit();
  mma_wait<0>(x);
  map_rc(x, [=](float y, int row, int col) { return far(row, col, other, w, sliding) ? y : 0.f; });
  convert(weights, x);
  mma_fence();
  mma_AB<ACC>(dv, weights, s.b[a]);
  mma_commit();
  mma_wait<0>(dv, weights);
}

// dh becomes +-h (dh - h . dh), times a factor; h may be of another size. all: adds h . dh.
TILE void through_softmax(rt<float, F> &dh, const st<elem, Q, F> &h, float size, float factor, rsum &all) {
  rt<float, F> x;
  rsum sum;
  rv dot;
  load(x, h);
  map(x, [=](float y) { return y * size; });
  fill(sum, 0.f);
  row_dot_add(sum, x, dh);
  add(all, sum);
  reduce(dot, sum);
  each<F>([=](int, int, float &y, float h, float d) { y = factor * h * (y - d); }, dh, x, dot);
}

TILE void put(const gmap &m, const rt<float, D> &x, shared &s, const params &p, const task &t, int step, bool over) {
  if (over) {
    int64_t ld = p.dv_stride[0];
    int steps = t.end - step;
    elem *to = (elem *)p.dv_data + step * ld + t.head * p.dv_stride[1];
    return store_rows<elem>(x, [=](int row) { return row < steps ? to + row * ld : (elem *)nullptr; }, p.value_dim);
  }
  store(s.dv, x);
  fence_async();
  wg_sync();
  tma_store(m, s.dv, step, 0, t.head, t.batch);
}
TILE void load_rest(shared &s, const params &p, const task &t, int step) {
  int64_t ld = p.dv_stride[0];
  int steps = t.end - step;
  const elem *from = (const elem *)p.dv_data + step * ld + t.head * p.dv_stride[1];
  load_rows(s.dv, [=](int row) { return row < steps ? from + row * ld : (const elem *)nullptr; }, p.value_dim);
  wg_sync();
}
TILE void put_dy(const rt<float, F> &x, shared &s, const params &p, const task &t, int step, bool over) {
  if (over) {
    int64_t ld = p.dy_stride[0];
    int steps = t.end - step;
    elem *to = (elem *)p.dy_data + step * ld + t.head * p.dy_stride[1];
    return store_rows<elem>(x, [=](int row) { return row < steps ? to + row * ld : (elem *)nullptr; }, F);
  }
  store(s.dy, x);
  fence_async();
  wg_sync();
  tma_store(p.dy, s.dy, step, 0, t.head, t.batch);
}

TILE void readers(const params &p, shared &s, int) {
  pass x = block_pass(p);
  const task &t = x.t;
  ring_pos r = {}, from = {}, old = {};
  rt<float, F> d0, d1;
  rt<float, D> dv, was;
  rv e, all;
  if (p.only_state) return;
  const float *initial = initial_of(p, t);
  float ratio = ratio_of(p.window_factor, p.linear_factor, t.head), factor = BACKWARDS ? 1.f : ratio;
  float size = BACKWARDS || ratio == 0.f ? 1.f : fast_rcp(ratio);
  bool late = begins_late(p, x);
  fill(all, 0.f);
  if (initial)
    for (int half = 0; half < 2; half++) {
      rv z;
      load_column(z, p, initial, half);
      store(s.begin[half], z);
    }
  wg_sync();
  if (LOCAL && t.chunks) ring_wait(s.a_ring, ring_at<2>(0));
  for (int i = 0; i < t.chunks; i++) {
    ring_pos a0 = ring_at<2>(i), a1 = ring_at<2>(i + 1);
    int step = step_at(p, x, i + 1);
    rsum sum;
    fill(sum, 0.f);
    bool over = runs_over(p.steps, t, step), begun = initial && (!late || i > 0);
    if (BACKWARDS) fill(e, 1.f);
    else load(e, e_of(p, t, step), t.end - step, 0.f);
    ring_wait(s.r_ring, r);
    ring_wait(s.state_ring, from);
    mma_fence();
    mma_ABt<ZERO>(d0, s.u[r.stage], s.state[0]);
    mma_ABt<ZERO>(d1, s.u[r.stage], s.state[1]);
    if (BACKWARDS) mma_AB<ZERO>(dv, s.r[r.stage][0], s.state[0]);
    if (BACKWARDS) mma_AB<ACC>(dv, s.r[r.stage][1], s.state[1]);
    mma_commit();
    if (BACKWARDS) mma_wait<0>(d0, d1, dv);
    else mma_wait<0>(d0, d1);
    add_column(d0, e, s.parts[0], s.begin[0], begun);
    add_column(d1, e, s.parts[1], s.begin[1], begun);
    if (LOCAL) {
      rv here;
      ring_wait(s.a_ring, a1);
      if (BACKWARDS) {
        load(here, e_of(p, t, step), t.end - step, 0.f);
        store(s.e, here);
        wg_sync();
      }
      if (over) clear_behind(s, a1.stage, t.end - step);
      if (!BACKWARDS || ratio != 0.f) {
        add_local(d0, d1, dv, p, s, e, r.stage, a1.stage, false);
        if (BACKWARDS && (i > 0 || t.before)) {
          int later = step_at(p, x, i);
          load(here, e_of(p, t, later), t.end - later, 0.f);
          wg_sync();
          store(s.e, here);
          wg_sync();
        }
        if (i > 0 || t.before) add_local(d0, d1, dv, p, s, e, r.stage, a0.stage, true);
      }
      sem_arrive(s.a_ring.empty[a0.stage]);            // read by products alone
    }
    ring_release(s.state_ring, from);
    ring_next(s.state_ring, from);
    if (BACKWARDS) {
      ring_wait(s.dv_ring, old);
      if (over) load_rest(s, p, t, step);
      load(was, s.dv);
      map(dv, was, [](float a, float b) { return a + b; });
      wg_sync();
      put(p.dv, dv, s, p, t, step, over);
    }
    if (over && !BACKWARDS) {                          // the next row's steps have no share of dr
      int steps = t.end - step;
      map_rc(d0, [=](float y, int row, int) { return row < steps ? y : 0.f; });
      map_rc(d1, [=](float y, int row, int) { return row < steps ? y : 0.f; });
    }
    through_softmax(d0, s.r[r.stage][0], size, factor, sum);
    through_softmax(d1, s.r[r.stage][1], size, factor, sum);
    if (!BACKWARDS) put_right(all, sum, p, e_of(p, t, step) - p.e, t.end - step, ratio);
    ring_done(s.r_ring, r);
    map(d0, d1, [](float a, float b) { return a - b; });
    tma_store_wait_read();
    wg_sync();
    if (BACKWARDS) ring_done(s.dv_ring, old);
    put_dy(d0, s, p, t, step, over);
  }
  if (!BACKWARDS) {
    int64_t part = ((int64_t)t.row * p.sum_stride + t.segment) * p.steps.heads + t.head;
    store(p.sums + part * Q, all, Q);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<readers, WARPGROUP, 1, 240>, role<run_state, WARPGROUP, 1, 240>,
              role<loader, THREAD, 1, 24>> kernel;
ENTRY(kernel, Q, D)
