// Backward of Mamba-2's SSD (Dao & Gu 2024, section 6) in chunks of 64 steps, all of them at once. With l_i = sum of
// dt_k a for k <= i inside a chunk that ends with step e, S the state in front of the chunk and G the gradient of the
// state behind it (ssd_states.cu), and of every head
//   R_ij = (dy_i . x_j) e^(l_i - l_j) dt_j for j <= i,  w_j = dt_j e^(l_e - l_j):
//   dx_j = sum over i of (c_i . b_j) e^(l_i - l_j) dt_j dy_i + w_j G b_j + d dy_j
//   dc_i = sum over heads of [ sum over j of R_ij b_j + e^(l_i) S^T dy_i ]
//   db_j = sum over heads of [ sum over i of R_ij c_i + w_j G^T x_j ]
// R is summed over the heads of a group in registers before its products. The gradient of the log decay dt_t a of a
// step t is
//   D_t = sum over i >= t of (row_i - col_i + in_i) + e^(l_e) <G, S> + sum over j < t of out_j
// with row_i and col_j the sums of R_ij (c_i . b_j), in_i = e^(l_i) dy_i . S c_i and out_j = w_j x_j . G b_j; then
//   ddt_t = a D_t + (col_t + out_t) / dt_t,  da = sum of dt_t D_t,  dd = sum of x_t . dy_t
// where col / dt and out / dt are made without the division, and row - col without R's diagonal, which is in both. Of
// linear attention (ssd_fwd.cu) D is itself a gradient; y's factor goes into R's weights and where a state is read.
// Steps past the end read as dt = 0 and x = dy = 0; where the next packed row follows in memory, the scan warp clears
// them. What would go from one sequence of seq_idx to another becomes 0.
// A block works on one chunk of the heads of one group, or on a part of them: 64 columns of P at a time, which all of
// this is linear in. States of more than 128 columns come in two passes over the heads; the first does all but the
// second half of dc and db.
// Roles: a loader thread; a scan warp: dt -> a head's vectors; a collect warp: what the others found -> ddt, and shares
// of da, dd and ddt_bias; a warpgroup for pairs of steps; two for the products with a state: dc, of dy and S, and db,
// of x and G.
//
// Registers of a thread, N = 128   tiles that live together                            vectors and the rest
//   pairs, 168                     c.b 32, R 32, x.dy 32, then 16 of its copy, dx 32   column sums 16, rows 8, 16
//   give_dc, give_db, 160          product 64, dc or db 64                             rows 6, a tile's words 4, 22
//   loader, scan, collect, 24      -                                                   vectors of two each, 7 at most
#include "tile/tile.h"
#include "ssd/ssd_steps.h"

// N: columns of the state, 64, 128 or 256. STAGES. A tile of the state has W columns
enum { Q = 64, W = N < 128 ? N : 128, PASSES = N / W, V = 4 };
// l_i in base 2; dt_j; e^(l_i); scale e^(l_i); scale e^(l_e - l_j); scale w_j; of dt with respect to what was given
struct vectors { sv<Q> l, dt, decay, read, tail, weight, slope; };
// Without the diagonal: row, and col without dt_j; the diagonal, without dt_j; in and out without their factors; rows
// of <G, S> and of x . dy
struct found { sv<4 * Q> row; sv<Q> col, own, in, out, kept, skip; };
struct shared {
  st<elem, Q, W> b[PASSES], c[PASSES], state[STAGES], dstate[STAGES][PASSES];
  st<elem, Q, 64> x[STAGES], dy[STAGES], dx, r;
  vectors v[V];
  found f[2];
  sv<Q> changes;
  ring<STAGES> inputs;
  ring<V, ASYNC_READS> v_ring;     // plain stores only, which need no fence
  ring<2, ASYNC_READS> f_ring;
  sem bc_full, r_full;
  sem bc_last, last[STAGES];       // tiles of a chunk that runs over are there, and to be cleared behind its end
};
typedef ssd_bwd_params params;

