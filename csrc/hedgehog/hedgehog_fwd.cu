// Hedgehog's hybrid attention (Zhang et al. 2024, arXiv 2402.04347; with a window: Zhang et al. 2024, LoLCATs, arXiv
// 2410.10254, equation 6), one pass over the sequence in chunks of 64 steps, the state in registers throughout:
//   out_i = N_i / d_i,  N_i = sum over the window of e^(s_ij - m_i) v_j + sum in front of it of (f_i . g_j) v_j
//   s_ij = scale q_i . k_j,  m_i its maximum in the window,  f = l / w [softmax(q Q), softmax(-q Q)]
// g that of k and K, without the factors, which matter by their ratio alone, and d_i as N_i with 1 for v_j. The linear
// part does not see m_i, so m_i is part of the definition. The window ends with step i. It is step i's block of 64 and
// the one before. Where LOCAL: blocks of `window` steps, or the last `window` steps, at most 64; then the linear part
// has some of these two chunks too, whose products are masked.
// S, the sum of g_j v_j^T over all chunks but the last two, and z, the sum of g_j, lag one chunk behind the window.
// Positions count chunks of k and v from the one in front of the first. In iteration i the chunk of q is i, those of k
// are positions i and i + 1, and S has the positions before i.
// Roles: a loader thread; features: f of chunk i and its d from z, then the column sums of g of position i; sums, a
// warp: z; state: S of position i to shared memory, then g of position i (LOCAL: i + 1), and + g v^T of position i;
// window: the softmax, both products with v, out.
//
// Registers of a thread, D = 128   tiles that live together                                   the rest
//   state, 192                     S 128, a softmax 32                                        rows 6
//   window, 192                    out 64, scores 64, then their copy 32 (LOCAL: products 32) rows 12
//   features, 96                   a softmax 32, another's copy 16, then column sums 16       rows 6
//   loader and sums, 32            -                                                          vectors of two each, 6
#include "tile/tile.h"
// D: columns of q, k and v, 64 or 128. LOCAL: a window of any kind. VS, QS: stages of v and of q, GS: of g
#include "hedgehog/hedgehog_steps.h"

struct shared {
  st<elem, D, F> q_map, k_map;
  st<elem, Q, D> q[QS], k[2], v[VS], out;
  st<elem, F, D> state[2];
  st<elem, Q, F> f[2], g[GS][2];
  sv<4 * F> parts[2];
  sv<F> z[2];
  sv<Q> den;                     // of the linear part
  sem maps;
  ring<QS, ASYNC_READS> q_ring;
  ring<2, ASYNC_READS> k_ring;
  ring<VS, ASYNC_READS> v_ring;
  ring<1, ASYNC_READS> f_ring, state_ring;
  ring<GS, ASYNC_READS> g_ring;  // refilled by plain stores only, which plain reads need no fence for
  sem z_full, parts_full;        // each is refilled by who has waited for the other
};
typedef hedgehog_fwd_params params;

TILE void init(shared &s) {
  sem_init(s.maps, arrivals(1, 0, 0));
  ring_init(s.q_ring, arrivals(1, 0, 0), arrivals(0, 0, 2));
  ring_init(s.k_ring, arrivals(1, 0, 0), arrivals(0, 0, 2));
  ring_init(s.v_ring, arrivals(1, 0, 0), arrivals(0, 0, 2));
  ring_init(s.f_ring, arrivals(0, 0, 1), arrivals(0, 0, 1));
  ring_init(s.state_ring, arrivals(0, 0, 1), arrivals(0, 0, 1));
  ring_init(s.g_ring, arrivals(0, 0, 1), arrivals(0, 0, 2 + LOCAL));
  sem_init(s.z_full, arrivals(0, 1, 0));
  sem_init(s.parts_full, arrivals(0, 0, 1));
}

TILE task block_task(const params &p) {
  int unit = block_index() / p.steps.segments;
  return task_of(p.steps, unit, block_index() - unit * p.steps.segments);
}

