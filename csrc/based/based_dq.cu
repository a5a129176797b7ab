// The gradient of q of Based (based_fwd.cu has the formulas and names), one pass over the sequence with the forward's
// state. With e_i = -dout_i . out_i, 0 without the normaliser, and N_i the z_i + eps that out_i was divided by:
//   ds_ij = (dout_i . v_j + e_i) (1 + s_ij) for j <= i
//   dq_i  = 1 / N_i (scale sum of ds_ij k_j + phi'(q_i)^T S dout_i + e_i (scale m + scale^2 M q_i))
// S dout_i is a gradient of features; based_features.h takes it to q's. e is kept for the gradients of k and v.
// Roles as in the forward. BUFFERS 1 leaves no room for the features of the next chunk.
//
// Registers of a thread of the states as there. Of out: dq 16, dout 16 GROUPS as an operand, scores and their gradients
// 64, or gradients of 64 features 32 and q, its gradients and neighbours 48.
#include "based/based_features.h"

// MANY, GROUPS (1 or 2), OUTS, STAGES, COPIES, BUFFERS, STATE_REGS, OUT_REGS come from the row.
enum { Q = 64, F = BASED_FEATURES, V = 64 * GROUPS };
static_assert(STAGES % OUTS == 0 && COPIES % OUTS == 0, "an out warpgroup sees every use of its stages");

struct shared {
  st<elem, Q, 64> q[STAGES], k[STAGES];
  st<elem, Q, V> v[STAGES], dout[STAGES], out[STAGES];
  st<elem, Q, 192> features[BUFFERS];        // of k
  st<elem, 64, 192> state[COPIES][GROUPS];   // S^T
  st<elem, 64, 64> sums[COPIES];    // M in rows 0 to 31, m in row 32, with their weights
  ring<STAGES, ASYNC_READS> inputs; // who reads it through registers too fences
  ring<COPIES, ASYNC_READS> copies; // of S^T, M and m
  sem last;                         // the tiles of a last chunk that runs over are there, and to be cleared
};
typedef based_dq_params params;

TILE void init(shared &s) {
  ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, GROUPS + 1));     // of the out warpgroups one
  ring_init(s.copies, arrivals(0, 0, GROUPS), arrivals(0, 0, 1));
  sem_init(s.last, arrivals(1, 0, 0));
}

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p.rows, 0);
  ring_pos at = {};
  for (int step = t.first; step < t.end; step += Q) {
    sem &full = runs_over(p.rows, t, step) ? s.last : s.inputs.full[at.stage];
    ring_acquire(s.inputs, at);
    sem_expect(full, 2 * tile_bytes(s.q[0]) + (p.norm ? 3 : 2) * tile_bytes(s.v[0]));
    tma_load(s.k[at.stage], p.k, full, step, 0, t.head, t.batch);
    tma_load(s.q[at.stage], p.q, full, step, 0, t.head, t.batch);
    tma_load(s.v[at.stage], p.v, full, step, 0, t.head, t.batch);
    tma_load(s.dout[at.stage], p.dout, full, step, 0, t.head, t.batch);
    if (p.norm) tma_load(s.out[at.stage], p.out, full, step, 0, t.head, t.batch);
    ring_next(s.inputs, at);
  }
}

TILE void cleaner(const params &p, shared &s, int) {
  task t = block_task(p.rows, 0);
  int chunks = chunks_of(t), steps = t.end - t.first - 64 * (chunks - 1);
  if (!chunks || !runs_over(p.rows, t, t.end - steps)) return;
  ring_pos at = ring_at<STAGES>(chunks - 1);
  sem_wait(s.last, 0);
  clear_rows<WARP>(s.k[at.stage], 0, steps);
  clear_rows<WARP>(s.v[at.stage], 0, steps);
  fence_async();
  sem_arrive<WARP>(s.inputs.full[at.stage]);
}

// Groups that share the features meet.
TILE void meet() {
  if (GROUPS > 1) bar_sync(1, 128 * GROUPS);
  else wg_sync();
}

// The features of a chunk's k, and its column of ones. Everybody's products with what was in the buffer are over.
TILE void make_features(const params &p, shared &s, ring_pos at, int buffer, const rv &unit) {
  rt<float, 16> ones;
  ring_wait(s.inputs, at);
  store_features(s.features[buffer], s.k[at.stage], unit, weights{1.f, 1.f, 1.f}, p.rows);
  ones_column(ones, 1.f);
  store(s.k[at.stage], ones, 32);
  if (BUFFERS == 1) fence_async();     // else that of the next copies comes behind
}

TILE void run_state(const params &p, shared &s, int wg) {
  task t = block_task(p.rows, 0);
  ring_pos at = {}, next = {}, copy = {};
  int buffer = 0;
  rt<float, F> state;
  rt<float, 32> sums;
  rv weight, unit;
  fill(unit, 1.f / SMALLER);
  float scale = p.rows.scale;
  map_rows(weight, [=](int row) { return row < 32 ? scale * scale : scale; });
  based_state begin = state_given(p.rows, t, p.initial, p.cuts, t.segment == 0, t.segment - 1);
  begin_state(state, begin, p.rows, wg, 1.f / SMALLER);
  begin_sums(sums, begin);
  if (BUFFERS == 2 && wg == 0 && t.first < t.end) make_features(p, s, next, buffer, unit);
  for (int step = t.first; step < t.end; step += Q) {
    ring_acquire(s.copies, copy);
    store(s.state[copy.stage][wg], state);
    if (wg == 0) {
      rt<float, 32> weighted;
      map_row(weighted, sums, weight, times);
      store(s.sums[copy.stage], weighted);
    }
    ring_fill(s.copies, copy);
    ring_next(s.copies, copy);
    if (BUFFERS == 1 && wg == 0) make_features(p, s, at, 0, unit);
    meet();                            // the chunk and its features are there, the last one's products are over
    mma_fence();
    mma_AtB<ACC>(state, s.v[at.stage], 64 * wg, s.features[buffer], 0);
    mma_AtB<ACC>(sums, s.k[at.stage], 0, s.k[at.stage], 0);
    mma_commit();
    if (BUFFERS == 2) {
      ring_next(s.inputs, next);
      buffer ^= 1;
      if (wg == 0 && step + Q < t.end) make_features(p, s, next, buffer, unit);   // under the products
    }
    mma_wait<0>(state, sums);
    ring_done(s.inputs, at);
    if (BUFFERS == 1) meet();
  }
}

