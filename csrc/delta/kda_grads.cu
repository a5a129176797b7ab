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
// Pairs are taken by groups of 16 steps: the factors of i and of j are tiles of 16 bits, to a base between them. Within
// a group that is its middle, where the group is near: then e^(l_i - l_j) is made of factors up to 2^64. Where it is
// not, pairs within it are taken by levels (tile/levels.h), and no factor is above its q or k, whatever the gates are.
// dg has of every pair the same product of rounded factors twice, which cancels where both steps are on one side of t:
// without that its error would be as large as dq's where all decays are steep. The terms i = j are not in it. Of the
// part of D, sum over j >= t is written as all less sum over j < t; the last step, which only the first of these has
// and whose weight is 1, is left out of both.
// Rows are of l2 norm 1 (norm): with x^ = r x, dx = r (dx^ - x^ (x^ . dx^)). Gates: what g was made of, from dg.
//
// Roles: a loader thread; HALVES warpgroups for each panel of 64 channels. Tiles of l, dq, dk and dg have a row for
// each channel and a column for each step, so that a warp has steps of its own 16 channels: nobody else knows of the
// pairs it takes. A warpgroup takes 32 steps of its panel, 16 at a time, and makes of other steps' what pairs with them
// want anew: no warp waits for another. The first half makes norms, A and B, the second sums gates up before, and those
// of dg after.
//
// Registers of a thread    tiles that live together                                          rows and the rest
//   compute, COMPUTE_REGS    16 steps' dq, dk, dg, c, q, k 8 each                                20
//                            three sums 24, decays 8, factors 4 + 4 + 4, a block's 4
//     A and B                two products 64
//     its ends               dg 32, what was given 32 (half a channel a thread)
#include "tile/levels.h"
#include "tile/slices.h"
#include "delta/kda_tasks.h"
#include "delta/kda_bwd.h"

// D: columns of q and k; VALUES: of v. PER_SM, LOAD_REGS, COMPUTE_REGS
enum { PANELS = D / 64, ROWS = 64, GROUP = 16, HALVES = 2, GROUPS = PANELS * HALVES };
typedef st<elem, Q, 64> panel;
enum { Q_DOT, K_DOT, BETA, DOTS };
struct first_rows { int64_t dq, dk; };         // where the gradients of a task begin; elements
struct shared {
  panel q[PANELS], k[PANELS];
  st<elem, Q, VALUES> dout, dv, errors;
  st<elem, VALUES, 64> state[PANELS], dstate[PANELS];
  st<factor, Q, 64> a, b;                  // A; B and its transpose
  st<elem, GROUP, 64> out[GROUPS][2];      // dq, dk
  tc l[PANELS];                        // to base 2; then the parts of dg
  sv<4 * Q> dots[DOTS][PANELS];            // q . dq, k . dk, k . c, of 16 channels each
  sv<Q> turns[GROUPS][2];                  // what makes dq and dk right angled to q and k
  sv<64> kept[PANELS];                     // <S, D>
  sv<Q> norm_q, norm_k, beta, own;         // own: d
  task_list todo;
  first_rows to[TASKS];
  ring<1> rows;                            // q and k
  ring<1, ASYNC_READS> matrices;           // and the rest
};
// Of the 16 steps before, until all have read l.
TILE pt &dl_before(shared &s, int wg) { return in_place_of<pt>(s.out[wg]); }
static_assert(sizeof(pt) <= 2 * sizeof(st<elem, GROUP, 64>), "what is parked fits into the memory of dq and dk");
typedef kda_grads_params params;

TILE void init(shared &s) {
  init_tasks(s.todo);
  ring_init(s.rows, arrivals(1, 0, 0), arrivals(0, 0, GROUPS));
  ring_init(s.matrices, arrivals(1, 0, 0), arrivals(0, 0, GROUPS));
}

// A task has at most 64 steps, or none. Then `rows` may be written: the last packed row's places reach to the last
// step, and gradients of steps in no row are 0. Its mark: twice these, and 1 if nobody has summed its gates, as the
// task before has no steps, or there is none.
TILE int rows_of(int mark) { return mark >> 1; }
TILE int rows_of(const task &t) { return rows_of(t.mark); }
TILE bool is_first(const task &t) { return t.mark & 1; }
TILE int task_count(const params &p) { return p.places * p.batches * p.rows.heads; }
TILE bool is_task(const params &p, uint32_t n) { return block_index() + (int)n * block_count() < task_count(p); }
TILE task task_at(const params &p, int index) {
  int unit = index / p.rows.heads, place = unit / p.batches;
  chunk_steps c = steps_at(p.rows, place);
  int steps = c.end - c.step, rows = steps;
  if (p.rows.starts && place >= row_place(p.rows, p.rows.rows - 1)) rows = p.rows.steps - c.step;
  return {place, 2 * (rows < Q ? rows : Q),
          {unit - place * p.batches, index - unit * p.rows.heads, c.step, steps < Q ? steps : Q}};
}

