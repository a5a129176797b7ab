// Gradients of Kimi delta attention (2025), of all chunks of 64 steps at once, from the state S in front of a chunk and the
// gradient D of the state behind it. With l_i the sum of log decays down to step i of a chunk whose last step is e, a
// vector of channels as k_i and q_i, R_i = v_i - (what the state before the step has for k_i), U_i = beta_i R_i, and dX = dv:
//   A_ij = scale dO_i . R_j,  B_ij = -dX_i . R_j  (j < i),  d_i = scale dO_i . R_i,  and of every channel
//   dq_i = scale e^(l_i) (S dO_i) + beta_i d_i k_i + sum over j < i of A_ij e^(l_i - l_j) beta_j k_j
//   dk_i = -e^(l_i) (S dX_i) + sum over j < i of B_ij e^(l_i - l_j) beta_j k_j + beta_i c_i
//   c_j  = e^(l_e - l_j) (D R_j) + d_j q_j + sum over i > j of e^(l_i - l_j) (A_ij q_i + B_ij k_i)
//   dbeta_j = k_j . c_j
//   dg_t = sum over steps i >= t of what decays as l_i does - what decays as -l_i does, and for D also e^(l_e) <S, D>:
//   it is what goes from the steps before t to those from t on.
// Pairs are taken by levels (tile/levels.h): the factors of i and of j are tiles of 16 bits, none above its q or k, whatever
// the gates are. dg has of every pair the same product of rounded factors twice, which cancels where both steps are on
// one side of t: without that its error would be as large as dq's where all decays are steep. The terms i = j are not
// in it. Of the part of D, sum over j >= t is written as all less sum over j < t; the last step, which only the first
// of these has and whose weight is 1, is left out of both.
// Rows are of l2 norm 1 (norm): with x^ = r x, dx = r (dx^ - x^ (x^ . dx^)). Gates: what g was made of, from dg.
//
// Roles: a loader thread; PANELS warpgroups, each with 64 channels. The first makes A, the last B, for all.
//
// Registers of a thread    tiles that live together                                      rows and the rest
//   compute, COMPUTE_REGS    dq 32, dk 32, dg 32, e 32, product 32, its two operands 32    12, 30
//   its ends                 dg 64, what was given 64 (a column a thread)
#include "tile/levels.h"
#include "delta/kda_bwd.h"
#include "ssd/ssd_fwd.h"

enum { Q = 64, PANELS = KEYS / 64, ROWS = 64 };
template<typename T> struct factor_of { typedef bf16 type; };
template<> struct factor_of<float> { typedef float type; };
typedef factor_of<elem>::type factor;      // fp16 has not the range of A
typedef st<elem, Q, 64> panel;
struct factors { st<factor, Q, 64> k, q; };
union matrices {
  struct { st<elem, VALUES, 64> state, dstate; };
  factors of_level;                        // when no product reads the states any more
};
struct shared {
  panel q[PANELS], k[PANELS];
  st<elem, Q, VALUES> dout, dv, errors;
  matrices m[PANELS];
  st<factor, Q, 64> a, b;                  // A; B and its transpose
  ct<64> l[PANELS];                        // in base 2; then the parts of dg
  sv<4 * 64> sums[PANELS];
  sv<64> kept[PANELS];
  sv<Q> own;                               // d
  sv<Q> dots[3 * PANELS];                  // q . dq, k . dk, k . c of 64 channels each
  sem inputs, states;
};
typedef kda_grads_params params;

TILE void init(shared &s) {
  sem_init(s.inputs, arrivals(1, 0, 0));
  sem_init(s.states, arrivals(1, 0, 0));
}

