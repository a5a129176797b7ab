// Backward of Mamba-2's SSD (Dao & Gu 2024, section 6) in chunks of 64 steps, all of them at once. With l_i = sum of dt_k a for k <= i inside a chunk
// that ends with step e, S the state in front of the chunk and G the gradient of the state behind it (ssd_states.cu), and of every head
//   R_ij = (dy_i . x_j) e^(l_i - l_j) dt_j for j <= i,  w_j = dt_j e^(l_e - l_j):
//   dx_j = sum over i of (c_i . b_j) e^(l_i - l_j) dt_j dy_i + w_j G b_j + d dy_j
//   dc_i = sum over heads of [ sum over j of R_ij b_j + e^(l_i) S^T dy_i ]
//   db_j = sum over heads of [ sum over i of R_ij c_i + w_j G^T x_j ]
// R is summed over the heads of a group in registers before its products. The gradient of the log decay dt_t a of a step t is
//   D_t = sum over i >= t of (row_i - col_i + in_i) + e^(l_e) <G, S> + sum over j < t of out_j
// with row_i and col_j the sums of R_ij (c_i . b_j), in_i = e^(l_i) dy_i . S c_i and out_j = w_j x_j . G b_j; then
//   ddt_t = a D_t + (col_t + out_t) / dt_t,  da = sum of dt_t D_t,  dd = sum of x_t . dy_t
// where col / dt and out / dt are made without the division. Steps past the end read as dt = 0 and x = dy = 0.
// A block works on one chunk of the heads of one group, or on a part of them; 64 columns of P at a time, all of them linear. Roles: a loader thread;
// a scan warp: dt -> a head's vectors, and what the others found -> D; a warpgroup for what is 64 steps by 64, columns later than rows; two for the
// products with a state: dc, of dy and S, and db, of x and G.
//
// Registers of a thread, N = 128       tiles that live together                                 vectors and the rest
//   pairs, 168 registers               c.b 32, R 32, x.dy 32, then 16 of its copy, dx 32        column sums 16, rows 6, 18
//   give_dc, give_db, 160              product 64, dc or db 64                                  rows 6, a shared tile's words 4, 22
//   loader, scan, 24                   -                                                        vectors of two each, 7 at most
#include "tile/tile.h"
#include "ssd/ssd_bwd.h"
#include "ssd/ssd_steps.h"

// N: columns of the state, 64 or 128. STAGES
enum { Q = 64 };
struct vectors { sv<Q> l, dt, decay, weight, slope; };          // l_i in base 2; dt_j; e^(l_i); w_j; of dt with respect to what the caller gave
struct found { sv<4 * Q> row; sv<Q> col, in, out, kept, skip; };  // col without dt_j, in and out without their factors; rows of <G, S> and of x . dy
struct shared {
  st<elem, Q, N> b, c, state[STAGES], dstate[STAGES];
  st<elem, Q, 64> x[STAGES], dy[STAGES], dx, r;
  vectors v[2];
  found f[2];
  ring<STAGES> inputs;
  ring<2, ASYNC_READS> v_ring, f_ring;   // plain stores only, which need no fence
  sem bc_full, r_full;
};
typedef ssd_bwd_params params;

TILE void init(shared &s) {
  ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 3));
  ring_init(s.v_ring, arrivals(0, 1, 0), arrivals(0, 0, 3));
  ring_init(s.f_ring, arrivals(0, 0, 3), arrivals(0, 1, 0));
  sem_init(s.bc_full, arrivals(1, 0, 0));
  sem_init(s.r_full, arrivals(0, 0, 1));
}