// Where a task's rows begin in a gradient of q or k that a head has for itself.
TILE int64_t first_row(const int64_t (&stride)[3], const task &t) {
  return t.at.batch * stride[0] + t.at.step * stride[1] + t.at.head * stride[2];
}

TILE void loader(const params &p, shared &s, int) {
  uint32_t n = 0;
  bool first = true;
  for (int i = block_index(); i < task_count(p); i += block_count(), n++) {
    task t = task_at(p, i);
    t.mark += first;
    first = t.at.steps <= 0;
    ring_pos at = ring_at<1>(n);
    put(s.to[n % TASKS].dq, first_row(p.dq_stride, t));
    put(s.to[n % TASKS].dk, first_row(p.dk_stride, t));
    give_task(s.todo, n, t);
    if (t.at.steps <= 0) {
      ring_acquire(s.matrices, at);
      sem_arrive<THREAD>(s.matrices.full[0]);
      ring_acquire(s.rows, at);
      sem_arrive<THREAD>(s.rows.full[0]);
      continue;
    }
    int head = t.at.head / p.rows.group_heads, matrix = t.at.batch * p.rows.heads + t.at.head;
    ring_acquire(s.matrices, at);
    ring_expect(s.matrices, at, 3 * tile_bytes(s.dout) + 2 * PANELS * tile_bytes(s.state[0]));
    sem &full = s.matrices.full[0];
    tma_load(s.dout, p.dout, full, t.at.step, 0, t.at.head, t.at.batch);
    tma_load(s.dv, p.dv, full, t.at.step, 0, t.at.head, t.at.batch);
    tma_load(s.errors, p.errors, full, t.at.step - p.rows.from, 0, t.at.head, t.at.batch);
    for (int h = 0; h < PANELS; h++) {
      for (int r = 0; r < VALUES; r += ROWS) {
        tma_load_rows(s.state[h], r, ROWS, p.states, full, r, 64 * h, t.place, matrix);
        tma_load_rows(s.dstate[h], r, ROWS, p.dstates, full, r, 64 * h, t.place, matrix);
      }
    }
    ring_acquire(s.rows, at);
    ring_expect(s.rows, at, 2 * PANELS * tile_bytes(s.k[0]));
    for (int h = 0; h < PANELS; h++) {
      tma_load(s.q[h], p.q, s.rows.full[0], t.at.step, 64 * h, head, t.at.batch);
      tma_load(s.k[h], p.k, s.rows.full[0], t.at.step, 64 * h, head, t.at.batch);
    }
  }
}

// Warpgroup `wg` has the channels of panel wg % PANELS, and half wg / PANELS of its steps.
TILE void all_sync() { bar_sync(1, 128 * GROUPS); }
TILE void half_sync() {
  if (PANELS == 1) wg_sync();
  else bar_sync(2, 128 * PANELS);
}
TILE void panel_sync(int panel) { bar_sync(3 + panel, 128 * HALVES); }

// Steps of the next row, of which nothing may come in.
TILE void clear_behind(shared &s, int steps, int wg) {
  if (wg < PANELS) {
    clear_rows(s.q[wg], 0, steps);
    clear_rows(s.k[wg], 0, steps);
  }
  if (wg == PANELS) clear_rows(s.dout, 0, steps);
  if (wg == PANELS) clear_rows(s.dv, 0, steps);
  if (wg == GROUPS - 1) clear_rows(s.errors, 0, steps);
  fence_async();
  all_sync();
}

// ---- A and B, with the norms' factors of both steps. So q, k, dq and dk stand for themselves: the factor that makes
// of x one of length 1 is in what x is multiplied with, and dx is what it will be multiplied with.
TILE void make_a(const params &p, shared &s) {
  rt<float, Q> x;
  rsum sum;
  rv own, norm;
  mma_fence();
  mma_ABt<ZERO>(x, s.dout, s.errors);
  mma_commit();
  float scale = p.scale;
  fill(sum, 0.f);
  load(norm, s.norm_q);
  mma_wait<0>(x);
  each<Q>([=](int i, int j, float &x, float &own, float nq, float nk) {
    x *= scale * nq * nk;
    own += i == j ? x : 0.f;
    x = i > j ? x : 0.f;
  }, x, sum, norm, s.norm_k);
  reduce(own, sum);
  store(s.own, own);
  store(s.a, x);
}
TILE void make_b(shared &s) {
  rt<float, Q> x, y;
  rv norm;
  mma_fence();
  mma_ABt<ZERO>(x, s.dv, s.errors);
  mma_ABt<ZERO>(y, s.errors, s.dv);
  mma_commit();
  load(norm, s.norm_k);
  mma_wait<0>(x, y);
  each<Q>([](int i, int j, float &x, float y, float ni, float nj) {
    x = i == j ? 0.f : (i > j ? x : y) * -(ni * nj);
  }, x, (const rt<float, Q> &)y, norm, s.norm_k);
  store(s.b, x);
}