TILE void init(shared &s) {
  ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 3));
  ring_init(s.v_ring, arrivals(0, 1, 0), arrivals(0, 1, 3));
  ring_init(s.f_ring, arrivals(0, 0, 3), arrivals(0, 1, 0));
  sem_init(s.bc_full, arrivals(1, 0, 0));
  sem_init(s.r_full, arrivals(0, 0, 1));
  sem_init(s.bc_last, arrivals(1, 0, 0));
  for (int i = 0; i < STAGES; i++) sem_init(s.last[i], arrivals(1, 0, 0));
}

// A unit is 64 columns of a head; an empty place has none. chunk: of the segment; step: its first, end: its row's, stop:
// of what it writes
struct task { int batch, chunk, group, split, head0, heads, units, step, end, stop; };
TILE int parts(const params &p) { return (p.head_dim + 63) / 64; }
TILE task block_task(const params &p) {
  int split = block_index() % p.splits, at = block_index() / p.splits, group = at % p.groups;
  int heads = (p.group_heads + p.splits - 1) / p.splits, first = split * heads, end = first + heads;
  if (end > p.group_heads) end = p.group_heads;
  at /= p.groups;
  int chunk = at % p.chunks;
  chunk_steps steps = steps_of(p.steps, p.first + chunk);
  int count = end > first ? end - first : 0, units = steps.end > steps.step ? count * parts(p) : 0;
  return {at / p.chunks, chunk, group, split, group * p.group_heads + first, count, units, steps.step, steps.end,
          steps.stop};
}
// Counted, not divided: a division takes as long as a sum over a warp.
struct unit { int head, part; };
TILE void unit_next(const params &p, unit &u) {
  if (++u.part < parts(p)) return;
  u.part = 0;
  u.head++;
}
TILE bool runs_over(const params &p, const task &t) { return runs_over(p.steps, t.step, t.end); }

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  bool over = runs_over(p, t);
  sem &bc = over ? s.bc_last : s.bc_full;
  sem_expect(bc, 2 * PASSES * tile_bytes(s.b[0]));
  for (int pass = 0; pass < PASSES; pass++) {
    tma_load(s.b[pass], p.b, bc, t.step, pass * W, t.group, t.batch);
    tma_load(s.c[pass], p.c, bc, t.step, pass * W, t.group, t.batch);
  }
  for (int pass = 0; pass < PASSES; pass++) {
    unit w = {t.head0, 0};
    for (int u = 0; u < t.units; u++, unit_next(p, w)) {
      sem &full = over ? s.last[at.stage] : s.inputs.full[at.stage];
      int head = w.head, col = w.part * 64, matrix = t.batch * p.steps.heads + head;
      ring_acquire(s.inputs, at);
      sem_expect(full, 2 * tile_bytes(s.x[0]) + (1 + PASSES - pass) * tile_bytes(s.state[0]));
      tma_load(s.x[at.stage], p.x, full, t.step, col, head, t.batch);
      tma_load(s.dy[at.stage], p.dy, full, t.step, col, head, t.batch);
      for (int i = pass; i < PASSES; i++) tma_load(s.dstate[at.stage][i], p.dstates, full, col, i * W, t.chunk, matrix);
      tma_load(s.state[at.stage], p.states, full, col, pass * W, t.chunk, matrix);
      ring_next(s.inputs, at);
    }
  }
}

