// The gated delta rule's gradients, of all chunks of 64 steps at once, from S in front of each chunk, R = the errors
// v_i - S_(i-1)^T k_i (delta_sweep.cu), D = the gradient of the state behind it and dV (delta_back.cu). With l_i the
// sum of the log decays inside the chunk, e its last step, and of each head
//   F_ij = scale e^(l_i - l_j) dO_i . R_j for j <= i,  E_ij = e^(l_i - l_j) dV_i . R_j for j < i
//   dQ = scale e^(l_i) dO S^T + F diag(beta) K
//   dK = -e^(l_i) dV S^T - E diag(beta) K + diag(beta) (F^T Q - E^T K + e^(l_e - l_j) R D^T)
//   dbeta_j = sum over i of N_ij + out_j
//   N_ij = F_ij (q_i . k_j) - E_ij (k_i . k_j),  out_j = e^(l_e - l_j) k_j . D R_j
// Nothing is divided by beta, which may be 0. With row_i and col_j the sums of N_ij beta_j over j < i, and in_i the
// parts of q_i . dQ_i and k_i . dK_i that come from S, the gradient of the log decay of step t is
//   dg_t = sum over i >= t of (row_i - col_i + in_i) + e^(l_e) <S, D> + sum over j < t of beta_j out_j
// A pair is in row and col with the same number, so where it does not cross t it cancels; N's diagonal would be in both
// and is in neither: with a strong decay it is all there is. <S, D> is the sum of the diagonal of S D^T.
// Factors of the norms of q and k are in the chunk's vectors. The part of a gradient along its row is taken out last.
// A block works on one chunk of the heads of a group after another, and on 64 columns of v at a time (a panel). What
// waits here is instructions: each role goes through its own once a head, and all of them are more than their cache
// holds. So F and E go through the same ones, the loader works out for all where a chunk lies, and gradients leave by
// copies; what few chunks want is called (tile/cold.h).
// Roles: a loader thread; a scan warp: gates -> a head's vectors; a trim warp: clears what is another sequence's; a
// collect warp: what the others found -> dg, dbeta, shares of da_log and ddt_bias; a warpgroup for pairs of steps; one
// for dQ, one for dK.
//
// Registers of a thread, N = 128          tiles that live together            vectors and the rest
//   pairs, 160                            F 32, E 32, S D^T or scores 32      column sums 16, rows 10, 40
//   give_dq, give_dk, 160                 product 64, dQ or dK 64             rows 6, a tile's words 4, 14
//   loader, scan, trim, collect, 32       -                                   vectors of two each
#include "tile/cold.h"
#include "delta/delta_prepare.h"
#include "delta/delta_bwd.h"

// N (columns of q and k) and *_REGS come from the row.
// Parts of N's column sums, without its diagonal; the diagonal; the sums of its rows times beta; of in, what is q's and
// what is k's; out; rows of <S, D>
struct found { sv<4 * Q> col; sv<Q> own, row, of_q, of_k, out, kept; };
// step: the chunk's first, end: its row's, stop: of what is written. heads: 0 in an empty place
struct task { int batch, chunk, group, heads, step, end, stop; };
enum { TASKS = 3 };             // whose places are known at a time
union behind {                  // give_dk has both to itself, from the last pairs of a task to the next task's
  st<elem, Q, Q> e;             // -E diag(beta)
  st<elem, Q, N> dk;
};
struct shared {
  st<elem, Q, N> q[2], k[2], state[2], dstate[2];
  st<elem, Q, 64> errors[2], dout[2], dv[2];
  st<elem, Q, Q> f;                               // F diag(beta)
  behind last;
  st<elem, Q, N> dq;
  chunk_vectors v[2];
  found found_of[2];
  task tasks[TASKS];
  ring<2, ASYNC_READS> qk_ring;                   // give_dq and give_dk read it into registers too, and fence
  ring<2, ASYNC_READS> later, earlier;            // of panels: R and D; dO, dV and S
  ring<1, ASYNC_READS> weights;
  ring<2, ASYNC_READS> v_ring, found_ring;        // plain stores only, which need no fence
  ring<TASKS, ASYNC_READS> todo;
  sem qk_last[2], later_last[2], earlier_last[2]; // tiles of a chunk that runs over are there, and to be cleared
};
typedef delta_grads_params params;