TILE void load_keys(const params &p, shared &s, const task &t, int position) {
  ring_pos k = ring_at<2>(position), v = ring_at<VS>(position);
  int step = step_of(p.steps, t, position);
  ring_acquire(s.k_ring, k);
  ring_expect(s.k_ring, k, tile_bytes(s.k[0]));
  tma_load(s.k[k.stage], p.k, s.k_ring.full[k.stage], step, 0, t.head, t.batch);
  ring_acquire(s.v_ring, v);
  ring_expect(s.v_ring, v, tile_bytes(s.v[0]));
  tma_load(s.v[v.stage], p.v, s.v_ring.full[v.stage], step, 0, t.head, t.batch);
}
TILE void load_queries(const params &p, shared &s, const task &t, int chunk) {
  ring_pos q = ring_at<QS>(chunk);
  if (chunk == t.chunks) return;
  ring_acquire(s.q_ring, q);
  ring_expect(s.q_ring, q, tile_bytes(s.q[0]));
  tma_load(s.q[q.stage], p.q, s.q_ring.full[q.stage], t.first + chunk * Q, 0, t.head, t.batch);
}
// Two stages of q are one chunk ahead; one stage is free only when k of position i + 1 has been read.
TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  if (t.chunks == 0) return;
  sem_expect(s.maps, tile_bytes(s.q_map) + tile_bytes(s.k_map));
  tma_load(s.q_map, p.q_map, s.maps, 0, 0, 0, t.head);
  tma_load(s.k_map, p.k_map, s.maps, 0, 0, 0, t.head);
  for (int i = 0; i <= t.chunks; i++) {
    if (QS == 2) load_queries(p, s, t, i);
    load_keys(p, s, t, i);
    if (QS == 1) load_queries(p, s, t, i);
  }
}

// softmax(x map) where sign is LOG2E, softmax(-x map) where it is -LOG2E, times a factor; columns from `count` on are
// 0. The product is computed for each of the two: both do not fit into the state's registers.
TILE void half_features(rt<float, F> &f, const st<elem, Q, D> &x, const st<elem, D, F> &map_, int count, float sign,
                        float factor) {
  rv high;
  rsum sum;
  mma_fence();
  mma_AB<ZERO>(f, x, map_);
  mma_commit();
  mma_wait<0>(f);
  map(f, [=](float y) { return y * sign; });
  if (count < F) map_rc(f, [=](float y, int, int col) { return col < count ? y : -infinity(); });
  fill(high, -infinity());
  row_max(high, f);
  map_row(f, high, [](float y, float m) { return fast_exp2(y - m); });
  row_sum(sum, f);
  reduce(high, sum);
  map(high, high, [=](float l) { return factor * fast_rcp(l); });
  map_row(f, high, [](float y, float l) { return y * l; });
}

TILE void make_features(const params &p, shared &s, int) {
  task t = block_task(p);
  float factor = ratio_of(p.window_factor, p.linear_factor, t.head);
  if (t.chunks) sem_wait(s.maps, 0);
  for (int i = 0; i < t.chunks; i++) {
    ring_pos q = ring_at<QS>(i), to = ring_at<1>(i), g_at = ring_at<GS>(i);
    rt<float, F> f;
    rt<elem, F> first;
    rsum sum;
    rv den;
    fill(sum, 0.f);
    ring_wait(s.q_ring, q);
    ROLLED for (int half = 0; half < 2; half++) {
      if (half) convert(first, f);
      half_features(f, s.q[q.stage], s.q_map, p.count, half ? -LOG2E : LOG2E, factor);
      if (!half) sem_wait(s.z_full, i & 1);
      each<F>([](int, int, float x, float y, float &l) { l = fused(x, y, l); }, f, s.z[half], sum);
    }
    ring_release(s.q_ring, q);
    reduce(den, sum);
    ring_acquire(s.f_ring, to);
    store(s.den, den);
    store(s.f[0], first);
    store(s.f[1], f);
    ring_fill(s.f_ring, to);
    ring_wait(s.g_ring, g_at);
    ROLLED for (int half = 0; half < 2; half++) {
      load(f, s.g[g_at.stage][half]);
      sum_columns(s.parts[half], f);
    }
    ring_release(s.g_ring, g_at);
    sem_arrive(s.parts_full);
  }
}

// Where the state of a matrix begins, in states of all heads the i-th.
TILE int64_t state_at(const params &p, const task &t, int64_t i) {
  return (i * p.steps.heads + t.head) * 2 * p.count * (p.value_dim + 1);
}
TILE const float *initial_of(const params &p, const task &t) {
  if (t.segment) return p.cuts + state_at(p, t, (int64_t)t.row * p.cut_stride + t.segment - 1);
  return p.initial ? p.initial + state_at(p, t, t.row) : nullptr;
}
TILE float *final_of(const params &p, const task &t) {
  return p.final && t.segment + 1 == p.steps.segments ? p.final + state_at(p, t, t.row) : nullptr;
}