// What goes through a whole chunk: of each channel, <S, D>.
TILE void make_kept(shared &s, int panel) {
  rt<float, 64> x;
  rsum sum;
  rv kept;
  mma_fence();
  mma_AtB<ZERO>(x, s.state[panel], 0, s.dstate[panel], 0);
  mma_commit();
  fill(sum, 0.f);
  mma_wait<0>(x);
  each<64>([](int i, int j, float x, float &sum) { sum += i == j ? x : 0.f; }, (const rt<float, 64> &)x, sum);
  reduce(kept, sum);
  store(s.kept[panel], kept);
}

// ---- 16 steps of a panel. dq and dk, of dg what each step has of it, and c; dk without beta c. And q and k.
typedef rt<float, GROUP> block16;
typedef rt<factor, GROUP> factors;
struct grads { block16 dq, dk, dl, c, q, k; };

// What 16 steps begin with: the terms i = j.
TILE void begin(shared &s, grads &g, int n, int panel) {
  const turned<elem> q = turned_of(s.q[panel]), k = turned_of(s.k[panel]);
  fill(g.dk, 0.f);
  fill(g.dl, 0.f);
  fill(g.dq, 0.f);
  fill(g.c, 0.f);
  fill(g.q, 0.f);
  fill(g.k, 0.f);
  each_part(GROUP * n, [](int, int, float &dq, float &c, float &q, float &k, float given_q, float given_k, float own,
                          float beta) {
    q = given_q;
    k = given_k;
    dq = own * beta * k;
    c = own * q;
  }, g.dq, g.c, g.q, g.k, q, k, s.own, s.beta);
}
// The part of D, and what all sums over steps >= t have; then that of S.
TILE void take_states(shared &s, grads &g, float scale, uint32_t i, int n, int panel) {
  const tc &l = s.l[panel];
  block16 x, y;
  rsum sum;
  rv all, end;
  int c0 = GROUP * n, last = get(s.todo.tasks[i % TASKS].steps) - 1;
  mma_fence();
  mma_AtBt_rows<ZERO>(x, s.dstate[panel], s.errors, c0);
  mma_commit();
  begin(s, g, n, panel);
  fill(sum, 0.f);
  load(end, l, 63);
  mma_wait<0>(x);
  each_part(c0, [=](int, int j, float x, float &c, float &dl, float k, float &sum, float l, float end, float nk,
                    float beta) {
    x *= fast_exp2(end - l) * nk;
    float y = j < last ? k * (beta * x) : 0.f;
    c += x;
    dl -= y;
    sum += y;
  }, (const block16 &)x, g.c, g.dl, (const block16 &)g.k, sum, l, (const rv &)end, s.norm_k, s.beta);
  mma_fence();
  mma_AtBt_rows<ZERO>(x, s.state[panel], s.dout, c0);
  mma_AtBt_rows<ZERO>(y, s.state[panel], s.dv, c0);
  mma_commit();
  reduce(all, sum);
  if (n == 3) {                             // and what goes through the whole chunk, of which D has its share
    rv kept;
    load(kept, s.kept[panel]);
    map(end, end, kept, [](float l, float x) { return fast_exp2(l) * x; });
    map(all, all, end, [](float x, float y) { return x + y; });
  }
  store_sum(s.l[panel], n, all);
  mma_wait<0>(x, y);
  each_part(c0, [=](int, int, float x, float y, float &dq, float &dk, float &dl, float q, float k, float l, float nq,
                    float nk) {
    float e = fast_exp2(l), of_q = e * (scale * nq), of_k = e * -nk;
    dl = fused(q, x * of_q, fused(k, y * of_k, dl));
    dq = fused(x, of_q, dq);                // with fused() a debug build has the same bits
    dk = fused(y, of_k, dk);
  }, (const block16 &)x, (const block16 &)y, g.dq, g.dk, g.dl, (const block16 &)g.q, (const block16 &)g.k, l, s.norm_q,
     s.norm_k);
}