TILE void init(shared &s) {
  ring_init(s.qk_ring, arrivals(1, 0, 0), arrivals(0, 0, 3));
  ring_init(s.v_ring, arrivals(0, 1, 0), arrivals(0, 1, 3));
  ring_init(s.later, arrivals(1, 0, 0), arrivals(0, 0, 2));
  ring_init(s.earlier, arrivals(1, 0, 0), arrivals(0, 0, 3));
  ring_init(s.weights, arrivals(0, 0, 1), arrivals(0, 0, 2));
  ring_init(s.found_ring, arrivals(0, 0, 3), arrivals(0, 1, 0));
  ring_init(s.todo, arrivals(1, 0, 0), arrivals(0, 3, 3));
  for (int i = 0; i < 2; i++) {
    sem_init(s.qk_last[i], arrivals(1, 0, 0));
    sem_init(s.later_last[i], arrivals(1, 0, 0));
    sem_init(s.earlier_last[i], arrivals(1, 0, 0));
  }
}

TILE task task_at(const params &p, int index) {
  int at = index / p.key_heads, group = index - at * p.key_heads, batch = at / p.chunks, chunk = at - batch * p.chunks;
  chunk_steps steps = steps_at(p.rows, chunk);
  bool last = p.rows.starts && chunk >= row_place(p.rows, p.rows.rows - 1);
  return {batch, chunk, group, steps.end > steps.step ? p.rows.group_heads : 0, steps.step, steps.end,
          last ? p.rows.steps : steps.end};
}
// The n-th (thread)
TILE void give_task(shared &s, uint32_t n, const task &t) {
  ring_pos at = ring_at<TASKS>(n);
  task &to = s.tasks[at.stage];
  ring_acquire(s.todo, at);
  put(to.batch, t.batch);
  put(to.chunk, t.chunk);
  put(to.group, t.group);
  put(to.heads, t.heads);
  put(to.step, t.step);
  put(to.end, t.end);
  put(to.stop, t.stop);
  sem_arrive<THREAD>(s.todo.full[at.stage]);
}
// Until its place is released.
TILE task given_task(const shared &s, uint32_t n) {
  const task &t = s.tasks[n % TASKS];
  return {get(t.batch), get(t.chunk), get(t.group), get(t.heads), get(t.step), get(t.end), get(t.stop)};
}
// The whole of what a warp wants of it.
TILE task take_task(shared &s, uint32_t n) {
  ring_wait(s.todo, ring_at<TASKS>(n));
  task t = given_task(s, n);
  ring_release<WARP>(s.todo, ring_at<TASKS>(n));
  return t;
}
TILE int head_of(const task &t, int u) { return t.group * t.heads + u; }
// Of a head, as the gates' functions want it.
TILE row_task row_of(const task &t, int head) {
  return {t.batch, t.batch, head, t.group, t.step, t.end, t.chunk, 1};
}
TILE bool runs_over(const params &p, const task &t) { return runs_over(p.rows, t.step, t.end); }

