// What the steps of a chunk are to the state, for all chunks at once (Kimi delta attention, 2025; the chunked form of the
// delta rule: Yang, Wang, Zhang, Shen, Kim 2024). With l_i the sum of log decays g_j, j <= i, inside a chunk of 64 steps
// whose last is e, a vector of channels as k_i and q_i, and m a vector for each group of 16 steps, l of its 8th:
//   L_ij = sum over channels of k_i e^(l_i - m) k_j e^(m - l_j)  (j < i)       of group of i: no exponent is above 8 |g|
//   P_ij = the same of scale q_i and k_j                         (j <= i)
//   T = diag(beta) (I + L diag(beta))^-1
// and tiles of k e^l, scale q e^l, k e^(l_e - l), and the vector e^(l_e). The state needs no more of q, k, g and beta.
// In L and P a step's g counts as -10 where it is less: e^80 fits into bf16, and an error of e^-10 is below
// that of the rounding. The tiles have the true g, from a second sum where that matters.
// Roles: a loader thread; a warpgroup that does everything else.
#include "tile/channels.h"
#include "tile/triangle.h"
#include "delta/kda.h"
#include "ssd/ssd_fwd.h"

enum { Q = 64, PANELS = KEYS / 64 };
template<typename T> struct other_types { typedef bf16 factor; typedef fp16 inner; };
template<> struct other_types<float> { typedef float factor, inner; };
typedef other_types<elem>::factor factor;   // e^80 fits
typedef other_types<elem>::inner inner;     // T, P and what makes them: bf16 has too few digits where keys are alike
typedef st<elem, Q, 64> panel;
struct results { panel decayed[PANELS]; st<inner, Q, 64> t, p; };
struct shared {
  panel k[PANELS], q[PANELS];     // then k e^(l_e - l), scale q e^l
  union {
    st<factor, 32, KEYS> left[4]; // of each group of 16 steps: k e^(l - m), below it scale q e^(l - m)
    results out;                  // when no product reads `left` any more
  };
  st<inner, Q, 64> scratch;
  ct<KEYS> l;                     // in base 2
  sv<Q> beta;
  ring<1> inputs;
};
typedef kda_prepare_params params;

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1)); }

// A chunk of a value head: `steps` steps from `step` on; none where the chunk's place is empty.
struct task { int place, chunk, batch, head, step, steps; };
TILE int row_start(const params &p, int row) {
  int start = p.starts[row];
  return start < 0 ? 0 : start > p.steps ? p.steps : start;
}
TILE int first_chunk(const params &p, int row) { return row_start(p, row) / Q + row; }
TILE task task_of(const params &p, int index) {
  task t;
  int chunk_batch = index / p.heads;
  t.head = index - chunk_batch * p.heads;
  t.chunk = chunk_batch / p.batches;
  t.batch = chunk_batch - t.chunk * p.batches;
  t.place = t.batch * p.heads + t.head;
  int chunk = p.first + t.chunk, end = p.steps;
  t.step = chunk * Q;
  if (p.starts) {
    int row = 0, last = p.rows - 1;
    while (row < last) {
      int middle = (row + last + 1) / 2;
      if (first_chunk(p, middle) <= chunk) row = middle;
      else last = middle - 1;
    }
    t.step = row_start(p, row) + (chunk - first_chunk(p, row)) * Q;
    end = row_start(p, row + 1);
  }
  t.steps = end - t.step;
  return t;
}
TILE int task_count(const params &p) { return p.chunks * p.batches * p.heads; }

TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  for (int i = block_index(); i < task_count(p); i += block_count()) {
    task t = task_of(p, i);
    if (t.steps <= 0) continue;
    int head = t.head / p.group_heads;
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, 2 * PANELS * tile_bytes(s.k[0]));
    for (int h = 0; h < PANELS; h++) {
      tma_load(s.k[h], p.k, s.inputs.full[0], t.step, 64 * h, head, t.batch);
      tma_load(s.q[h], p.q, s.inputs.full[0], t.step, 64 * h, head, t.batch);
    }
    ring_next(s.inputs, at);
  }
}