// ---- pairs. With b(n) = l of the last step of group n - 1, those of group n and an earlier one, m: e^(l_i - b(n)) for
// i in group n, e^(b(m + 1) - l_j) for j in group m, and between them, for all pairs of both groups at once, e^(b(n) -
// b(m + 1)). Those within a near group: e^(l_i - c) and e^(c - l_j), c that of a step in its middle, which then takes
// the place of b(n) and b(n + 1), too. Bases are whole numbers, to base 2: factors of one step have the same bits then,
// whatever its base is.
TILE void load_base(rv &base, const tc &l, int step) {
  load(base, l, step);
  map(base, base, [](float x) { return rintf(x); });
}
TILE void load_middle(rv &base, const tc &l, int n) { load_base(base, l, GROUP * n + GROUP / 2 - 1); }
TILE void carry(block16 &x, const rv &f) {
  map_row(x, f, [](float x, float y) { return x * y; });
}
// The base of sums goes on to an earlier step, or to a later one. f: what they are to be carried with, 1 at most.
TILE void to_earlier(rv &f, rv &base, const rv &next) {
  map(f, base, next, [](float x, float y) { return fast_exp2(x - y); });
  base = next;
}
TILE void to_later(rv &f, rv &base, const rv &next) {
  map(f, base, next, [](float x, float y) { return fast_exp2(y - x); });
  base = next;
}
// Factors of group n: e^(l_i - base), and rounded with q_i and with k_i; and with beta_j k_j e^(base - l_j).
struct late_factors { block16 e; factors q, k; };
TILE void make_late(late_factors &d, shared &s, const grads &g, const rv &base, int n, int panel) {
  block16 x, y;
  fill(d.e, 0.f);
  fill(x, 0.f);
  fill(y, 0.f);
  each_part(GROUP * n, [](int, int, float &e, float &x, float &y, float l, float base, float q, float k) {
    e = fast_exp2(l - base);
    x = q * e;
    y = k * e;
  }, d.e, x, y, s.l[panel], base, (const block16 &)g.q, (const block16 &)g.k);
  convert_to_part(d.q, 0, x);
  convert_to_part(d.k, 0, y);
}
TILE void make_early(factors &d, shared &s, const grads &g, const rv &base, int n, int panel) {
  block16 x;
  fill(x, 0.f);
  each_part(GROUP * n, [](int, int, float &x, float l, float base, float k, float beta) {
    x = k * (beta * fast_exp2(base - l));
  }, x, s.l[panel], base, (const block16 &)g.k, s.beta);
  convert_to_part(d, 0, x);
}
// What the pairs give whose later step is in group n, and those whose earlier step is.
TILE void add_late(grads &g, const block16 &x, const block16 &y, const late_factors &to, int n) {
  each_part(GROUP * n, [](int, int, float &dq, float &dk, float &dl, float e, float x, float y, float q, float k) {
    dq = fused(x, e, dq);
    dk = fused(y, e, dk);
    dl = fused(x, q, fused(y, k, dl));
  }, g.dq, g.dk, g.dl, to.e, x, y, to.q, to.k);
}
TILE void add_early(grads &g, shared &s, const block16 &z, const factors &from, const rv &base, int n, int panel) {
  each_part(GROUP * n, [](int, int, float &c, float &dl, float z, float l, float base, float k) {
    dl = fused(-z, k, dl);
    c = fused(z, fast_exp2(base - l), c);
  }, g.c, g.dl, z, s.l[panel], base, from);
}
// Sums over the steps of earlier groups, and over those of later ones.
TILE void sum_earlier(block16 &x, block16 &y, rv &base, shared &s, int n, int panel) {
  const turned<elem> k = turned_of(s.k[panel]);
  const tc &l = s.l[panel];
  rv next, f;
  fill(x, 0.f);
  fill(y, 0.f);
  load_base(base, l, 0);
  ROLLED for (int m = 0; m < n; m++) {
    block16 e;
    factors a;
    qt<factor> w;
    load_base(next, l, GROUP * m + GROUP - 1);
    to_later(f, base, next);
    carry(x, f);
    carry(y, f);
    fill(e, 0.f);
    each_part(GROUP * m, [](int, int, float &x, float l, float base, float k, float beta) {
      x = k * (beta * fast_exp2(base - l));
    }, e, l, (const rv &)base, k, s.beta);
    convert_to_part(a, 0, e);
    load_t(w, s.a, GROUP * n, GROUP * m);
    mma_own(x, 0, a, 0, w);
    load_t(w, s.b, GROUP * n, GROUP * m);
    mma_own(y, 0, a, 0, w);
  }
}
TILE void sum_later(block16 &z, rv &base, shared &s, int n, int panel) {
  const turned<elem> q = turned_of(s.q[panel]), k = turned_of(s.k[panel]);
  const tc &l = s.l[panel];
  rv next, f;
  fill(z, 0.f);
  load_base(base, l, Q - 1);
  ROLLED for (int m = 3; m > n; m--) {
    block16 x, y;
    factors a;
    qt<factor> w;
    load_base(next, l, GROUP * m - 1);
    to_earlier(f, base, next);
    carry(z, f);
    fill(x, 0.f);
    fill(y, 0.f);
    each_part(GROUP * m, [](int, int, float &x, float &y, float l, float base, float q, float k) {
      float e = fast_exp2(l - base);
      x = q * e;
      y = k * e;
    }, x, y, l, (const rv &)base, q, k);
    convert_to_part(a, 0, x);
    load(w, s.a, GROUP * m, GROUP * n);
    mma_own(z, 0, a, 0, w);
    convert_to_part(a, 0, y);
    load(w, s.b, GROUP * m, GROUP * n);
    mma_own(z, 0, a, 0, w);
  }
}

