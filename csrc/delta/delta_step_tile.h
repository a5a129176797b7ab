// Which way a state lies in memory, and what that means to the kernel of steps: the rows of its tile are keys, and
// columns values, or the other way round.
#pragma once
#include "ssd/step_tile.h"
#include "tile/dots.h"
#include "delta/delta_step.h"

// A step sums over its keys: the state times a vector, for each value, and products of two vectors. put() begins such a
// sum and take() ends it; between the two stands meet().
// Keys along rows: sums go down columns, through shared memory.
struct keys_down {
  typedef mr<ROWS> keys;
  typedef mc<COLS> values;
  typedef mcsum<COLS> sums;
  typedef sv<4 * COLS> room;
  typedef sv<4> dot_room;
  TILE void put(room &r, values &, const sums &parts) { store(r, parts); }
  TILE void put(dot_room &r, float &, const keys &a, const keys &b) { store_dot(r, a, b); }
  TILE void meet() { wg_sync(); }
  TILE void take(values &sum, const room &r) { load_sum(sum, r); }
  TILE void take(float &sum, const dot_room &r) { sum = load_dot(r); }
};
// Keys along columns: sums go along rows, which a few threads share.
struct keys_across {
  typedef mc<COLS> keys;
  typedef mr<ROWS> values;
  typedef mrsum<ROWS> sums;
  typedef struct {} room, dot_room;
  TILE void put(room &, values &sum, const sums &parts) { reduce(sum, parts); }
  TILE void put(dot_room &, float &sum, const keys &a, const keys &b) { sum = dot(a, b); }
  TILE void meet() {}
  TILE void take(values &, const room &) {}
  TILE void take(float &, const dot_room &) {}
};
template<bool FIRST, class A, class B> struct choose { typedef A type; };
template<class A, class B> struct choose<false, A, B> { typedef B type; };
typedef choose<DOWN, keys_down, keys_across>::type side;
typedef side::keys keys;
typedef side::values values;
enum { VALUES = DOWN ? COLS : ROWS, KEYS = DOWN ? ROWS : COLS };

template<typename T, int R> TILE void begin_side(mr<R> &v, const T *g, int n) { load_begin(v, g, n); }
template<typename T, int C> TILE void begin_side(mc<C> &v, const T *g, int n) { load_begin<ACCESS>(v, g, n); }
template<int R> TILE void save_side(elem *g, const mr<R> &v, int n) { save(g, v, n); }
template<int C> TILE void save_side(elem *g, const mc<C> &v, int n) { save<ACCESS>(g, v, n); }

// A number of a head, or one of each of its keys, by one thread each.
TILE void begin_numbers(float &x, const delta_numbers &d, int64_t at, int) {
  x = 0.f;
  if (d.data && d.is_float) load_begin(x, (const float *)d.data + at);
  else if (d.data) load_begin(x, (const elem *)d.data + at);
}
TILE void begin_numbers(ml<KEYS> &x, const delta_numbers &d, int64_t at, int n) {
  if (d.is_float) load_begin(x, (const float *)d.data + at, d.data ? n : 0);
  else load_begin(x, (const elem *)d.data + at, d.data ? n : 0);
}
template<class X> TILE void begin_numbers(X &x, const delta_numbers &d, int sample, int step, int head, int n) {
  begin_numbers(x, d, sample * d.batch + step * d.step + head * d.head, n);
}
template<class X> TILE void end_numbers(X &x, const delta_numbers &d) {
  if (d.is_float) load_end<float>(x);
  else load_end<elem>(x);
}
// x = f(x, y) of a number or of each of them.
template<class F> TILE void change(float &x, float y, F f) { x = f(x, y); }
template<class F> TILE void change(ml<KEYS> &x, const ml<KEYS> &y, F f) { map(x, x, y, f); }

TILE int quotient_of(int n, const divisor &d) { return DIVIDES ? n / d.by : quotient(n, d); }
// A block has one of `parts` parts of one value head's state of one sample.
TILE step_task delta_task(const delta_step_params &p) {
  int head = quotient_of(block_index(), p.parts), sample = quotient_of(head, p.heads);
  int token = !ONCE && p.accepted ? p.accepted[sample] - 1 : 0;
  bool known = token >= 0 && token < p.wide;
  int place = p.places && known ? p.places[sample * p.places_stride + token] : sample;
  return {sample, head - sample * p.heads.by, block_index() - head * p.parts.by, known ? place : -1};
}
TILE void keep_behind(const state_tile &state, const delta_step_params &p, const step_task &t, int step, int row,
                      int col) {
  const step_states &s = p.kept;
  int place = s.slots ? s.slots[t.sample * p.kept_slots + step * p.kept_token] : t.sample;
  if (place < 0 || place >= s.places) return;
  keep_state(state, s, place * s.place + step * p.kept_step + t.head * s.head + row * s.row + col, row, col);
}
