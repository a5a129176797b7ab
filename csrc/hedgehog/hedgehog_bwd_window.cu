// The window's share of Hedgehog's gradients. With u_i and e_i of hedgehog_bwd_pre.cu, a_ij = e^(s_ij - m_i) and x_ij =
// a_ij (u_i . v_j + e_i):
//   dv_j = sum over i of a_ij u_i,  ds_ij = x_ij - [s_ij = m_i] sum over j of x_ij / how many
//   dq_i = scale sum over j of ds_ij k_j,  dk_j = scale sum over i of ds_ij q_i
// where the sum of x_ij is not 0, because the linear part is not divided by e^(m_i).
// A block walks over the chunks of a segment. Positions count chunks of k and v from the one in front of the first; the
// chunk i of q meets positions i and i + 1. A chunk's dk and dv want the q behind it, so the first chunk of the next
// segment is walked over too, for these alone.
// Roles: a loader thread; scores: a, ds and dq; keys: dk and dv.
//
// Registers of a thread, D = 128   tiles that live together                            the rest
//   scores, 232                    s 64, u v^T 64; then ds 32, dq 64                   rows 10
//   keys, 200                      dk 64, dv 64                                        8
#include "tile/tile.h"
// D: columns of q, k and v, 64 or 128
#include "hedgehog/hedgehog_bwd.h"
#include "hedgehog/hedgehog_steps.h"

struct shared {
  st<elem, Q, D> q[2], u[2], k[3], v[2], dq, dk, dv;
  st<elem, Q, Q> a[2], ds[2];    // with the same chunk, with the one before
  ring<2, ASYNC_READS> q_ring;   // with u
  ring<3, ASYNC_READS> k_ring;
  ring<2, ASYNC_READS> v_ring;
  ring<1, ASYNC_READS> a_ring;   // with ds
};
typedef hedgehog_bwd_window_params params;