// Whether group n is near, of a warp's channels: factors, and products of them with A and B, are below 2^120. Factors
// may be below 2^-16 where the largest of A and B is above 2^-40: nothing is lost of what is 2^-20 times that.
#define FAR 64.f
#define LARGE 16777216.f          // 2^24
#define SMALL 9.09494702e-13f     // 2^-40
TILE bool is_near(shared &s, const grads &g, int n, int panel) {
  rsum most;
  rv middle;
  qt<factor> a, b;
  load_middle(middle, s.l[panel], n);
  fill(most, 0.f);
  each_part(GROUP * n, [](int, int, float &most, float l, float middle, float q, float k, float beta) {
    most = fmaxf(most, fabsf(l - middle) * (LARGE / FAR));
    most = fmaxf(most, fused(fabsf(k), 1.f + fabsf(beta), fabsf(q)));
  }, most, s.l[panel], (const rv &)middle, (const block16 &)g.q, (const block16 &)g.k, s.beta);
  load(a, s.a, GROUP * n, GROUP * n);
  load(b, s.b, GROUP * n, GROUP * n);
  if (exceeds(most, LARGE) || exceeds(a, b, LARGE)) return false;
  return exceeds(a, b, SMALL) || !exceeds(most, LARGE / 4);
}
// All pairs of a near group, with the middle as base. Places are worked out anew, as registers lack.
TILE void take_near(shared &s, grads &g, int n, int panel) {
  block16 x, y, z;
  rv base, middle, f;
  qt<factor> w;
  late_factors to;
  factors from;
  n = (int)anew(n);
  sum_later(z, base, s, n, panel);
  load_middle(middle, s.l[panel], n);
  to_earlier(f, base, middle);
  carry(z, f);
  sum_earlier(x, y, base, s, n, panel);
  load_middle(middle, s.l[panel], n);
  to_later(f, base, middle);
  carry(x, f);
  carry(y, f);
  n = (int)anew(n);
  make_early(from, s, g, middle, n, panel);
  load_t(w, s.a, GROUP * n, GROUP * n);
  mma_own(x, 0, from, 0, w);
  load_t(w, s.b, GROUP * n, GROUP * n);
  keep_above(w, w);
  mma_own(y, 0, from, 0, w);
  make_late(to, s, g, middle, n, panel);
  add_late(g, x, y, to, n);
  load(w, s.a, GROUP * n, GROUP * n);
  mma_own(z, 0, to.q, 0, w);
  load(w, s.b, GROUP * n, GROUP * n);
  keep_below(w, w);
  mma_own(z, 0, to.k, 0, w);
  add_early(g, s, z, from, middle, n, panel);
}

// ---- where a group is not near: pairs with other groups,
TILE void take_others(shared &s, grads &g, int n, int panel) {
  block16 x, y;
  rv base;
  if (n > 0) {
    late_factors to;
    sum_earlier(x, y, base, s, n, panel);
    make_late(to, s, g, base, n, panel);
    add_late(g, x, y, to, n);
  }
  if (n < 3) {
    factors from;
    sum_later(x, base, s, n, panel);
    make_early(from, s, g, base, n, panel);
    add_early(g, s, x, from, base, n, panel);
  }
}
// then the pairs of one level, 8 to 2. Of a step in a block's second half e is e^(l_i - l_m), in its first half
// e^(l_m - l_j), where k has beta.
TILE void take_level(shared &s, grads &g, int h, int n, int panel) {
  const level l = level_of(s.l[panel], h);
  block16 e, x;
  factors to_q, to_k;
  qt<factor> a;
  fill(e, 0.f);
  fill(x, 0.f);
  each_part(GROUP * n, [=](int, int i, float &e, float &x, float l, float k, float beta) {
    e = fast_exp2(-fabsf(l));
    x = k * (e * (i & h ? 1.f : beta));
  }, e, x, l, (const block16 &)g.k, s.beta);
  convert_to_part(to_k, 0, x);
  each_part(GROUP * n, [=](int, int, float &x, float e, float q) { x = q * e; }, x, (const block16 &)e,
            (const block16 &)g.q);
  convert_to_part(to_q, 0, x);
  fill(x, 0.f);
  load_t(a, s.a, GROUP * n, GROUP * n);
  keep_level(a, a, h);
  mma_own(x, 0, to_k, 0, a);
  each_part(GROUP * n, [](int, int, float &dq, float &dl, float e, float x, float to_q) {
    dq = fused(x, e, dq);
    dl = fused(x, to_q, dl);
  }, g.dq, g.dl, (const block16 &)e, (const block16 &)x, (const factors &)to_q);
  fill(x, 0.f);
  load(a, s.a, GROUP * n, GROUP * n);
  keep_level(a, a, h);
  mma_own(x, 0, to_q, 0, a);
  load(a, s.b, GROUP * n, GROUP * n);
  keep_level(a, a, h);
  mma_own(x, 0, to_k, 0, a);
  each_part(GROUP * n, [=](int, int i, float &dk, float &dl, float &c, float e, float x, float to_k) {
    float later = i & h ? 1.f : 0.f, y = x * e;
    dk = fused(later, y, dk);
    c = fused(1.f - later, y, c);
    dl = fused(i & h ? x : -x, to_k, dl);
  }, g.dk, g.dl, g.c, (const block16 &)e, (const block16 &)x, (const factors &)to_k);
}
// Those of level 1, one by one.
TILE void take_neighbours(shared &s, grads &g, int n, int panel) {
  typedef couple<float &> gradient;
  typedef couple<float> value;
  const next_below<factor> a = next_below_of(s.a), b = next_below_of(s.b);
  each_couple(GROUP * n, [](gradient dq, gradient dk, gradient dl, gradient c, value q, value k, value l, value beta,
                            value a, value b) {
    float e = fast_exp2(l.b - l.a), from = k.a * (beta.a * e), to = fused(a.a, q.b, b.a * k.b), both = from * to;
    dq.b = fused(a.a, from, dq.b);
    dk.b = fused(b.a, from, dk.b);
    c.a = fused(e, to, c.a);
    dl.b += both;
    dl.a -= both;
  }, g.dq, g.dk, g.dl, g.c, (const block16 &)g.q, (const block16 &)g.k, s.l[panel], s.beta, a, b);
}
// dk is whole. Parts of dots of this group's steps.
TILE void take_dots(const params &p, shared &s, grads &g, int n, int panel) {
  csum<GROUP> dbeta;
  clear(dbeta);
  each_part(GROUP * n, [](int, int, float &dk, float &sum, float c, float k, float beta) {
    dk = fused(beta, c, dk);
    sum = fused(k, c, sum);
  }, g.dk, dbeta, (const block16 &)g.c, (const block16 &)g.k, s.beta);
  store(s.dots[BETA][panel], GROUP * n, dbeta);
  if (!p.gates.norm) return;
  csum<GROUP> q_dot, k_dot;
  clear(q_dot);
  clear(k_dot);
  each_part(GROUP * n, [](int, int, float dq, float dk, float q, float k, float &a, float &b) {
    a = fused(q, dq, a);
    b = fused(k, dk, b);
  }, (const block16 &)g.dq, (const block16 &)g.dk, (const block16 &)g.q, (const block16 &)g.k, q_dot, k_dot);
  store(s.dots[Q_DOT][panel], GROUP * n, q_dot);
  store(s.dots[K_DOT][panel], GROUP * n, k_dot);
}

