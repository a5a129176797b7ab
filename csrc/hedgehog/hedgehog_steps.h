// Features, and where chunks of 64 steps lie. For Hedgehog's kernels.
#pragma once
#include "hedgehog/hedgehog.h"
enum { Q = 64, F = 64 };        // steps of a chunk, most columns of a map
#define LOG2E 1.4426950408889634f

// The block's row and head; its first chunk begins at step `first`, `chunks` of them, the last of which ends in front
// of step `end`. before: the chunk in front of the first is the row's too.
struct task { int row, batch, head, segment, first, end, chunks; bool before; };
TILE task task_of(const hedgehog_steps &p, int unit, int segment) {
  int row = unit / p.heads, chunk = segment * p.segment;
  task t = {row, row, unit - row * p.heads, segment, chunk * Q, p.count, 0, segment > 0};
  if (p.starts) {
    int first = p.starts[row], end = p.starts[row + 1];
    t.batch = 0;
    t.first = first > 0 ? first : 0;
    t.end = end < p.count ? end : p.count;
  }
  int left = t.end > t.first ? (t.end - t.first + Q - 1) / Q : 0;
  t.chunks = segment + 1 < p.segments ? p.segment : left;
  return t;
}
// Chunks count from the one in front of the first, which is 0. Where that is not the row's, it begins behind all steps:
// copies read zeros.
TILE int step_of(const hedgehog_steps &p, const task &t, int chunk) {
  return chunk == 0 && !t.before ? p.count : t.first + (chunk - 1) * Q;
}
// Steps of the next packed row are in the last chunk.
TILE bool runs_over(const hedgehog_steps &p, const task &t, int step) { return p.starts && t.end - step < Q; }

// Steps behind the last packed row are in no sequence: 0. ld, head: strides of step and head in elements.
TILE void clear_rest(const hedgehog_steps &p, const task &t, void *data, int64_t ld, int64_t head, int dim) {
  if (!p.starts || t.row + 1 < p.rows) return;
  rt<float, 64> zero;
  fill(zero, 0.f);
  for (int step = t.end; step < p.count; step += Q)
    for (int col = 0; col < dim; col += 64) {
      elem *to = (elem *)data + step * ld + t.head * head + col;
      int steps = p.count - step;
      store_rows<elem>(zero, [=](int i) { return i < steps ? to + i * ld : (elem *)nullptr; }, dim - col);
    }
}

// The linear part's factor over the window's.
TILE float ratio_of(const float *window, const float *linear, int head) {
  return linear[head] * fast_rcp(window[head]);
}

// f = softmax(x map) and g = softmax(-x map), times a factor; columns from `count` on are 0.
TILE void features(rt<float, F> &f, rt<float, F> &g, const st<elem, Q, D> &x, const st<elem, D, F> &map_, int count,
                   float factor) {
  rv high, low;
  rsum sum;
  mma_fence();
  mma_AB<ZERO>(f, x, map_);
  mma_commit();
  mma_wait<0>(f);
  if (count < F) map_rc(f, [=](float y, int, int col) { return col < count ? y : -infinity(); });
  fill(high, -infinity());
  row_max(high, f);
  map_row(g, f, high, [](float y, float m) { return m - y; });
  if (count < F) map_rc(g, [=](float y, int, int col) { return col < count ? y : -infinity(); });
  fill(low, -infinity());
  row_max(low, g);
  map_row(f, high, [](float y, float m) { return fast_exp2((y - m) * LOG2E); });
  map_row(g, low, [](float y, float m) { return fast_exp2((y - m) * LOG2E); });
  row_sum(sum, f);
  reduce(high, sum);
  row_sum(sum, g);
  reduce(low, sum);
  map(high, high, [=](float l) { return factor * fast_rcp(l); });
  map(low, low, [=](float l) { return factor * fast_rcp(l); });
  map_row(f, high, [](float y, float l) { return y * l; });
  map_row(g, low, [](float y, float l) { return y * l; });
}

// The first column of a row's window, counted from the chunk's begin: negative in the chunk before. A block's steps are
// a power of 2.
TILE int window_begin(int row, int w, bool sliding) { return sliding ? row - w + 1 : (row & -w) - w; }
TILE void window_begins(rv &first, const hedgehog_steps &p) {
  int w = p.window;
  bool sliding = p.sliding;
  map_rows(first, [=](int row) { return (float)window_begin(row, w, sliding); });
}

// A warp's sums of features, which is the last column of the state: F of f and as many of g.
struct sums { wv<F> f, g; };
TILE void load_sums(sums &z, const float *state, int count, int value_dim) {
  int64_t ld = value_dim + 1;
  load(z.f, state + value_dim, ld, count, 0.f);
  load(z.g, state + count * ld + value_dim, ld, count, 0.f);
}
TILE void store_sums(float *state, const sums &z, int count, int value_dim) {
  int64_t ld = value_dim + 1;
  store(state + value_dim, ld, z.f, count);
  store(state + count * ld + value_dim, ld, z.g, count);
}
// Adds what store() of a csum<F> has left.
TILE void add_parts(wv<F> &z, const sv<4 * F> &parts) {
  wv<F> x;
  UNROLLED for (int i = 0; i < 4; i++) {
    load(x, slice<F>(parts, F * i));
    map(z, z, x, [](float a, float b) { return a + b; });
  }
}
TILE void sum_columns(sv<4 * F> &parts, rt<float, F> &f) {
  csum<F> sum;
  clear(sum);
  each<F>([](int, int, float x, float &c) { c += x; }, f, sum);
  store(parts, sum);
}
