// What the kernels of Based share: the features of 64 steps, and where sequences and their states lie.
//
// 1 + s + s^2 / 2 with s = scale q . k is the product of two rows of features: 1, k and the products of two entries of
// k on the one side, and on the other the same of q with their weights. Entries a and a + d, modulo 16, are a pair of
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

// Rows of kernels.def have MANY for more than one part.
TILE int this_part(const based_rows &p) { return MANY ? p.part : 0; }
TILE int block_x(const based_rows &p) { return this_part(p) == 1 ? 16 : 0; }
TILE int block_y(const based_rows &p) { return this_part(p) == 0 ? 0 : 16; }
TILE bool is_square(const based_rows &p) { return this_part(p) < 2; }
TILE bool is_first(const based_rows &p) { return this_part(p) == 0; }
TILE bool is_last(const based_rows &p) { return !MANY || p.part + 1 == p.parts; }

// Weights of the features of a side, of k 1. square: of distance 0, beside that of pairs.
struct weights { float square, pair, line; };
TILE weights weights_of_q(const based_rows &p) {
  return {is_square(p) ? 0.5f : 1.f, p.scale * p.scale, p.scale};
}

TILE float times(float x, float y) { return x * y; }
TILE float plus(float x, float y) { return x + y; }

// The two blocks of a tile of q or k; x times the weight of its row and that of pairs. square: x for distance 0. y4: y
// rotated by 4.
struct slices { rt<elem, 16> x, square, y, y4; };
template<class Tile>
TILE void load_slices(slices &o, const Tile &t, const rv &row, const weights &w, const based_rows &p) {
  rt<float, 16> x;
  load(o.y, t, block_y(p));
  if (this_part(p) == 3) rotate_cols<8>(o.y, o.y);
  load(x, t, block_x(p));
  map_row(x, row, times);
  map(x, [=](float f) { return f * w.pair; });
  convert(o.x, x);
  map(x, [=](float f) { return f * w.square; });
  convert(o.square, x);
}
// Distances 0 to 3, and then 4 to 7. Both are even or lie between two that are.
TILE void near_pairs(rt<elem, 64> &d, slices &o) {
  rt<elem, 16> y2, odd;
  multiply_to_part(d, 0, o.square, o.y);
  rotate_cols<2>(y2, o.y);
  rotate_cols<4>(o.y4, o.y);
  rotate_by_one(odd, o.y, y2);
  multiply_to_part(d, 16, o.x, odd);
  multiply_to_part(d, 32, o.x, y2);
  rotate_by_one(odd, y2, o.y4);
  multiply_to_part(d, 48, o.x, odd);
}
TILE void far_pairs(rt<elem, 64> &d, const slices &o) {
  rt<elem, 16> y6, y8, odd;
  rotate_cols<6>(y6, o.y);
  rotate_cols<8>(y8, o.y);
  multiply_to_part(d, 0, o.x, o.y4);
  rotate_by_one(odd, o.y4, y6);
  multiply_to_part(d, 16, o.x, odd);
  multiply_to_part(d, 32, o.x, y6);
  rotate_by_one(odd, y6, y8);
  multiply_to_part(d, 48, o.x, odd);
}
// Distance 8, 1 and x itself, of a part of squares; else zeros.
template<class Tile>
TILE void last_features(rt<elem, 32> &d, const Tile &t, const rv &row, const weights &w, const based_rows &p) {
  rt<float, 16> x, f;
  bool square = is_square(p), first = is_first(p);
  load(x, t, block_x(p));
  load(f, t, block_x(p));
  rotate_cols<8>(f);
  map_row(x, row, times);
  map(f, x, [=](float a, float b) { return a * b * w.pair; });
  map_rc(f, row, [=](float a, float r, int, int col) {
    return !square ? 0.f : col < 8 ? a : col == 8 && first ? r : 0.f;
  });
  convert_to_part(d, 0, f);
  float line = square ? w.line : 0.f;
  map(x, [=](float a) { return a * line; });
  convert_to_part(d, 16, x);
}
// All of them into a tile, by 16 columns.
template<class Features>
TILE void store_pair(Features &d, int col, const rt<elem, 16> &x, const rt<elem, 16> &y) {
  rt<elem, 16> f;
  multiply_to_part(f, 0, x, y);
  store(d, f, col);
}
template<class Tile, class Features>
TILE void store_features(Features &d, const Tile &t, const rv &row, const weights &w, const based_rows &p) {
  {
    slices o;
    rt<elem, 16> even, odd, next;
    load_slices(o, t, row, w, p);
    store_pair(d, 0, o.square, o.y);
    rotate_cols<2>(even, o.y);
    rotate_by_one(odd, o.y, even);
    store_pair(d, 16, o.x, odd);
    store_pair(d, 32, o.x, even);
    rotate_cols<4>(next, o.y);
    rotate_by_one(odd, even, next);
    store_pair(d, 48, o.x, odd);
    store_pair(d, 64, o.x, next);
    rotate_cols<6>(even, o.y);
    rotate_by_one(odd, next, even);
    store_pair(d, 80, o.x, odd);
    store_pair(d, 96, o.x, even);
    rotate_cols<8>(next, o.y);
    rotate_by_one(odd, even, next);
    store_pair(d, 112, o.x, odd);
  }
  rt<elem, 32> rest;
  last_features(rest, t, row, w, p);
  store(d, rest, 128);
}