TILE void add_up(const params &p, shared &s, int) {
  task t = block_task(p);
  sums z;
  const float *initial = initial_of(p, t);
  float *final = final_of(p, t);
  fill(z.f, 0.f);
  fill(z.g, 0.f);
  if (initial) load_sums(z, initial, p.count, p.value_dim);
  for (int i = 0; i < t.chunks; i++) {
    store(s.z[0], z.f);
    store(s.z[1], z.g);
    sem_arrive<WARP>(s.z_full);
    sem_wait(s.parts_full, i & 1);
    if (i > 0 || t.before) {
      add_parts(z.f, s.parts[0]);
      add_parts(z.g, s.parts[1]);
    }
  }
  if (final) store_sums(final, z, p.count, p.value_dim);
}

TILE void run_state(const params &p, shared &s, int) {
  task t = block_task(p);
  rt<float, D> s0, s1;
  const float *initial = initial_of(p, t);
  int64_t ld = p.value_dim + 1, half = p.count * ld;
  fill(s0, 0.f);
  fill(s1, 0.f);
  if (initial) {
    load(s0, initial, ld, p.count, p.value_dim);
    load(s1, initial + half, ld, p.count, p.value_dim);
  }
  int made = 0;
  if (t.chunks) sem_wait(s.maps, 0);
  for (int i = 0; i < t.chunks; i++) {
    ring_pos to = ring_at<1>(i), g = ring_at<GS>(i), v = ring_at<VS>(i);
    ring_acquire(s.state_ring, to);
    store(s.state[0], s0);
    store(s.state[1], s1);
    ring_fill(s.state_ring, to);
    for (; made <= i + LOCAL; made++) {
      ring_pos k = ring_at<2>(made), next = ring_at<GS>(made);
      ring_wait(s.k_ring, k);
      ring_acquire(s.g_ring, next);
      ROLLED for (int half = 0; half < 2; half++) {
        rt<float, F> feature;
        half_features(feature, s.k[k.stage], s.k_map, p.count, half ? -LOG2E : LOG2E, 1.f);
        store(s.g[next.stage][half], feature);
      }
      ring_release(s.k_ring, k);
      ring_fill(s.g_ring, next);
    }
    ring_wait(s.g_ring, g);
    ring_wait(s.v_ring, v);
    if (i > 0 || t.before) {
      mma_fence();
      mma_AtB<ACC>(s0, s.g[g.stage][0], 0, s.v[v.stage], 0);
      mma_AtB<ACC>(s1, s.g[g.stage][1], 0, s.v[v.stage], 0);
      mma_commit();
      mma_wait<0>(s0, s1);
    }
    ring_release(s.g_ring, g);
    ring_release(s.v_ring, v);
  }
  float *final = final_of(p, t);
  if (final) {
    store(final, ld, s0, p.count, p.value_dim);
    store(final + half, ld, s1, p.count, p.value_dim);
  }
}

// own: scores with the same chunk; other: with the one before, if there is one. They become weights of v.
TILE void weigh(rt<float, Q> &own, rt<float, Q> &other, rsum &sum, float scale, const rv &first, bool both) {
  rv high;
  if (LOCAL) {
    map_rc(own, first, [=](float x, float f, int row, int col) {
      return col <= row && (float)col >= f ? x * scale : -infinity();
    });
    map_rc(other, first, [=](float x, float f, int, int col) {
      return both && (float)(col - Q) >= f ? x * scale : -infinity();
    });
  } else {
    map(own, [=](float x) { return x * scale; });
    tril(own, 0, -infinity());
    if (both) map(other, [=](float x) { return x * scale; });
    else fill(other, -infinity());
  }
  fill(high, -infinity());
  row_max(high, own);
  row_max(high, other);
  map_row(own, high, [](float x, float m) { return fast_exp2(x - m); });
  map_row(other, high, [](float x, float m) { return fast_exp2(x - m); });
  row_sum(sum, own);
  row_sum_add(sum, other);
}