TILE void loader(const params &p, shared &s, int) {
  ring_pos qk = {}, at = {};
  uint32_t n = 0;
  for (int index = block_index(); index < p.tasks; index += block_count(), n++) {
    task t = task_at(p, index);
    give_task(s, n, t);
    if (!t.heads) continue;
    bool over = runs_over(p, t);
    sem &full = over ? s.qk_last[qk.stage] : s.qk_ring.full[qk.stage];
    ring_acquire(s.qk_ring, qk);
    sem_expect(full, 2 * tile_bytes(s.q[0]));
    tma_load(s.q[qk.stage], p.q, full, t.step, 0, t.group, t.batch);
    tma_load(s.k[qk.stage], p.k, full, t.step, 0, t.group, t.batch);
    ring_next(s.qk_ring, qk);
    for (int u = 0; u < t.heads; u++) {
      int head = head_of(t, u), matrix = t.batch * p.rows.heads + head;
      int first = p.rows.starts ? 0 : p.rows.from;
      for (int panel = 0; panel < p.panels; panel++) {
        int i = at.stage, col = panel * 64;
        sem &later = over ? s.later_last[i] : s.later.full[i], &earlier = over ? s.earlier_last[i] : s.earlier.full[i];
        ring_acquire(s.later, at);
        sem_expect(later, tile_bytes(s.errors[0]) + tile_bytes(s.dstate[0]));
        tma_load(s.errors[i], p.errors, later, t.step - first, col, head, t.batch);
        tma_load(s.dstate[i], p.dstates, later, col, 0, t.chunk, matrix);
        ring_acquire(s.earlier, at);
        sem_expect(earlier, 2 * tile_bytes(s.dout[0]) + tile_bytes(s.state[0]));
        tma_load(s.dout[i], p.dout, earlier, t.step, col, head, t.batch);
        tma_load(s.dv[i], p.dv, earlier, t.step, col, head, t.batch);
        tma_load(s.state[i], p.states, earlier, col, 0, t.chunk, matrix);
        ring_next(s.later, at);
      }
    }
  }
}

// The phase of a semaphore that not every use of its stage completes: bit `stage` of `phases` says it.
TILE void wait_last(sem (&last)[2], int stage, int &phases) {
  sem_wait(last[stage], phases >> stage & 1);
  phases ^= 1 << stage;
}
TILE void trim(const params &p, shared &s, int) {
  ring_pos qk = {}, at = {};
  int qk_phases = 0, later_phases = 0, earlier_phases = 0;
  uint32_t i = 0;
  for (int index = block_index(); index < p.tasks; index += block_count(), i++) {
    task t = take_task(s, i);
    if (!t.heads) continue;
    bool over = runs_over(p, t);
    int steps = t.end - t.step;
    if (over) {
      wait_last(s.qk_last, qk.stage, qk_phases);
      clear_rows<WARP>(s.q[qk.stage], 0, steps);
      clear_rows<WARP>(s.k[qk.stage], 0, steps);    // who reads them has waited for a panel: its fence does
      sem_arrive<WARP>(s.qk_ring.full[qk.stage]);
    }
    ring_next(s.qk_ring, qk);
    for (int i = 0; i < t.heads * p.panels; i++) {
      if (over) {
        wait_last(s.later_last, at.stage, later_phases);
        clear_rows<WARP>(s.errors[at.stage], 0, steps);
        fence_async();
        sem_arrive<WARP>(s.later.full[at.stage]);
        wait_last(s.earlier_last, at.stage, earlier_phases);
        clear_rows<WARP>(s.dout[at.stage], 0, steps);
        clear_rows<WARP>(s.dv[at.stage], 0, steps);
        fence_async();
        sem_arrive<WARP>(s.earlier.full[at.stage]);
      }
      ring_next(s.later, at);
    }
  }
}

// ---- the scan warp
TILE void scan(const params &p, shared &s, int) {
  ring_pos at = {};
  given_steps given;
  uint32_t i = 0;
  for (int index = block_index(); index < p.tasks; index += block_count(), i++) {
    task t = take_task(s, i);
    for (int u = 0; u < t.heads; u++) {
      int head = head_of(t, u);
      load_given(given, p.rows, p.gates, row_of(t, head), t.step);
      ring_acquire(s.v_ring, at);
      put_vectors(s.v[at.stage], given, p.gates, head, p.scale);
      sem_arrive<WARP>(s.v_ring.full[at.stage]);
      ring_next(s.v_ring, at);
    }
  }
}