// Gradients of x and y from those of the features, from distance 8 to 0. What goes to y is moved back by one column for
// each distance. Until the end they lack the weight of pairs.
struct pulling { rt<float, 16> x, gx, gy; rt<elem, 16> y, y2, y4, y6, y8; };
template<class Tile> TILE void begin_pulling(pulling &o, const Tile &t, const based_rows &p) {
  load(o.x, t, block_x(p));
  load(o.y, t, block_y(p));
  if (this_part(p) == 3) rotate_cols<8>(o.y, o.y);
  rotate_cols<2>(o.y2, o.y);
  rotate_cols<4>(o.y4, o.y);
  rotate_cols<6>(o.y6, o.y);
  rotate_cols<8>(o.y8, o.y);
}
// One distance, whose features have the gradient d.
TILE void pull(pulling &o, const rt<float, 16> &d, const rt<elem, 16> &turned) {
  rt<float, 16> y;
  widen(y, turned);
  each<16>([](int, int, float &gx, float &gy, float g, float x, float y) {
    gx = fused(g, y, gx);
    gy = fused(g, x, gy);
  }, o.gx, o.gy, d, o.x, y);
}
// d: of the last 32 features.
TILE void pull_last(pulling &o, const rt<float, 32> &d, const weights &w, const based_rows &p) {
  rt<float, 16> f;
  bool square = is_square(p);
  float line = square ? w.line / w.pair : 0.f;
  copy_part(o.gx, d, 16);
  map(o.gx, [=](float x) { return x * line; });
  fill(o.gy, 0.f);
  copy_part(f, d, 0);
  map_rc(f, [=](float x, int, int col) { return square && col < 8 ? x : 0.f; });
  pull(o, f, o.y8);
}
TILE void pull_far(pulling &o, const rt<float, 64> &d) {
  rt<float, 16> f;
  rt<elem, 16> odd;
  rotate_cols<-1>(o.gy);
  rotate_by_one(odd, o.y6, o.y8);
  copy_part(f, d, 48);
  pull(o, f, odd);
  rotate_cols<-1>(o.gy);
  copy_part(f, d, 32);
  pull(o, f, o.y6);
  rotate_cols<-1>(o.gy);
  rotate_by_one(odd, o.y4, o.y6);
  copy_part(f, d, 16);
  pull(o, f, odd);
  rotate_cols<-1>(o.gy);
  copy_part(f, d, 0);
  pull(o, f, o.y4);
}
TILE void pull_near(pulling &o, const rt<float, 64> &d, float square) {
  rt<float, 16> f;
  rt<elem, 16> odd;
  rotate_cols<-1>(o.gy);
  rotate_by_one(odd, o.y2, o.y4);
  copy_part(f, d, 48);
  pull(o, f, odd);
  rotate_cols<-1>(o.gy);
  copy_part(f, d, 32);
  pull(o, f, o.y2);
  rotate_cols<-1>(o.gy);
  rotate_by_one(odd, o.y, o.y2);
  copy_part(f, d, 16);
  pull(o, f, odd);
  rotate_cols<-1>(o.gy);
  copy_part(f, d, 0);
  map(f, [=](float x) { return x * square; });
  pull(o, f, o.y);
}
// To the columns of the whole tile. unit: of the weight of pairs and of the states.
TILE void add_pulled(rt<float, 16> &low, rt<float, 16> &high, pulling &o, float unit, const based_rows &p) {
  int part = this_part(p);
  auto add = [=](float x, float y) { return fused(y, unit, x); };
  if (part == 3) rotate_cols<8>(o.gy);
  if (part == 1) map(high, o.gx, add);
  else map(low, o.gx, add);
  if (part == 0) map(low, o.gy, add);
  else map(high, o.gy, add);
}

