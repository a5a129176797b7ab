// Segments that begin early (delta.h): how early, for the kernels that pass over them.
#pragma once
#include "tile/quotient.h"
#include "delta/delta_prepare.h"

// Warp. The largest of n numbers of chunks that delta_fades.cu has found; 0 where one of them is 0.
TILE int most_early(const float *early, int n) {
  enum { AT_ONCE = 160 };                   // in one round for as many ranges as a GPU has multiprocessors
  float most = 0.f;
  ROLLED for (int first = 0; first < n; first += AT_ONCE) {
    wv<AT_ONCE> x;
    map_index(x, [=](int i) { return early[first + i < n ? first + i : first]; });
    map(x, x, x, [](float x, float) { return x > 0.f ? x : infinity(); });
    most = fmaxf(most, max_of(x));
  }
  return most < infinity() ? (int)most : 0;
}
// The same. Any width, for few numbers
TILE int few_early(const float *early, int n) {
  enum { AT_ONCE = 8 };
  float least = early[0], most = least;
  ROLLED for (int first = 0; first < n; first += AT_ONCE)
    UNROLLED for (int k = 0; k < AT_ONCE; k++) {
      float x = early[first + k < n ? first + k : 0];
      least = fminf(least, x);
      most = fmaxf(most, x);
    }
  return least > 0.f ? (int)most : 0;
}
// Where a range of the line of chunks begins. Those that begin where the line does are the longest: they have
// nothing in front.
TILE int range_begin(int range, const delta_line &line) {
  return quotient(range * line.chunks + line.ranges.by - 1, line.ranges);
}
// t becomes one of its segments, of `steps` steps.
TILE void take_segment(row_task &t, int segment, int steps) {
  t.place += segment * (steps / Q);
  t.first += segment * steps;
  if (t.end > t.first + steps) t.end = t.first + steps;
  t.chunks = (t.end - t.first + Q - 1) / Q;
}
// A segment begins `early` chunks in front of its own, if it is not the first of its row: how many. 0: none begins.
TILE int begin_early(row_task &t, int segment, int early) {
  int in_front = segment > 0 ? early : 0;
  t.place -= in_front;
  t.first -= in_front * Q;
  t.chunks = early ? t.chunks + in_front : 0;
  return in_front;
}
// EARLY: 64 values of state number `i` between segments, `keys` columns (delta_meets_params). half: of values
TILE float *early_state(const delta_cut &cut, const delta_rows &p, const row_task &t, int i, int half, int keys) {
  return cut.states + (((int64_t)t.row * cut.stride + i) * p.heads + t.head) * (128 * keys) + half * 64 * keys;
}
