// What the kernels of Based share: the features of 64 steps, and where sequences and their states lie.
//
// 1 + s + s^2 / 2 with s = scale q . k is the product of two rows of features: 1, k and the products of two entries of k
// on the one side, and on the other the same of q with their weights. Entries a and a + d, modulo 16, are a pair of
// distance d. All pairs of 16 entries are those of distance 0, ..., 7 and half of those of distance 8. So 16 columns
// of k, times the same rotated by d, are 16 features:
//   columns 16 d ...   distance d < 8, half the weight where d is 0
//   columns 128 ...    distance 8, its first 8; then 1, and 7 zeros
//   columns 144 ...    k
// Of two blocks of 16 entries, all 256 products are pairs of distance 0 to 15, 8 of them in a part.
#pragma once
#include "tile/tile.h"
#include "tile/slices.h"
#include "based/based.h"

// The 16-bit copies of states are of sums that grow with the sequence: fp16 holds them longer so.
enum { SMALLER = 16 };

TILE int block_x(const based_rows &p) { return p.part == 1 ? 16 : 0; }
TILE int block_y(const based_rows &p) { return p.part == 0 ? 0 : 16; }
TILE bool is_square(const based_rows &p) { return p.part < 2; }
TILE bool is_first(const based_rows &p) { return p.part == 0; }

// Weights of the features of a side: of k all are 1.
struct weights { float square, pair, line; };
TILE weights weights_of_q(const based_rows &p) {
  float pair = p.scale * p.scale;
  return {is_square(p) ? 0.5f * pair : pair, pair, p.scale};
}

// The two blocks of a tile of q or k. x is scaled by a weight of its row.
struct operands { rt<float, 16> x, y; };
template<class Tile> TILE void load_blocks(operands &o, const Tile &t, const based_rows &p) {
  load(o.x, t, block_x(p));
  load(o.y, t, block_y(p));
  if (p.part == 3) rotate_cols<8>(o.y);
}
TILE float times(float x, float y) { return x * y; }

// Four distances, from y's on; y is left rotated by 4.
TILE void next_pairs(rt<elem, 64> &d, operands &o, float first, float others) {
  UNROLLED for (int i = 0; i < 4; i++) {
    rt<float, 16> f;
    float w = i ? others : first;
    fill(f, w);
    map(f, o.x, times);
    map(f, o.y, times);
    convert_to_part(d, 16 * i, f);
    rotate_cols<1>(o.y);
  }
}
// Distance 8, 1 and k; y is rotated by 8. row: x's scale.
TILE void last_features(rt<elem, 32> &d, const operands &o, const rv &row, const weights &w, const based_rows &p) {
  rt<float, 16> f;
  bool square = is_square(p), first = is_first(p);
  fill(f, w.pair);
  map(f, o.x, times);
  map(f, o.y, times);
  map_rc(f, row, [=](float x, float r, int, int col) {
    return !square ? 0.f : col < 8 ? x : col == 8 && first ? r : 0.f;
  });
  convert_to_part(d, 0, f);
  fill(f, square ? w.line : 0.f);
  map(f, o.x, times);
  convert_to_part(d, 16, f);
}
// All of them into a tile.
template<class Tile, class Features>
TILE void store_features(Features &d, const Tile &t, const rv &row, const weights &w, const based_rows &p) {
  operands o;
  rt<elem, 64> four;
  rt<elem, 32> rest;
  load_blocks(o, t, p);
  map_row(o.x, row, times);
  next_pairs(four, o, w.square, w.pair);
  store(d, four, 0);
  next_pairs(four, o, w.pair, w.pair);
  store(d, four, 64);
  last_features(rest, o, row, w, p);
  store(d, rest, 128);
}