// A unit is 64 columns of a head.
struct task { int batch, chunk, group, split, head0, units; };   // chunk: of the segment
TILE int parts(const params &p) { return (p.head_dim + 63) / 64; }
TILE task block_task(const params &p) {
  int split = block_index() % p.splits, at = block_index() / p.splits, group = at % p.groups;
  int heads = (p.group_heads + p.splits - 1) / p.splits, first = split * heads, end = first + heads;
  if (end > p.group_heads) end = p.group_heads;
  at /= p.groups;
  return {at / p.chunks, at % p.chunks, group, split, group * p.group_heads + first, end > first ? (end - first) * parts(p) : 0};
}

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  int step = (p.first + t.chunk) * Q;
  sem_expect(s.bc_full, 2 * tile_bytes(s.b));
  tma_load(s.b, p.b, s.bc_full, step, 0, t.group, t.batch);
  tma_load(s.c, p.c, s.bc_full, step, 0, t.group, t.batch);
  for (int u = 0; u < t.units; u++) {
    sem &full = s.inputs.full[at.stage];
    int head = t.head0 + u / parts(p), col = u % parts(p) * 64, matrix = t.batch * p.steps.heads + head;
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, 2 * tile_bytes(s.x[0]) + 2 * tile_bytes(s.state[0]));
    tma_load(s.x[at.stage], p.x, full, step, col, head, t.batch);
    tma_load(s.dy[at.stage], p.dy, full, step, col, head, t.batch);
    tma_load(s.dstate[at.stage], p.dstates, full, col, 0, t.chunk, matrix);
    tma_load(s.state[at.stage], p.states, full, col, 0, t.chunk, matrix);
    ring_next(s.inputs, at);
  }
}

// ---- the scan warp
TILE void give_vectors(const params &p, vectors &v, const wv<Q> &raw, int head) {
  wv<Q> dt, l, out;
  make_steps(dt, raw, p.steps, head);
  store(v.dt, dt);
  step_slopes(out, raw, p.steps, head);
  store(v.slope, out);
  log_decays(l, dt, p.steps, head);
  store(v.l, l);
  map(out, l, dt, [](float x, float) { return fast_exp2(x); });
  store(v.decay, out);
  float end = last(l);
  map(out, l, dt, [=](float x, float d) { return d * fast_exp2(end - x); });
  store(v.weight, out);
}
TILE float sum(wv<Q> a, const sv<Q> &b) {   // of a b
  wv<Q> x;
  load(x, b);
  map(a, a, x, [](float y, float z) { return y * z; });
  return sum_of(a);
}
// Adds a unit's share to ddt, and to the sum of dt D.
TILE void take_found(wv<Q> &ddt, float &da, float &dd, const params &p, const vectors &v, const found &f, int head) {
  wv<Q> x, y, late, early, own;
  float end = get(v.l, Q - 1), a = p.steps.a[head];
  load(late, f.in);
  load(x, v.decay);
  map(late, late, x, [](float d, float e) { return d * e; });
  UNROLLED for (int i = 0; i < 4; i++) {
    load(x, slice<Q>(f.row, Q * i));
    map(late, late, x, [](float d, float e) { return d + e; });
  }
  load(x, v.dt);
  load(own, f.col);
  map(y, own, x, [](float c, float d) { return c * d; });
  map(late, late, y, [](float d, float c) { return d - c; });
  cumsum_down(late);
  load(y, v.l);
  map(y, y, y, [=](float l, float) { return fast_exp2(end - l); });
  load(early, f.out);
  map(y, early, y, [](float d, float e) { return d * e; });
  map(own, own, y, [](float c, float d) { return c + d; });   // col and out, over dt
  map(y, y, x, [](float d, float e) { return d * e; });
  map(early, y, y, [](float d, float) { return d; });
  cumsum(early);
  map(early, early, y, [](float all, float d) { return all - d; });
  load(y, f.kept);
  float kept = fast_exp2(end) * sum_of(y);
  map(late, late, early, [=](float d, float e) { return d + e + kept; });
  map(ddt, ddt, own, [](float d, float e) { return d + e; });
  map(ddt, ddt, late, [=](float d, float e) { return fused(a, e, d); });
  da += sum(late, v.dt);
  if (p.skips) {
    load(y, f.skip);
    dd += sum_of(y);
  }
}
TILE void put_sum(const params &p, const task &t, int kind, int head, float x) {
  wv<Q> v;
  fill(v, x);
  store(p.sums + ((int64_t)(t.batch * 3 + kind) * p.all_chunks + p.first + t.chunk) * p.steps.heads + head, v, 1);
}

