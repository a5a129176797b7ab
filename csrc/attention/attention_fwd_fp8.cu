// Attention forward of 8-bit floats:  o = softmax(scale q k^T) v,  lse = log sum exp(scale q k^T)
//   q = q_descale q8,  k = k_descale k8,  v = v_descale v8
// The loop of attention_fwd.cu (see there), with c = scale log2 e q_descale k_descale. Probabilities are rounded to
// e4m3 on their way into the product with v, which ends at 448: m is 6 less than the maximum when it was found, so that
// more of the format's range is used, and is found again where p reaches its end.
// Products of 8-bit operands want both along the reduction, v along the keys. Warps beside the loader (transposer)
// transpose every block of v, from the loader's ring into one of their own, t_ring.
#include "attention/attention_fwd.h"

// From the row: D, BN (keys a block), NC (compute warpgroups), TURNS (1: matrix work in turns), K_STAGES, V_STAGES (of
// 64 keys), T_STAGES (of transposed v), O_COLS (columns of o that leave at a time: fewer take less shared memory),
// FEATURES (0), *_REGS
enum { TRANSPOSERS = 3 };

struct shared {
  st<e4m3, 64, D> q[NC];
  st<e4m3, BN, D> k[K_STAGES];
  st<e4m3, 64, D> v[V_STAGES];   // parts of a block
  tt<e4m3, BN, D> v_transposed[T_STAGES];
  st<bf16, 64, O_COLS> o[NC];
  ring<K_STAGES, ASYNC_READS> k_ring;
  ring<V_STAGES, GENERIC_READS> v_ring;
  ring<T_STAGES, ASYNC_READS> t_ring;
  ring<NC, ASYNC_READS> q_ring;
  query_task_smem task_of[2];    // of even and odd tasks, as in the queue
  task_queue queue;
};
struct kv_pos { ring_pos k, v; };   // a role's positions in its rings of k and of v
TILE void init(shared &s) {
  ring_init(s.k_ring, arrivals(1, 0, 0), arrivals(0, 0, NC));
  ring_init(s.v_ring, arrivals(1, 0, 0), arrivals(0, TRANSPOSERS, 0));
  ring_init(s.t_ring, arrivals(0, TRANSPOSERS, 0), arrivals(0, 0, NC));
  queue_init(s.queue, arrivals(0, TRANSPOSERS, NC));
  ring_init(s.q_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
}

// ---- what feeds the compute warpgroups

TILE void load_keys(const attention_fp8_params &p, shared &s, ring_pos &at, int row, int head, int batch) {
  ring_acquire(s.k_ring, at);
  ring_expect(s.k_ring, at, tile_bytes(s.k[0]));
  tma_load(s.k[at.stage], p.fwd.k, s.k_ring.full[at.stage], row, 0, head, batch);
  ring_next(s.k_ring, at);
}
TILE void load_values(const attention_fp8_params &p, shared &s, ring_pos &at, int row, int head, int batch) {
  for (int part = 0; part < BN; part += 64) {
    ring_acquire(s.v_ring, at);
    ring_expect(s.v_ring, at, tile_bytes(s.v[0]));
    tma_load(s.v[at.stage], p.fwd.v, s.v_ring.full[at.stage], row + part, 0, head, batch);
    ring_next(s.v_ring, at);
  }
}
TILE void loader(const attention_fp8_params &p, shared &s, int) {
  kv_pos at = {};
  query_task t, following;
  int next = next_task(p.fwd, 0, 0, t);
  for (uint32_t count = 0; hand_out(p.fwd, s.queue, s.task_of, count, next, t); count++) {
    int j = t.steps - 1, k_head = t.head / p.fwd.group;
    for (int w = 0; w < NC; w++) {
      ring_pos q = q_stage(count, w);
      ring_acquire(s.q_ring, q);
      ring_expect(s.q_ring, q, tile_bytes(s.q[w]));
      tma_load(s.q[w], p.fwd.q, s.q_ring.full[w], t.row0 + w * 64, 0, t.head, t.batch);
      if (w == 0) load_keys(p, s, at.k, j * BN, k_head, t.batch);   // right behind its q: the first warpgroup can begin
    }
    for (; j >= 0; j--) {   // v ahead of the next keys: it has further to go
      if (j == 0) next = next_task(p.fwd, count + 1, next, following);   // here, where stages are to be waited for
      load_values(p, s, at.v, j * BN, k_head, t.batch);
      if (j > 0) load_keys(p, s, at.k, (j - 1) * BN, k_head, t.batch);
    }
    t = following;
  }
}
TILE void transposer(const attention_fp8_params &p, shared &s, int index) {
  uint32_t block = 0;   // counted over all tasks: kept instead of ring positions, for want of registers
  for (uint32_t count = 0; queue_take(s.queue, count) < p.fwd.tasks; count++) {
    uint32_t end = block + (uint32_t)get(s.task_of[count % 2].steps);
    queue_release<WARP>(s.queue, count);
    for (; block < end; block++) {
      ring_pos to = ring_at<T_STAGES>(block);
      ring_acquire(s.t_ring, to);
      for (int part = 0; part < BN; part += 64) {
        ring_pos from = ring_at<V_STAGES>(block * (BN / 64) + part / 64);
        ring_wait(s.v_ring, from);
        transpose_part(s.v_transposed[to.stage], part, s.v[from.stage], index, TRANSPOSERS);
        ring_release<WARP>(s.v_ring, from);
      }
      ring_fill<WARP>(s.t_ring, to);
    }
  }
}

// ---- blocks of scores

// Scores to probabilities, and their sums.
TILE void exponentials(rt<e4m3, BN> &probabilities, rsum &sum, const rt<float, BN> &x, const rv &m, float c) {
  rt<float, BN> y;
  map_row(y, x, m, [=](float a, float b) { return fast_exp2(fused(a, c, -b)); });
  row_sum(sum, y);
  convert(probabilities, y);
}
// The same from the scores' own origin; x is lost.
TILE void exponentials(rt<e4m3, BN> &probabilities, rsum &sum, rt<float, BN> &x, const rv &base, const rv &top,
                       float c) {
  map_row(x, base, [](float a, float b) { return a - b; });
  exponentials(probabilities, sum, x, top, c);
}

TILE float descale(const float *of, const attention_fp8_params &p, const query_task &t) {
  return of ? of[t.batch * p.k_heads + t.head / p.fwd.group] : 1.f;
}
// The factor of scores in the exponent. Of tensors of zeros it may be 0: then too a score of -infinity is masked and
// others count.
TILE float exponent(const attention_fp8_params &p, const query_task &t) {
  float c = p.fwd.scale_log2 * descale(p.q_descale, p, t) * descale(p.k_descale, p, t);
  return clamp(c, 1e-30f, 3e38f);
}

TILE void finish(const attention_fp8_params &p, shared &s, const query_task &t, rt<float, D> &o, rv &m, const rv &x_max,
                 const rsum &l, float c, int wg) {
  int row0 = t.row0 + wg * 64;
  float factor = descale(p.v_descale, p, t);
  rv sum, inverse, lse;
  reduce(sum, l);
  rows_maxima(m, x_max, c);
  map(inverse, sum, [=](float l) { return l == 0.f ? 0.f : factor * fast_rcp(l); });
  map_row(o, inverse, [](float x, float f) { return x * f; });
  store_output(p.fwd.o, s.o[wg], o, row0, t.head, t.batch);
  if (p.fwd.lse) {
    log_sum(lse, m, sum);
    store(p.fwd.lse + (int64_t)(t.batch * p.fwd.q_heads + t.head) * p.fwd.q_total + row0, lse, p.fwd.q_total - row0);
  }
}

TILE void scores(shared &s, kv_pos &at, rt<float, BN> &x, int wg) {   // the key block is there
  mma_fence();
  mma_ABt<ZERO>(x, s.q[wg], s.k[at.k.stage]);
  mma_commit();
}
TILE void product(shared &s, kv_pos &at, rt<float, D> &o, rt<e4m3, BN> &probabilities) {
  ring_wait(s.t_ring, at.v);
  mma_fence();
  mma_AB<ACC>(o, probabilities, s.v_transposed[at.v.stage]);
  mma_commit();
}
// A key block that this warpgroup's rows do not see.
TILE void pass_over(shared &s, kv_pos &at, int wg) {
  skip_turn(wg);
  ring_wait(s.k_ring, at.k);
  ring_done(s.k_ring, at.k);
  ring_wait(s.t_ring, at.v);
  ring_done(s.t_ring, at.v);
}

// x: scores with key block j; probabilities and v: block j + 1
TILE void step(const attention_fp8_params &p, shared &s, kv_pos &at, const query_task_smem &h, rt<float, BN> &x,
               rt<e4m3, BN> &probabilities, rt<float, D> &o, rv &m, rv &x_max, rsum &l, float c, int j, int masked,
               int wg) {
  rsum sum;
  my_turn(wg);
  scores(s, at, x, wg);
  product(s, at, o, probabilities);
  next_turn(wg);
  mma_wait<1>(x);
  ring_done(s.k_ring, at.k);
  if (j == 0) ring_release(s.q_ring, {wg, 0});   // the last scores with q are there
  if (masked) mask(x, p.fwd, h, j * BN, wg);
  if (j > 0) ring_wait(s.k_ring, at.k);
  mma_wait<0>(o, probabilities);
  ring_done(s.t_ring, at.v);
  exponentials(probabilities, sum, x, m, c);
  if (saturated(probabilities)) {
    rv base, top, alpha;
    maximum(x, m, base, top, alpha, x_max, c, 6.f, 0.f);
    scale_rows(o, alpha);
    scale(l, alpha);
    exponentials(probabilities, sum, x, base, top, c);
  }
  add(l, sum);
}

TILE void compute(const attention_fp8_params &p, shared &s, int wg) {
  kv_pos at = {};
  if (TURNS) turn_begin<NC>(wg);
  for (uint32_t count = 0; queue_take(s.queue, count) < p.fwd.tasks; count++) {
    const query_task_smem &h = s.task_of[count % 2];
    query_task t = get_task(h, p.fwd);
    int j = t.steps - 1;
    float c = exponent(p, t);
    key_range mine = get_key_range(h, wg);
    rt<float, BN> x;
    rt<e4m3, BN> probabilities;
    rt<float, D> o;
    rv m, x_max, base, top, alpha;
    rsum l;
    for (; j >= mine.seen; j--) pass_over(s, at, wg);
    ring_wait(s.q_ring, q_stage(count, wg));
    ring_wait(s.k_ring, at.k);
    scores(s, at, x, wg);
    mma_wait<0>(x);
    ring_done(s.k_ring, at.k);
    if (j == 0) ring_release(s.q_ring, {wg, 0});
    fill(m, -infinity());
    x_max = m;
    fill(o, 0.f);
    mask(x, p.fwd, h, j * BN, wg);
    maximum(x, m, base, top, alpha, x_max, c, 6.f, 0.f);
    exponentials(probabilities, l, x, m, c);
    if (saturated(probabilities)) exponentials(probabilities, l, x, base, top, c);
    if (j > 0) ring_wait(s.k_ring, at.k);
    j--;
    for (; j >= 0 && (j + 1) * BN > mine.open; j--) step(p, s, at, h, x, probabilities, o, m, x_max, l, c, j, 1, wg);
    for (; j >= 0; j--) step(p, s, at, h, x, probabilities, o, m, x_max, l, c, j, 0, wg);
    product(s, at, o, probabilities);
    mma_wait<0>(o, probabilities);
    ring_done(s.t_ring, at.v);
    finish(p, s, t, o, m, x_max, l, c, wg);
    queue_release(s.queue, count);
  }
  if (TURNS) turn_end<NC>(wg);
  tma_store_wait_read();
}

typedef block<attention_fp8_params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>,
              role<loader, THREAD, 1, LOAD_REGS>, role<transposer, WARP, TRANSPOSERS, LOAD_REGS>> kernel;
ENTRY(kernel, BM, BN)