// ---- the scan warp
TILE void give_vectors(const params &p, vectors &v, const wv<Q> &raw, const wv<Q> &changes, int head) {
  wv<Q> dt, l, out;
  step_slopes(out, raw, p.steps, head);
  store(v.slope, out);
  log_decays(dt, l, raw, p.steps.dt, head);
  store(v.dt, dt);
  store(v.l, l);
  decays_from_begin(out, l, changes);
  float scale = p.scale;
  store(v.decay, out);
  map(out, out, out, [=](float e, float) { return e * scale; });
  store(v.read, out);
  decays_to_end(out, l, changes);
  map(out, out, out, [=](float e, float) { return e * scale; });
  store(v.tail, out);
  map(out, out, dt, [](float e, float d) { return e * d; });
  store(v.weight, out);
}
// The next unit's dt is under way while this one's is worked on.
TILE void scan(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {}, in = {};
  bool over = runs_over(p, t);
  wv<Q> raw, next, changes;
  count_changes(changes, p.steps, t.batch, t.step, t.end);
  store(s.changes, changes);
  if (over) {
    sem_wait(s.bc_last, 0);
    for (int i = 0; i < PASSES; i++) {
      clear_rows<WARP>(s.b[i], 0, t.end - t.step);
      clear_rows<WARP>(s.c[i], 0, t.end - t.step);
    }
    fence_async();
    sem_arrive<WARP>(s.bc_full);
  }
  if (t.units) load_steps(raw, p.steps, t.batch, t.step, t.end, t.head0);
  unit w = {t.head0, 0};
  for (int u = 0; u < PASSES * t.units; u++) {
    int head = w.head;
    unit_next(p, w);
    if (u + 1 == t.units || u + 1 == PASSES * t.units) w = {t.head0, 0};   // the next pass, if there is one
    load_steps(next, p.steps, t.batch, t.step, t.end, w.head);
    ring_acquire(s.v_ring, at);
    give_vectors(p, s.v[at.stage], raw, changes, head);
    sem_arrive<WARP>(s.v_ring.full[at.stage]);
    ring_next(s.v_ring, at);
    raw = next;
    if (!over) continue;
    sem_wait(s.last[in.stage], in.phase);
    clear_rows<WARP>(s.x[in.stage], 0, t.end - t.step);
    clear_rows<WARP>(s.dy[in.stage], 0, t.end - t.step);
    fence_async();
    sem_arrive<WARP>(s.inputs.full[in.stage]);
    ring_next(s.inputs, in);
  }
}