// ---- results
// Sums over all channels, of which every warp has a part.
TILE void sum_parts(rv &sum, const sv<4 * Q> (&parts)[PANELS]) {
  fill(sum, 0.f);
  UNROLLED for (int h = 0; h < PANELS; h++)
    UNROLLED for (int w = 0; w < 4; w++) {
      rv x;
      load(x, slice<Q>(parts[h], Q * w));
      map(sum, sum, x, [](float x, float y) { return x + y; });
    }
}
TILE float *share_of(const params &p, const task &t, int64_t ld, int head, int which, int panel) {
  int64_t member = t.at.head - head * p.rows.group_heads;
  int64_t row = ((member * p.batches + t.at.batch) * p.places + t.place) * Q;
  return p.parts + row * ld + (head * 2 + which) * p.key_dim + 64 * panel;
}
TILE void make_turns(shared &s, int c0, int wg) {
  auto turn = [](float dot, float n) { return dot * n * n; };
  map_parts(s.turns[wg][0], c0, s.dots[Q_DOT], s.norm_q, turn);
  map_parts(s.turns[wg][1], c0, s.dots[K_DOT], s.norm_k, turn);
  wg_sync();
}
// Where a task's rows begin in the gradient of q (0) or k (1), and, worked out anew as its registers lack, the stride.
TILE elem *gradient_of(const params &p, const shared &s, uint32_t i, int which, int panel, int64_t &ld) {
  ld = anew(which ? p.dk_stride[1] : p.dq_stride[1]);
  return (elem *)(which ? p.dk : p.dq) + get(which ? s.to[i % TASKS].dk : s.to[i % TASKS].dq) + 64 * panel;
}
// dq and dk of 16 steps.
TILE void put(const params &p, shared &s, uint32_t i, grads &g, int c0, int wg) {
  int panel = wg % PANELS, rows = rows_of(get(s.todo.tasks[i % TASKS].mark)) - c0, n = p.key_dim - 64 * panel;
  if (p.gates.norm) {
    make_turns(s, c0, wg);
    each_part(c0, [](int, int, float &dq, float &dk, float q, float k, float a, float b) {
      dq = fused(-a, q, dq);
      dk = fused(-b, k, dk);
    }, g.dq, g.dk, (const block16 &)g.q, (const block16 &)g.k, s.turns[wg][0], s.turns[wg][1]);
  }
  if (p.parts) {
    task t = given_task(s.todo, i);
    int head = t.at.head / p.rows.group_heads, ld = (int)anew(p.rows.heads / p.rows.group_heads * 2 * p.key_dim);
    store(share_of(p, t, ld, head, 0, panel) + (int64_t)c0 * ld, 1, ld, g.dq, n, rows);
    return store(share_of(p, t, ld, head, 1, panel) + (int64_t)c0 * ld, 1, ld, g.dk, n, rows);
  }
  store_t(s.out[wg][0], g.dq);
  store_t(s.out[wg][1], g.dk);
  if (rows >= GROUP) {                      // else the row ends here, and what is behind may be another sequence's
    fence_async();
    wg_sync();
    head_steps at = given_task(s.todo, i).at;
    tma_store(p.to_q, s.out[wg][0], at.step + c0, 64 * panel, at.head, at.batch);
    return tma_store(p.to_k, s.out[wg][1], at.step + c0, 64 * panel, at.head, at.batch);
  }
  wg_sync();
  ROLLED for (int which = 0; which < 2; which++) {
    int64_t ld;
    elem *to = gradient_of(p, s, i, which, panel, ld) + c0 * ld;
    store_rows(s.out[wg][which], [=](int i) { return i < rows ? to + i * ld : (elem *)nullptr; }, n);
  }
}
// What each of 32 steps has of dg, in place of l.
TILE void put_parts(shared &s, grads &g, int n, int wg) {
  block16 before;
  load(before, dl_before(s, wg));
  store(s.l[wg % PANELS], GROUP * (n - 1), before);
  store(s.l[wg % PANELS], GROUP * n, g.dl);
  wg_sync();
}
TILE int64_t first_of(const params &p, const task &t) {
  return ((int64_t)t.at.batch * p.rows.steps + t.at.step) * p.rows.heads + t.at.head;
}
TILE void put_dbeta(const params &p, const task &t, const rv &x) {
  if (p.dbeta) store_steps(p.dbeta + first_of(p, t), x, p.rows.heads, rows_of(t));
}
TILE void put_betas(const params &p, shared &s, const task &t) {
  rv dot, beta;
  sum_parts(dot, s.dots[BETA]);
  float f = p.gates.most;
  if (f != 0.f) {
    float rate = fast_rcp(f);
    load(beta, s.beta);
    map(dot, dot, beta, [=](float x, float beta) { return x * beta * (1.f - beta * rate); });
  }
  put_dbeta(p, t, dot);
}