template<typename T> TILE void load_gates(const params &p, const task &t, hm<KEYS> &x) {
  load(x, (const T *)p.g.data + t.batch * p.g.batch + t.step * p.g.step + t.head * p.g.head, p.g.step, t.steps, p.key_dim);
}
// Log decays in base 2.
TILE void take_gates(const params &p, const task &t, hm<KEYS> &x) {
  const float LOG2E = 1.4426950408889634f;
  hv<KEYS> bias;
  if (p.g.is_float) load_gates<float>(p, t, x);
  else load_gates<elem>(p, t, x);
  load(bias, p.dt_bias ? p.dt_bias + t.head * p.key_dim : p.a_log, p.dt_bias ? p.key_dim : 0);
  float rate = p.a_log ? fast_exp2(p.a_log[t.head] * LOG2E) : 1.f, bound = p.lower_bound;
  if (p.gate == KDA_LOG) map(x, bias, t.steps, [](float y, float) { return log_gate(y); });
  else if (p.gate == KDA_SOFTPLUS)
    map(x, bias, t.steps, [=](float y, float b) { return log_gate(-rate * softplus(y + b)); });
  else map(x, bias, t.steps, [=](float y, float b) {
    return log_gate(bound * fast_rcp(1.f + fast_exp2((y + b) * (-LOG2E * rate))));
  });
}
template<typename T> TILE void load_beta(const params &p, const task &t, rv &beta) {
  load_steps(beta, (const T *)p.beta.data + t.batch * p.beta.batch + t.step * p.beta.step + t.head * p.beta.head,
             p.beta.step, t.steps);
}
TILE void take_beta(const params &p, const task &t, rv &beta) {
  rv inside;
  if (p.beta.is_float) load_beta<float>(p, t, beta);
  else load_beta<elem>(p, t, beta);
  float f = p.beta_factor;
  if (f == 0.f) return;
  map(beta, beta, [=](float x) { return f * fast_rcp(1.f + fast_exp2(x * -1.4426950408889634f)); });
  int steps = t.steps;
  map_rows(inside, [=](int i) { return i < steps ? 1.f : 0.f; });
  map(beta, beta, inside, [](float x, float y) { return x * y; });
}
// 1 / |x_i| of rows of which `x` has the panels.
TILE void inverse_norms(rv &norm, const panel (&x)[PANELS]) {
  rsum sum;
  fill(sum, 0.f);
  UNROLLED for (int h = 0; h < PANELS; h++)
    each<64>([](int, int, float y, float &z) { z = fused(y, y, z); }, x[h], sum);
  reduce(norm, sum);
  map(norm, norm, [](float x) { return fast_rsqrt(x + 1e-6f); });
}

// d = (I + R)^-1, of which a is R, strictly upper triangular. With R0 its 16 x 16 blocks on the diagonal, R1 the others
// and M = R1 (I + R0)^-1: (I + R0)^-1 (I - M) (I + M^2), as the fourth power of M is 0.
TILE void invert(rt<float, Q> &d, rt<float, Q> &a, st<inner, Q, 64> &scratch) {
  rt<float, Q> b;
  invert_diagonal(d, a);
  store(scratch, d);
  fence_async();
  wg_sync();
  {
    rt<inner, 48> r1;
    convert_part(r1, a, 16);
    mma_fence();
    mma_AB_blocks<ZERO>(a, r1, scratch, 16);
    mma_commit();
    mma_wait<0>(a, r1);
  }
  map(a, [](float x) { return -x; });
  wg_sync();                      // everybody has read scratch
  store(scratch, a);
  fence_async();
  wg_sync();
  {
    rt<inner, 32> m;
    convert_part(m, a, 16);
    mma_fence();
    mma_AB_blocks<ZERO>(b, m, scratch, 16);
    mma_commit();
    mma_wait<0>(b, m);
  }
  {
    rt<inner, 48> x;
    convert_part(x, d, 0);
    mma_fence();
    mma_AB_blocks<ACC>(d, x, scratch, 0);
    mma_commit();
    mma_wait<0>(d, x);
  }
  wg_sync();
  store(scratch, b);
  fence_async();
  wg_sync();
  {
    rt<inner, 32> x;
    convert_part(x, d, 0);
    mma_fence();
    mma_AB_blocks<ACC>(d, x, scratch, 0);
    mma_commit();
    mma_wait<0>(d, x);
  }
}

