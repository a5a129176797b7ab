// Gradients of Kimi delta attention (2025), of all chunks of 64 steps at once, from the state S in front of a chunk and
// the gradient D of the state behind it. With l_i the sum of log decays down to step i of a chunk whose last step is e,
// a vector of channels as k_i and q_i, R_i = v_i - (what the state before the step has for k_i), U_i = beta_i R_i, and
// dX = dv:
//   A_ij = scale dO_i . R_j,  B_ij = -dX_i . R_j  (j < i),  d_i = scale dO_i . R_i,  and of every channel
//   dq_i = scale e^(l_i) (S dO_i) + beta_i d_i k_i + sum over j < i of A_ij e^(l_i - l_j) beta_j k_j
//   dk_i = -e^(l_i) (S dX_i) + sum over j < i of B_ij e^(l_i - l_j) beta_j k_j + beta_i c_i
//   c_j  = e^(l_e - l_j) (D R_j) + d_j q_j + sum over i > j of e^(l_i - l_j) (A_ij q_i + B_ij k_i)
//   dbeta_j = k_j . c_j
//   dg_t = sum over steps i >= t of what decays as l_i does - what decays as -l_i does, and for D also e^(l_e) <S, D>:
//   it is what goes from the steps before t to those from t on.
// Pairs are taken by levels (tile/levels.h): the factors of i and of j are tiles of 16 bits, none above its q or k,
// whatever the gates are. dg has of every pair the same product of rounded factors twice, which cancels where both
// steps are on one side of t: without that its error would be as large as dq's where all decays are steep. The terms i
// = j are not in it. Of the part of D, sum over j >= t is written as all less sum over j < t; the last step, which only
// the first of these has and whose weight is 1, is left out of both.
// Rows are of l2 norm 1 (norm): with x^ = r x, dx = r (dx^ - x^ (x^ . dx^)). Gates: what g was made of, from dg.
//
// Roles: a loader thread; PANELS warpgroups, each with 64 channels. The first makes A, the last B, for all.
//
// Registers of a thread    tiles that live together                                      rows and the rest
//   compute, COMPUTE_REGS    dq 32, dk 32, dg 32, e 32, product 32, its two operands 32    12, 30
//   its ends                 dg 64, what was given 64 (a column a thread)
#include "delta/kda_gates.h"
#include "tile/levels.h"
#include "delta/kda_bwd.h"

// D: columns of q and k; VALUES: of v. PER_SM, LOAD_REGS, COMPUTE_REGS
enum { PANELS = D / 64, ROWS = 64 };
template<typename T> struct factor_of { typedef bf16 type; };
template<> struct factor_of<float> { typedef float type; };
typedef factor_of<elem>::type factor;      // fp16 has not the range of A
typedef st<elem, Q, 64> panel;
struct factors { st<factor, Q, 64> k, q; };
struct shared {
  panel q[PANELS], k[PANELS];
  st<elem, Q, VALUES> dout, dv, errors;
  st<elem, VALUES, 64> state[PANELS], dstate[PANELS];
  st<factor, Q, 64> a, b;                  // A; B and its transpose
  ct<64> l[PANELS];                        // to base 2; then the parts of dg
  sv<4 * 64> sums[PANELS];
  sv<64> kept[PANELS];
  sv<Q> own;                               // d
  sv<Q> dots[3 * PANELS];                  // q . dq, k . dk, k . c of 64 channels each
  sem inputs, states;
};
// Of a level, when the panel's warpgroup needs the state no more.
TILE factors &factors_of(shared &s, int wg) { return in_place_of<factors>(s.state[wg]); }
static_assert(sizeof(factors) <= sizeof(st<elem, VALUES, 64>), "factors fit into a state's memory");
typedef kda_grads_params params;

TILE void init(shared &s) {
  sem_init(s.inputs, arrivals(1, 0, 0));
  sem_init(s.states, arrivals(1, 0, 0));
}

