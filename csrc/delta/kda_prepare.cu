// Kimi delta attention (2025): what the steps of a chunk are to the state, for all chunks at once. With l_i the sum of
// the log decays up to step i of a chunk of 64 steps whose last is e, a vector of channels as k_i and q_i, and m a
// vector for each group of 16 steps, the mean of l of the two in its middle:
//   L_ij = sum over channels of k_i e^(l_i - m) k_j e^(m - l_j) for j < i, m of i's group
//   P_ij = the same of scale q_i and k_j for j <= i;   M = (I + L diag(beta))^-1
// and tiles of k e^l, scale q e^l and k e^(l_e - l), and the vector e^(l_e). The state needs no more of q, k and the
// gates. In L and P, a log decay counts as -10.5 where it is less: so no exponent is above 79, and e^79 |k| fits into
// bf16. It is wrong by e^-10.5 at most, less than what rounding leaves. The tiles have the true decays, from another
// sum where that matters. k_j e^(m - l_j) is made with the middle of j's own group. From there it goes from middle to
// middle, by a factor that all steps of a group share. That may be e^-168: its square root is multiplied with twice.
// Roles: a loader thread; a warpgroup for all else. The next task's k, q and gates come while this one's tiles leave.
//
// Without PAIRS, the tiles and the vector alone, the same bit by bit: what a caller lacks who has M and P.
//
// Registers of a thread. Gates: a column of 64. Factors: of 64 columns e^l, a product and, of all columns, what becomes
// the right operand, 32 each. Pairs: four accumulators of 16, four operands of 16, 32 of the other columns. Inverse:
// two tiles of 32. Tiles: three of 32.
#include "delta/kda_gates.h"

// D: columns of q and k. PAIRS, LOAD_REGS, COMPUTE_REGS
// LATER: a task's stores behind those of what is in place of the sums
enum { PANELS = D / 64, LATER = 2 * PANELS - 1 + 2 * PAIRS };
template<typename T> struct factor_of { typedef bf16 type; };
template<> struct factor_of<float> { typedef float type; };
typedef factor_of<elem>::type factor;
typedef st<elem, Q, 64> panel;
union sums {                        // the tiles when nobody reads the sums any more
  ct<D> l;                          // to base 2
  panel tiles[PANELS + 1];
};
struct shared {
  panel k[PANELS], q[PANELS];
  st<factor, 32, D> left[4];        // of each group of 16 steps: k e^(l - m), and below it scale q e^(l - m)
  tri<inner> scratch;               // then M^T
  union sums sums;
  sv<D> between[3];                 // e^ of half of what lies between the middles of two groups
  ring<1> inputs;
};
TILE square &m_of(shared &s) { return in_place_of<square>(s.scratch); }
// When no product reads `left` any more, and, of the last panel, nobody the sums: k e^l, scale q e^l, k e^(l_e - l).
TILE square &reads_of(shared &s) { return in_place_of<square>(s.left[2]); }
TILE panel &tile_of(shared &s, int h, int which) {
  if (PANELS == 1) return which == 0 ? in_place_of<panel>(s.left[0]) : in_place_of<panel>(s.sums.tiles[which - 1]);
  return h == 0 ? in_place_of<panel>(s.left[which == 2 ? 3 : which]) : in_place_of<panel>(s.sums.tiles[which]);
}
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

// The factors of columns i of L^T and P^T, and those of rows j, for their own groups.
TILE void make_factors(rt<float, 64> &right, shared &s, const rv &norm_k, const rv &norm_q, int h) {
  rt<float, 64> e, x;
  fill(x, 0.f);
  fill(right, 0.f);
  load_from_middle(e, s.sums.l, 64 * h);
  each<64>([](int, int, float &x, float &right, float &e, float y, float n) {
    y *= n;
    right = y * fast_exp2(-e);
    e = fast_exp2(e);
    x = y * e;
  }, x, right, e, s.k[h], norm_k);
  store_groups(s.left, 0, x, 64 * h);
  each<64>([](int, int, float &x, float e, float y, float n) { x = y * n * e; }, x, (const rt<float, 64> &)e, s.q[h],
           norm_q);
  store_groups(s.left, 1, x, 64 * h);
}
template<int A> TILE void add_panel(rt<float, 32> &d0, rt<float, 32> &d1, rt<float, 32> &d2, rt<float, 32> &d3,
                                    rt<float, 64> &right, shared &s, int h) {
  rt<factor, 64> r0, r1, r2, r3;
  convert_group(r0, right, 0);
  carry_to_group(right, s.between[0], 64 * h, 1);
  convert_group(r1, right, 1);
  carry_to_group(right, s.between[1], 64 * h, 2);
  convert_group(r2, right, 2);
  carry_to_group(right, s.between[2], 64 * h, 3);
  convert_group(r3, right, 3);
  mma_fence();
  mma_ABt_part<A>(d0, r0, s.left[0], 64 * h);
  mma_ABt_part<A>(d1, r1, s.left[1], 64 * h);
  mma_ABt_part<A>(d2, r2, s.left[2], 64 * h);
  mma_ABt_part<A>(d3, r3, s.left[3], 64 * h);
  mma_commit();
  mma_wait<0>(d0, d1, d2, d3, r0, r1, r2, r3);
}
// a = L^T, b = P^T. Where j is behind i the products are anything, also infinite.
TILE void make_pairs(rt<float, Q> &a, rt<float, Q> &b, shared &s, const rv &norm_k, const rv &norm_q) {
  rt<float, 32> d0, d1, d2, d3;
  rt<float, 64> right, last;
  make_factors(right, s, norm_k, norm_q, 0);
  if (PANELS == 2) make_factors(last, s, norm_k, norm_q, PANELS - 1);
  fence_async();
  wg_sync();
  add_panel<ZERO>(d0, d1, d2, d3, right, s, 0);
  if (PANELS == 2) add_panel<ACC>(d0, d1, d2, d3, last, s, PANELS - 1);
  fill(a, 0.f);
  fill(b, 0.f);
  put_group(a, b, d0, 0);
  put_group(a, b, d1, 1);
  put_group(a, b, d2, 2);
  put_group(a, b, d3, 3);
  triu(a, 1, 0.f);
  triu(b, 0, 0.f);
}
// The sums of all columns have been read when the last tiles are stored in their place.
TILE void make_tiles(shared &s, const rv &norm_k, const rv &norm_q) {
  UNROLLED for (int h = 0; h < PANELS; h++) {
    rt<float, 64> e, x, y;
    fill(x, 0.f);
    load(e, s.sums.l, 64 * h);
    fill(y, 0.f);
    map(y, e, [](float, float l) { return l; });
    map_last_row(y, s.sums.l, 64 * h, [](float y, float end) { return end - y; });
    if (h == PANELS - 1) wg_sync();
    each<64>([](int, int, float &e, float &x, float &y, float k, float n) {
      k *= n;
      e = fast_exp2(e);
      x = k * e;
      y = k * fast_exp2(y);
    }, e, x, y, s.k[h], norm_k);
    store(tile_of(s, h, 0), x);
    store(tile_of(s, h, 2), y);
    each<64>([](int, int, float &e, float q, float n) { e *= q * n; }, e, s.q[h], norm_q);
    store(tile_of(s, h, 1), e);
  }
}