// ---- the collect warp
TILE void plus(wv<Q> &a, const wv<Q> &b) { map(a, a, b, [](float x, float y) { return x + y; }); }
TILE void plus(wv<Q> &a, const sv<Q> &b) {
  wv<Q> x;
  load(x, b);
  plus(a, x);
}
TILE int64_t gate_at(const params &p, const task &t, int head) {
  return ((int64_t)t.batch * p.rows.steps + t.step) * p.rows.heads + head;
}
// Of what was given: the share of da_log, and dg in place; dbeta.
TILE float slope_g(const params &p, wv<Q> &dg, const task &t, int head) {
  if (!p.gates.a_log) return 0.f;
  wv<Q> given, x;
  float a = -fast_exp2(p.gates.a_log[head] * 1.4426950408889634f), bias = p.gates.dt_bias ? p.gates.dt_bias[head] : 0.f;
  load(given, p.gates.g + gate_at(p, t, head), p.rows.heads, t.end - t.step, -infinity());
  map(x, given, dg, [=](float g, float d) { return a * softplus(g + bias) * d; });
  map(dg, given, dg, [=](float g, float d) { return a * sigmoid(g + bias) * d; });
  return sum_of(x);
}
TILE void slope_beta(const params &p, wv<Q> &dbeta, const wv<Q> &beta) {
  float most = p.gates.most;
  if (p.gates.sigmoid) map(dbeta, dbeta, beta, [=](float d, float b) { return d * b * (1.f - b / most); });
}
TILE void put(const params &p, const task &t, float *g, int head, const wv<Q> &v) {
  if (g) store(g + gate_at(p, t, head), p.rows.heads, v, t.stop - t.step);
}
TILE void put_share(const params &p, const task &t, int kind, int head, float x) {
  wv<Q> v;
  fill(v, x);
  int place = p.rows.starts ? t.chunk : p.rows.from / Q + t.chunk;
  store(p.sums + ((int64_t)(t.batch * 3 + kind) * p.all_places + place) * p.rows.heads + head, 1, v, 1);
}
TILE void collect(const params &p, shared &s, int) {
  ring_pos at = {}, vs = {};
  wv<Q> beta, x, dg, dbeta;
  uint32_t i = 0;
  for (int index = block_index(); index < p.tasks; index += block_count(), i++) {
    task t = take_task(s, i);
    for (int u = 0; u < t.heads; u++) {
      int head = head_of(t, u);
      found &f = s.found_of[at.stage];
      ring_wait(s.v_ring, vs);
      load(beta, s.v[vs.stage].beta);
      float end = fast_exp2(get(s.v[vs.stage].l, Q - 1));
      ring_release<WARP>(s.v_ring, vs);
      ring_next(s.v_ring, vs);
      ring_wait(s.found_ring, at);
      fill(dbeta, 0.f);
      UNROLLED for (int i = 0; i < 4; i++) plus(dbeta, slice<Q>(f.col, Q * i));
      map(dg, beta, dbeta, [](float b, float x) { return -b * x; });
      plus(dbeta, f.own);
      load(x, f.out);
      plus(dbeta, x);
      map(x, beta, x, [](float b, float x) { return b * x; });
      slope_beta(p, dbeta, beta);
      put(p, t, p.dbeta, head, dbeta);
      plus(dg, f.row);
      plus(dg, f.of_q);
      plus(dg, f.of_k);
      load(beta, f.kept);
      end *= sum_of(beta);
      ring_release<WARP>(s.found_ring, at);
      ring_next(s.found_ring, at);
      cumsum_down(dg);
      map(dg, dg, x, [=](float d, float out) { return d - out + end; });
      cumsum(x);
      plus(dg, x);
      float share = slope_g(p, dg, t, head);
      int n = t.end - t.step;
      map_index(x, [=](int i) { return i < n ? 1.f : 0.f; });
      map(dg, dg, x, [](float d, float there) { return there > 0.f ? d : 0.f; });
      put(p, t, p.dg, head, dg);
      if (p.sums) {
        put_share(p, t, 0, head, share);
        put_share(p, t, 2, head, sum_of(dg));
      }
    }
    if (t.heads) continue;
    fill(x, 0.f);
    for (int i = 0; i < p.rows.group_heads; i++) {
      int head = t.group * p.rows.group_heads + i;
      put(p, t, p.dg, head, x);
      put(p, t, p.dbeta, head, x);
    }
  }
}

// Where a role is, in tasks, heads and panels: fewer registers than a position in each of the rings.
struct counts { uint32_t task, head, panel; };