// dg from what each step has of it, and from that the gradients of what was given.
TILE void put_gates(const params &p, shared &s, const task &t, int panel, int kind) {
  ht dg, x;
  hc bias;
  hcsum rates;
  kda_gates g = p.gates;
  g.gate = kind;
  g.g.step = anew(g.g.step);
  float rate = rate_of(g, t.at.head), bound = g.lower_bound;
  load(dg, s.l[panel]);
  add_sums(dg, s.l[panel]);
  sum_up(dg, s.l[panel]);
  clear(rates);
  fill(bias, 0.f);
  if (g.gate != KDA_LOG) take_given(x, bias, g, t.at, p.key_dim, 64 * panel);
  if (g.gate == KDA_LOG) {
    if (t.at.steps < Q) map(dg, dg, bias, rates, t.at.steps, [](float d, float, float, float &) { return d; });
  } else if (g.gate == KDA_SOFTPLUS)
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
  int n = p.key_dim - 64 * panel;
  int64_t of_step = anew((int64_t)p.rows.heads * p.key_dim);
  if (p.dg) store(p.dg + first_of(p, t) * p.key_dim + 64 * panel, of_step, dg, rows_of(t), n);
  if (kind == KDA_LOG || !p.sums) return;
  int place = p.rows.from / Q + t.place;
  float *sums = p.sums + ((int64_t)t.at.batch * 3 * p.all_places + place) * of_step;
  store(sums + (int64_t)64 * panel * p.rows.heads + t.at.head, p.rows.heads, rates, s.l[panel], 2, n);
  clear(rates);
  sum_add(rates, dg);
  store(sums + p.all_places * of_step + t.at.head * p.key_dim + 64 * panel, 1, rates, s.l[panel], 3, n);
}

// Steps in no row have no gradients. A loader that goes ahead may fill the panels meanwhile.
TILE void put_none(const params &p, const shared &s, uint32_t i, int wg) {
  task t = given_task(s.todo, i);
  rt<float, 64> zero;
  rv none;
  int head = t.at.head / p.rows.group_heads, n = p.key_dim - 64 * wg, rows = rows_of(t);
  fill(zero, 0.f);
  fill(none, 0.f);
  ROLLED for (int which = 0; which < 2; which++) {
    if (p.parts) {
      int ld = (int)anew(p.rows.heads / p.rows.group_heads * 2 * p.key_dim);
      store(share_of(p, t, ld, head, which, wg), ld, zero, rows, n);
      continue;
    }
    int64_t ld;
    elem *to = gradient_of(p, s, i, which, wg, ld);
    store_rows<elem>(zero, [=](int i) { return i < rows ? to + i * ld : (elem *)nullptr; }, n);
  }
  if (p.dg) store(p.dg + first_of(p, t) * p.key_dim + 64 * wg, (int64_t)p.rows.heads * p.key_dim, zero, rows_of(t), n);
  if (wg == 0) put_dbeta(p, t, none);
}