TILE void run_window(const params &p, shared &s, int) {
  task t = block_task(p);
  rt<float, D> out;
  rt<float, Q> own, other;
  rt<elem, Q> own_weights, other_weights;
  rv first, den, linear;
  rsum sum;
  float scale = p.scale * LOG2E;
  if (LOCAL) window_begins(first, p.steps);
  if (t.chunks) {
    ring_wait(s.k_ring, ring_at<2>(0));
    ring_wait(s.v_ring, ring_at<VS>(0));
    if (LOCAL) ring_wait(s.g_ring, ring_at<GS>(0));
  }
  for (int i = 0; i < t.chunks; i++) {
    ring_pos k0 = ring_at<2>(i), k1 = ring_at<2>(i + 1), v0 = ring_at<VS>(i), v1 = ring_at<VS>(i + 1);
    ring_pos q = ring_at<QS>(i), f = ring_at<1>(i);
    int step = t.first + i * Q, steps = t.end - step;
    bool both = i > 0 || t.before, over = runs_over(p.steps, t, step);
    ring_wait(s.k_ring, k1);
    ring_wait(s.q_ring, q);
    mma_fence();
    mma_ABt<ZERO>(own, s.q[q.stage], s.k[k1.stage]);
    mma_ABt<ZERO>(other, s.q[q.stage], s.k[k0.stage]);
    mma_commit();
    if (!LOCAL) {
      ring_wait(s.f_ring, f);
      ring_wait(s.state_ring, f);
      load(linear, s.den);
      mma_fence();
      mma_AB<ZERO>(out, s.f[0], s.state[0]);
      mma_AB<ACC>(out, s.f[1], s.state[1]);
      mma_commit();
      mma_wait<1>(own, other);
    } else mma_wait<0>(own, other);
    ring_release(s.q_ring, q);
    ring_release(s.k_ring, k0);
    weigh(own, other, sum, scale, first, both);
    if (LOCAL) {
      rt<float, Q> product;
      ring_pos g0 = ring_at<GS>(i), g1 = ring_at<GS>(i + 1);
      ring_wait(s.f_ring, f);
      ring_wait(s.g_ring, g1);
      load(linear, s.den);
      mma_fence();
      mma_ABt<ZERO>(product, s.f[0], s.g[g1.stage][0]);
      mma_ABt<ACC>(product, s.f[1], s.g[g1.stage][1]);
      mma_commit();
      mma_wait<0>(product);
      map_rc(product, first, [](float x, float f, int, int col) { return (float)col < f ? x : 0.f; });
      row_sum_add(sum, product);
      map(own, product, [](float x, float y) { return x + y; });
      mma_fence();
      mma_ABt<ZERO>(product, s.f[0], s.g[g0.stage][0]);
      mma_ABt<ACC>(product, s.f[1], s.g[g0.stage][1]);
      mma_commit();
      mma_wait<0>(product);
      ring_release(s.g_ring, g0);
      map_rc(product, first, [=](float x, float f, int, int col) { return both && (float)(col - Q) < f ? x : 0.f; });
      row_sum_add(sum, product);
      map(other, product, [](float x, float y) { return x + y; });
    }
    convert(own_weights, own);
    convert(other_weights, other);
    reduce(den, sum);
    map(den, den, linear, [](float x, float y) { return x + y; });
    ring_wait(s.v_ring, v1);
    if (over) {
      clear_rows(s.v[v1.stage], 0, steps);
      fence_async();
      wg_sync();
    }
    if (LOCAL) {
      ring_wait(s.state_ring, f);
      mma_fence();
      mma_AB<ZERO>(out, s.f[0], s.state[0]);
      mma_AB<ACC>(out, s.f[1], s.state[1]);
    } else {
      mma_wait<0>(out);
      ring_release(s.f_ring, f);
      ring_release(s.state_ring, f);
      mma_fence();
    }
    mma_AB<ACC>(out, own_weights, s.v[v1.stage]);
    mma_AB<ACC>(out, other_weights, s.v[v0.stage]);
    mma_commit();
    tma_store_wait_read();
    wg_sync();
    mma_wait<0>(out, own_weights, other_weights);
    if (LOCAL) {
      ring_release(s.f_ring, f);
      ring_release(s.state_ring, f);
    }
    ring_release(s.v_ring, v0);
    if (p.den) store(p.den + ((int64_t)t.batch * p.steps.heads + t.head) * p.steps.count + step, den, steps);
    map(den, den, [](float x) { return fast_rcp(x); });
    map_row(out, den, [](float x, float y) { return x * y; });
    if (over) {
      int64_t ld = p.out_step;
      elem *to = (elem *)p.out_data + step * ld + t.head * p.out_head;
      store_rows<elem>(out, [=](int row) { return row < steps ? to + row * ld : (elem *)nullptr; }, p.value_dim);
    } else {
      store(s.out, out);
      fence_async();
      wg_sync();
      tma_store(p.out, s.out, step, 0, t.head, t.batch);
    }
  }
  tma_store_wait_read();
  clear_rest(p.steps, t, p.out_data, p.out_step, p.out_head, p.value_dim);
}

enum { STATE_REGS = D == 64 ? 176 : 192, FEATURE_REGS = D == 64 ? 112 : 96 };
typedef block<params, shared, init, role<run_window, WARPGROUP, 1, 192>, role<run_state, WARPGROUP, 1, STATE_REGS>,
              role<make_features, WARPGROUP, 1, FEATURE_REGS>, role<loader, THREAD, 1, 32>,
              role<add_up, WARP, 1, 32>> kernel;
ENTRY(kernel, Q, D)