// ---- pairs of steps: row i, column j
TILE void pairs(const params &p, shared &s, int) {
  counts n = {};
  rt<float, Q> f, e, both;
  uint32_t i = 0;
  for (int index = block_index(); index < p.tasks; index += block_count(), i++) {
    ring_wait(s.todo, ring_at<TASKS>(i));
    task t = given_task(s, i);
    ring_release(s.todo, ring_at<TASKS>(i));
    if (!t.heads) continue;
    for (int u = 0; u < t.heads; u++, n.head++) {
      rsum kept, own, row;
      csum<Q> col;
      rv l, factor;
      fill(f, 0.f);
      fill(e, 0.f);
      fill(kept, 0.f);
      for (int panel = 0; panel < p.panels; panel++, n.panel++) {
        ring_pos at = ring_at<2>(n.panel);
        int i = at.stage;
        ring_wait(s.later, at);
        ring_wait(s.earlier, at);
        mma_fence();
        mma_ABt<ZERO>(both, s.state[i], s.dstate[i]);
        mma_ABt<ACC>(f, s.dout[i], s.errors[i]);
        mma_ABt<ACC>(e, s.dv[i], s.errors[i]);
        mma_commit();
        mma_wait<0>(both, f, e);
        ring_release(s.later, at);
        ring_release(s.earlier, at);
        each<Q>([](int row, int col, float x, float &sum) { sum += row == col ? x : 0.f; },
                (const rt<float, Q> &)both, kept);
      }
      ring_pos qk = ring_at<2>(n.task), with = ring_at<2>(n.head), to = ring_at<1>(n.head);
      const chunk_vectors &v = s.v[with.stage];
      ring_wait(s.qk_ring, qk);
      fill(own, 0.f);
      fill(row, 0.f);
      clear(col);
      ROLLED for (int kind = 0; kind < 2; kind++) {     // F, then -E, which has no diagonal
        mma_fence();
        mma_ABt<ZERO>(both, kind ? s.k[qk.stage] : s.q[qk.stage], s.k[qk.stage]);
        mma_commit();
        if (kind == 0) ring_wait(s.v_ring, with);
        load(l, v.l);
        load(factor, kind ? v.norm_k : v.norm_q);
        map(factor, factor, [=](float x) { return kind ? -x : x; });
        mma_wait<0>(both);
        each<Q>([=](int i, int j, float &x, float score, float &col, float &row, float &own, float l, float r,
                    float from, float b) {
          x = j + kind > i ? 0.f : x * (r * fast_exp2(l - from));
          float n = x * score, pair = i == j ? 0.f : n;
          own += i == j ? n : 0.f;
          col += pair;
          row = fused(pair, b, row);
          x *= b;
        }, f, (const rt<float, Q> &)both, col, row, own, l, factor, v.from, v.beta);
        if (kind == 0) ring_acquire(s.weights, to);
        store(kind ? s.last.e : s.f, f);
        map(f, e, [](float, float x) { return x; });
      }
      ring_fill(s.weights, to);
      ring_release(s.v_ring, with);
      ring_acquire(s.found_ring, with);
      found &out = s.found_of[with.stage];
      store(out.col, col);
      reduce(factor, own);
      store(out.own, factor);
      reduce(factor, row);
      store(out.row, factor);
      reduce(factor, kept);
      store(out.kept, factor);
      sem_arrive(s.found_ring.full[with.stage]);
    }
    ring_release(s.qk_ring, ring_at<2>(n.task++));
  }
}

