// Kimi delta attention (2025): what the steps of a chunk are to the state, for all chunks at once. With l_i the sum of
// the log decays up to step i of a chunk of 64 steps whose last is e, a vector of channels as k_i and q_i, and m a
// vector for each group of 16 steps, the mean of l of the two in its middle:
//   L_ij = sum over channels of k_i e^(l_i - m) k_j e^(m - l_j) for j < i, m of i's group
//   P_ij = the same of scale q_i and k_j for j <= i;   M = (I + L diag(beta))^-1
// and tiles of k e^l, scale q e^l and k e^(l_e - l), and the vector e^(l_e). The state needs no more of q, k and the
// gates. In L and P, a log decay counts as -10.5 where it is less: so no exponent is above 79, and e^79 |k| fits into
// bf16. It is wrong by e^-10.5 at most, less than what rounding leaves. The tiles have the true decays, from another
// sum where that matters. Roles: a loader thread; a warpgroup for all else.
//
// Registers of a thread. Gates: a column of 64. Factors: tiles of 64 columns of l, of e^l or a product, 32 each. Pairs:
// four accumulators of 16, four operands of 16, l 32. Inverse: three tiles of 32, an operand of 12.
#include "delta/kda_gates.h"

// D: columns of q and k. LOAD_REGS, COMPUTE_REGS
enum { PANELS = D / 64 };
template<typename T> struct factor_of { typedef bf16 type; };
template<> struct factor_of<float> { typedef float type; };
typedef factor_of<elem>::type factor;
typedef st<elem, Q, 64> panel;
struct shared {
  panel k[PANELS], q[PANELS];       // then k e^(l_e - l), scale q e^l
  st<factor, 32, D> left[4];        // of each group of 16 steps: k e^(l - m), and below it scale q e^(l - m)
  tri<inner> scratch;               // then M^T
  ct<D> l;                          // to base 2
  ring<1, ASYNC_READS> inputs;      // read into registers too, in front of the fence that the stores need
};
// When no product reads `left` any more.
TILE panel &decayed(shared &s, int h) { return in_place_of<panel>(s.left[h]); }
TILE square &m_of(shared &s) { return in_place_of<square>(s.scratch); }
TILE square &reads_of(shared &s) { return in_place_of<square>(s.left[2]); }
typedef kda_prepare_params params;

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

// A chunk of a head: its steps, or more than a chunk has; none where its place is empty.
struct task { int place; head_steps at; };
TILE int task_count(const params &p) { return p.rows.places * p.batches * p.rows.heads; }
TILE task task_at(const params &p, int index) {
  int unit = index / p.rows.heads, place = unit / p.batches;
  chunk_steps c = steps_at(p.rows, place);
  return {place, {unit - place * p.batches, index - unit * p.rows.heads, c.step, c.end - c.step}};
}

TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = block_index(); i < task_count(p); i += block_count()) {
    task t = task_at(p, i);
    if (t.at.steps <= 0) continue;
    int head = t.at.head / p.rows.group_heads;
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, 2 * PANELS * tile_bytes(s.k[0]));
    ROLLED for (int h = 0; h < PANELS; h++) {
      tma_load(s.k[h], p.k, s.inputs.full[0], t.at.step, 64 * h, head, t.at.batch);
      tma_load(s.q[h], p.q, s.inputs.full[0], t.at.step, 64 * h, head, t.at.batch);
    }
    ring_next(s.inputs, at);
  }
}