// A chunk of a value head: `steps` steps from `step` on, none where the chunk's place is empty. `rows` are written: the
// last row's places reach to the last step, and those of steps in no row are 0.
struct task { int place, chunk, batch, head, step, steps, rows; };
TILE int row_start(const params &p, int row) {
  int start = p.starts[row];
  return start < 0 ? 0 : start > p.steps ? p.steps : start;
}
TILE int first_chunk(const params &p, int row) { return row_start(p, row) / Q + row; }
TILE task block_task(const params &p) {
  task t;
  int index = block_index(), chunk_batch = index / p.heads;
  t.head = index - chunk_batch * p.heads;
  t.chunk = chunk_batch / p.batches;
  t.batch = chunk_batch - t.chunk * p.batches;
  t.place = t.batch * p.heads + t.head;
  int chunk = p.first + t.chunk, end = p.steps, stop = p.steps;
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
    if (row + 1 < p.rows) stop = end;
  }
  t.steps = end - t.step < Q ? end - t.step : Q;
  t.rows = stop - t.step < Q ? stop - t.step : Q;
  return t;
}

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  if (t.steps <= 0) return;
  int head = t.head / p.group_heads;
  sem_expect(s.inputs, 2 * PANELS * tile_bytes(s.k[0]) + 3 * tile_bytes(s.dout));
  for (int h = 0; h < PANELS; h++) {
    tma_load(s.q[h], p.q, s.inputs, t.step, 64 * h, head, t.batch);
    tma_load(s.k[h], p.k, s.inputs, t.step, 64 * h, head, t.batch);
  }
  tma_load(s.dout, p.dout, s.inputs, t.step, 0, t.head, t.batch);
  tma_load(s.dv, p.dv, s.inputs, t.step, 0, t.head, t.batch);
  tma_load(s.errors, p.errors, s.inputs, t.chunk * Q, 0, t.head, t.batch);
  sem_expect(s.states, 2 * PANELS * tile_bytes(s.m[0].state));
  for (int h = 0; h < PANELS; h++) {
    for (int r = 0; r < VALUES; r += ROWS) {
      tma_load_rows(s.m[h].state, r, ROWS, p.states, s.states, r, 64 * h, t.chunk, t.place);
      tma_load_rows(s.m[h].dstate, r, ROWS, p.dstates, s.states, r, 64 * h, t.chunk, t.place);
    }
  }
}

TILE void all_sync() {
  if (PANELS == 1) wg_sync();
  else bar_sync(1, 128 * PANELS);
}