// ---- the gradients of rows
// Where a packed row ends, and, zeros, where no steps are.
COLD void put_last_rows(const params &p, const shared &s, uint32_t i, bool of_k) {
  task t = given_task(s, i);
  const int64_t *stride = of_k ? p.dk_stride : p.dq_stride;
  int64_t ld = stride[1];
  elem *to = (elem *)(of_k ? p.dk_data : p.dq_data) + t.batch * stride[0] + t.step * ld + t.group * stride[2];
  int rows = t.stop - t.step;
  ROLLED for (int c = 0; c < N; c += 64) {
    rt<float, 64> x;
    if (t.heads) load(x, of_k ? s.last.dk : s.dq, c);
    else fill(x, 0.f);
    store_rows<elem>(x, [=](int i) { return i < rows ? to + i * ld + c : (elem *)nullptr; }, p.key_dim - c);
  }
}
// Everybody knows that nothing is read there.
TILE void put_rows(st<elem, Q, N> &to, const rt<float, N> &d) {
  wg_sync();
  store(to, d);
  fence_async();
  wg_sync();
}
TILE void send_rows(const params &p, shared &s, uint32_t i, bool of_k) {
  task t = given_task(s, i);
  if (!t.heads || (p.rows.starts && t.stop - t.step < Q)) put_last_rows(p, s, i, of_k);
  else if (of_k) tma_store(p.dk, s.last.dk, t.step, 0, t.group, t.batch);
  else tma_store(p.dq, s.dq, t.step, 0, t.group, t.batch);
}
// Takes out the part along the given rows, whose factors are norm / scale.
TILE void take_along(rt<float, N> &d, const st<elem, Q, N> &given, const sv<Q> &norms, float scale) {
  rsum dot;
  rv factor, norm;
  fill(dot, 0.f);
  each<N>([](int, int, float x, float y, float &dot) { dot = fused(x, y, dot); }, (const rt<float, N> &)d, given, dot);
  reduce(factor, dot);
  load(norm, norms);
  map(factor, factor, norm, [=](float x, float n) { return x * (n * n) / (scale * scale); });
  each<N>([](int, int, float &x, float y, float f) { x -= y * f; }, d, given, (const rv &)factor);
}
// The sum over panels, which are released.
template<int R>
TILE void sum_panels(const params &p, rt<float, N> &product, ring<2, R> &panels, const st<elem, Q, 64> (&a)[2],
                     const st<elem, Q, N> (&b)[2], uint32_t n) {
  fill(product, 0.f);
  for (int panel = 0; panel < p.panels; panel++) {
    ring_pos at = ring_at<2>(n + panel);
    ring_wait(panels, at);
    mma_fence();
    mma_AB<ACC>(product, a[at.stage], b[at.stage]);
    mma_commit();
    mma_wait<0>(product);
    ring_release(panels, at);
  }
}
// sum += product f weight, row by row, and to = f times the dot product with the given row. Rows come with them.
TILE void add_and_dot(sv<Q> &to, rt<float, N> &sum, const rt<float, N> &product, const st<elem, Q, N> &given,
                      const rv &f, const rv &weight) {
  rsum dot;
  rv row;
  fill(dot, 0.f);
  each<N>([](int, int, float &sum, float x, float y, float &dot, float w) {
    dot = fused(x, y, dot);
    sum = fused(x, w, sum);
  }, sum, product, given, dot, (const rv &)weight);
  reduce(row, dot);
  map(row, row, f, [](float x, float f) { return x * f; });
  store(to, row);
}

TILE void give_dq(const params &p, shared &s, int) {
  counts n = {};
  rt<float, N> product, sum;
  rv f;
  uint32_t i = 0;
  for (int index = block_index(); index < p.tasks; index += block_count(), i++) {
    ring_wait(s.todo, ring_at<TASKS>(i));
    if (!given_task(s, i).heads) {
      send_rows(p, s, i, false);
      ring_release(s.todo, ring_at<TASKS>(i));
      continue;
    }
    ring_pos qk = ring_at<2>(n.task);
    fill(sum, 0.f);
    for (int u = 0; u < p.rows.group_heads; u++, n.head++, n.panel += p.panels) {
      ring_pos with = ring_at<2>(n.head), from = ring_at<1>(n.head);
      const chunk_vectors &v = s.v[with.stage];
      sum_panels(p, product, s.earlier, s.dout, s.state, n.panel);
      ring_wait(s.qk_ring, qk);
      ring_wait(s.v_ring, with);
      ring_acquire(s.found_ring, with);
      load(f, v.read);
      add_and_dot(s.found_of[with.stage].of_q, sum, product, s.q[qk.stage], f, f);
      sem_arrive(s.found_ring.full[with.stage]);
      if (u + 1 < p.rows.group_heads) ring_release(s.v_ring, with);
      ring_wait(s.weights, from);
      mma_fence();
      mma_AB<ACC>(sum, s.f, s.k[qk.stage]);
      mma_commit();
      mma_wait<0>(sum);
      ring_release(s.weights, from);
    }
    ring_pos last = ring_at<2>(n.head - 1);
    if (p.gates.norm_k) take_along(sum, s.q[qk.stage], s.v[last.stage].norm_q, p.scale);
    ring_release(s.v_ring, last);
    fence_async();
    ring_release(s.qk_ring, qk);
    n.task++;
    tma_store_wait_read();                    // that of the task before has left
    put_rows(s.dq, sum);
    send_rows(p, s, i, false);
    ring_release(s.todo, ring_at<TASKS>(i));
  }
  tma_store_wait_read();
}