// A chunk of a head: its steps, at most 64, none where its place is empty. `rows` are written: the last packed row's
// places reach to the last step, and gradients of steps in no row are 0.
struct task { int place; head_steps at; int rows; };
TILE task block_task(const params &p) {
  int unit = block_index() / p.rows.heads, place = unit / p.batches;
  chunk_steps c = steps_at(p.rows, place);
  int steps = c.end - c.step, rows = steps;
  if (p.rows.starts && place >= row_place(p.rows, p.rows.rows - 1)) rows = p.rows.steps - c.step;
  return {place,
          {unit - place * p.batches, block_index() - unit * p.rows.heads, c.step, steps < Q ? steps : Q},
          rows < Q ? rows : Q};
}

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  if (t.at.steps <= 0) return;
  int head = t.at.head / p.rows.group_heads, matrix = t.at.batch * p.rows.heads + t.at.head;
  sem_expect(s.inputs, 2 * PANELS * tile_bytes(s.k[0]) + 3 * tile_bytes(s.dout));
  for (int h = 0; h < PANELS; h++) {
    tma_load(s.q[h], p.q, s.inputs, t.at.step, 64 * h, head, t.at.batch);
    tma_load(s.k[h], p.k, s.inputs, t.at.step, 64 * h, head, t.at.batch);
  }
  tma_load(s.dout, p.dout, s.inputs, t.at.step, 0, t.at.head, t.at.batch);
  tma_load(s.dv, p.dv, s.inputs, t.at.step, 0, t.at.head, t.at.batch);
  tma_load(s.errors, p.errors, s.inputs, t.at.step - p.rows.from, 0, t.at.head, t.at.batch);
  sem_expect(s.states, 2 * PANELS * tile_bytes(s.state[0]));
  for (int h = 0; h < PANELS; h++) {
    for (int r = 0; r < VALUES; r += ROWS) {
      tma_load_rows(s.state[h], r, ROWS, p.states, s.states, r, 64 * h, t.place, matrix);
      tma_load_rows(s.dstate[h], r, ROWS, p.dstates, s.states, r, 64 * h, t.place, matrix);
    }
  }
}