// Gates of a task that is this block's next come into the L2.
TILE void bring_gates(const params &p, int i) {
  if (i >= task_count(p)) return;
  task t = task_at(p, i);
  if (p.gates.g.is_float) prefetch(first_of<float>(p.gates.g, t.at), p.gates.g.step, t.at.steps, p.key_dim);
  else prefetch(first_of<elem>(p.gates.g, t.at), p.gates.g.step, t.at.steps, p.key_dim);
}

TILE void compute(const params &p, shared &s, int) {
  ring_pos at = {};
  const float LOW = PAIRS ? -10.5f * 1.4426950408889634f : -infinity();
  for (int i = block_index(); i < task_count(p); i += block_count()) {
    task t = task_at(p, i);
    if (t.at.steps <= 0) continue;
    hv<D> end, least;
    rv beta, norm_k, norm_q;
    rt<float, Q> a, b;
    {
      hm<D> g;
      take_gates(g, p.gates, t.at, p.key_dim, 0);
      if (PAIRS) least_of(least, g);
      tma_store_wait_read<LATER>();
      wg_sync();                            // of the task before, the tiles in place of the sums have left
      if (PAIRS) sum_down(s.sums.l, end, g, LOW, s.between, [](float x) { return fast_exp2(0.5f * x); });
      else sum_down(s.sums.l, end, g, LOW);
    }
    take_beta(beta, p.gates, t.at);
    bring_gates(p, i + block_count());
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
    tma_store_wait_read();
    // A sync, too: all has left, and all have written l, and rows that are no steps.
    bool steep = PAIRS && any(least, [=](float x) { return x < LOW; });
    if (!PAIRS) wg_sync();
    float scale = p.scale;
    fill(norm_k, 1.f);
    fill(norm_q, scale);
    if (p.gates.norm) {
      take_norms(norm_k, s.k);
      take_norms(norm_q, s.q);
      map(norm_q, norm_q, [=](float x) { return x * scale; });
    }
    if (PAIRS) {
      make_pairs(a, b, s, norm_k, norm_q);
      wg_sync();                            // everybody's products have read `left`
      store(reads_of(s), b);
      map_row(a, beta, [](float x, float y) { return x * y; });
      invert(b, a, s.scratch);
    }
    if (steep) {
      hm<D> g;
      take_gates(g, p.gates, t.at, p.key_dim, 0);
      sum_down(s.sums.l, end, g, -infinity());
    }
    map(end, end, [](float x) { return fast_exp2(x); });
    int64_t place = (int64_t)(t.at.batch * p.rows.heads + t.at.head) * p.rows.places + t.place;
    store(p.ends + place * D, end, D);
    if (PAIRS) {
      wg_sync();                            // everybody has read scratch, and written l
      store_carried(m_of(s), b);
    }
    make_tiles(s, norm_k, norm_q);
    ring_done(s.inputs, at);                // its fence is that of the stores, too
    wg_sync();
    int row = t.place * Q;
    UNROLLED for (int h = PANELS - 1; h >= 0; h--) {
      tma_store(p.read_q, tile_of(s, h, 1), row, 64 * h, t.at.head, t.at.batch);
      tma_store(p.write_k, tile_of(s, h, 2), row, 64 * h, t.at.head, t.at.batch);
      tma_store(p.read_k, tile_of(s, h, 0), row, 64 * h, t.at.head, t.at.batch);
    }
    if (PAIRS) {
      tma_store(p.p, reads_of(s), row, 0, t.at.head, t.at.batch);
      tma_store(p.m, m_of(s), row, 0, t.at.head, t.at.batch);
    }
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              OCCUPANCY<2>> kernel;
ENTRY(kernel, Q, 1)