// Sums of log decays down.
TILE void sum_gates(const params &p, shared &s, const task &t, int panel) {
  ht x;
  kda_gates given = p.gates;
  given.g.step = anew(given.g.step);
  take_gates_of<hc>(x, given, t.at, p.key_dim, 64 * panel, log_decay);
  sum_down(s.l[panel], x, -infinity());
}
// dg of a task, and the next one's sums, unless gates are raw: what was given comes meanwhile. Of a next one without
// steps they are not read.
TILE void put_gates_and_sum(const params &p, shared &s, uint32_t i, int panel) {
  if (p.gates.gate != KDA_LOG) return put_gates(p, s, given_task(s.todo, i), panel, p.gates.gate);
  ht x;
  task next = {};
  if (is_task(p, i + 1)) next = given_task(s.todo, i + 1);
  kda_gates given = p.gates;
  given.g.step = anew(given.g.step);
  take_given(x, given, next.at, p.key_dim, 64 * panel);
  put_gates(p, s, given_task(s.todo, i), panel, KDA_LOG);
  hc none;
  fill(none, 0.f);
  map(x, none, Q, [](float y, float) { return log_decay(y); });     // of nothing: nothing
  wg_sync();                                // everybody has read what l's place had
  sum_down(s.l[panel], x, -infinity());
}

// norm_q by the first warpgroup, norm_k by the last of its half.
TILE void put_norms(const params &p, shared &s, int wg) {
  rv norm;
  fill(norm, 1.f);
  if (wg == 0) {
    if (p.gates.norm) take_norms(norm, s.q);
    store(s.norm_q, norm);
  }
  if (wg == PANELS - 1) {
    if (p.gates.norm) take_norms(norm, s.k);
    store(s.norm_k, norm);
  }
}

TILE void prefetch_given(const params &p, const task &t, int panel) {
  const kda_given &g = p.gates.g;
  int n = p.key_dim - 64 * panel;
  if (g.is_float) prefetch(first_of<float>(g, t.at) + 64 * panel, g.step, t.at.steps, n);
  else prefetch(first_of<elem>(g, t.at) + 64 * panel, g.step, t.at.steps, n);
}

TILE void compute(const params &p, shared &s, int wg) {
  int panel = wg % PANELS, half = wg / PANELS;
  for (uint32_t i = 0; is_task(p, i); i++) {
    wait_for_task(s.todo, i);
    task t = given_task(s.todo, i);
    ring_pos at = ring_at<1>(i);
    if (t.at.steps <= 0) {
      ring_wait(s.matrices, at);
      sem_arrive<WARPGROUP>(s.matrices.empty[0]);
      ring_wait(s.rows, at);
      if (half == 0 && rows_of(t) > 0) put_none(p, s, i, panel);
      sem_arrive<WARPGROUP>(s.rows.empty[0]);
      continue;
    }
    if (half == 1) {
      if (is_first(t) || p.gates.gate != KDA_LOG) sum_gates(p, s, t, panel);
    } else if (wg == 0) {
      rv beta;
      take_beta(beta, p.gates, t.at);
      store(s.beta, beta);
    }
    tma_store_wait_read();                    // of the task before; then all sync
    ring_wait(s.matrices, at);
    const int steps = given_task(s.todo, i).at.steps;    // read again: kept, its registers lack in the gates
    if (steps < Q || p.gates.norm) ring_wait(s.rows, at);
    if (steps < Q) clear_behind(s, steps, wg);
    if (half == 0) {
      put_norms(p, s, wg);
      half_sync();
      if (wg == 0) make_a(p, s);
      if (wg == PANELS - 1) make_b(s);
      make_kept(s, panel);
    }
    ring_wait(s.rows, at);
    all_sync();
    if (half == 1 && is_task(p, i + 1)) {
      wait_for_task(s.todo, i + 1);
      t = given_task(s.todo, i + 1);
      if (t.at.steps > 0) prefetch_given(p, t, panel);
    }
    ROLLED for (int n = 2 * half; n < 2 * half + 2; n++) {
      grads g;
      take_states(s, g, p.scale, i, n, panel);
      if (n & 1) ring_release(s.matrices, at);
      if (is_near(s, g, n, panel)) take_near(s, g, n, panel);
      else {
        const int m = (int)anew(n);           // as there
        take_others(s, g, m, panel);
        UNROLLED for (int h = GROUP / 2; h > 1; h /= 2) take_level(s, g, h, m, panel);
        take_neighbours(s, g, m, panel);
      }
      take_dots(p, s, g, n, panel);
      if (n & 1 || p.gates.norm) all_sync();
      if (n & 1) put_parts(s, g, n, wg);
      put(p, s, i, g, GROUP * n, wg);
      if (n & 1) continue;
      tma_store_wait_read();                  // dg goes to where they lie
      wg_sync();
      store(dl_before(s, wg), g.dl);
    }
    t = given_task(s.todo, i);
    ring_release(s.rows, at);
    if (wg == 0) put_betas(p, s, t);
    panel_sync(panel);
    if (half == 1) put_gates_and_sum(p, s, i, panel);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, GROUPS, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, Q, 1)