// A unit's vectors are given before the results of the unit in front of it are taken, so that nobody waits for them.
TILE void scan(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {}, done = {};
  int chunk = p.first + t.chunk;
  wv<Q> raw, next, ddt;
  float da = 0, dd = 0;
  if (t.units) load_steps(raw, p.steps, t.batch, chunk, t.head0);
  for (int u = 0; u < t.units + 1; u++) {
    if (u < t.units) {
      int head = t.head0 + u / parts(p);
      load_steps(next, p.steps, t.batch, chunk, u + 1 < t.units ? t.head0 + (u + 1) / parts(p) : head);
      ring_acquire(s.v_ring, at);
      give_vectors(p, s.v[at.stage], raw, head);
      sem_arrive<WARP>(s.v_ring.full[at.stage]);
      ring_next(s.v_ring, at);
      raw = next;
    }
    if (u == 0) continue;
    int head = t.head0 + (u - 1) / parts(p);
    vectors &v = s.v[done.stage];
    if ((u - 1) % parts(p) == 0) {
      fill(ddt, 0.f);
      da = dd = 0;
    }
    ring_wait(s.f_ring, done);
    take_found(ddt, da, dd, p, v, s.f[done.stage], head);
    ring_release<WARP>(s.f_ring, done);
    ring_next(s.f_ring, done);
    if (u % parts(p)) continue;
    wv<Q> slope;
    load(slope, v.slope);
    map(ddt, ddt, slope, [](float g, float f) { return g * f; });
    store(p.ddt + ((int64_t)t.batch * p.steps.count + chunk * Q) * p.steps.heads + head, p.steps.heads, ddt, p.steps.count - chunk * Q);
    put_sum(p, t, 0, head, da);
    if (p.skips) put_sum(p, t, 1, head, dd);
    if (p.biased) put_sum(p, t, 2, head, sum_of(ddt));
  }
}

// ---- pairs of steps: row j, column i
TILE void pairs(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {}, with = {};
  rt<float, Q> scores, x, r, dx;
  rt<elem, Q> weights;
  fill(r, 0.f);
  sem_wait(s.bc_full, 0);
  mma_fence();
  mma_ABt<ZERO>(scores, s.b, s.c);
  mma_commit();
  mma_wait<0>(scores);
  for (int u = 0; u < t.units; u++) {
    int head = t.head0 + u / parts(p);
    vectors &v = s.v[with.stage];
    found &f = s.f[with.stage];
    rv l, dt, weight;
    rsum col;
    csum<Q> row;
    float d = p.d ? p.d[head] : 0.f;
    ring_wait(s.inputs, at);
    mma_fence();
    mma_ABt<ZERO>(x, s.x[at.stage], s.dy[at.stage]);
    mma_commit();
    mma_ABt<ZERO>(dx, s.b, s.dstate[at.stage]);
    mma_commit();
    ring_wait(s.v_ring, with);
    load(l, v.l);
    load(dt, v.dt);
    load(weight, v.weight);
    fill(col, 0.f);
    clear(row);
    mma_wait<1>(x);
    each<Q>([=](int j, int i, float &x, float &r, float score, float &col, float &row, float li, float lj, float dtj) {
      float e = i < j ? 0.f : fast_exp2(li - lj), w = e * dtj, g = x * score;
      col = fused(g, e, col);
      row = fused(g, w, row);
      r = fused(x, w, r);
      x = fused(score, w, i == j ? d : 0.f);
    }, x, r, (const rt<float, Q> &)scores, col, row, v.l, l, dt);
    convert(weights, x);
    mma_wait<0>(dx);
    map_row(dx, weight, [](float g, float w) { return g * w; });
    mma_fence();
    mma_AB<ACC>(dx, weights, s.dy[at.stage]);
    mma_commit();
    ring_acquire(s.f_ring, with);
    store(f.row, row);
    reduce(l, col);
    store(f.col, l);
    sem_arrive(s.f_ring.full[with.stage]);
    ring_release(s.v_ring, with);
    ring_next(s.v_ring, with);
    tma_store_wait_read();
    wg_sync();
    mma_wait<0>(dx, weights);
    ring_done(s.inputs, at);
    store(s.dx, dx);
    fence_async();
    wg_sync();
    tma_store(p.dx, s.dx, (p.first + t.chunk) * Q, u % parts(p) * 64, head, t.batch);
  }
  store(s.r, r);
  fence_async();
  sem_arrive(s.r_full);
  tma_store_wait_read();
}