// Gradients of x and y from those of the features, in the opposite order. y comes rotated by 8, what goes to y is moved
// back by one column for each distance.
struct pulled { rt<float, 16> x, y; };
TILE void pull_last(pulled &g, operands &o, const rt<float, 32> &d, const weights &w, const based_rows &p) {
  rt<float, 16> f;
  bool square = is_square(p);
  copy_part(g.x, d, 16);
  float line = square ? w.line : 0.f;
  map(g.x, [=](float x) { return x * line; });
  copy_part(f, d, 0);
  float pair = w.pair;
  map_rc(f, [=](float x, int, int col) { return square && col < 8 ? x * pair : 0.f; });
  g.y = f;
  map(f, o.y, times);
  map(g.x, f, [](float x, float y) { return x + y; });
  map(g.y, o.x, times);
}
TILE void pull_four(pulled &g, operands &o, const rt<float, 64> &d, float first, float others) {
  UNROLLED for (int i = 3; i >= 0; i--) {
    rt<float, 16> f;
    rotate_cols<-1>(g.y);
    rotate_cols<-1>(o.y);
    copy_part(f, d, 16 * i);
    float w = i ? others : first;
    map(f, [=](float x) { return x * w; });
    rt<float, 16> h = f;
    map(f, o.y, times);
    map(g.x, f, [](float x, float y) { return x + y; });
    map(h, o.x, times);
    map(g.y, h, [](float x, float y) { return x + y; });
  }
}
// To the columns of the whole tile, of which `all` has sums already.
TILE void add_pulled(rt<float, 16> &low, rt<float, 16> &high, pulled &g, const based_rows &p) {
  auto sum = [](float x, float y) { return x + y; };
  if (p.part == 3) rotate_cols<8>(g.y);
  if (p.part == 1) map(high, g.x, sum);
  else map(low, g.x, sum);
  if (p.part == 0) map(low, g.y, sum);
  else map(high, g.y, sum);
}

// ---- sequences
struct task { int row, batch, head, first, end; };
TILE task block_task(const based_rows &p) {
  int row = block_index() / p.heads;
  task t = {row, row, block_index() - row * p.heads, 0, p.steps};
  if (p.starts) {
    int first = p.starts[row], end = p.starts[row + 1];
    t.batch = 0;
    t.first = first > 0 ? first : 0;
    t.end = end < p.steps ? end : p.steps;
  }
  return t;
}
TILE int chunks_of(const task &t) { return t.end > t.first ? (t.end - t.first + 63) / 64 : 0; }
// Steps of the next packed row are in this chunk, the last of its row.
TILE bool runs_over(const based_rows &p, const task &t, int step) { return p.starts && t.end - step < 64; }
// Of a step in [batch, heads, steps].
TILE int64_t place(const based_rows &p, const task &t, int step) {
  return ((int64_t)t.batch * p.heads + t.head) * p.steps + step;
}

// ---- states
TILE int64_t state_of(const based_rows &p, const task &t, int wg) {
  int64_t matrix = ((int64_t)t.row * p.heads + t.head) * p.parts + p.part;
  return (matrix * p.dim_v + 64 * wg) * BASED_FEATURES;
}
TILE int64_t sums_of(const based_rows &p, const task &t) {
  return ((int64_t)t.row * p.heads + t.head) * (BASED_SUM_ROWS * BASED_SUM_COLS);
}
TILE float *count_of(const based_rows &p, const task &t, float *sums) {
  return sums + sums_of(p, t) + (BASED_SUM_ROWS - 1) * BASED_SUM_COLS;
}
// unit: 1 of the caller's is as much here
TILE void begin_state(rt<float, BASED_FEATURES> &s, const float *from, const based_rows &p, const task &t, int wg,
                      float unit) {
  if (!from) return fill(s, 0.f);
  load(s, from + state_of(p, t, wg), BASED_FEATURES, p.dim_v - 64 * wg, BASED_FEATURES);
  map(s, [=](float x) { return x * unit; });
}
TILE void keep_state(rt<float, BASED_FEATURES> &s, float *to, const based_rows &p, const task &t, int wg, float unit) {
  if (!to) return;
  map(s, [=](float x) { return x * unit; });
  store(to + state_of(p, t, wg), BASED_FEATURES, s, p.dim_v - 64 * wg, BASED_FEATURES);
}
TILE void begin_sums(rt<float, 32> &s, const float *from, const based_rows &p, const task &t, float unit) {
  if (!from) return fill(s, 0.f);
  load(s, from + sums_of(p, t), BASED_SUM_COLS, BASED_SUM_ROWS - 1, BASED_SUM_COLS);
  map(s, [=](float x) { return x * unit; });
}

// Columns 32 to 47 of a tile of q or k, which are zeros behind its own: 1 in the first. As a row of its products with
// the tile it makes the tile's column sums.
TILE void ones_column(rt<float, 16> &d, float x) {
  fill(d, 0.f);
  map_rc(d, [=](float, int, int col) { return col == 0 ? x : 0.f; });
}