// ---- the collect warp
TILE void multiply(wv<Q> &a, const sv<Q> &b) {
  wv<Q> x;
  load(x, b);
  map(a, a, x, [](float y, float z) { return y * z; });
}
TILE void plus(wv<Q> &a, const wv<Q> &b) { map(a, a, b, [](float x, float y) { return x + y; }); }
// Adds a unit's share to ddt, and to the sum of dt D.
TILE void take_found(wv<Q> &ddt, float &da, const params &p, const vectors &v, const found &f, int head, int pass) {
  wv<Q> d, x, y, own;
  load(x, f.kept);
  bool gates = p.steps.dt.gates;
  float kept = get(v.decay, Q - 1) * sum_of(x) * p.scale, a = gates ? 1.f : p.steps.dt.a[head];
  load(d, f.in);
  multiply(d, v.read);
  fill(own, 0.f);
  if (pass == 0) {
    UNROLLED for (int i = 0; i < 4; i++) {
      load(x, slice<Q>(f.row, Q * i));
      plus(d, x);
    }
    load(own, f.col);
    x = own;
    multiply(x, v.dt);
    map(d, d, x, [](float y, float c) { return y - c; });
    load(x, f.own);
    plus(own, x);
  }
  cumsum_down(d);
  load(x, f.out);
  multiply(x, v.tail);
  plus(own, x);             // col and out, over dt
  multiply(x, v.dt);
  y = x;
  cumsum(y);
  map(y, y, x, [](float all, float z) { return all - z; });
  map(d, d, y, [=](float late, float early) { return late + early + kept; });
  map(own, own, d, [=](float z, float e) { return fused(a, e, gates ? 0.f : z); });
  plus(ddt, own);
  multiply(d, v.dt);
  da += sum_of(d);
}
// A later pass adds to what an earlier one wrote.
TILE void put_sum(const params &p, const task &t, int kind, int head, float x, int pass) {
  float *g = p.sums + ((int64_t)(t.batch * 3 + kind) * p.all_chunks + p.first + t.chunk) * p.steps.heads + head;
  wv<Q> v, before;
  fill(v, x);
  if (pass) {
    load(before, g, 1, 1, 0.f);
    plus(v, before);
  }
  store(g, v, 1);
}
TILE void put_ddt(const params &p, const task &t, int head, wv<Q> &ddt, int pass) {
  float *g = p.ddt + ((int64_t)t.batch * p.steps.count + t.step) * p.steps.heads + head;
  wv<Q> before;
  if (p.biased) put_sum(p, t, 2, head, sum_of(ddt), pass);
  if (pass) {
    load(before, g, p.steps.heads, t.stop - t.step, 0.f);
    plus(ddt, before);
  }
  store(g, p.steps.heads, ddt, t.stop - t.step);
}
TILE void collect(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {}, with = {};
  wv<Q> ddt, x;
  float da = 0, dd = 0;
  for (int pass = 0; pass < PASSES; pass++) {
    unit w = {t.head0, 0};
    for (int u = 0; u < t.units; u++, unit_next(p, w)) {
      int head = w.head;
      bool last = w.part + 1 == parts(p);
      vectors &v = s.v[at.stage];
      found &f = s.f[with.stage];
      if (w.part == 0) {
        fill(ddt, 0.f);
        da = dd = 0;
      }
      ring_wait(s.f_ring, with);       // who found it has waited for the vectors
      take_found(ddt, da, p, v, f, head, pass);
      if (p.skips && !pass) {
        load(x, f.skip);
        dd += sum_of(x);
      }
      ring_release<WARP>(s.f_ring, with);
      if (last) multiply(ddt, v.slope);
      ring_release<WARP>(s.v_ring, at);
      ring_next(s.f_ring, with);
      ring_next(s.v_ring, at);
      if (!last) continue;
      if (p.ddt) put_ddt(p, t, head, ddt, pass);
      if (p.sums) put_sum(p, t, 0, head, da, pass);
      if (p.skips && !pass) put_sum(p, t, 1, head, dd, 0);
    }
  }
}

// ---- pairs of steps: row j, column i
TILE void put_dx(const params &p, shared &s, const task &t, const rt<float, 64> &dx, int head, int col) {
  if (runs_over(p, t)) {
    int64_t ld = p.dx_stride[1];
    elem *to = (elem *)p.dx_data + t.batch * p.dx_stride[0] + t.step * ld + head * p.dx_stride[2] + col;
    int steps = t.stop - t.step;
    return store_rows<elem>(dx, [=](int j) { return j < steps ? to + j * ld : (elem *)nullptr; }, p.head_dim - col);
  }
  store(s.dx, dx);
  fence_async();
  wg_sync();
  tma_store(p.dx, s.dx, t.step, col, head, t.batch);
}

// Steps in no row have no gradients.
TILE void put_none(const params &p, shared &s, const task &t) {
  rt<float, 64> zero;
  unit w = {t.head0, 0};
  fill(zero, 0.f);
  for (int u = 0; u < t.heads * parts(p); u++, unit_next(p, w)) put_dx(p, s, t, zero, w.head, w.part * 64);
  float *ddt = p.ddt + ((int64_t)t.batch * p.steps.count + t.step) * p.steps.heads + t.head0;
  for (int i = 0; p.ddt && i < t.heads; i += 64)
    store(ddt + i, p.steps.heads, zero, t.stop - t.step, t.heads - i);
}