// The chunk's own steps, and the sums before it for e_i.
TILE void own_gradient(rt<float, 32> &dq, const rv &delta, const params &p, shared &s, int stage) {
  rt<float, Q> scores, weights;
  rt<elem, Q> ds;
  rt<elem, 32> q;
  float scale = p.rows.scale;
  load(q, s.q[stage]);
  mma_fence();
  mma_ABt_part<ZERO>(scores, q, s.k[stage], 0);
  mma_ABt<ZERO>(weights, s.dout[stage], s.v[stage]);
  mma_commit();
  mma_wait<0>(scores, weights, q);
  map(scores, [=](float x) { return fused(x, scale, 1.f) * scale; });
  map_row(weights, delta, plus);
  map(scores, weights, times);
  tril(scores, 0, 0.f);
  convert(ds, scores);
  mma_fence();
  mma_AB_cols<ACC>(dq, ds, s.k[stage], 0);
  mma_commit();
  mma_wait<0>(dq, ds);
}
TILE void gradient_of_norm(rt<float, 32> &dq, const rv &delta, shared &s, int stage, int copy) {
  rt<elem, 64> with_one;
  load_with_one(with_one, s.q[stage]);
  mma_fence();
  mma_AB_cols<ZERO>(dq, with_one, s.sums[copy], 0);
  mma_commit();
  mma_wait<0>(dq, with_one);
  map_row(dq, delta, times);
}

TILE void delta_of(rv &delta, const params &p, shared &s, const task &t, int stage, int step) {
  rsum sum;
  fill(sum, 0.f);
  UNROLLED for (int g = 0; g < GROUPS; g++) {
    rt<float, 64> dout, out;
    load(dout, s.dout[stage], 64 * g);
    load(out, s.out[stage], 64 * g);
    row_dot_add(sum, dout, out);
  }
  reduce(delta, sum);
  map(delta, delta, [](float x) { return -x; });
  store(p.delta + place(p.rows, t, step), delta, t.end - step);
}

TILE void store_part(const rt<float, 16> &dq, const params &p, const task &t, int step, int col) {
  elem *to = (elem *)p.dq + t.batch * p.dq_batch + step * p.dq_step + t.head * p.dq_head + col;
  int64_t ld = p.dq_step;
  int steps = t.end - step;
  if (col < p.rows.dim)
    store_rows<elem>(dq, [=](int i) { return i < steps ? to + i * ld : (elem *)nullptr; }, p.rows.dim - col);
}

TILE void run_out(const params &p, shared &s, int wg) {
  task t = block_task(p.rows, 0);
  ring_pos at = ring_at<STAGES>(wg), copy = ring_at<COPIES>(wg);
  weights w = weights_of_q(p.rows);
  bool first = is_first(p.rows), last = is_last(p.rows);
  for (int step = t.first + wg * Q; step < t.end; step += OUTS * Q) {
    rt<float, 32> dq;
    rv delta, norm;
    float *before = p.partial + place(p.rows, t, step) * 32;
    ring_wait(s.inputs, at);
    fill(delta, 0.f);
    if (p.norm && first) delta_of(delta, p, s, t, at.stage, step);
    ring_wait(s.copies, copy);
    if (!first) {
      load(dq, before, 32, t.end - step, 32);
    } else {
      if (p.norm) gradient_of_norm(dq, delta, s, at.stage, copy.stage);
      else fill(dq, 0.f);
      own_gradient(dq, delta, p, s, at.stage);
    }
    pulling o;
    rt<float, 16> low, high;
    rt<elem, 64> dout[GROUPS];
    UNROLLED for (int g = 0; g < GROUPS; g++) load(dout[g], s.dout[at.stage], 64 * g);
    begin_pulling(o, s.q[at.stage], p.rows);
    pull_all(o, dout, s.state[copy.stage], w, p.rows);
    ring_release(s.copies, copy);
    next_turn(s.copies, copy, OUTS);
    fence_async();
    ring_release(s.inputs, at);
    next_turn(s.inputs, at, OUTS);
    copy_part(low, dq, 0);
    copy_part(high, dq, 16);
    add_pulled(low, high, o, w.pair * SMALLER, p.rows);
    if (!last) {
      store(before, 32, low, t.end - step, 16);
      store(before + 16, 32, high, t.end - step, 16);
      continue;
    }
    if (p.norm) {
      load(norm, p.norm + place(p.rows, t, step), t.end - step, 1.f);
      map(norm, norm, [](float x) { return fast_rcp(x); });
      map_row(low, norm, times);
      map_row(high, norm, times);
    }
    store_part(low, p, t, step, 0);
    if (MANY) store_part(high, p, t, step, 16);
  }
}

typedef block<params, shared, init, role<run_state, WARPGROUP, GROUPS, STATE_REGS>,
              role<run_out, WARPGROUP, OUTS, OUT_REGS>, role<loader, THREAD, 1, 24>, role<cleaner, WARP, 1, 24>> kernel;
ENTRY(kernel, Q, 1)
