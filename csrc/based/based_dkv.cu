// The gradients of k and v of Based, one pass from the last chunk to the first. With N_i what out_i was divided by, e_i
// = -dout_i . out_i (both in based_dq.cu), phi the features, s_ij = scale q_i . k_j, and inside a chunk, R, D and d the
// sums of the steps behind it:
//   dv_j = R phi(k_j) + sum of w_ij / N_i dout_i for i >= j,   w_ij = 1 + s_ij + s_ij^2 / 2
//   dk_j = phi'(k_j)^T R^T v_j + d + D k_j + scale sum of (dout_i . v_j + e_i) (1 + s_ij) / N_i q_i
//   R^T += dout^T (phi(q) / N),   D += scale^2 q^T (e / N q),   d += scale sum of e / N q
// Steps past the end have 1 / N = 0 and zeros for q and dout. Where the next packed row follows in memory, the warp of
// the vectors clears its steps before anybody reads them.
// Roles: GROUPS state warpgroups, each with 64 rows of R^T: q -> features, sums, and copies of 16 bits of the sums; an
// out warpgroup, or OUTS that take the chunks in turn; a loader thread; a warp: norm and delta -> vectors. BUFFERS 1
// leaves no room for the features of the next chunk.
//
// Registers of a thread of the states: R^T 80, D 16, features 16 to 32, addresses. Of out: dv 32 GROUPS, dk 16, scores
// and their gradients 64, or features 40, or gradients of 64 features 32 and k, its gradients and neighbours 48.
#include "based/based_features.h"

// MANY, GROUPS (1 or 2), OUTS, STAGES, COPIES, BUFFERS, STATE_REGS, OUT_REGS come from the row.
enum { Q = 64, F = BASED_FEATURES, V = 64 * GROUPS };
static_assert(STAGES % OUTS == 0 && COPIES % OUTS == 0, "an out warpgroup sees every use of its stages");

struct vectors { sv<Q> inverse, delta, both; };   // 1 / N_i, e_i, e_i / N_i
struct shared {
  st<elem, Q, 64> q[STAGES], k[STAGES];
  st<elem, Q, V> v[STAGES], dout[STAGES];
  vectors vec[STAGES];
  st<elem, Q, 192> features[BUFFERS];        // of q, divided by N
  st<elem, Q, 64> weighted[BUFFERS];         // scale^2 e / N q; column 32: scale e / N
  st<elem, 64, 192> state[COPIES][GROUPS];   // R^T
  st<elem, 64, 64> sums[COPIES];    // D in rows 0 to 31, d in row 32
  st<elem, Q, V> dv[OUTS];
  ring<STAGES, ASYNC_READS> inputs; // who reads it through registers too fences
  ring<COPIES, ASYNC_READS> copies; // of R^T, D and d
  sem last;                         // the tiles of a last chunk that runs over are there, and to be cleared
};
typedef based_dkv_params params;

TILE void init(shared &s) {
  ring_init(s.inputs, arrivals(1, 1, 0), arrivals(0, 0, GROUPS + 1));     // of the out warpgroups one
  ring_init(s.copies, arrivals(0, 0, GROUPS), arrivals(0, 0, 1));
  sem_init(s.last, arrivals(1, 0, 0));
}

TILE int last_step(const task &t) { return t.first + (chunks_of(t) - 1) * Q; }

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p.rows, 1);
  ring_pos at = {};
  for (int step = last_step(t); step >= t.first; step -= Q) {
    sem &full = runs_over(p.rows, t, step) ? s.last : s.inputs.full[at.stage];
    ring_acquire(s.inputs, at);
    sem_expect(full, (p.rows.cutting ? 1 : 2) * (tile_bytes(s.q[0]) + tile_bytes(s.v[0])));
    tma_load(s.q[at.stage], p.q, full, step, 0, t.head, t.batch);
    tma_load(s.dout[at.stage], p.dout, full, step, 0, t.head, t.batch);
    if (!p.rows.cutting) tma_load(s.k[at.stage], p.k, full, step, 0, t.head, t.batch);
    if (!p.rows.cutting) tma_load(s.v[at.stage], p.v, full, step, 0, t.head, t.batch);
    ring_next(s.inputs, at);
  }
}