// ---- what was given
template<typename T> TILE void load_gates(const params &p, const task &t, hm<64> &x, int wg) {
  load(x, (const T *)p.g.data + t.batch * p.g.batch + t.step * p.g.step + t.head * p.g.head + 64 * wg, p.g.step, t.steps,
       p.key_dim - 64 * wg < 64 ? p.key_dim - 64 * wg : 64);
}
TILE void take_given(const params &p, const task &t, hm<64> &x, hv<64> &bias, int wg) {
  if (p.g.is_float) load_gates<float>(p, t, x, wg);
  else load_gates<elem>(p, t, x, wg);
  load(bias, p.dt_bias ? p.dt_bias + t.head * p.key_dim + 64 * wg : p.a_log, p.dt_bias ? p.key_dim - 64 * wg : 0);
}
TILE float rate_of(const params &p, const task &t) {
  return p.a_log ? fast_exp2(p.a_log[t.head] * 1.4426950408889634f) : 1.f;
}
TILE float bounded(float y, float rate) { return fast_rcp(1.f + fast_exp2(y * (-1.4426950408889634f * rate))); }
// Sums of the log decays, in base 2.
TILE void sum_gates(const params &p, shared &s, const task &t, int wg) {
  hm<64> x;
  hv<64> bias, end;
  float rate = rate_of(p, t), bound = p.lower_bound;
  take_given(p, t, x, bias, wg);
  if (p.gate == KDA_LOG) map(x, bias, t.steps, [](float y, float) { return log_gate(y); });
  else if (p.gate == KDA_SOFTPLUS)
    map(x, bias, t.steps, [=](float y, float b) { return log_gate(-rate * softplus(y + b)); });
  else map(x, bias, t.steps, [=](float y, float b) { return log_gate(bound * bounded(y + b, rate)); });
  sum_down(s.l[wg], end, x, -infinity());
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
// Steps of the next row, of which nothing may come in.
TILE void clear_behind(shared &s, int steps, int wg) {
  clear_rows(s.q[wg], 0, steps);
  clear_rows(s.k[wg], 0, steps);
  if (wg == 0) clear_rows(s.dout, 0, steps);
  if (wg == 0) clear_rows(s.dv, 0, steps);
  if (wg == PANELS - 1) clear_rows(s.errors, 0, steps);
  fence_async();
  all_sync();
}

// ---- A and B
TILE void make_a(const params &p, shared &s) {
  rt<float, Q> x;
  rsum sum;
  rv own;
  mma_fence();
  mma_ABt<ZERO>(x, s.dout, s.errors);
  mma_commit();
  mma_wait<0>(x);
  float scale = p.scale;
  fill(sum, 0.f);
  each<Q>([=](int i, int j, float &x, float &own) {
    x *= scale;
    own += i == j ? x : 0.f;
    x = i > j ? x : 0.f;
  }, x, sum);
  reduce(own, sum);
  store(s.own, own);
  store(s.a, x);
}
TILE void make_b(shared &s) {
  rt<float, Q> x, y;
  mma_fence();
  mma_ABt<ZERO>(x, s.dv, s.errors);
  mma_ABt<ZERO>(y, s.errors, s.dv);
  mma_commit();
  mma_wait<0>(x, y);
  each<Q>([](int i, int j, float &x, float y) { x = i > j ? -x : i < j ? -y : 0.f; }, x, (const rt<float, Q> &)y);
  store(s.b, x);
}

// ---- what a panel's warpgroup holds throughout: factors of rows; dq and dk, and of dg what each step has of it
struct rows { rv norm_q, norm_k, beta; };

// The part of D, and what all sums over steps >= t have.
TILE void take_dstate(shared &s, const rows &r, rt<float, 64> &dk, rt<float, 64> &dl, rsum &dbeta, int steps, int wg) {
  rt<float, 64> x;
  rsum kept;
  rv sums;
  int last = steps - 1;
  mma_fence();
  mma_AB<ZERO>(x, s.errors, s.m[wg].dstate);
  mma_commit();
  load(dl, s.l[wg], 0);
  map_last_row(dl, s.l[wg], 0, [](float x, float end) { return fast_exp2(end - x); });
  {
    csum<64> sum;
    clear(sum);
    fill(dbeta, 0.f);
    fill(dk, 0.f);
    mma_wait<0>(x);
    each<64>([=](int i, int, float x, float &dk, float &dl, float &sum, float &dbeta, float k, float nk, float beta) {
      x *= dl;
      k *= nk;
      dk = beta * x;
      dbeta = fused(k, x, dbeta);
      float y = i < last ? k * dk : 0.f;
      dl = -y;
      sum += y;
    }, (const rt<float, 64> &)x, dk, dl, sum, dbeta, s.k[wg], r.norm_k, r.beta);
    store(s.sums[wg], sum);
  }
  mma_fence();
  mma_AtB<ZERO>(x, s.m[wg].state, 0, s.m[wg].dstate, 0);
  mma_commit();
  fill(kept, 0.f);
  mma_wait<0>(x);
  each<64>([](int i, int j, float x, float &sum) { sum += i == j ? x : 0.f; }, (const rt<float, 64> &)x, kept);
  reduce(sums, kept);
  store(s.kept[wg], sums);
  wg_sync();
  load(x, s.l[wg], 0);
  each<64>([](int i, int, float &dl, float l, float a, float b, float c, float d, float kept) {
    dl += i == 63 ? a + b + c + d + fast_exp2(l) * kept : 0.f;
  }, dl, (const rt<float, 64> &)x, slice<64>(s.sums[wg], 0), slice<64>(s.sums[wg], 64), slice<64>(s.sums[wg], 128),
     slice<64>(s.sums[wg], 192), s.kept[wg]);
}
// That of S, and the terms i = j.
TILE void take_state(shared &s, const rows &r, rt<float, 64> &dq, rt<float, 64> &dk, rt<float, 64> &dl, rsum &dbeta,
                     float scale, int wg) {
  rt<float, 64> x, l;
  rv own;
  mma_fence();
  mma_AB<ZERO>(dq, s.dout, s.m[wg].state);
  mma_commit();
  load(l, s.l[wg], 0);
  load(own, s.own);
  mma_AB<ZERO>(x, s.dv, s.m[wg].state);
  mma_commit();
  mma_wait<1>(dq);
  each<64>([=](int, int, float &dq, float &dl, float l, float q, float k, float nq, float nk, float own, float beta,
               float &dbeta) {
    q *= nq;
    k *= nk;
    dq *= scale * fast_exp2(l);
    dl = fused(q, dq, dl);
    dq = fused(beta * own, k, dq);
    dbeta = fused(own * q, k, dbeta);
  }, dq, dl, (const rt<float, 64> &)l, s.q[wg], s.k[wg], r.norm_q, r.norm_k, own, r.beta, dbeta);
  mma_wait<0>(x);
  each<64>([=](int, int, float x, float &dk, float &dl, float l, float q, float k, float nq, float nk, float own,
               float beta) {
    x *= -fast_exp2(l);
    dl = fused(k * nk, x, dl);
    dk = fused(beta * own, q * nq, dk + x);
  }, (const rt<float, 64> &)x, dk, dl, (const rt<float, 64> &)l, s.q[wg], s.k[wg], r.norm_q, r.norm_k, own, r.beta);
}

// The pairs of one level. Of a row in a block's second half e is e^(l_i - l_m), in its first half e^(l_m - l_j), where k has
// beta; so has what comes to it.
TILE void take_level(shared &s, const rows &r, rt<float, 64> &dq, rt<float, 64> &dk, rt<float, 64> &dl, rsum &dbeta, int h,
                     int wg) {
  rt<float, 64> e, x;
  factors &to = s.m[wg].of_level;
  map_level(e, s.l[wg], 0, h, [](float y) { return fast_exp2(-fabsf(y)); });
  each<64>([](int, int, float &x, float e, float q, float nq) { x = q * nq * e; }, x, (const rt<float, 64> &)e, s.q[wg], r.norm_q);
  store(to.q, x);
  each<64>([=](int i, int, float &x, float e, float k, float nk, float beta) { x = k * nk * (i & h ? e : e * beta); }, x,
           (const rt<float, 64> &)e, s.k[wg], r.norm_k, r.beta);
  store(to.k, x);
  fence_async();
  wg_sync();
  {
    rt<factor, Q> a;
    load(a, s.a);
    keep_level(a, a, h);
    mma_fence();
    mma_AB<ZERO>(x, a, to.k);
    mma_commit();
    mma_wait<0>(x, a);
  }
  each<64>([](int, int, float x, float e, float &dq, float &dl, float q) {
    dq = fused(x, e, dq);
    dl = fused(x, q, dl);
  }, (const rt<float, 64> &)x, (const rt<float, 64> &)e, dq, dl, to.q);
  {
    rt<factor, Q> a;                       // of both at a time there would be spills
    load(a, s.b);
    keep_level(a, a, h);
    mma_fence();
    mma_AB<ZERO>(x, a, to.k);
    mma_commit();
    mma_wait<0>(x, a);
    load_t(a, s.a);
    keep_level(a, a, h);
    mma_fence();
    mma_AB<ACC>(x, a, to.q);
    mma_commit();
    mma_wait<0>(x, a);
  }
  each<64>([=](int i, int, float x, float e, float &dk, float &dl, float &dbeta, float rounded, float k, float nk, float beta) {
    bool later = i & h;
    float y = x * e;
    dk = fused(later ? 1.f : beta, y, dk);
    dbeta = fused(later ? 0.f : k * nk, y, dbeta);
    dl = fused(later ? x : -x, rounded, dl);
  }, (const rt<float, 64> &)x, (const rt<float, 64> &)e, dk, dl, dbeta, to.k, s.k[wg], r.norm_k, r.beta);
  wg_sync();
}

// ---- results
// Sums over all channels, of which every panel has a part.
TILE void add_panels(const shared &s, rv &sum, int which) {
  load(sum, s.dots[which]);
  if (PANELS == 1) return;
  rv other;
  load(other, s.dots[which + 3 * (PANELS - 1)]);
  map(sum, sum, other, [](float x, float y) { return x + y; });
}
TILE void put_dot(sv<Q> &d, const rsum &sum) {
  rv rows;
  reduce(rows, sum);
  store(d, rows);
}
TILE void put(const params &p, const task &t, const rt<float, 64> &x, int which, int wg) {
  int head = t.head / p.group_heads, n = p.key_dim - 64 * wg, rows = t.rows;
  if (p.parts) {
    int64_t ld = (int64_t)(p.heads / p.group_heads) * 2 * p.key_dim;
    int64_t row = (((int64_t)(t.head - head * p.group_heads) * p.batches + t.batch) * p.chunks + t.chunk) * Q;
    return store(p.parts + row * ld + (head * 2 + which) * p.key_dim + 64 * wg, ld, x, rows, n);
  }
  const int64_t *stride = which ? p.dk_stride : p.dq_stride;
  int64_t ld = stride[1];
  elem *to = (elem *)(which ? p.dk : p.dq) + t.batch * stride[0] + t.step * ld + head * stride[2] + 64 * wg;
  store_rows<elem>(x, [=](int i) { return i < rows ? to + i * ld : (elem *)nullptr; }, n);
}
TILE float *dg_of(const params &p, const task &t, int wg) {
  return p.dg + (((int64_t)t.batch * p.steps + t.step) * p.heads + t.head) * p.key_dim + 64 * wg;
}
TILE void put_dbeta(const params &p, const task &t, const rv &x) {
  store_steps(p.dbeta + ((int64_t)t.batch * p.steps + t.step) * p.heads + t.head, p.heads, x, t.rows);
}
TILE void put_products(const params &p, shared &s, const task &t, const rows &r, rt<float, 64> &dq, rt<float, 64> &dk,
                       const rsum &dbeta, int wg) {
  rv dot;
  if (p.norm) {
    rsum q_dot, k_dot;
    fill(q_dot, 0.f);
    fill(k_dot, 0.f);
    each<64>([](int, int, float dq, float dk, float q, float k, float &a, float &b) {
      a = fused(q, dq, a);
      b = fused(k, dk, b);
    }, (const rt<float, 64> &)dq, (const rt<float, 64> &)dk, s.q[wg], s.k[wg], q_dot, k_dot);
    put_dot(s.dots[3 * wg], q_dot);
    put_dot(s.dots[3 * wg + 1], k_dot);
  }
  put_dot(s.dots[3 * wg + 2], dbeta);
  all_sync();
  if (p.norm) {
    auto normed = [](int, int, float &d, float x, float n, float dot) { d = n * (d - x * (n * n * dot)); };
    add_panels(s, dot, 0);
    each<64>(normed, dq, s.q[wg], r.norm_q, dot);
    add_panels(s, dot, 1);
    each<64>(normed, dk, s.k[wg], r.norm_k, dot);
  }
  put(p, t, dq, 0, wg);
  put(p, t, dk, 1, wg);
  if (wg > 0) return;
  add_panels(s, dot, 2);
  float f = p.beta_factor;
  if (f != 0.f) {
    float rate = fast_rcp(f);
    map(dot, dot, r.beta, [=](float x, float beta) { return x * beta * (1.f - beta * rate); });
  }
  put_dbeta(p, t, dot);
}

// dg from what each step has of it, and from that the gradients of what was given.
TILE void put_gates(const params &p, shared &s, const task &t, int wg) {
  hm<64> dg, x;
  hv<64> bias, rates;
  float rate = rate_of(p, t), bound = p.lower_bound;
  load(dg, s.l[wg]);
  sum_up(dg);
  take_given(p, t, x, bias, wg);
  map(rates, bias, [](float) { return 0.f; });
  if (p.gate == KDA_LOG) map(dg, x, bias, rates, t.steps, [](float d, float, float, float &) { return d; });
  else if (p.gate == KDA_SOFTPLUS)
    map(dg, x, bias, rates, t.steps, [=](float d, float x, float b, float &sum) {
      float y = x + b;
      d *= -rate;
      sum = fused(d, softplus(y), sum);
      return d * bounded(y, 1.f);
    });
  else
    map(dg, x, bias, rates, t.steps, [=](float d, float x, float b, float &sum) {
      float y = x + b, z = bounded(y, rate);
      d *= bound * rate * z * (1.f - z);
      sum = fused(d, y, sum);
      return d;
    });
  int n = p.key_dim - 64 * wg;
  store(dg_of(p, t, wg), (int64_t)p.heads * p.key_dim, dg, t.rows, n);
  if (!p.sums) return;
  int64_t of_step = (int64_t)p.heads * p.key_dim, chunk = p.first + t.chunk;
  float *sums = p.sums + ((int64_t)t.batch * 3 * p.all_chunks + chunk) * of_step;
  store(sums + (int64_t)64 * wg * p.heads + t.head, p.heads, rates, n);
  sum_of(rates, dg);
  store(sums + p.all_chunks * of_step + t.head * p.key_dim + 64 * wg, 1, rates, n);
}

// Steps in no row have no gradients.
TILE void put_none(const params &p, const task &t, int wg) {
  rt<float, 64> zero;
  rv none;
  int n = p.key_dim - 64 * wg;
  fill(zero, 0.f);
  fill(none, 0.f);
  put(p, t, zero, 0, wg);
  put(p, t, zero, 1, wg);
  store(dg_of(p, t, wg), (int64_t)p.heads * p.key_dim, zero, t.rows, n);
  if (wg == 0) put_dbeta(p, t, none);
}

TILE void compute(const params &p, shared &s, int wg) {
  task t = block_task(p);
  if (t.rows <= 0) return;
  if (t.steps <= 0) return put_none(p, t, wg);
  rt<float, 64> dq, dk, dl;
  rsum dbeta;
  rows r;
  sum_gates(p, s, t, wg);
  take_beta(p, t, r.beta);
  sem_wait(s.inputs, 0);
  if (t.steps < Q) clear_behind(s, t.steps, wg);
  fill(r.norm_q, 1.f);
  fill(r.norm_k, 1.f);
  if (p.norm) {
    inverse_norms(r.norm_q, s.q);
    inverse_norms(r.norm_k, s.k);
  }
  if (wg == 0) make_a(p, s);
  if (wg == PANELS - 1) make_b(s);
  all_sync();
  sem_wait(s.states, 0);
  take_dstate(s, r, dk, dl, dbeta, t.steps, wg);
  take_state(s, r, dq, dk, dl, dbeta, p.scale, wg);
  wg_sync();
  ROLLED for (int h = 32; h > 0; h /= 2) take_level(s, r, dq, dk, dl, dbeta, h, wg);
  store(s.l[wg], 0, dl);
  put_products(p, s, t, r, dq, dk, dbeta, wg);
  put_gates(p, s, block_task(p), wg);      // anew: kept, it would cause spills
}

typedef block<params, shared, init, role<compute, WARPGROUP, PANELS, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, Q, 1)
