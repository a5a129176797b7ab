// What the norms' kernels share: which lines a warpgroup has, streams of them, sums over a line, dropout.
#pragma once
#include "tile/lines.h"
#include "norm/norm.h"

// LONG: lines of any length and at any address, which are read in parts of WIDTH columns. Else a line is one part, and
// stays in registers.
enum { WIDTH = 1024 * J * GROUPS, ACCESS = LONG ? SINGLES : EIGHTS };
typedef lt<J> tile;
// LINES: lines of a warpgroup, or of the SPAN warpgroups that share one; 0: what the problem says
TILE int lines_of(const norm_problem &p) { return LINES ? LINES : p.lines; }
TILE int span_of(const norm_problem &p) { return LINES ? SPAN : p.span; }
// Where GROUPS == SPAN the barrier's number is a constant. Else a block reserves all 16 barriers, and a multiprocessor
// has 64: four blocks.
TILE int member_of(const norm_problem &p, int warpgroup) {
  return LINES && GROUPS == SPAN ? 0 : warpgroup / span_of(p);
}
TILE int slots_of(const norm_problem &p) { return LINES ? GROUPS / SPAN * LINES : p.slots; }

// A warpgroup's lines: the first is row `row` of group `group`; columns from col on. There may be none.
struct place { int row, group, col; };
TILE place place_of(const norm_problem &p, int i, int warpgroup) {
  int block = (int)((uint64_t)(uint32_t)i * p.inverse_groups >> 32), group = i - block * p.groups;
  if (group >= p.groups) {                     // the quotient may be less by 1
    block++;
    group -= p.groups;
  }
  int member = member_of(p, warpgroup), row = block * slots_of(p) + member * lines_of(p);
  int col = (warpgroup - member * span_of(p)) * (1024 * J);
  return {row, group, col};
}
TILE int rows_left(const norm_problem &p, const place &at) { return p.rows - at.row; }
TILE int columns_left(const norm_problem &p, const place &at) { return p.dim - at.col; }
TILE place moved(const place &at, int columns) { return {at.row, at.group, at.col + columns}; }

// Strides of lines that are not LONG are from 0 to 2^31 - 1: products with them are one instruction.
TILE int64_t stride_of(int64_t stride) { return LONG ? stride : (int64_t)(uint32_t)stride; }
TILE int64_t offset_of(const norm_stream &g, const place &at) {
  return (uint32_t)at.row * stride_of(g.row) + (uint32_t)at.group * stride_of(g.group) + at.col;
}
template<typename T> TILE void begin_lines(tile &t, const T *g, int64_t ld, const norm_problem &p, int m, int n) {
  if (LONG && !p.eights) load_begin<SINGLES>(t, g, ld, lines_of(p), m, n);
  else load_begin<EIGHTS>(t, g, ld, lines_of(p), m, n);
}
template<typename T> TILE void save_lines(T *g, int64_t ld, const tile &t, const norm_problem &p, int m, int n) {
  if (LONG && !p.eights) save<SINGLES>(g, ld, t, lines_of(p), m, n);
  else save<EIGHTS>(g, ld, t, lines_of(p), m, n);
}
TILE void begin_given(tile &t, const norm_stream &g, const norm_problem &p, const place &at) {
  int64_t first = offset_of(g, at);
  if (!HALVES && g.is_float)
    begin_lines(t, (const float *)g.data + first, stride_of(g.row), p, rows_left(p, at), columns_left(p, at));
  else begin_lines(t, (const elem *)g.data + first, stride_of(g.row), p, rows_left(p, at), columns_left(p, at));
}
TILE void begin(tile &t, const norm_stream &g, const norm_problem &p, const place &at) {
  if (g.data) begin_given(t, g, p, at);
}
TILE void end_given(tile &t, const norm_stream &g) {
  if (!HALVES && g.is_float) load_end<float>(t);
  else load_end<elem>(t);
}
TILE void end(tile &t, const norm_stream &g) {
  if (g.data) end_given(t, g);
}
TILE void keep(const norm_stream &g, const tile &t, const norm_problem &p, const place &at) {
  int64_t first = offset_of(g, at);
  if (!g.data) return;
  if (!HALVES && g.is_float)
    save_lines((float *)g.data + first, stride_of(g.row), t, p, rows_left(p, at), columns_left(p, at));
  else save_lines((elem *)g.data + first, stride_of(g.row), t, p, rows_left(p, at), columns_left(p, at));
}
// The same for all lines. Zeros where there is none.
TILE void load_vector(tile &t, const void *v, int is_float, const norm_problem &p, const place &at) {
  int64_t first = (int64_t)at.group * p.dim + at.col;
  int n = v ? columns_left(p, at) : 0;
  if (is_float) {
    begin_lines(t, (const float *)v + first, 0, p, lines_of(p), n);
    load_end<float>(t);
  } else {
    begin_lines(t, (const elem *)v + first, 0, p, lines_of(p), n);
    load_end<elem>(t);
  }
}