// Behind the task's steps, and what is kept in front of them.
TILE based_state state_behind(const params &p, const task &t) {
  return state_given(p.rows, t, p.final, p.cuts, t.segment + 1 == p.rows.segments, t.segment);
}
TILE based_state state_wanted(const params &p, const task &t) {
  return state_kept(p.rows, t, p.initial, p.cuts, t.segment == 0, t.segment - 1);
}

TILE void make_vectors(const params &p, shared &s, int) {
  task t = block_task(p.rows, 1);
  ring_pos at = {};
  wv<Q> inverse, delta, both;
  float total = 0.f;
  for (int step = last_step(t); step >= t.first; step -= Q) {
    int steps = t.end - step;
    if (p.norm) {
      load(inverse, p.norm + place(p.rows, t, step), 1, steps, infinity());
      load(delta, p.delta + place(p.rows, t, step), 1, steps, 0.f);
    } else {
      map_index(inverse, [=](int i) { return i < steps ? 1.f : infinity(); });
      fill(delta, 0.f);
    }
    map(inverse, inverse, inverse, [](float x, float) { return fast_rcp(x); });
    map(both, inverse, delta, times);
    total += sum_of(both);
    ring_acquire(s.inputs, at);
    vectors &v = s.vec[at.stage];
    store(v.inverse, inverse);
    store(v.delta, delta);
    store(v.both, both);
    if (runs_over(p.rows, t, step)) {
      sem_wait(s.last, 0);
      clear_rows<WARP>(s.q[at.stage], 0, steps);
      clear_rows<WARP>(s.dout[at.stage], 0, steps);
      fence_async();
      sem_arrive<WARP>(s.inputs.full[at.stage]);
    }
    sem_arrive<WARP>(s.inputs.full[at.stage]);
    ring_next(s.inputs, at);
  }
  based_state begin = state_behind(p, t), end = state_wanted(p, t);
  if (end.sums && is_first(p.rows)) {
    wv<32> count;
    float all = total + (begin.sums ? *count_of(begin.sums) : 0.f);
    map_index(count, [=](int i) { return i ? 0.f : all; });
    store(count_of(end.sums), 1, count, 32);
  }
}

// Groups that share the features meet.
TILE void meet() {
  if (GROUPS > 1) bar_sync(1, 128 * GROUPS);
  else wg_sync();
}

// The tile whose transpose times q adds to D and d.
template<class Tile> TILE void store_weighted(Tile &d, shared &s, const vectors &v, int stage, float scale) {
  rt<float, 32> q;
  rt<float, 16> ones;
  rv both;
  load(both, v.both);
  load(q, s.q[stage]);
  map(q, [=](float x) { return x * scale * scale; });
  map_row(q, both, times);
  store(d, q, 0);
  ones_column(ones, scale);
  map_row(ones, both, times);
  store(d, ones, 32);
}
// Of a chunk's q. Everybody's products with what was in the buffer are over.
TILE void make_features(const params &p, shared &s, ring_pos at, int buffer) {
  rv row;
  ring_wait(s.inputs, at);
  vectors &v = s.vec[at.stage];
  load(row, v.inverse);
  map(row, row, [](float x) { return x * SMALLER; });
  store_features(s.features[buffer], s.q[at.stage], row, weights_of_q(p.rows), p.rows);
  store_weighted(s.weighted[buffer], s, v, at.stage, p.rows.scale);
  fence_async();
}