TILE void give_dk(const params &p, shared &s, int) {
  counts n = {};
  rt<float, N> product, sum;
  rv f, weight;
  uint32_t i = 0;
  for (int index = block_index(); index < p.tasks; index += block_count(), i++) {
    ring_wait(s.todo, ring_at<TASKS>(i));
    if (!given_task(s, i).heads) {
      send_rows(p, s, i, true);
      ring_release(s.todo, ring_at<TASKS>(i));
      continue;
    }
    ring_pos qk = ring_at<2>(n.task);
    fill(sum, 0.f);
    for (int u = 0; u < p.rows.group_heads; u++, n.head++, n.panel += p.panels) {
      ring_pos with = ring_at<2>(n.head), from = ring_at<1>(n.head);
      const chunk_vectors &v = s.v[with.stage];
      found &found = s.found_of[with.stage];
      sum_panels(p, product, s.later, s.errors, s.dstate, n.panel);
      if (u == 0 && n.head) {
        tma_store_wait_read();                // dK of the task before has left from where E was
        ring_release(s.weights, ring_at<1>(n.head - 1));
      }
      ring_wait(s.qk_ring, qk);
      ring_wait(s.v_ring, with);
      ring_acquire(s.found_ring, with);
      load(f, v.weight);
      load(weight, v.beta);
      map(weight, weight, f, [](float beta, float f) { return beta * f; });
      add_and_dot(found.out, sum, product, s.k[qk.stage], f, weight);
      sum_panels(p, product, s.earlier, s.dv, s.state, n.panel);
      load(f, v.decay);
      map(f, f, [](float x) { return -x; });
      add_and_dot(found.of_k, sum, product, s.k[qk.stage], f, f);
      sem_arrive(s.found_ring.full[with.stage]);
      if (u + 1 < p.rows.group_heads) ring_release(s.v_ring, with);
      ring_wait(s.weights, from);
      mma_fence();
      mma_AtB<ACC>(sum, s.f, 0, s.q[qk.stage], 0);
      mma_AtB<ACC>(sum, s.last.e, 0, s.k[qk.stage], 0);
      mma_AB<ACC>(sum, s.last.e, s.k[qk.stage]);
      mma_commit();
      mma_wait<0>(sum);
      if (u + 1 < p.rows.group_heads) ring_release(s.weights, from);
    }
    ring_pos last = ring_at<2>(n.head - 1);
    if (p.gates.norm_k) take_along(sum, s.k[qk.stage], s.v[last.stage].norm_k, 1.f);
    ring_release(s.v_ring, last);
    fence_async();
    ring_release(s.qk_ring, qk);
    n.task++;
    put_rows(s.last.dk, sum);
    send_rows(p, s, i, true);
    ring_release(s.todo, ring_at<TASKS>(i));
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<pairs, WARPGROUP, 1, PAIR_REGS>, role<give_dq, WARPGROUP, 1, ROW_REGS>,
              role<give_dk, WARPGROUP, 1, ROW_REGS>, role<loader, THREAD, 1, LOAD_REGS>, role<trim, WARP, 1, LOAD_REGS>,
              role<collect, WARP, 1, LOAD_REGS>, role<scan, WARP, 1, LOAD_REGS>> kernel;
ENTRY(kernel, Q, 1)