TILE void init(shared &s) {
  ring_init(s.q_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
  ring_init(s.k_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
  ring_init(s.v_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
  ring_init(s.a_ring, arrivals(0, 0, 1), arrivals(0, 0, 1));
}

TILE task block_task(const params &p) {
  int unit = block_index() / p.steps.segments;
  return task_of(p.steps, unit, block_index() - unit * p.steps.segments);
}
TILE int walks(const params &p, const task &t) { return t.chunks + (t.segment + 1 < p.steps.segments); }

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  if (t.chunks == 0) return;
  for (int i = 0; i <= walks(p, t); i++) {
    int step = step_of(p.steps, t, i);
    ring_pos k = ring_at<3>(i), v = ring_at<2>(i);
    ring_acquire(s.k_ring, k);
    ring_expect(s.k_ring, k, tile_bytes(s.k[0]));
    tma_load(s.k[k.stage], p.k, s.k_ring.full[k.stage], step, 0, t.head, t.batch);
    ring_acquire(s.v_ring, v);
    ring_expect(s.v_ring, v, tile_bytes(s.v[0]));
    tma_load(s.v[v.stage], p.v, s.v_ring.full[v.stage], step, 0, t.head, t.batch);
    if (i == walks(p, t)) break;
    ring_acquire(s.q_ring, v);
    ring_expect(s.q_ring, v, 2 * tile_bytes(s.q[0]));
    tma_load(s.q[v.stage], p.q, s.q_ring.full[v.stage], t.first + i * Q, 0, t.head, t.batch);
    tma_load(s.u[v.stage], p.u, s.q_ring.full[v.stage], t.first + i * Q, 0, t.head, t.batch);
  }
}

// Scores in base 2, -infinity outside of the window; then less each row's maximum.
TILE void less_maximum(rt<float, Q> &own, rt<float, Q> &other, rsum &ties, const params &p, bool both) {
  rv high;
  float scale = p.scale * LOG2E;
  int w = p.steps.window;
  bool sliding = p.steps.sliding;
  if (sliding || w < Q) {
    map_rc(own, [=](float x, int row, int col) {
      return col <= row && col >= window_begin(row, w, sliding) ? x * scale : -infinity();
    });
    map_rc(other, [=](float x, int row, int col) {
      return both && col - Q >= window_begin(row, w, sliding) ? x * scale : -infinity();
    });
  } else {
    map(own, [=](float x) { return x * scale; });
    tril(own, 0, -infinity());
    map(other, [=](float x) { return both ? x * scale : -infinity(); });
  }
  fill(high, -infinity());
  row_max(high, own);
  row_max(high, other);
  map_row(own, high, [](float x, float m) { return x - m; });
  map_row(other, high, [](float x, float m) { return x - m; });
  fill(ties, 0.f);
  each<Q>([](int, int, float x, float &n) { n += x == 0.f ? 1.f : 0.f; }, own, ties);
  each<Q>([](int, int, float x, float &n) { n += x == 0.f ? 1.f : 0.f; }, other, ties);
}
// s, less its maximum, becomes a, negative where that is the maximum; x, which was u . v, becomes a (x + e). Sums of
// both.
TILE void weigh(rt<float, Q> &x, rt<float, Q> &s, const rv &e, rsum &sum, rsum &weights) {
  each<Q>([](int, int, float &y, float &d, float b, float &l, float &m) {
    float a = fast_exp2(d);
    y = d == -infinity() ? 0.f : a * (y + b);
    d = d == 0.f ? -a : a;
    l += y;
    m += a;
  }, x, s, e, sum, weights);
}
// Its sign is taken from a, x becomes ds.
TILE void finish(rt<float, Q> &s, rt<float, Q> &x, const rv &share, float scale) {
  each<Q>([=](int, int, float &d, float &y, float c) {
    y = scale * (y - (d < 0.f ? c : 0.f));
    d = fabsf(d);
  }, s, x, share);
}

// A chunk at the end of a packed row: behind it the next one's steps follow.
TILE void clear_behind(shared &s, int q, int k, int v, int steps) {
  clear_rows(s.q[q], 0, steps);
  clear_rows(s.u[q], 0, steps);
  clear_rows(s.k[k], 0, steps);
  clear_rows(s.v[v], 0, steps);
  fence_async();
  wg_sync();
}
TILE void put(const gmap &m, st<elem, Q, D> &tile, const rt<float, D> &x, const task &t, int step, bool over,
              void *data, const int64_t *stride, int dim, bool alone) {
  if (over) {
    int64_t ld = stride[0];
    int steps = t.end - step;
    elem *to = (elem *)data + step * ld + t.head * stride[1];
    return store_rows<elem>(x, [=](int row) { return row < steps ? to + row * ld : (elem *)nullptr; }, dim);
  }
  if (alone) tma_store_wait_read();        // the warpgroup's only tile
  else tma_store_wait_read<1>();           // of two in turn
  wg_sync();
  store(tile, x);
  fence_async();
  wg_sync();
  tma_store(m, tile, step, 0, t.head, t.batch);
}

TILE void scores(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos q = {}, to = {};
  rt<float, Q> own, other, own_u, other_u;
  rt<elem, Q> own_ds, other_ds;
  rt<float, D> dq;
  rv e, share, count;
  float scale = p.scale;
  int n = t.chunks ? walks(p, t) : 0;
  if (n) {
    ring_wait(s.k_ring, ring_at<3>(0));
    ring_wait(s.v_ring, ring_at<2>(0));
  }
  for (int i = 0; i < n; i++) {
    ring_pos k0 = ring_at<3>(i), k1 = ring_at<3>(i + 1), v0 = ring_at<2>(i), v1 = ring_at<2>(i + 1);
    int step = t.first + i * Q;
    bool both = i > 0 || t.before, over = runs_over(p.steps, t, step), mine = i < t.chunks;
    rsum ties, sum, weights;
    int64_t row = ((int64_t)t.batch * p.steps.heads + t.head) * p.steps.count + step;
    load(e, p.e + row, t.end - step, 0.f);
    ring_wait(s.k_ring, k1);
    ring_wait(s.v_ring, v1);
    ring_wait(s.q_ring, q);
    if (over) clear_behind(s, q.stage, k1.stage, v1.stage, t.end - step);
    mma_fence();
    mma_ABt<ZERO>(own, s.q[q.stage], s.k[k1.stage]);
    mma_ABt<ZERO>(other, s.q[q.stage], s.k[k0.stage]);
    mma_commit();
    mma_ABt<ZERO>(own_u, s.u[q.stage], s.v[v1.stage]);
    mma_ABt<ZERO>(other_u, s.u[q.stage], s.v[v0.stage]);
    mma_commit();
    mma_wait<1>(own, other);
    less_maximum(own, other, ties, p, both);
    mma_wait<0>(own_u, other_u);
    ring_release(s.v_ring, v0);
    fill(sum, 0.f);
    fill(weights, 0.f);
    weigh(own_u, own, e, sum, weights);
    weigh(other_u, other, e, sum, weights);
    reduce(share, sum);
    reduce(count, weights);
    if (mine) store(p.sums + row, share, t.end - step);
    if (mine) store(p.weights + row, count, t.end - step);
    reduce(count, ties);
    map(share, share, count, [](float x, float n) { return x * fast_rcp(n); });
    finish(own, own_u, share, scale);
    finish(other, other_u, share, scale);
    ring_acquire(s.a_ring, to);
    store(s.a[0], own);
    store(s.a[1], other);
    convert(own_ds, own_u);
    convert(other_ds, other_u);
    store(s.ds[0], own_ds);
    store(s.ds[1], other_ds);
    ring_fill(s.a_ring, to);
    if (mine) {
      mma_fence();
      mma_AB<ZERO>(dq, own_ds, s.k[k1.stage]);
      mma_AB<ACC>(dq, other_ds, s.k[k0.stage]);
      mma_commit();
      mma_wait<0>(dq, own_ds, other_ds);
    }
    ring_release(s.k_ring, k0);
    ring_next(s.q_ring, q);
    ring_next(s.a_ring, to);
    if (!mine) continue;
    put(p.dq, s.dq, dq, t, step, over, p.dq_data, p.dq_stride, p.key_dim, true);
  }
  tma_store_wait_read();
  clear_rest(p.steps, t, p.dq_data, p.dq_stride[0], p.dq_stride[1], p.key_dim);
}

TILE void keys(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos q = {}, from = {};
  rt<float, D> dk, dv;
  int n = t.chunks ? walks(p, t) : 0;
  for (int i = 0; i <= n; i++) {
    int step = t.first + (i - 1) * Q;
    if (i < n) ring_wait(s.a_ring, from);
    if (i > 0 && i < n) {
      mma_fence();
      mma_AtB<ACC>(dk, s.ds[1], 0, s.q[q.stage], 0);
      mma_AtB<ACC>(dv, s.a[1], 0, s.u[q.stage], 0);
      mma_commit();
      mma_wait<0>(dk, dv);
    }
    if (i > 0 && i <= t.chunks) {
      bool over = runs_over(p.steps, t, step);
      put(p.dk, s.dk, dk, t, step, over, p.dk_data, p.dk_stride, p.key_dim, false);
      put(p.dv, s.dv, dv, t, step, over, p.dv_data, p.dv_stride, p.value_dim, false);
    }
    if (i == n) break;
    if (i < t.chunks) {
      mma_fence();
      mma_AtB<ZERO>(dk, s.ds[0], 0, s.q[q.stage], 0);
      mma_AtB<ZERO>(dv, s.a[0], 0, s.u[q.stage], 0);
      mma_commit();
      mma_wait<0>(dk, dv);
    }
    ring_done(s.a_ring, from);
    ring_done(s.q_ring, q);
  }
  tma_store_wait_read();
  clear_rest(p.steps, t, p.dk_data, p.dk_stride[0], p.dk_stride[1], p.key_dim);
  clear_rest(p.steps, t, p.dv_data, p.dv_stride[0], p.dv_stride[1], p.value_dim);
}

typedef block<params, shared, init, role<scores, WARPGROUP, 1, 232>, role<keys, WARPGROUP, 1, 200>,
              role<loader, THREAD, 1, 40>> kernel;
ENTRY(kernel, Q, D)