TILE void run_state(const params &p, shared &s, int wg) {
  task t = block_task(p.rows, 1);
  ring_pos at = {}, next = {}, copy = {};
  int buffer = 0;
  rt<float, F> state;
  rt<float, 32> sums;
  rv weight;
  // D k is what the gradient of M, which is symmetric, gives k twice: for either factor
  map_rows(weight, [](int row) { return row < 32 ? 2.f : 1.f; });
  based_state begin = state_behind(p, t), end = state_wanted(p, t);
  begin_state(state, begin, p.rows, wg, SMALLER);
  begin_sums(sums, begin);
  map_row(sums, weight, times);
  if (wg == 0) {
    rt<float, 16> none;
    fill(none, 0.f);
    for (int i = 0; i < BUFFERS; i++) store(s.weighted[i], none, 48);
    if (BUFFERS == 2 && t.first < t.end) make_features(p, s, next, buffer);
  }
  for (int step = last_step(t); step >= t.first; step -= Q) {
    if (!p.rows.cutting) {
      ring_acquire(s.copies, copy);
      store(s.state[copy.stage][wg], state);
      if (wg == 0) store(s.sums[copy.stage], sums);
      ring_fill(s.copies, copy);
      ring_next(s.copies, copy);
    }
    if (BUFFERS == 1 && wg == 0) make_features(p, s, at, 0);
    meet();                            // the chunk and its features are there, the last one's products are over
    mma_fence();
    mma_AtB<ACC>(state, s.dout[at.stage], 64 * wg, s.features[buffer], 0);
    mma_AtB<ACC>(sums, s.weighted[buffer], 0, s.q[at.stage], 0);
    mma_commit();
    if (BUFFERS == 2) {
      ring_next(s.inputs, next);
      buffer ^= 1;
      if (wg == 0 && step > t.first) make_features(p, s, next, buffer);   // under the products
    }
    mma_wait<0>(state, sums);
    ring_done(s.inputs, at);
    if (BUFFERS == 1) meet();
  }
  keep_state(state, end, p.rows, wg, 1.f / SMALLER);
  if (wg == 0 && end.sums && is_first(p.rows)) {
    map(weight, weight, [](float x) { return 1.f / x; });
    map_row(sums, weight, times);
    keep_sums(sums, end);
  }
}

// The chunk's own steps. dk: of the sums behind it so far, for e_i.
TILE void own_gradients(rt<float, 32> &dk, rt<float, 64> (&dv)[GROUPS], const params &p, shared &s, int stage) {
  rt<float, Q> scores, gradients;
  rt<elem, Q> own;
  rt<elem, 32> k;
  vectors &v = s.vec[stage];
  float scale = p.rows.scale;
  load(k, s.k[stage]);
  mma_fence();
  mma_ABt_part<ZERO>(scores, k, s.q[stage], 0);
  mma_ABt<ZERO>(gradients, s.v[stage], s.dout[stage]);
  mma_commit();
  mma_wait<0>(scores, gradients, k);
  map_col(gradients, v.delta, plus);
  map(gradients, scores, [=](float g, float x) { return g * fused(x, scale, 1.f) * scale; });
  map_col(gradients, v.inverse, times);
  triu(gradients, 0, 0.f);
  map_col(scores, v.inverse, [=](float x, float y) {
    float u = fused(x, scale, 1.f);
    return fused(0.5f * u, u, 0.5f) * y;
  });
  triu(scores, 0, 0.f);
  convert(own, gradients);
  mma_fence();
  mma_AB_cols<ACC>(dk, own, s.q[stage], 0);
  mma_commit();
  mma_wait<0>(dk, own);
  convert(own, scores);
  mma_fence();
  UNROLLED for (int g = 0; g < GROUPS; g++) mma_AB_cols<ZERO>(dv[g], own, s.dout[stage], 64 * g);
  mma_commit();
  UNROLLED for (int g = 0; g < GROUPS; g++) mma_wait<0>(dv[g], own);
}
TILE void gradient_of_norm(rt<float, 32> &dk, shared &s, int stage, int copy) {
  rt<elem, 64> with_one;
  load_with_one(with_one, s.k[stage]);
  mma_fence();
  mma_AB_cols<ZERO>(dk, with_one, s.sums[copy], 0);
  mma_commit();
  mma_wait<0>(dk, with_one);
}

TILE void store_part(const rt<float, 16> &dk, const params &p, const task &t, int step, int col) {
  elem *to = (elem *)p.dk + t.batch * p.dk_batch + step * p.dk_step + t.head * p.dk_head + col;
  int64_t ld = p.dk_step;
  int steps = t.end - step;
  if (col < p.rows.dim)
    store_rows<elem>(dk, [=](int i) { return i < steps ? to + i * ld : (elem *)nullptr; }, p.rows.dim - col);
}

TILE void store_dv(rt<float, 64> (&dv)[GROUPS], const params &p, shared &s, const task &t, int step, int wg) {
  if (runs_over(p.rows, t, step)) {
    elem *to = (elem *)p.dv_data + step * p.dv_step + t.head * p.dv_head;
    int64_t ld = p.dv_step;
    int steps = t.end - step;
    UNROLLED for (int g = 0; g < GROUPS; g++)
      store_rows<elem>(dv[g], [=](int i) { return i < steps ? to + i * ld + 64 * g : (elem *)nullptr; },
                       p.rows.dim_v - 64 * g);
    return;
  }
  tma_store_wait_read();
  wg_sync();
  UNROLLED for (int g = 0; g < GROUPS; g++) store(s.dv[wg], dv[g], 64 * g);
  fence_async();
  wg_sync();
  tma_store(p.dv, s.dv[wg], step, 0, t.head, t.batch);
}