TILE void pairs(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {}, vs = {}, with = {};
  rt<float, Q> scores, x, r, dx;
  rt<elem, Q> weights;
  fill(r, 0.f);
  sem_wait(s.bc_full, 0);
  mma_fence();
  mma_ABt<ZERO>(scores, s.b[0], s.c[0]);
  if (PASSES == 2) mma_ABt<ACC>(scores, s.b[PASSES - 1], s.c[PASSES - 1]);
  mma_commit();
  mma_wait<0>(scores);
  unit w = {t.head0, 0};
  if (!t.units) put_none(p, s, t);
  for (int u = 0; u < t.units; u++, unit_next(p, w)) {
    int head = w.head;
    vectors &v = s.v[vs.stage];
    found &f = s.f[with.stage];
    rv l, dt, weight;
    rsum col, own;
    csum<Q> row;
    float d = p.d ? p.d[head] : 0.f;
    ring_wait(s.inputs, at);
    mma_fence();
    mma_ABt<ZERO>(x, s.x[at.stage], s.dy[at.stage]);
    mma_commit();
    mma_ABt<ZERO>(dx, s.b[0], s.dstate[at.stage][0]);
    if (PASSES == 2) mma_ABt<ACC>(dx, s.b[PASSES - 1], s.dstate[at.stage][PASSES - 1]);
    mma_commit();
    ring_wait(s.v_ring, vs);
    float log_scale = p.log_scale;
    load(l, v.l);
    map(l, l, [=](float x) { return x - log_scale; });
    load(dt, v.dt);
    load(weight, v.weight);
    fill(col, 0.f);
    fill(own, 0.f);
    clear(row);
    mma_wait<1>(x);
    if (p.steps.seq_idx) {
      rv mine;
      load(mine, s.changes);
      map_rc(x, mine, s.changes, [](float y, float nj, float ni, int, int) { return ni == nj ? y : 0.f; });
    }
    bool other = p.steps.seq_idx != nullptr;
    each_of_triangles<Q>([](int, int, float &x, float &r, float score, float &col, float &, float &row, float li,
                            float lj, float dtj) {
      float e = fast_exp2(li - lj), w = e * dtj, g = x * score;
      col = fused(g, e, col);
      row = fused(g, w, row);
      r = fused(x, w, r);
      x = score * w;
    }, [=](int j, int i, float &x, float &r, float score, float &col, float &own, float &row, float li, float lj,
           float dtj) {
      float e = i < j ? 0.f : fast_exp2(li - lj), w = e * dtj, g = x * score, later = i == j ? 0.f : g;
      col = fused(later, e, col);
      row = fused(later, w, row);
      own += i == j ? g : 0.f;
      r = fused(x, w, r);
      x = fused(score, w, i == j ? d : 0.f);
    }, [](int, int, float &x, float &, float, float &, float &, float &, float, float, float) { x = 0.f; },
    x, r, (const rt<float, Q> &)scores, col, own, row, v.l, l, dt);
    if (other) {
      load(l, s.changes);
      map_rc(x, l, s.changes, [](float y, float nj, float ni, int, int) { return ni == nj ? y : 0.f; });
    }
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
    reduce(l, own);
    store(f.own, l);
    sem_arrive(s.f_ring.full[with.stage]);
    ring_release(s.v_ring, vs);
    ring_next(s.v_ring, vs);
    ring_next(s.f_ring, with);
    tma_store_wait_read();
    wg_sync();
    mma_wait<0>(dx, weights);
    sem_arrive(s.inputs.empty[at.stage]);     // read by products alone
    ring_next(s.inputs, at);
    put_dx(p, s, t, dx, head, w.part * 64);
  }
  store(s.r, r);
  fence_async();
  sem_arrive(s.r_full);
  for (int u = t.units; u < PASSES * t.units; u++) {
    ring_wait(s.inputs, at);
    sem_arrive(s.inputs.empty[at.stage]);
    ring_next(s.inputs, at);
    ring_wait(s.v_ring, vs);
    ring_done(s.v_ring, vs);
    ring_acquire(s.f_ring, with);
    sem_arrive(s.f_ring.full[with.stage]);
    ring_next(s.f_ring, with);
  }
  tma_store_wait_read();
}

