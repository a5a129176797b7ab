// Causal linear attention with the Taylor features of Based (Arora et al. 2024), one pass over the sequence in chunks
// of 64 steps, the state in registers throughout. With phi the features (based_features.h), s_ij = scale q_i . k_j, and
// inside a chunk, S and M the sums of the steps before it:
//   w_ij  = 1 + s_ij + s_ij^2 / 2 for j <= i
//   out_i = (S phi(q_i) + sum of w_ij v_j) / (z_i + eps)
//   z_i   = sum of w_ij + n + scale q_i . m + scale^2 / 2 q_i^T M q_i
//   S^T  += v^T phi(k),   M += k^T k,   m += the sum of k,   n += steps
// Steps past the end are zeros: k and v add nothing. Where the next packed row follows in memory, a warp clears its
// steps in k and v before anybody reads them, and the last chunk of out is stored from registers.
// Roles: GROUPS state warpgroups, each with 64 rows of S^T: k -> features, sums, and copies of 16 bits of the sums;
// OUTS out warpgroups, which take the chunks in turn; a loader thread; a warp that clears.
//
// Registers of a thread of the states: S^T 80, M 16, features 16 to 32, addresses. Of out: out 32 GROUPS, scores or
// products 32, w 16, features 32, q 16.
#include "based/based_features.h"

// MANY, GROUPS (1 or 2), OUTS, STAGES, COPIES, STATE_REGS, OUT_REGS come from the row.
enum { Q = 64, F = BASED_FEATURES, V = 64 * GROUPS };
static_assert(STAGES % OUTS == 0 && COPIES % OUTS == 0, "an out warpgroup sees every use of its stages");

struct shared {
  st<elem, Q, 64> q[STAGES], k[STAGES];
  st<elem, Q, V> v[STAGES];
  st<elem, Q, 192> features[2];     // of k, of this chunk and of the next
  st<elem, 64, 192> state[COPIES][GROUPS];   // S^T
  st<elem, 64, 64> sums[COPIES];    // M in rows 0 to 31, m in row 32, with their weights
  st<elem, Q, V> out[OUTS];
  ring<STAGES, ASYNC_READS> inputs; // who reads it through registers too fences
  ring<COPIES, ASYNC_READS> copies; // of S^T, M and m
  sem last;                         // the tiles of a last chunk that runs over are there, and to be cleared
};
typedef based_fwd_params params;

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
    sem_expect(full, (p.rows.cutting ? 1 : 2) * tile_bytes(s.q[0]) + tile_bytes(s.v[0]));
    tma_load(s.k[at.stage], p.k, full, step, 0, t.head, t.batch);
    if (!p.rows.cutting) tma_load(s.q[at.stage], p.q, full, step, 0, t.head, t.batch);
    tma_load(s.v[at.stage], p.v, full, step, 0, t.head, t.batch);
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

TILE based_state state_before(const params &p, const task &t) {
  return state_given(p.rows, t, p.initial, p.cuts, t.segment == 0, t.segment - 1);
}
TILE float count_before(const params &p, const task &t) {
  based_state begin = state_before(p, t);
  return begin.sums ? *count_of(begin.sums) : 0.f;
}