TILE void all_sync() {
  if (PANELS == 1) wg_sync();
  else bar_sync(1, 128 * PANELS);
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
  mma_AB<ZERO>(x, s.errors, s.dstate[wg]);
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
  mma_AtB<ZERO>(x, s.state[wg], 0, s.dstate[wg], 0);
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
  mma_AB<ZERO>(dq, s.dout, s.state[wg]);
  mma_commit();
  load(l, s.l[wg], 0);
  load(own, s.own);
  mma_AB<ZERO>(x, s.dv, s.state[wg]);
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

// The pairs of one level. Of a row in a block's second half e is e^(l_i - l_m), in its first half e^(l_m - l_j), where
// k has beta; so has what comes to it.
TILE void take_level(shared &s, const rows &r, rt<float, 64> &dq, rt<float, 64> &dk, rt<float, 64> &dl, rsum &dbeta,
                     int h, int wg) {
  rt<float, 64> e, x;
  factors &to = factors_of(s, wg);
  fill(x, 0.f);
  map_level(e, s.l[wg], 0, h, [](float y) { return fast_exp2(-fabsf(y)); });
  each<64>([](int, int, float &x, float e, float q, float nq) { x = q * nq * e; }, x, (const rt<float, 64> &)e, s.q[wg],
           r.norm_q);
  store(to.q, x);
  each<64>([=](int i, int, float &x, float e, float k, float nk, float beta) { x = k * nk * (i & h ? e : e * beta); },
           x, (const rt<float, 64> &)e, s.k[wg], r.norm_k, r.beta);
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
  each<64>([=](int i, int, float x, float e, float &dk, float &dl, float &dbeta, float rounded, float k, float nk,
               float beta) {
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
  int head = t.at.head / p.rows.group_heads, n = p.key_dim - 64 * wg, rows = t.rows;
  if (p.parts) {
    int64_t ld = (int64_t)(p.rows.heads / p.rows.group_heads) * 2 * p.key_dim;
    int64_t member = t.at.head - head * p.rows.group_heads;
    int64_t row = ((member * p.batches + t.at.batch) * p.places + t.place) * Q;
    return store(p.parts + row * ld + (head * 2 + which) * p.key_dim + 64 * wg, ld, x, rows, n);
  }
  const int64_t *stride = which ? p.dk_stride : p.dq_stride;
  int64_t ld = stride[1];
  elem *to = (elem *)(which ? p.dk : p.dq) + t.at.batch * stride[0] + t.at.step * ld + head * stride[2] + 64 * wg;
  store_rows<elem>(x, [=](int i) { return i < rows ? to + i * ld : (elem *)nullptr; }, n);
}
TILE int64_t first_of(const params &p, const task &t) {
  return ((int64_t)t.at.batch * p.rows.steps + t.at.step) * p.rows.heads + t.at.head;
}
TILE void put_dbeta(const params &p, const task &t, const rv &x) {
  if (p.dbeta) store_steps(p.dbeta + first_of(p, t), x, p.rows.heads, t.rows);
}
TILE void put_products(const params &p, shared &s, const task &t, const rows &r, rt<float, 64> &dq, rt<float, 64> &dk,
                       const rsum &dbeta, int wg) {
  rv dot;
  if (p.gates.norm) {
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
  if (p.gates.norm) {
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
  float f = p.gates.most;
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
  const kda_gates &g = p.gates;
  float rate = rate_of(g, t.at.head), bound = g.lower_bound;
  load(dg, s.l[wg]);
  sum_up(dg);
  take_given(x, bias, g, t.at, p.key_dim, 64 * wg);
  fill(rates, 0.f);
  if (g.gate == KDA_LOG) map(dg, x, bias, rates, t.at.steps, [](float d, float, float, float &) { return d; });
  else if (g.gate == KDA_SOFTPLUS)
    map(dg, x, bias, rates, t.at.steps, [=](float d, float x, float b, float &sum) {
      d *= -rate;
      sum = fused(d, softplus(x + b), sum);
      return d * sigmoid(x + b);
    });
  else
    map(dg, x, bias, rates, t.at.steps, [=](float d, float x, float b, float &sum) {
      float z = sigmoid(rate * (x + b));
      d *= bound * rate * z * (1.f - z);
      sum = fused(d, x + b, sum);
      return d;
    });
  int n = p.key_dim - 64 * wg;
  int64_t of_step = (int64_t)p.rows.heads * p.key_dim;
  if (p.dg) store(p.dg + first_of(p, t) * p.key_dim + 64 * wg, of_step, dg, t.rows, n);
  if (!p.sums) return;
  int place = p.rows.from / Q + t.place;
  float *sums = p.sums + ((int64_t)t.at.batch * 3 * p.all_places + place) * of_step;
  store(sums + (int64_t)64 * wg * p.rows.heads + t.at.head, p.rows.heads, rates, n);
  sum_of(rates, dg);
  store(sums + p.all_places * of_step + t.at.head * p.key_dim + 64 * wg, 1, rates, n);
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
  if (p.dg)
    store(p.dg + first_of(p, t) * p.key_dim + 64 * wg, (int64_t)p.rows.heads * p.key_dim, zero, t.rows, n);
  if (wg == 0) put_dbeta(p, t, none);
}

TILE void compute(const params &p, shared &s, int wg) {
  task t = block_task(p);
  if (t.rows <= 0) return;
  if (t.at.steps <= 0) return put_none(p, t, wg);
  rt<float, 64> dq, dk, dl;
  rsum dbeta;
  rows r;
  {
    hm<64> g;
    hv<64> end;
    take_gates(g, p.gates, t.at, p.key_dim, 64 * wg);
    sum_down(s.l[wg], end, g, -infinity());
  }
  take_beta(r.beta, p.gates, t.at);
  sem_wait(s.inputs, 0);
  if (t.at.steps < Q) clear_behind(s, t.at.steps, wg);
  fill(r.norm_q, 1.f);
  fill(r.norm_k, 1.f);
  if (p.gates.norm) {
    take_norms(r.norm_q, s.q);
    take_norms(r.norm_k, s.k);
  }
  if (wg == 0) make_a(p, s);
  if (wg == PANELS - 1) make_b(s);
  all_sync();
  sem_wait(s.states, 0);
  take_dstate(s, r, dk, dl, dbeta, block_task(p).at.steps, wg);   // anew: kept, it would cause spills
  take_state(s, r, dq, dk, dl, dbeta, p.scale, wg);
  wg_sync();
  ROLLED for (int h = 32; h > 0; h /= 2) take_level(s, r, dq, dk, dl, dbeta, h, wg);
  store(s.l[wg], 0, dl);
  put_products(p, s, t, r, dq, dk, dbeta, wg);
  put_gates(p, s, block_task(p), wg);      // the same
}

typedef block<params, shared, init, role<compute, WARPGROUP, PANELS, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, Q, 1)