TILE void run_out(const params &p, shared &s, int wg) {
  task t = block_task(p.rows, 1);
  ring_pos at = ring_at<STAGES>(wg), copy = ring_at<COPIES>(wg);
  bool last = is_last(p.rows);
  weights w = {1.f, 1.f, 1.f};
  for (int step = last_step(t) - wg * Q; step >= t.first; step -= OUTS * Q) {
    rt<float, 32> dk;
    rt<float, 64> dv[GROUPS];
    float *before = p.partial + place(p.rows, t, step) * 32;
    float *before_v = p.partial_v + place(p.rows, t, step) * p.rows.dim_v;
    ring_wait(s.inputs, at);
    if (p.rows.cutting) {
      ring_release(s.inputs, at);
      next_turn(s.inputs, at, OUTS);
      continue;
    }
    ring_wait(s.copies, copy);
    if (!is_first(p.rows)) {
      load(dk, before, 32, t.end - step, 32);
      UNROLLED for (int g = 0; g < GROUPS; g++)
        load(dv[g], before_v + 64 * g, p.rows.dim_v, t.end - step, p.rows.dim_v - 64 * g);
    } else {
      gradient_of_norm(dk, s, at.stage, copy.stage);
      own_gradients(dk, dv, p, s, at.stage);
    }
    {
      rv unit;
      slices f;
      rt<elem, 64> four;
      rt<elem, 32> rest;
      fill(unit, 1.f / SMALLER);
      load_slices(f, s.k[at.stage], unit, w, p.rows);
      near_pairs(four, f);
      mma_fence();
      UNROLLED for (int g = 0; g < GROUPS; g++) mma_ABt_part<ACC>(dv[g], four, s.state[copy.stage][g], 0);
      mma_commit();
      UNROLLED for (int g = 0; g < GROUPS; g++) mma_wait<0>(dv[g], four);
      far_pairs(four, f);
      last_features(rest, s.k[at.stage], unit, w, p.rows);
      mma_fence();
      UNROLLED for (int g = 0; g < GROUPS; g++) {
        mma_ABt_part<ACC>(dv[g], four, s.state[copy.stage][g], 64);
        mma_ABt_part<ACC>(dv[g], rest, s.state[copy.stage][g], 128);
      }
      mma_commit();
      UNROLLED for (int g = 0; g < GROUPS; g++) mma_wait<0>(dv[g], four, rest);
    }
    if (!last) {
      UNROLLED for (int g = 0; g < GROUPS; g++)
        store(before_v + 64 * g, p.rows.dim_v, dv[g], t.end - step, p.rows.dim_v - 64 * g);
    } else {
      store_dv(dv, p, s, t, step, wg);
    }
    pulling o;
    rt<float, 16> low, high;
    rt<elem, 64> v[GROUPS];
    UNROLLED for (int g = 0; g < GROUPS; g++) load(v[g], s.v[at.stage], 64 * g);
    begin_pulling(o, s.k[at.stage], p.rows);
    pull_all(o, v, s.state[copy.stage], w, p.rows);
    ring_release(s.copies, copy);
    next_turn(s.copies, copy, OUTS);
    fence_async();
    ring_release(s.inputs, at);
    next_turn(s.inputs, at, OUTS);
    copy_part(low, dk, 0);
    copy_part(high, dk, 16);
    add_pulled(low, high, o, 1.f / SMALLER, p.rows);
    if (!last) {
      store(before, 32, low, t.end - step, 16);
      store(before + 16, 32, high, t.end - step, 16);
    } else {
      store_part(low, p, t, step, 0);
      if (MANY) store_part(high, p, t, step, 16);
    }
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<run_state, WARPGROUP, GROUPS, STATE_REGS>,
              role<run_out, WARPGROUP, OUTS, OUT_REGS>, role<loader, THREAD, 1, 24>,
              role<make_vectors, WARP, 1, 24>> kernel;
ENTRY(kernel, Q, 1)