// The features of a chunk's k, and its column of ones. Everybody's products of the chunk before last are over.
TILE void make_features(const params &p, shared &s, ring_pos at, int buffer, const rv &unit) {
  rt<float, 16> ones;
  ring_wait(s.inputs, at);
  store_features(s.features[buffer], s.k[at.stage], unit, weights{1.f, 1.f, 1.f}, p.rows);
  ones_column(ones, 1.f);
  store(s.k[at.stage], ones, 32);
  fence_async();
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
  map_rows(weight, [=](int row) { return row < 32 ? 0.5f * scale * scale : scale; });
  based_state begin = state_before(p, t);
  begin_state(state, begin, p.rows, wg, 1.f / SMALLER);
  begin_sums(sums, begin);
  if (wg == 0 && t.first < t.end) make_features(p, s, next, buffer, unit);
  for (int step = t.first; step < t.end; step += Q) {
    if (!p.rows.cutting) {
      ring_acquire(s.copies, copy);
      store(s.state[copy.stage][wg], state);
      if (wg == 0) {
        rt<float, 32> weighted;
        map_row(weighted, sums, weight, times);
        store(s.sums[copy.stage], weighted);
      }
      ring_fill(s.copies, copy);
      ring_next(s.copies, copy);
    }
    meet();                            // the chunk and its features are there, the last one's products are over
    mma_fence();
    mma_AtB<ACC>(state, s.v[at.stage], 64 * wg, s.features[buffer], 0);
    mma_AtB<ACC>(sums, s.k[at.stage], 0, s.k[at.stage], 0);
    mma_commit();
    ring_next(s.inputs, next);
    buffer ^= 1;
    if (wg == 0 && step + Q < t.end) make_features(p, s, next, buffer, unit);   // under the products
    mma_wait<0>(state, sums);
    ring_done(s.inputs, at);
  }
  based_state end = state_kept(p.rows, t, p.final, p.cuts, t.segment + 1 == p.rows.segments, t.segment);
  keep_state(state, end, p.rows, wg, SMALLER);
  if (wg == 0 && end.sums && is_first(p.rows)) {
    rv count;
    keep_sums(sums, end);
    float steps = count_before(p, t) + (float)(t.end > t.first ? t.end - t.first : 0);
    map_rows(count, [=](int row) { return row ? 0.f : steps; });
    store(count_of(end.sums), count, BASED_SUM_COLS);
  }
}

// z_i + eps. rows: the sums of a chunk's own weights. products: of q and a one with M and m.
TILE void norm_of(rv &z, rsum &rows, const rt<float, 32> &products, const params &p, shared &s, const task &t,
                  int stage, int step, float before) {
  rt<float, 32> q;
  load(q, s.q[stage]);
  row_dot_add(rows, products, q);
  reduce(z, rows);
  float more = (float)(step - t.first) + before + p.rows.eps;
  map(z, z, [=](float x) { return x + more; });
  store(p.norm + place(p.rows, t, step), z, t.end - step);
}

// 64 columns of what the parts before this one have, and of all of them so far.
TILE void add_before(rt<float, 64> &out, const params &p, const task &t, int step, int col) {
  rt<float, 64> before;
  load(before, p.partial + place(p.rows, t, step) * p.rows.dim_v + col, p.rows.dim_v, t.end - step, p.rows.dim_v - col);
  map(out, before, plus);
}