// d = a times the columns of states from c0.
template<int N, int G, class State>
TILE void features_gradient(rt<float, N> &d, const rt<elem, 64> (&a)[G], State &states, int c0) {
  UNROLLED for (int g = 0; g < G; g++)
    if (g == 0) mma_AB_cols<ZERO>(d, a[g], states[g], c0);
    else mma_AB_cols<ACC>(d, a[g], states[g], c0);
}
// All that the features' gradients, a times the states, add to those of x and y.
template<int G, class State>
TILE void pull_all(pulling &o, rt<elem, 64> (&a)[G], State &states, const weights &w, const based_rows &p) {
  rt<float, 32> last;
  rt<float, 64> far, near;
  mma_fence();
  features_gradient(last, a, states, 128);
  mma_commit();
  features_gradient(far, a, states, 64);
  mma_commit();
  mma_wait<1>(last);
  pull_last(o, last, w, p);
  mma_fence();
  features_gradient(near, a, states, 0);
  mma_commit();
  mma_wait<1>(far);
  pull_far(o, far);
  mma_wait<0>(near);
  UNROLLED for (int g = 0; g < G; g++) mma_wait<0>(a[g]);
  pull_near(o, near, w.square);
}

// ---- sequences
struct task { int row, batch, head, segment, first, end; };
// first_cut: the segment of a row's first cut.
TILE task block_task(const based_rows &p, int first_cut) {
  int count = p.cutting ? p.segments - 1 : p.segments, matrix = block_index() / count, row = matrix / p.heads;
  int segment = block_index() - matrix * count + (p.cutting ? first_cut : 0);
  task t = {row, row, matrix - row * p.heads, segment, segment * p.segment, (segment + 1) * p.segment};
  if (segment + 1 == p.segments) t.end = p.steps;
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
// The head's, among those of `s`, which has `stride` for each row. NULL stays NULL.
TILE based_state matrix_of(const based_state &s, const based_rows &p, const task &t, int stride, int i) {
  int64_t matrix = ((int64_t)t.row * stride + i) * p.heads + t.head;
  return {s.features ? s.features + matrix * p.parts * p.dim_v * BASED_FEATURES : s.features,
          s.sums ? s.sums + matrix * (BASED_SUM_ROWS * BASED_SUM_COLS) : s.sums};
}
TILE based_state no_state() { return {nullptr, nullptr}; }
// Where a segment's begins and where it is kept. cut: of a segment that is not the first, or not the last.
TILE based_state state_given(const based_rows &p, const task &t, const based_state &given, const based_state &cuts,
                             bool outermost, int cut) {
  if (p.cutting) return no_state();
  return outermost ? matrix_of(given, p, t, 1, 0) : matrix_of(cuts, p, t, p.cut_stride, cut);
}
TILE based_state state_kept(const based_rows &p, const task &t, const based_state &wanted, const based_state &cuts,
                            bool outermost, int cut) {
  if (p.cutting) return matrix_of(cuts, p, t, p.cut_stride, cut);
  return outermost ? matrix_of(wanted, p, t, 1, 0) : no_state();
}
TILE float *rows_of(const based_rows &p, float *features, int wg) {
  return features + ((int64_t)this_part(p) * p.dim_v + 64 * wg) * BASED_FEATURES;
}
TILE float *count_of(float *sums) { return sums + (BASED_SUM_ROWS - 1) * BASED_SUM_COLS; }
// unit: 1 of the caller's is as much here
TILE void begin_state(rt<float, BASED_FEATURES> &s, const based_state &from, const based_rows &p, int wg, float unit) {
  if (!from.features) return fill(s, 0.f);
  load(s, rows_of(p, from.features, wg), BASED_FEATURES, p.dim_v - 64 * wg, BASED_FEATURES);
  map(s, [=](float x) { return x * unit; });
}
TILE void keep_state(rt<float, BASED_FEATURES> &s, const based_state &to, const based_rows &p, int wg, float unit) {
  if (!to.features) return;
  map(s, [=](float x) { return x * unit; });
  store(rows_of(p, to.features, wg), BASED_FEATURES, s, p.dim_v - 64 * wg, BASED_FEATURES);
}
TILE void begin_sums(rt<float, 32> &s, const based_state &from) {
  if (!from.sums) return fill(s, 0.f);
  load(s, from.sums, BASED_SUM_COLS, BASED_SUM_ROWS - 1, BASED_SUM_COLS);
}
TILE void keep_sums(const rt<float, 32> &s, const based_state &to) {
  store(to.sums, BASED_SUM_COLS, s, BASED_SUM_ROWS - 1, BASED_SUM_COLS);
}

// The chunk that is the next of one of `count` warpgroups that take them in turn.
template<class Ring> TILE void next_turn(const Ring &r, ring_pos &at, int count) {
  for (int i = 0; i < count; i++) ring_next(r, at);
}

// Columns 32 to 47 of a tile of q or k, which are zeros behind its own: 1 in the first. As a row of its products with
// the tile it makes the tile's column sums.
TILE void ones_column(rt<float, 16> &d, float x) {
  fill(d, 0.f);
  map_rc(d, [=](float, int, int col) { return col == 0 ? x : 0.f; });
}
// A tile and its column of ones, as an operand.
template<class Tile> TILE void load_with_one(rt<elem, 64> &d, const Tile &t) {
  rt<float, 16> ones;
  load(d, t);
  ones_column(ones, 1.f);
  convert_to_part(d, 32, ones);
}