// ---- products with a state: 0, dc; 1, db
TILE void keep(const params &p, const task &t, int which, const rt<float, W> &sum, int pass) {
  int rows = t.stop - t.step, n = p.state_dim, col = pass * W;
  if (p.parts) {
    int64_t ld = (int64_t)p.groups * 2 * n, row = (((int64_t)t.split * p.batches + t.batch) * p.chunks + t.chunk) * Q;
    return store(p.parts + row * ld + (t.group * 2 + which) * n + col, ld, sum, rows, n - col);
  }
  const int64_t *stride = which ? p.db_stride : p.dc_stride;
  int64_t ld = stride[1];
  elem *out = (elem *)(which ? p.db : p.dc) + t.batch * stride[0] + t.step * ld + t.group * stride[2] + col;
  store_rows<elem>(sum, [=](int row) { return row < rows ? out + row * ld : (elem *)nullptr; }, n - col);
}

TILE void contract(const params &p, shared &s, int which) {
  task t = block_task(p);
  uint32_t count = 0;         // of units: fewer registers than a position in each of the rings
  rt<float, W> product, sum;
  sem_wait(s.bc_full, 0);
  for (int pass = 0; pass < PASSES; pass++) {
    fill(sum, 0.f);
    for (int u = 0; u < t.units; u++, count++) {
      ring_pos at = ring_at<STAGES>(count), vs = ring_at<V>(count), with = ring_at<2>(count);
      vectors &v = s.v[vs.stage];
      found &f = s.f[with.stage];
      rsum dot, rest;
      rv factor;
      auto multiply = [](int, int, float x, float y, float &sum) { sum = fused(x, y, sum); };
      fill(rest, 0.f);
      fill(dot, 0.f);
      ring_wait(s.inputs, at);
      // In registers that the product has then.
      if (which && PASSES == 2) each<W>(multiply, s.state[at.stage], s.dstate[at.stage][pass], rest);
      mma_fence();
      mma_AB<ZERO>(product, which ? s.x[at.stage] : s.dy[at.stage],
                   which ? s.dstate[at.stage][pass] : s.state[at.stage]);
      mma_commit();
      if (which && PASSES == 1) each<W>(multiply, s.state[at.stage], s.dstate[at.stage][pass], rest);
      if (!which && p.skips && !pass) each<64>(multiply, s.x[at.stage], s.dy[at.stage], rest);
      ring_wait(s.v_ring, vs);
      load(factor, which ? v.weight : v.read);
      ring_release(s.v_ring, vs);
      mma_wait<0>(product);
      ring_release(s.inputs, at);
      each<W>([](int, int, float x, float &sum, float y, float &dot, float f) {
        dot = fused(x, y, dot);
        sum = fused(x, f, sum);
      }, product, sum, which ? s.b[pass] : s.c[pass], dot, factor);
      ring_acquire(s.f_ring, with);
      reduce(factor, dot);
      store(which ? f.out : f.in, factor);
      reduce(factor, rest);
      if (which || p.skips) store(which ? f.kept : f.skip, factor);
      sem_arrive(s.f_ring.full[with.stage]);
    }
    sem_wait(s.r_full, 0);
    mma_fence();
    if (which) mma_AB<ZERO>(product, s.r, s.c[pass]);
    else mma_AtB<ZERO>(product, s.r, 0, s.b[pass], 0);
    mma_commit();
    mma_wait<0>(product);
    map(sum, product, [](float x, float y) { return x + y; });
    keep(p, t, which, sum, pass);
  }
}
TILE void give_dc(const params &p, shared &s, int) { contract(p, s, 0); }
TILE void give_db(const params &p, shared &s, int) { contract(p, s, 1); }

typedef block<params, shared, init, role<pairs, WARPGROUP, 1, 168>, role<give_dc, WARPGROUP, 1, 160>,
              role<give_db, WARPGROUP, 1, 160>, role<loader, THREAD, 1, 24>, role<scan, WARP, 1, 24>,
              role<collect, WARP, 1, 24>> kernel;
ENTRY(kernel, Q, 1)