// ---- products with a state: 0, dc; 1, db
TILE void keep(const params &p, const task &t, int which, const rt<float, N> &sum) {
  int step = (p.first + t.chunk) * Q, rows = p.steps.count - step, n = p.state_dim;
  if (p.parts) {
    int64_t ld = (int64_t)p.groups * 2 * n, row = ((int64_t)t.split * (block_count() / p.splits / p.groups / p.chunks) + t.batch) * p.chunks * Q + t.chunk * Q;
    return store(p.parts + row * ld + (t.group * 2 + which) * n, ld, sum, rows, n);
  }
  elem *out = (elem *)(which ? p.db : p.dc);
  const int64_t *stride = which ? p.db_stride : p.dc_stride;
  int64_t ld = stride[1];
  out += t.batch * stride[0] + step * ld + t.group * stride[2];
  store_rows<elem>(sum, [=](int row) { return row < rows ? out + row * ld : nullptr; }, n);
}

TILE void contract(const params &p, shared &s, int which) {
  task t = block_task(p);
  ring_pos at = {}, with = {};
  rt<float, N> product, sum;
  fill(sum, 0.f);
  sem_wait(s.bc_full, 0);
  for (int u = 0; u < t.units; u++) {
    vectors &v = s.v[with.stage];
    found &f = s.f[with.stage];
    rsum dot, other;
    rv factor;
    ring_wait(s.inputs, at);
    mma_fence();
    mma_AB<ZERO>(product, which ? s.x[at.stage] : s.dy[at.stage], which ? s.dstate[at.stage] : s.state[at.stage]);
    mma_commit();
    fill(other, 0.f);
    fill(dot, 0.f);
    auto multiply = [](int, int, float x, float y, float &sum) { sum = fused(x, y, sum); };
    if (which) each<N>(multiply, s.state[at.stage], s.dstate[at.stage], other);
    else if (p.skips) each<64>(multiply, s.x[at.stage], s.dy[at.stage], other);
    ring_wait(s.v_ring, with);
    load(factor, which ? v.weight : v.decay);
    ring_release(s.v_ring, with);
    mma_wait<0>(product);
    ring_done(s.inputs, at);
    each<N>([](int, int, float x, float &sum, float y, float &dot, float f) {
      dot = fused(x, y, dot);
      sum = fused(x, f, sum);
    }, product, sum, which ? s.b : s.c, dot, factor);
    ring_acquire(s.f_ring, with);
    reduce(factor, dot);
    store(which ? f.out : f.in, factor);
    reduce(factor, other);
    if (which || p.skips) store(which ? f.kept : f.skip, factor);
    sem_arrive(s.f_ring.full[with.stage]);
    ring_next(s.f_ring, with);
  }
  sem_wait(s.r_full, 0);
  mma_fence();
  if (which) mma_AB<ZERO>(product, s.r, s.c);
  else mma_AtB<ZERO>(product, s.r, 0, s.b, 0);
  mma_commit();
  mma_wait<0>(product);
  map(sum, product, [](float x, float y) { return x + y; });
  keep(p, t, which, sum);
}

TILE void give_dc(const params &p, shared &s, int) { contract(p, s, 0); }
TILE void give_db(const params &p, shared &s, int) { contract(p, s, 1); }

typedef block<params, shared, init, role<pairs, WARPGROUP, 1, 168>, role<give_dc, WARPGROUP, 1, 160>, role<give_db, WARPGROUP, 1, 160>, role<loader, THREAD, 1, 24>, role<scan, WARP, 1, 24>> kernel;
ENTRY(kernel, Q, 1)