// ---- sums over lines, of which a warpgroup, or those that share a line, make two at a time
struct sums_room { sv<4> a[2][GROUPS], b[2][GROUPS]; };      // of every other time: nobody reads where others write
struct summer { int warpgroup, turn; };
TILE void sum_up(lv &a, const lsum &part_a, lv &b, const lsum &part_b, const norm_problem &p, sums_room &s,
                 summer &who) {
  int lines = lines_of(p), span = span_of(p);
  if (lines > 2) {
    reduce(a, part_a, lines);
    reduce(b, part_b, lines);
    return;
  }
  put_sums(s.a[who.turn][who.warpgroup], part_a);
  put_sums(s.b[who.turn][who.warpgroup], part_b);
  int line = member_of(p, who.warpgroup), first = line * span;
  bar_sync(1 + line, 128 * span);
  take_sums(a, s.a[who.turn][first], lines);
  take_sums(b, s.b[who.turn][first], lines);
  for (int i = first + 1; i < first + span; i++) {
    lv more_a, more_b;
    take_sums(more_a, s.a[who.turn][i], lines);
    take_sums(more_b, s.b[who.turn][i], lines);
    map(a, a, more_a, [](float x, float y) { return x + y; });
    map(b, b, more_b, [](float x, float y) { return x + y; });
  }
  who.turn ^= 1;
}
TILE void sum_up(lv &a, const lsum &part, const norm_problem &p, sums_room &s, summer &who) {
  int lines = lines_of(p), span = span_of(p);
  if (lines > 2) return reduce(a, part, lines);
  put_sums(s.a[who.turn][who.warpgroup], part);
  int line = member_of(p, who.warpgroup), first = line * span;
  bar_sync(1 + line, 128 * span);
  take_sums(a, s.a[who.turn][first], lines);
  for (int i = first + 1; i < first + span; i++) {
    lv more;
    take_sums(more, s.a[who.turn][i], lines);
    map(a, a, more, [](float x, float y) { return x + y; });
  }
  who.turn ^= 1;
}

// The largest number of a line, none of them negative.
TILE void most_up(lv &a, const lsum &part, const norm_problem &p, sums_room &s, summer &who) {
  int lines = lines_of(p), span = span_of(p);
  if (lines > 2) return reduce_most(a, part, lines);
  put_most(s.a[who.turn][who.warpgroup], part);
  int line = member_of(p, who.warpgroup), first = line * span;
  bar_sync(1 + line, 128 * span);
  take_most(a, s.a[who.turn][first], lines);
  for (int i = first + 1; i < first + span; i++) {
    lv more;
    take_most(more, s.a[who.turn][i], lines);
    map(a, a, more, [](float x, float y) { return x > y ? x : y; });
  }
  who.turn ^= 1;
}

// ---- dropout: 8 draws of 16 bits for every 8 columns of a row, by Philox 4x32-10 (Salmon, Moraes, Dror & Shaw 2011)
// of the row and the columns' number, with the seed as key
struct draws { uint32_t word[4]; };
TILE draws draw(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t key, uint32_t key_b) {
  UNROLLED for (int round = 0; round < 10; round++) {
    uint64_t x = (uint64_t)a * 0xd2511f53u, y = (uint64_t)c * 0xcd9e8d57u;
    a = (uint32_t)(y >> 32) ^ b ^ key;
    b = (uint32_t)y;
    c = (uint32_t)(x >> 32) ^ d ^ key_b;
    d = (uint32_t)x;
    key += 0x9e3779b9u;
    key_b += 0xbb67ae85u;
  }
  return {{a, b, c, d}};
}
template<int N> TILE void drop(lt<N> &t, const norm_problem &p, const place &at) {
  uint32_t key = p.seed[0], key_b = p.seed[1], most = p.drop_most;
  float scale = p.keep_scale;
  int row = at.row, col = at.col;
  each_eight(t, lines_of(p), columns_left(p, at), [=](float *x, int line, int column) {
    draws bits = draw((uint32_t)(row + line), 0, (uint32_t)(col + column) / 8, 0, key, key_b);
    UNROLLED for (int i = 0; i < 4; i++) {
      x[2 * i] = bits.word[i] << 16 <= most ? 0.f : x[2 * i] * scale;
      x[2 * i + 1] = bits.word[i] <= most ? 0.f : x[2 * i + 1] * scale;
    }
  });
}

TILE float sigmoid(float a) { return fast_rcp(1.f + fast_exp2(a * -1.4426950408889634f)); }
TILE float silu(float z) { return z * sigmoid(z); }