// The factors of columns i of L^T and P^T.
TILE void make_left(shared &s, const rv &norm_k, const rv &norm_q) {
  UNROLLED for (int h = 0; h < PANELS; h++) {
    rt<float, 64> e, x;
    fill(x, 0.f);
    load_from_middle(e, s.l, 64 * h);
    map(e, [](float y) { return fast_exp2(y); });
    each<64>([](int, int, float &z, float w, float y, float n) { z = y * n * w; }, x, e, s.k[h], norm_k);
    store_groups(s.left, 0, x, 64 * h);
    each<64>([](int, int, float &z, float w, float y, float n) { z = y * n * w; }, x, e, s.q[h], norm_q);
    store_groups(s.left, 1, x, 64 * h);
  }
}
// Those of rows j of a group's 16 columns, which are in the same or an earlier group.
TILE void make_right(rt<factor, 64> &right, const rt<float, 64> &l, shared &s, const rv &norm, int h, int group) {
  map_to_group(right, s.k[h], l, norm, s.l, 64 * h, group,
               [](float x, float own, float n, float m) { return x * n * fast_exp2(m - own); });
}
// All of them are there before the first product: what a warp does for them depends on the warp, and ptxas would let no
// product run on meanwhile.
template<int A> TILE void add_panel(rt<float, 32> &d0, rt<float, 32> &d1, rt<float, 32> &d2, rt<float, 32> &d3,
                                    shared &s, const rv &norm, int h) {
  rt<float, 64> l;
  rt<factor, 64> r0, r1, r2, r3;
  load(l, s.l, 64 * h);
  make_right(r0, l, s, norm, h, 0);
  make_right(r1, l, s, norm, h, 1);
  make_right(r2, l, s, norm, h, 2);
  make_right(r3, l, s, norm, h, 3);
  mma_fence();
  mma_ABt_part<A>(d0, r0, s.left[0], 64 * h);
  mma_ABt_part<A>(d1, r1, s.left[1], 64 * h);
  mma_ABt_part<A>(d2, r2, s.left[2], 64 * h);
  mma_ABt_part<A>(d3, r3, s.left[3], 64 * h);
  mma_commit();
  mma_wait<0>(d0, d1, d2, d3, r0, r1, r2, r3);
}
// a = L^T, b = P^T. Where j is behind i the products are anything, also infinite.
TILE void make_pairs(rt<float, Q> &a, rt<float, Q> &b, shared &s, const rv &norm) {
  rt<float, 32> d0, d1, d2, d3;
  add_panel<ZERO>(d0, d1, d2, d3, s, norm, 0);
  if (PANELS == 2) add_panel<ACC>(d0, d1, d2, d3, s, norm, PANELS - 1);
  fill(a, 0.f);
  fill(b, 0.f);
  put_group(a, b, d0, 0);
  put_group(a, b, d1, 1);
  put_group(a, b, d2, 2);
  put_group(a, b, d3, 3);
  triu(a, 1, 0.f);
  triu(b, 0, 0.f);
}
TILE void make_tiles(shared &s, const rv &norm_k, const rv &norm_q) {
  UNROLLED for (int h = 0; h < PANELS; h++) {
    rt<float, 64> l, x;
    fill(x, 0.f);
    load(l, s.l, 64 * h);
    each<64>([](int, int, float &z, float w, float y, float n) { z = y * n * fast_exp2(w); }, x, l, s.k[h], norm_k);
    store(decayed(s, h), x);
    each<64>([](int, int, float &z, float w, float y, float n) { z = y * n * fast_exp2(w); }, x, l, s.q[h], norm_q);
    map_last_row(l, s.l, 64 * h, [](float y, float end) { return fast_exp2(end - y); });
    each<64>([](int, int, float &z, float y, float n) { z *= y * n; }, l, s.k[h], norm_k);
    wg_sync();                              // everybody has read what is replaced now
    store(s.q[h], x);
    store(s.k[h], l);
  }
}

TILE void compute(const params &p, shared &s, int) {
  ring_pos at = {};
  const float LOW = -10.5f * 1.4426950408889634f;
  for (int i = block_index(); i < task_count(p); i += block_count()) {
    task t = task_at(p, i);
    if (t.at.steps <= 0) continue;
    hv<D> end, least;
    rv beta, norm_k, norm_q;
    rt<float, Q> a, b;
    {
      hm<D> g;
      take_gates(g, p.gates, t.at, p.key_dim, 0);
      least_of(least, g);
      sum_down(s.l, end, g, LOW);
    }
    take_beta(beta, p.gates, t.at);
    if (p.betas)
      store_steps(p.betas + ((int64_t)t.at.batch * p.rows.steps + t.at.step) * p.rows.heads + t.at.head, beta,
                  p.rows.heads, t.at.steps);
    ring_wait(s.inputs, at);
    if (runs_over(p.rows, t.at.step, t.at.step + t.at.steps)) {
      ROLLED for (int h = 0; h < PANELS; h++) {
        clear_rows(s.k[h], 0, t.at.steps);
        clear_rows(s.q[h], 0, t.at.steps);
      }
    }
    bool steep = any(least, [=](float x) { return x < LOW; });   // and all have written l, and rows that are no steps
    float scale = p.scale;
    fill(norm_k, 1.f);
    fill(norm_q, scale);
    if (p.gates.norm) {
      take_norms(norm_k, s.k);
      take_norms(norm_q, s.q);
      map(norm_q, norm_q, [=](float x) { return x * scale; });
    }
    make_left(s, norm_k, norm_q);
    fence_async();
    wg_sync();
    make_pairs(a, b, s, norm_k);
    wg_sync();                              // everybody's products have read `left`
    store(reads_of(s), b);
    map_row(a, beta, [](float x, float y) { return x * y; });
    invert(b, a, s.scratch);
    if (steep) {
      hm<D> g;
      take_gates(g, p.gates, t.at, p.key_dim, 0);
      sum_down(s.l, end, g, -infinity());
    }
    map(end, end, [](float x) { return fast_exp2(x); });
    int64_t place = (int64_t)(t.at.batch * p.rows.heads + t.at.head) * p.rows.places + t.place;
    store(p.ends + place * D, end, D);
    wg_sync();                              // everybody has read scratch, and written l
    store_carried(m_of(s), b);
    make_tiles(s, norm_k, norm_q);
    fence_async();
    wg_sync();
    int row = t.place * Q;
    tma_store(p.m, m_of(s), row, 0, t.at.head, t.at.batch);
    tma_store(p.p, reads_of(s), row, 0, t.at.head, t.at.batch);
    ROLLED for (int h = 0; h < PANELS; h++) {
      tma_store(p.read_k, decayed(s, h), row, 64 * h, t.at.head, t.at.batch);
      tma_store(p.read_q, s.q[h], row, 64 * h, t.at.head, t.at.batch);
      tma_store(p.write_k, s.k[h], row, 64 * h, t.at.head, t.at.batch);
    }
    tma_store_wait_read();
    ring_done(s.inputs, at);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              OCCUPANCY<2>> kernel;
ENTRY(kernel, Q, 1)