// The factors of columns i of L^T and P^T.
TILE void make_left(shared &s, const rv &norm_k, const rv &norm_q) {
  UNROLLED for (int h = 0; h < PANELS; h++) {
    rt<float, 64> e, x;
    load_from_middle(e, s.l, 64 * h);
    map(e, [](float y) { return fast_exp2(y); });
    each<64>([](int, int, float &z, float w, float y, float n) { z = y * n * w; }, x, e, s.k[h], norm_k);
    store_groups(s.left, 0, x, 64 * h);
    each<64>([](int, int, float &z, float w, float y, float n) { z = y * n * w; }, x, e, s.q[h], norm_q);
    store_groups(s.left, 1, x, 64 * h);
  }
}
// Rows j of 16 columns i of both, of panel h: the factors of rows in the same or an earlier group. They are there before
// the first product: their work depends on the warp, and ptxas lets no product be under way then.
TILE void make_right(rt<factor, 64> &right, const rt<float, 64> &l, shared &s, const rv &norm, int h, int group) {
  map_to_group(right, s.k[h], l, norm, s.l, 64 * h, group,
               [](float x, float own, float n, float m) { return x * n * fast_exp2(m - own); });
}
template<int A> TILE void add_panel(rt<float, 32> &d0, rt<float, 32> &d1, rt<float, 32> &d2, rt<float, 32> &d3, shared &s,
                                    const rv &norm, int h) {
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
// a = L^T, b = P^T. Above the diagonal of L and P there is anything, also infinity.
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
    load(l, s.l, 64 * h);
    each<64>([](int, int, float &z, float w, float y, float n) { z = y * n * fast_exp2(w); }, x, l, s.k[h], norm_k);
    store(s.out.decayed[h], x);
    each<64>([](int, int, float &z, float w, float y, float n) { z = y * n * fast_exp2(w); }, x, l, s.q[h], norm_q);
    store(s.q[h], x);
    map_last_row(l, s.l, 64 * h, [](float x, float end) { return fast_exp2(end - x); });
    each<64>([](int, int, float &z, float y, float n) { z *= y * n; }, l, s.k[h], norm_k);
    store(s.k[h], l);
  }
}

TILE void compute(const params &p, shared &s, int) {
  ring_pos at = {};
  const float LOW = -10.f * 1.4426950408889634f;
  for (int i = block_index(); i < task_count(p); i += block_count()) {
    task t = task_of(p, i);
    if (t.steps <= 0) continue;
    hv<KEYS> end, least;
    rv beta, norm_k, norm_q;
    rt<float, Q> a, b;
    {
      hm<KEYS> g;
      take_gates(p, t, g);
      least_of(least, g);
      sum_down(s.l, end, g, LOW);
    }
    take_beta(p, t, beta);
    store(s.beta, beta);
    ring_wait(s.inputs, at);
    if (t.steps < Q && p.starts) {                       // steps of the next row, of which nothing may come in
      CONSTANT_INDEX for (int h = 0; h < PANELS; h++) {
        clear_rows(s.k[h], 0, t.steps);
        clear_rows(s.q[h], 0, t.steps);
      }
    }
    bool steep = any(least, [=](float x) { return x < LOW; });   // all have written l, beta and the rows that are 0
    float scale = p.scale;
    fill(norm_k, 1.f);
    fill(norm_q, scale);
    if (p.norm) {
      inverse_norms(norm_k, s.k);
      inverse_norms(norm_q, s.q);
      map(norm_q, norm_q, [=](float x) { return x * scale; });
    }
    make_left(s, norm_k, norm_q);
    fence_async();
    wg_sync();
    make_pairs(a, b, s, norm_k);
    wg_sync();                                           // everybody's products have read `left`
    store(s.out.p, b);
    map_row(a, beta, [](float x, float y) { return x * y; });
    invert(b, a, s.scratch);
    map_col(b, s.beta, [](float x, float y) { return x * y; });
    store(s.out.t, b);
    if (steep) {
      hm<KEYS> g;
      take_gates(p, t, g);
      sum_down(s.l, end, g, -infinity());
      wg_sync();
    }
    map(end, end, [](float x) { return fast_exp2(x); });
    int64_t place = (int64_t)t.place * p.chunks + t.chunk;
    store(p.decays + place * p.key_dim, end, p.key_dim);
    make_tiles(s, norm_k, norm_q);
    fence_async();
    wg_sync();
    tma_store(p.pairs, s.out.t, 0, 0, 2 * t.chunk, t.place);
    tma_store(p.pairs, s.out.p, 0, 0, 2 * t.chunk + 1, t.place);
    CONSTANT_INDEX for (int h = 0; h < PANELS; h++) {
      tma_store(p.scaled, s.out.decayed[h], 0, 64 * h, 3 * t.chunk, t.place);
      tma_store(p.scaled, s.q[h], 0, 64 * h, 3 * t.chunk + 1, t.place);
      tma_store(p.scaled, s.k[h], 0, 64 * h, 3 * t.chunk + 2, t.place);
    }
    tma_store_wait_read();
    ring_done(s.inputs, at);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              OCCUPANCY<2>> kernel;
ENTRY(kernel, Q, 1)