TILE void run_out(const params &p, shared &s, int wg) {
  task t = block_task(p.rows, 0);
  ring_pos at = ring_at<STAGES>(wg), copy = ring_at<COPIES>(wg);
  weights w = weights_of_q(p.rows);
  float scale = p.rows.scale, before = count_before(p, t);
  bool first = is_first(p.rows);
  rv unit;
  fill(unit, (float)SMALLER);
  for (int step = t.first + wg * Q; step < t.end; step += OUTS * Q) {
    rt<float, 64> out[GROUPS];
    rt<float, Q> scores;
    rt<elem, Q> own;
    rsum rows;
    rv z;
    ring_wait(s.inputs, at);
    if (p.rows.cutting) {
      ring_release(s.inputs, at);
      next_turn(s.inputs, at, OUTS);
      continue;
    }
    {
      rt<elem, 32> q;
      load(q, s.q[at.stage]);
      mma_fence();
      mma_ABt_part<ZERO>(scores, q, s.k[at.stage], 0);
      mma_commit();
      mma_wait<0>(scores, q);
    }
    map(scores, [=](float x) {
      float u = fused(x, scale, 1.f);
      return fused(0.5f * u, u, 0.5f);
    });
    tril(scores, 0, 0.f);
    if (!first) fill(scores, 0.f);
    row_sum(rows, scores);
    convert(own, scores);
    mma_fence();
    UNROLLED for (int g = 0; g < GROUPS; g++) mma_AB_cols<ZERO>(out[g], own, s.v[at.stage], 64 * g);
    // under the product
    slices o;
    rt<elem, 64> near, far, with_one;
    rt<elem, 32> rest;
    rt<float, 32> products;
    load_slices(o, s.q[at.stage], unit, w, p.rows);
    near_pairs(near, o);
    far_pairs(far, o);
    last_features(rest, s.q[at.stage], unit, w, p.rows);
    if (!MANY) load_with_one(with_one, s.q[at.stage]);
    ring_wait(s.copies, copy);
    mma_fence();
    UNROLLED for (int g = 0; g < GROUPS; g++) {
      mma_ABt_part<ACC>(out[g], near, s.state[copy.stage][g], 0);
      mma_ABt_part<ACC>(out[g], far, s.state[copy.stage][g], 64);
      mma_ABt_part<ACC>(out[g], rest, s.state[copy.stage][g], 128);
    }
    if (!MANY) mma_AB_cols<ZERO>(products, with_one, s.sums[copy.stage], 0);
    mma_commit();
    UNROLLED for (int g = 0; g < GROUPS; g++) mma_wait<0>(out[g], own, near, far, rest);
    if (!MANY) {
      mma_wait<0>(products, with_one);
    } else {                           // there were no registers for it before
      load_with_one(with_one, s.q[at.stage]);
      mma_fence();
      mma_AB_cols<ZERO>(products, with_one, s.sums[copy.stage], 0);
      mma_commit();
      mma_wait<0>(products, with_one);
    }
    ring_release(s.copies, copy);
    next_turn(s.copies, copy, OUTS);
    if (p.norm && first) norm_of(z, rows, products, p, s, t, at.stage, step, before);
    else fill(z, 1.f);
    fence_async();
    ring_release(s.inputs, at);
    next_turn(s.inputs, at, OUTS);
    if (!first) {
      UNROLLED for (int g = 0; g < GROUPS; g++) add_before(out[g], p, t, step, 64 * g);
    }
    if (!is_last(p.rows)) {
      float *to = p.partial + place(p.rows, t, step) * p.rows.dim_v;
      UNROLLED for (int g = 0; g < GROUPS; g++)
        store(to + 64 * g, p.rows.dim_v, out[g], t.end - step, p.rows.dim_v - 64 * g);
      continue;
    }
    if (p.norm && !first) load(z, p.norm + place(p.rows, t, step), t.end - step, 1.f);
    map(z, z, [](float x) { return fast_rcp(x); });
    UNROLLED for (int g = 0; g < GROUPS; g++) map_row(out[g], z, times);
    if (runs_over(p.rows, t, step)) {
      elem *to = (elem *)p.out_data + step * p.out_step + t.head * p.out_head;
      int64_t ld = p.out_step;
      int steps = t.end - step;
      UNROLLED for (int g = 0; g < GROUPS; g++)
        store_rows<elem>(out[g], [=](int i) { return i < steps ? to + i * ld + 64 * g : (elem *)nullptr; },
                         p.rows.dim_v - 64 * g);
      continue;
    }
    tma_store_wait_read();
    wg_sync();
    UNROLLED for (int g = 0; g < GROUPS; g++) store(s.out[wg], out[g], 64 * g);
    fence_async();
    wg_sync();
    tma_store(p.out, s.out[wg], step, 0, t.head, t.batch);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<run_state, WARPGROUP, GROUPS, STATE_REGS>,
              role<run_out, WARPGROUP, OUTS, OUT_REGS>, role<loader, THREAD, 1, 24>, role<cleaner, WARP, 1, 24>> kernel;
ENTRY(kernel, Q, 1)
