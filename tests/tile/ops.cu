// Every tile operation in a kernel of its own, written in the vocabulary only: the CPU and the GPU build of this file
// must agree with the formulas in test_tile.py. Rows: ops.def.
#include "tile/tile.h"
#include "tile/channels.h"
#include "tile/dots.h"
#include "tile/folds.h"
#include "tile/halves.h"
#include "tile/levels.h"
#include "tile/mail.h"
#include "tile/matrix.h"
#include "tile/numbers.h"
#include "tile/quarters.h"
#include "tile/slices.h"
#include "tile/triangle.h"

struct op_params {
  gmap a, b, c;
  const float *x, *y;         // x: N floats, one for each column; y: 64, one for each row
  const elem *e;
  float *out;
  int *counter;
  int row, col, head, batch;  // place of tile a in its tensor, and of b in c
  int m, n;                   // limits of what is read or written
};
#define SHAPE template<int RA, int CA, int RB, int CB, int N, int I>
SHAPE struct tiles {
  st<elem, RA, CA> a;
  st<elem, RB, CB> b;
  sv<N> v;
  sv<64> rows;
  sem full;
  int value;
};
#define TILES tiles<RA, CA, RB, CB, N, I>
SHAPE TILE void init(TILES &s) { sem_init(s.full, arrivals(1, 0, 0)); }
SHAPE TILE void loader(const op_params &p, TILES &s, int) {
  put(s.value, p.m + p.n);
  sem_expect(s.full, tile_bytes(s.a) + tile_bytes(s.b) + N * 4);
  tma_load(s.a, p.a, s.full, p.row, p.col, p.head, p.batch);
  tma_load(s.b, p.b, s.full, 0, 0, 0, 0);
  tma_load(s.v, p.x, s.full);
}
SHAPE TILE void put_b(const op_params &p, TILES &s) {
  fence_async();
  wg_sync();
  tma_store(p.c, s.b, p.row, p.col, p.head, p.batch);
  tma_store_wait();
}
template<int N> TILE void outer(rt<float, N> &t, const op_params &p, const sv<N> &v) {   // x[col] + y[row]
  cv<N> x;
  rv y;
  load(x, v);
  load(y, p.y, 64, 0.f);
  fill(t, 0.f);
  map_col(t, x, [](float, float b) { return b; });
  map_row(t, y, [](float a, float b) { return a + b; });
}

// ---- products
#define PRODUCT(...)                    \
  rt<float, N> d;                       \
  mma_fence();                          \
  __VA_ARGS__;                          \
  mma_commit();
SHAPE TILE void mma_ABt_shared(const op_params &p, TILES &s, int) {
  sem_wait(s.full, 0);
  PRODUCT(mma_ABt<ZERO>(d, s.a, s.b), mma_ABt<ACC>(d, s.a, s.b))
  mma_wait<0>(d);
  store(p.out, N, d, 64, N);
}
SHAPE TILE void mma_ABt_rows_shared(const op_params &p, TILES &s, int) {
  sem_wait(s.full, 0);
  PRODUCT(mma_ABt_rows<ZERO>(d, s.a, s.b, I), mma_ABt_rows<ACC>(d, s.a, s.b, I))
  mma_wait<0>(d);
  store(p.out, N, d, 64, N);
}
SHAPE TILE void mma_AB_cols_shared(const op_params &p, TILES &s, int) {
  sem_wait(s.full, 0);
  PRODUCT(mma_AB_cols<ZERO>(d, s.a, s.b, I), mma_AB_cols<ACC>(d, s.a, s.b, I))
  mma_wait<0>(d);
  store(p.out, N, d, 64, N);
}
SHAPE TILE void mma_AB_shared(const op_params &p, TILES &s, int) {
  sem_wait(s.full, 0);
  PRODUCT(mma_AB<ZERO>(d, s.a, s.b), mma_AB<ACC>(d, s.a, s.b))
  mma_wait<0>(d);
  store(p.out, N, d, 64, N);
}
SHAPE TILE void mma_AtB_window(const op_params &p, TILES &s, int) {
  sem_wait(s.full, 0);
  constexpr int ca = N == 32 ? 0 : 64 * I, cb = N == 32 ? 32 * I : 64 * I;
  PRODUCT(mma_AtB<ZERO>(d, s.a, ca, s.b, cb), mma_AtB<ACC>(d, s.a, ca, s.b, cb))
  mma_wait<0>(d);
  store(p.out, N, d, 64, N);
}
SHAPE TILE void mma_AtBt_shared(const op_params &p, TILES &s, int) {
  sem_wait(s.full, 0);
  PRODUCT(mma_AtBt<ZERO>(d, s.a, s.b), mma_AtBt<ACC>(d, s.a, s.b))
  mma_wait<0>(d);
  store(p.out, N, d, 64, N);
}
SHAPE TILE void mma_AtBt_rows_shared(const op_params &p, TILES &s, int) {
  sem_wait(s.full, 0);
  PRODUCT(mma_AtBt_rows<ZERO>(d, s.a, s.b, I), mma_AtBt_rows<ACC>(d, s.a, s.b, I))
  mma_wait<0>(d);
  store(p.out, N, d, 64, N);
}
SHAPE TILE void mma_ABt_register(const op_params &p, TILES &s, int) {
  rt<elem, CA> a;
  sem_wait(s.full, 0);
  load(a, s.a);
  PRODUCT(mma_ABt<ZERO>(d, a, s.b), mma_ABt<ACC>(d, a, s.b))
  mma_wait<0>(d, a);
  store(p.out, N, d, 64, N);
}
SHAPE TILE void mma_AB_register(const op_params &p, TILES &s, int) {
  rt<elem, CA> a;
  sem_wait(s.full, 0);
  load(a, s.a);
  PRODUCT(mma_AB<ZERO>(d, a, s.b), mma_AB<ACC>(d, a, s.b))
  mma_wait<0>(d, a);
  store(p.out, N, d, 64, N);
}
SHAPE TILE void mma_AB_rows_register(const op_params &p, TILES &s, int) {
  rt<elem, 2 * CA> whole;
  OVERLAY(elem, CA, a, whole);
  sem_wait(s.full, 0);
  load(a, s.a);
  PRODUCT(mma_AB_rows<ZERO>(d, a, s.b, I), mma_AB_rows<ACC>(d, a, s.b, I))
  mma_wait<0>(d, a);
  store(p.out, N, d, 64, N);
}
SHAPE TILE void mma_AB_cols_register(const op_params &p, TILES &s, int) {
  rt<elem, CA> a;
  sem_wait(s.full, 0);
  load(a, s.a);
  PRODUCT(mma_AB_cols<ZERO>(d, a, s.b, I), mma_AB_cols<ACC>(d, a, s.b, I))
  mma_wait<0>(d, a);
  store(p.out, N, d, 64, N);
}
SHAPE TILE void mma_ABt_part_register(const op_params &p, TILES &s, int) {
  rt<elem, CA> a;
  sem_wait(s.full, 0);
  load(a, s.a);
  PRODUCT(mma_ABt_part<ZERO>(d, a, s.b, 64 * I), mma_ABt_part<ACC>(d, a, s.b, 64 * I))
  mma_wait<0>(d, a);
  store(p.out, N, d, 64, N);
}
// Once by quarters of b, once with the joined halves of a
SHAPE TILE void mma_AB_quarters(const op_params &p, TILES &s, int) {
  rt<float, N> d, t;
  rt<float, N / 2> x, y, first, last;
  rt<elem, N / 2> a, b;
  rt<elem, N> both;
  sem_wait(s.full, 0);
  load(t, s.a);
  split_halves(x, y, t);
  convert(a, x);
  convert(b, y);
  mma_fence();
  mma_AB_quarter<ZERO>(first, a, s.b, 0, 0);
  mma_AB_quarter<ACC>(first, b, s.b, 32, 0);
  mma_AB_quarter<ZERO>(last, a, s.b, 0, 32);
  mma_AB_quarter<ACC>(last, b, s.b, 32, 32);
  mma_commit();
  mma_wait<0>(first, last, a, b);
  join_halves(both, a, b);
  mma_fence();
  mma_AB<ZERO>(d, both, s.b);
  mma_commit();
  mma_wait<0>(d, both);
  split_halves(x, y, d);
  map(first, x, [](float a, float b) { return a + b; });
  map(last, y, [](float a, float b) { return a + b; });
  store(p.out, N, first, 64, N / 2);
  store(p.out + N / 2, N, last, 64, N / 2);
}

// ---- copies
SHAPE TILE void load_float(const op_params &p, TILES &s, int) {
  rt<float, N> t;
  sem_wait(s.full, 0);
  load(t, s.a, I);
  store(p.out, N, t, p.m, p.n);
}
SHAPE TILE void load_elem(const op_params &p, TILES &s, int) {
  rt<elem, N> t;
  sem_wait(s.full, 0);
  load(t, s.a, I);
  store(s.b, t, I);
  put_b(p, s);
}
SHAPE TILE void load_transposed(const op_params &p, TILES &s, int) {
  rt<elem, RA> t;
  sem_wait(s.full, 0);
  load_t(t, s.a);
  store(s.b, t);
  put_b(p, s);
}
SHAPE TILE void store_float(const op_params &p, TILES &s, int) {
  rt<float, N> t;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  store(s.b, t, I);
  put_b(p, s);
}
SHAPE TILE void store_converted(const op_params &p, TILES &s, int) {
  rt<float, N> t;
  rt<elem, N> r;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  convert(r, t);
  store(s.b, r);
  put_b(p, s);
}
SHAPE TILE void store_converted_part(const op_params &p, TILES &s, int) {
  rt<float, N> t;
  rt<elem, 64> r;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  convert_part(r, t, I);
  store(s.b, r);
  put_b(p, s);
}
SHAPE TILE void store_transposed(const op_params &p, TILES &s, int) {
  rt<float, N> t;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  store_t(s.b, t);
  put_b(p, s);
}
SHAPE TILE void store_with_row_col(const op_params &p, TILES &s, int) {
  rt<float, N> t;
  rv y;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  load(y, p.y, 64, 0.f);
  store_rc(s.b, t, y, s.v,
           [](float a, float u, float v, int row, int col) { return col <= row ? a + u - v : a * 2.f; });
  put_b(p, s);
}
SHAPE TILE void store_triangle(const op_params &p, TILES &s, int) {
  rt<float, N> t;
  rv y;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  load(y, p.y, 64, 0.f);
  auto f = [](float a, float u, float v) { return a + u - v; };
  if (I) store_triu(s.b, t, y, s.v, 3.f, f);
  else store_tril(s.b, t, y, s.v, 3.f, f);
  put_b(p, s);
}
SHAPE TILE void gathered_rows(const op_params &p, TILES &s, int) {   // row r from element r % 3 of e on
  const elem *e = p.e;
  int m = p.m;
  sem_wait(s.full, 0);
  load_rows(s.b, [=](int row) { return row < m ? e + row % 3 : (const elem *)nullptr; }, p.n);
  put_b(p, s);
}
// row r to element r (N + I) of out; every fifth is left out
SHAPE TILE void scattered_rows(const op_params &p, TILES &s, int) {
  rt<float, N> t;
  elem *out = (elem *)p.out;
  int m = p.m;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  store_rows<elem>(t, [=](int row) { return row < m && row % 5 ? out + row * (N + I) : (elem *)nullptr; }, p.n);
}
// Rows of gv in place of others, and its copies from and to global memory.
SHAPE TILE void down_the_rows(const op_params &p, TILES &s, int) {
  gv<N> x, before, w, e;
  sem_wait(s.full, 0);
  fill(before, 0.f);
  load(w, p.x, 1, p.n);
  load(e, p.e, 1, p.m);
  for (int r = 0; r < RB; r++) {
    load_row(x, s.b, r, I);
    map(before, x, before, w, [](float a, float b, float c) { return a - b + c; });
    store_row(s.b, r, before, I);
    copy(before, x);
  }
  map(x, w, e, [](float a, float b) { return a - b; });
  map(x, x, [](float a) { return 2 * a; });
  store(p.out, 2, x, p.n);
  put_b(p, s);
}
SHAPE TILE void cleared_rows(const op_params &p, TILES &s, int) {
  sem_wait(s.full, 0);
  clear_rows(s.b, I, p.m);
  put_b(p, s);
}
// on a GPU four warps, each of which writes all of it
SHAPE TILE void cleared_by_warp(const op_params &p, TILES &s, int) {
  sem_wait(s.full, 0);
  clear_rows<WARP>(s.b, I, p.m);
  put_b(p, s);
}
SHAPE TILE void tall_copy(const op_params &p, TILES &s, int) {   // b as loaded, to another place
  sem_wait(s.full, 0);
  put_b(p, s);
}

// I 0 to 5: 16 columns of t at a time, rotated; 6 to 9: of a. Every block of 16 columns is one. 10: they are appended
// one after the other, and then the first one again.
SHAPE TILE void slice_form(const op_params &p, TILES &s, int) {
  rt<float, N> t, appended;
  rt<elem, N> products;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  fill(appended, 0.f);
  UNROLLED for (int i = 0; i < N / 16; i++) {
    rt<float, 16> x;
    rt<elem, 16> e, two, turned;
    copy_part(x, t, 16 * i);
    load(e, s.a, 16 * i);
    rotate_cols<2>(two, e);
    if (I == 1) rotate_cols<1>(x);
    if (I == 2) rotate_cols<-1>(x);
    if (I == 3) rotate_cols<6>(x);
    if (I == 4) rotate_cols<8>(x);
    if (I == 5) rotate_cols<11>(x);
    if (I == 6) rotate_cols<10>(turned, e);
    if (I == 7) rotate_by_one(turned, e, two);
    if (I == 8) multiply_to_part(products, 16 * i, e, two);
    if (I == 9) convert_to_part(products, 16 * i, x);
    if (I == 10) append_part(appended, x);
    if (I == 6 || I == 7) widen(x, turned);
    store(p.out + 16 * i, N, x, 64, 16);
  }
  if (I == 8 || I == 9) store(s.b, products);
  if (I == 10) {
    rt<float, 16> first;
    copy_part(first, t, 0);
    append_part(appended, first);
    store(p.out, N, appended, 64, N);
  }
  put_b(p, s);
}

// I 0: of the blocks on the diagonal; 1: the whole one; 2: a tile that is stored with what rounding leaves; 3, 4: as 1, 2
// in halves
SHAPE TILE void inverse_form(const op_params &p, TILES &s, int) {
  rt<float, N> t, d;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  if (I == 2 || I == 4) {
    map(t, [](float x) { return 1.f + 0.125f * x; });
    store_carried<I == 4 ? IN_HALVES : IN_ONE>(in_place_of<st<elem, 64, 64>>(s.b), t);
    return put_b(p, s);
  }
  tri<elem> &scratch = in_place_of<tri<elem>>(s.b);
  map_rc(t, [](float x, int row, int col) { return col > row ? 0.25f * x : infinity(); });
  invert_diagonal<I == 3 ? IN_HALVES : IN_ONE>(d, scratch, t);
  wg_sync();
  if (I == 3) invert_pairs<IN_HALVES>(d, scratch);
  if (I == 1) {
    invert_pairs(d, scratch);
    wg_sync();
    invert_rest(d, scratch);
  }
  store(p.out, N, d, 64, N);
}

// ---- arithmetic
SHAPE TILE void map_scalar(const op_params &p, TILES &s, int) {
  rt<float, N> t;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  if (I == 0) map(t, [](float x) { return fast_exp2(x); });
  if (I == 1) map(t, [](float x) { return fast_log2(x); });
  if (I == 2) map(t, [](float x) { return fast_rcp(x); });
  if (I == 3) map(t, [](float x) { return fast_rsqrt(x); });
  if (I == 4) map(t, [](float x) { return fmaxf(sqrtf(fabsf(x)), 0.f); });   // of the C library
  if (I == 5) map(t, [](float x) { return fast_tanh(x); });
  if (I == 6) map(t, [](float x) { return clamp(x, -0.75f, 2.f); });
  store(p.out, N, t, 64, N);
}
SHAPE TILE void map_form(const op_params &p, TILES &s, int) {
  rt<float, N> t, u;
  rv y;
  cv<N> x;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  outer(u, p, s.v);
  load(y, p.y, 64, 0.f);
  load(x, s.v);
  map(u, [](float a) { return a * 2.f + 1.f; });
  if (I == 0) map(t, u, [](float a, float b) { return fused(a, b, -b); });
  if (I == 1) map_row(t, y, [](float a, float b) { return a * b; });
  if (I == 2) map_col(t, x, [](float a, float b) { return a * b; });
  if (I == 3) map_col(t, s.v, [](float a, float b) { return a * b; });
  if (I == 4) map_col(t, u, x, [](float a, float b, float c) { return a * b - c; });
  if (I == 5) map_col(t, u, s.v, [](float a, float b, float c) { return a * b - c; });
  if (I == 6) map_rc(t, [](float a, int row, int col) { return col <= row + 3 ? a : -infinity(); });
  if (I == 7) {
    map_rows(y, [](int row) { return (float)(row * row); });
    map_rc(t, y, [](float a, float b, int row, int col) { return fused(b, (float)row, a) - (float)col; });
  }
  if (I == 8) scale_rows(t, y);
  if (I == 9) {
    fill(y, 1.f);
    scale_rows(t, y);
  }
  if (I == 18) {                        // NaN in the rows that are cleared
    map_row(t, y, [](float a, float b) { return b > 0.f ? a : infinity() - infinity(); });
    map(y, y, [](float a) { return a > 0.f ? a : 0.f; });
    scale_or_clear(t, y);
  }
  if (I == 10) tril(t, 3, -infinity());
  if (I == 11) triu(t, -5, 7.f);
  if (I == 12) {
    map_row(u, t, y, [](float a, float b) { return a * b - 1.f; });
    map(t, u, [](float a, float b) { return a + b; });
  }
  if constexpr (I == 16) {
    rt<elem, N> e;
    map_rc(u, [](float, int row, int col) { return (float)(row % 8 + 2 * (col % 8)); });
    convert(e, u);
    map_col(t, e, s.v, [](float a, float b, float c) { return a * b - c; });
  }
  if (I == 17)
    map_rc(t, y, s.v,
           [](float a, float b, float c, int row, int col) { return fused(a, b, c) + (float)(row - 2 * col); });
  if (I == 15)
    map_rc(t, u, s.v,
           [](float a, float b, float c, int row, int col) { return fused(a, b, c) + (float)(row - 2 * col); });
  if (I == 13) map_row_pairs(t, [](float &a, float &b, int row, int col) {
    a += (float)(row - 2 * col);
    b += (float)(1000 + row - 2 * col);
  });
  if (I == 14) map_col_pairs(t, [](float &a, float &b, int row, int col) {
    a += (float)(row - 2 * col);
    b += (float)(1000 + row - 2 * col);
  });
  store(p.out, N, t, 64, N);
}
SHAPE TILE void map_elem(const op_params &p, TILES &s, int) {
  rt<elem, N> t;
  sem_wait(s.full, 0);
  load(t, s.a);
  map_col(t, s.v, [](float a, float b) { return a * b; });
  store(s.b, t);
  put_b(p, s);
}
SHAPE TILE void row_reduction(const op_params &p, TILES &s, int) {
  rt<float, N> t, u;
  rsum l;
  rv y;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  outer(u, p, s.v);
  load(y, p.y, 64, 0.f);
  fill(l, 1.f);
  if (I == 0) row_max(y, t);
  if (I == 1) {
    fill(l, 0.f);
    row_sum_add(l, t);
    scale(l, y);
    row_sum_add(l, t);
    reduce(y, l);
  }
  if (I == 2) {
    fill(l, 0.f);
    map(u, [](float a) { return a - 1.f; });
    row_dot_add(l, t, u);
    reduce(y, l);
  }
  if (I == 3) {
    rsum m;
    row_sum(l, t);
    row_sum(m, t);
    add(l, m);
    reduce(y, l);
  }
  if (I == 4 || I == 5) {   // row 20 is not less: once too large, once NaN
    row_sum(l, t);
    bool before = exceeds(l, 1e30f);
    map_rows(y, [](int row) { return row != 20 ? 1.f : I == 4 ? infinity() : infinity() * 0.f; });
    fill(l, 1.f);
    scale(l, y);
    bool after = exceeds(l, 1e30f);
    map_rows(y, [=](int) { return before ? 2.f : after ? 1.f : 0.f; });
  }
  if constexpr (I == 6 || I == 7) {   // an element of row 20 rounds to 448, or is NaN
    rt<e4m3, N> e;
    fill(t, 431.f);
    convert(e, t);
    bool before = saturated(e);
    map_rc(t, [](float a, int row, int col) { return row != 20 || col != 5 ? a : I == 6 ? 433.f : infinity() * 0.f; });
    convert(e, t);
    bool after = saturated(e);
    map_rows(y, [=](int) { return before ? 2.f : after ? 1.f : 0.f; });
  }
  store(p.out, y, 64);
}
SHAPE TILE void vectors(const op_params &p, TILES &s, int) {
  rv y, z, w;
  sem_wait(s.full, 0);
  load(y, p.y, p.m, -7.f);
  load(z, s.v);
  float third = get(s.v, 3);
  map(w, y, z, [=](float a, float b) { return a * b + third; });
  map(w, w, [](float a) { return a * 2.f; });
  if (I == 1) {
    wg_sync();   // all have read the third
    store(s.v, w);
    fill(w, 0.f);
    load(w, s.v);
  }
  store(p.out, w, p.n);
}
SHAPE TILE void columns(const op_params &p, TILES &s, int) {
  rt<float, N> t;
  cv<N> x;
  sem_wait(s.full, 0);
  fill(t, 1.f);
  load(x, p.e, p.n);
  map_col(t, x, [](float a, float b) { return a + b; });
  store(p.out, N, t, p.m, N);
}
SHAPE TILE void sliced(const op_params &p, TILES &s, int) {
  rt<float, N / 2> t;
  sem_wait(s.full, 0);
  fill(t, 1.f);
  map_col(t, slice<N / 2>(s.v, I), [](float a, float b) { return a + b; });
  store(p.out, N / 2, t, 64, N / 2);
}
SHAPE TILE void accumulators(const op_params &p, TILES &s, int) {
  rt<float, N> t, u;
  float *acc = p.out + 64 * N;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  zero_acc<N>(acc);
  wg_sync();
  add_acc(acc, t);
  if (I == 0) add_acc(acc, t);
  if constexpr (I > 0) {
    rt<float, 32> half;
    outer(half, p, slice<32>(s.v, 0));
    add_acc_cols(acc, 32 * (I - 1), half);
  }
  wg_sync();
  load_acc(u, acc);
  store(p.out, N, u, 64, N);
}
SHAPE TILE void half_form(const op_params &p, TILES &s, int) {
  rt<float, 64> t;
  rt<float, 32> even, odd;
  rt<fp16, 64> h, k;
  rt<fp16, 32> first, second;
  rv y;
  float *acc = p.out + 64 * N;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  load(y, p.y, 64, 0.f);
  convert(h, t);
  convert(k, t);
  if (I == 0) {
    each_half<64>([](half &a, half &b, half row, half col) {
      a = fused(a, row, -(b * col));
      b = half_of(2.f) + b - row;
    }, h, k, y, s.v);
    each_half<64>([](half &a, half b) { a = a * half_of(4.f) + b; }, h, (const rt<fp16, 64> &)k);
    convert(t, h);
    store(p.out, N, t, 64, N);
    return;
  }
  map(t, [](float a) { return halves(a, 2.f * a); });
  store_acc(acc, t);
  wg_sync();
  load_acc(even, odd, acc);
  if (I == 2) map(even, odd, [](float, float a) { return a; });
  unpack_halves(first, second, even, I == 2);
  convert(even, first);
  convert(odd, second);
  store(p.out, N, even, 64, 32);
  store(p.out + 32, N, odd, 64, 32);
}
// Groups of 1 << I rows. b: t behind the trade; out: what it traded with.
SHAPE TILE void fold_form(const op_params &p, TILES &s, int) {
  enum { LOG = I ? I : 1 };
  rt<float, 64> t, u;
  rv y, z;
  sem_wait(s.full, 0);
  load_folded(t, s.a, 0, LOG);
  fill(u, 0.f);
  map(u, t, [](float, float a) { return 2.f * a; });
  trade_rows(t, u);
  store_folded(s.b, t, 0, LOG);
  row_largest(s.rows, u);
  wg_sync();
  group_largest_folded(y, s.rows, I);
  map(z, y, [](float a) { return -a; });
  trade_rows(y, z);
  map_row(u, y, [](float a, float b) { return a + b; });
  map_row(u, z, [](float a, float b) { return a + 4.f * b; });
  store_columns(p.out + 64 * N, u, true);
  wg_sync();
  rt<float, 32> even, odd;
  load_columns(even, p.out + 64 * N, 0);
  load_columns(odd, p.out + 64 * N, 1);
  store(p.out, N, even, 64, 32);
  store(p.out + 32, N, odd, 64, 32);
  wg_sync();
  store_columns(p.out + 64 * N, u, false);
  wg_sync();
  load_columns(even, p.out + 64 * N, 0);
  load_columns(odd, p.out + 64 * N, 1);
  wg_sync();
  store(p.out + 64 * N, N, even, 64, 32);
  store(p.out + 64 * N + 32, N, odd, 64, 32);
  put_b(p, s);
}
SHAPE TILE void float_rows(const op_params &p, TILES &s, int) {
  rt<float, N> t, u;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  enum { ROW = I ? 1 : N, COL = I ? 64 : 1 };
  store(p.out, ROW, COL, t, 64, N);
  load(u, p.out, ROW, COL, 50, N - 3);
  store(p.out, ROW, COL, u, 64, N);
}
SHAPE TILE void scalars(const op_params &p, TILES &s, int) {
  rv y;
  sem_wait(s.full, 0);
  float value = (float)get(s.value);
  fill(y, value);
  if (block_index() == 0) zero_words(p.counter + 1, 2);
  store(p.out, y, 64);
}

// ---- scans: a warp makes prefix sums of a column, a warpgroup writes them out
struct scan_shared {
  sm<64, 4> m;
  sv<64> sums, products, total, places;
  parked aside;
  sem full, done;
};
TILE void scan_init(scan_shared &s) {
  sem_init(s.full, arrivals(1, 0, 0));
  sem_init(s.done, arrivals(0, 1, 0));
}
TILE void scan_loader(const op_params &p, scan_shared &s, int) {
  sem_expect(s.full, 64 * 4 * 4);
  tma_load(s.m, p.a, s.full, p.row, p.col, p.head, p.batch);
}
TILE void scan_warp(const op_params &, scan_shared &s, int) {
  wv<64> v, sums, w;
  sem_wait(s.full, 0);
  load_col(v, s.m, 2);
  map(sums, v, v, [](float a, float) { return a; });
  cumsum(sums);
  float total = last(sums);
  store(s.sums, sums);
  map(w, v, sums, [](float a, float b) { return a * b; });
  store(s.products, w);
  fill(w, total);
  store(s.total, w);
  map_index(w, [=](int i) { return total + (float)(i * i); });
  store(s.places, w);
  sem_arrive<WARP>(s.done);
}
TILE void scan_out(const op_params &p, scan_shared &s, int) {
  rv y;
  sem_wait(s.done, 0);
  load(y, s.sums);
  store(s.aside, y);
  fill(y, 0.f);
  load(y, s.aside);
  store(p.out, y, 64);
  load(y, s.products);
  store(p.out + 64, y, 64);
  load(y, s.total);
  store(p.out + 128, y, 64);
  load(y, s.places);
  store(p.out + 192, y, 64);
}

// ---- a tile made of parts with 16 rows, from places in reverse order
struct parts_shared {
  st<elem, 64, 128> a;
  sem full;
};
TILE void parts_init(parts_shared &s) { sem_init(s.full, arrivals(1, 0, 0)); }
TILE void parts_loader(const op_params &p, parts_shared &s, int) {
  sem_expect(s.full, tile_bytes(s.a));
  for (int i = 0; i < 4; i++)
    tma_load_rows(s.a, 16 * i, 16, p.a, s.full, p.row + 16 * (3 - i), p.col, p.head + i, p.batch);
}
TILE void parts_out(const op_params &p, parts_shared &s, int) {
  rt<float, 128> t;
  sem_wait(s.full, 0);
  load(t, s.a);
  store(p.out, 128, t, 64, 128);
}

// ---- 8-bit operands: 2 a b^T of shared tiles; 2 (x[col] + y[row]) b with the sum rounded to e4m3 and b turned by
// three warps
template<int N, int K> struct e4m3_shared {
  st<e4m3, 64, K> a;
  st<e4m3, N, K> b;
  sem full;
};
template<int N, int K> TILE void e4m3_init(e4m3_shared<N, K> &s) { sem_init(s.full, arrivals(1, 0, 0)); }
template<int N, int K> TILE void e4m3_loader(const op_params &p, e4m3_shared<N, K> &s, int) {
  sem_expect(s.full, tile_bytes(s.a) + tile_bytes(s.b));
  tma_load(s.a, p.a, s.full, p.row, p.col, p.head, p.batch);
  tma_load(s.b, p.b, s.full, p.row, p.col, p.head, p.batch);
}
template<int N, int K> TILE void e4m3_ABt(const op_params &p, e4m3_shared<N, K> &s, int) {
  sem_wait(s.full, 0);
  PRODUCT(mma_ABt<ZERO>(d, s.a, s.b), mma_ABt<ACC>(d, s.a, s.b))
  mma_wait<0>(d);
  store(p.out, N, d, 64, N);
}
template<int K, int N> struct turned_shared {
  st<e4m3, 64, N> b[K / 64];
  tt<e4m3, K, N> turned;
  sv<K> x;
  sem full, done;
};
template<int K, int N> TILE void turned_init(turned_shared<K, N> &s) {
  sem_init(s.full, arrivals(1, 0, 0));
  sem_init(s.done, arrivals(0, 3, 0));
}
template<int K, int N> TILE void turned_loader(const op_params &p, turned_shared<K, N> &s, int) {
  sem_expect(s.full, K * N + K * 4);
  for (int i = 0; i < K / 64; i++) tma_load(s.b[i], p.b, s.full, p.row + 64 * i, p.col, p.head, p.batch);
  tma_load(s.x, p.x, s.full);
}
template<int K, int N> TILE void turned_warps(const op_params &, turned_shared<K, N> &s, int index) {
  sem_wait(s.full, 0);
  for (int i = 0; i < K / 64; i++) transpose_part(s.turned, 64 * i, s.b[i], index, 3);
  fence_async();
  sem_arrive<WARP>(s.done);
}
template<int K, int N> TILE void turned_AB(const op_params &p, turned_shared<K, N> &s, int) {
  rt<float, K> t;
  rt<e4m3, K> a;
  sem_wait(s.full, 0);
  outer(t, p, s.x);
  convert(a, t);
  sem_wait(s.done, 0);
  PRODUCT(mma_AB<ZERO>(d, a, s.turned), mma_AB<ACC>(d, a, s.turned))
  mma_wait<0>(d, a);
  store(p.out, N, d, 64, N);
}

// ---- two tiles in one, 128 columns: the first's rows from `row` on, the second's `m` further; rows >= n of each are
// cleared. Products of the first with both; then of (x[col] + y[row]) with both, over columns 64 .. 127 and all, twice
struct twins_shared {
  st<elem, 128, 128> b;
  sv<64> x;
  sem full, cleared;
};
TILE void twins_init(twins_shared &s) {
  sem_init(s.full, arrivals(1, 0, 0));
  sem_init(s.cleared, arrivals(0, 1, 0));
}
TILE void twins_loader(const op_params &p, twins_shared &s, int) {
  sem_expect(s.full, tile_bytes(s.b) + 64 * 4);
  for (int h = 0; h < 2; h++)
    tma_load_rows(s.b, 64 * h, 64, p.b, s.full, p.row + h * p.m, p.col, p.head, p.batch);
  tma_load(s.x, p.x, s.full);
}
TILE void twins_warp(const op_params &p, twins_shared &s, int) {
  sem_wait(s.full, 0);
  clear_halves<WARP>(s.b, p.n);
  fence_async();
  sem_arrive<WARP>(s.cleared);
}
TILE void twins_group(const op_params &p, twins_shared &s, int) {
  rt<float, 64> d, e, t;
  rt<elem, 64> a;
  float *out = p.out;
  sem_wait(s.full, 0);
  sem_wait(s.cleared, 0);
  mma_fence();
  mma_ABt_halves<ZERO>(d, e, s.b);
  mma_commit();
  mma_wait<0>(d, e);
  store(out, 64, d, 64, 64);
  store(out + 4096, 64, e, 64, 64);
  outer(t, p, s.x);
  convert(a, t);
  for (int k0 = 64; k0 >= 0; k0 -= 64) {
    mma_fence();
    if (k0) mma_ABt_halves<ZERO>(d, e, a, s.b, k0);
    else mma_ABt_halves<ACC>(d, e, a, s.b, k0);
    mma_commit();
    mma_wait<0>(d, e, a);
    out += 2 * 4096;
    store(out, 64, d, 64, 64);
    store(out + 4096, 64, e, 64, 64);
  }
}

// ---- zeros that a thread writes; each block looks at those of the block before, and adds its number
struct zero_shared {
  sv<32> zeros;
  sem seen;
};
TILE void zero_init(zero_shared &s) { sem_init(s.seen, arrivals(1, 0, 0)); }
TILE void zero_thread(const op_params &p, zero_shared &s, int) {
  int block = block_index();
  clear(s.zeros);
  fence_async();
  for (int i = 0; i < 2; i++) tma_store(p.out + 64 * block + 32 * i, s.zeros);
  tma_store_wait<0, THREAD>();
  order_wait<THREAD>(p.counter, block);
  order_count<THREAD>(p.counter);
  sem_arrive<THREAD>(s.seen);
}
TILE void zero_compute(const op_params &p, zero_shared &s, int) {
  rv y;
  int block = block_index();
  sem_wait(s.seen, 0);
  if (block == 0) return;
  load(y, p.out + 64 * (block - 1), 64, 0.f);
  map(y, y, [=](float a) { return a + (float)block; });
  store(p.out + 64 * (block - 1), y, 64);
}

// ---- one warp and global memory
struct warp_shared { sv<64> v; };
TILE void warp_init(warp_shared &) {}
TILE void warp_vectors(const op_params &p, warp_shared &s, int) {
  wv<64> v, w;
  load(v, p.x, 3, p.n, -2.f);
  store(p.out, v, 64);
  fill(w, max_of(v));
  store(p.out + 64, w, 1);
  fill(w, sum_of(v));
  store(p.out + 65, w, 1);
  fill(w, get(v, 5) + get(v, 37));
  store(p.out + 66, w, 1);
  store(s.v, v);
  load(w, s.v);
  store((elem *)(p.out + 128), w, p.m);
  copy_row((elem *)(p.out + 256), p.e + 1, p.m);
  copy_row((elem *)(p.out + 384), p.e, p.m);
  cumsum_down(v);
  store(p.out + 512, 3, v, p.n);
  load_steps(w, p.e, 2, p.m / 2);
  store(p.out + 704, w, 64);
}

// ---- channels along the rows: steps of e, whose rows begin 64 apart; levels of pairs
struct levels_shared {
  tc l;
  st<elem, 64, 64> a;
  st<elem, 16, 64> b;
};
TILE void levels_init(levels_shared &) {}
TILE void levels_group(const op_params &p, levels_shared &s, int) {
  ht x, y;
  hc v, two;
  hcsum sum;
  rv r;
  rt<float, 64> all;
  rt<float, 16> t;
  rt<elem, 16> row;
  qt<elem> d;
  float *out = p.out;
  const tc &l = s.l;
  const turned<elem> a = turned_of(s.a);
  prefetch(p.e, 64, p.m, p.n);
  load(x, p.e, 64, p.m, p.n);
  sum_down(s.l, x, -1.f);
  fill(all, 0.f);
  map_rc(all, [](float, int row, int col) { return row % 8 + 8 * (col % 16) + 1; });
  store(s.a, all);
  wg_sync();
  load(y, s.l);
  store(out, 64, y, 64, 64);
  out += 4096;
  for (int c = 0; c < 64; c += 16) {
    fill(t, 0.f);
    each_part(c, [](int row, int col, float &t, float l, float a) { t = l + 256.f * a + 65536.f * (row + col); },
              t, l, a);
    store(out + c, 64, t, 64, 16);
  }
  out += 4096;
  fill(t, 0.f);
  map_rc(t, [](float, int row, int col) { return row % 16 == col ? 1.f : 0.f; });
  convert_to_part(row, 0, t);
  for (int h = 8; h > 0; h /= 2, out += 4096 + 1024) {
    const level m = level_of(s.l, h);
    for (int c = 0; c < 64; c += 16) {
      fill(t, 0.f);
      each_part(c, [](int, int, float &t, float l) { t = l; }, t, m);
      store(out + c, 64, t, 64, 16);
    }
    load(d, s.a, 16, 32);
    keep_level(d, d, h);
    fill(t, 0.f);
    mma_own(t, 0, row, 0, d);
    store(out + 4096, 16, t, 64, 16);
  }
  load(r, l, 5);
  store(out, r, 64);
  wg_sync();
  for (int c = 0; c < 64; c += 16) {
    fill(t, 0.f);
    map_rc(t, [=](float, int row, int col) { return row + 100.f * (col + c); });
    store(s.l, c, t);
    load(r, p.y, 64, 0.f);
    store_sum(s.l, c / 16, r);
  }
  wg_sync();
  load(y, s.l);
  add_sums(y, s.l);
  sum_up(y, s.l);
  store(out + 64, 64, y, p.m, p.n);
  load(v, p.x, p.n);
  fill(two, 2.f);
  clear(sum);
  map(y, x, v, sum, p.m, [](float y, float x, float v, float &sum) {
    sum += x;
    return y + x * v;
  });
  map(y, two, p.m, [](float y, float two) { return y + two; });
  store(out + 64 + 4096, 64, y, 64, 64);
  store(out + 64 + 8192, 2, sum, s.l, 2, p.n);
  clear(sum);
  sum_add(sum, y);
  store(out + 64 + 8192 + 128, 1, sum, s.l, 3, 64);
  elem *to = (elem *)(out + 64 + 8192 + 192);
  fill(t, 0.f);
  map_rc(t, [](float, int row, int col) { return row + 4 * col; });
  store_t(s.b, t);
  wg_sync();
  store_rows(s.b, [=](int row) { return row < p.m && row % 5 ? to + row * 65 : (elem *)nullptr; }, p.n);
}

// ---- products of a warp's own rows, and what goes with them
struct own_shared {
  st<elem, 64, 64> a;
  st<elem, 128, 64> b;
  st<elem, 64, 128> c;
  sv<256> parts[2];
  sv<64> sums;
  pt before;
};
TILE void own_init(own_shared &) {}
TILE void own_group(const op_params &p, own_shared &s, int) {
  rt<float, 64> x;
  rt<float, 128> y;
  rt<elem, 64> first;
  rt<float, 16> t, u;
  csum<16> sum;
  rv v;
  qt<elem> d;
  float *out = p.out;
  const turned<elem> a = turned_of(s.a);
  const next_below<elem> below = next_below_of(s.a);
  fill(x, 0.f);
  fill(y, 0.f);
  map_rc(x, [](float, int row, int col) { return (3 * row + 5 * col) % 11 - 5; });
  store(s.a, x);
  convert(first, x);
  map_rc(y, [](float, int row, int col) { return (7 * row + 2 * col) % 13 - 6; });
  store_t(s.b, y);
  store(s.c, y);
  load(v, p.y, 64, 0.f);
  store(s.sums, v);
  fence_async();
  wg_sync();
  fill(t, 0.f);
  load(d, s.a, 16, 32);
  mma_own(t, 0, first, 48, d);
  store(out, 16, t, 64, 16);
  store(s.before, t);
  load_t(d, s.a, 48, 16);
  mma_own(t, 0, first, 0, d);
  store(out + 1024, 16, t, 64, 16);
  load(u, s.before);
  store(out + 2 * 1024, 16, u, 64, 16);
  out += 3 * 1024;
  for (int c = 0; c < 64; c += 16, out += 2 * 1024) {
    fill(t, 1.f);
    mma_fence();
    mma_AtBt_rows<ACC>(t, s.b, s.c, c);
    mma_commit();
    mma_wait<0>(t);
    store(out, 16, t, 64, 16);
    clear(sum);
    each_part(c, [](int, int, float t, float a, float &sum) { sum += t + a; }, (const rt<float, 16> &)t, a, sum);
    store(s.parts[0], c, sum);
    each_part(c, [](int, int col, float, float &sum) { sum += col; }, (const rt<float, 16> &)t, sum);
    store(s.parts[1], c, sum);
    each_couple(c, [](couple<float &> t, couple<float> a, couple<float> b) {
      t.a += 10.f * a.b + 100.f * b.a;
      t.b += 10.f * a.a + 1000.f * b.b;
    }, t, a, below);
    store(out + 1024, 16, t, 64, 16);
  }
  wg_sync();
  for (int c = 0; c < 64; c += 16)
    map_parts(s.sums, c, s.parts, s.sums, [](float sum, float v) { return sum + v; });
  wg_sync();
  load(v, s.sums);
  store(out, v, 64);
}

// ---- decays of channels: sums down the columns of e, whose rows begin `col` apart, with biases x and steps y
struct channels_shared {
  ct l;
  cg groups;
  st<elem, 32, 64> left[4];
  st<elem, 64, 64> own;
  st<elem, 64, 128> panels;
  sm<64, 64> given;
  sv<128> parts[4];
  handed sums;
};
TILE void channels_init(channels_shared &) {}
TILE void channels_group(const op_params &p, channels_shared &s, int) {
  const by_group middle = {s.groups.middle}, end = {s.groups.end};
  hm x;
  hv v, all;
  rv steps;
  rt<float, 64> a, b;
  rt<elem, 64> d;
  rt<elem, 16> own_part;
  rt<float, 16> t, u, of_warps, others;
  float *out = p.out;
  const float most = p.y[1];                // groups' sums are within this, and not near
  auto half = [](float x) { return 0.5f * x; };
  auto same = [](float x) { return x; };
  load(x, p.e, p.col, p.m, p.n);
  load(v, p.x, p.n);
  map(x, v, p.m, [](float x, float v) { return x + v; });
  int reaches = sum_down(s.l, s.groups, all, x, 1.f, -1.f, false, half, same);
  wg_sync();
  at_least(x, -1.f);
  store(s.given, x);
  wg_sync();
  load(x, s.given);
  reaches = 10 * reaches + sum_down(s.l, s.groups, all, x, 1.f, 1e30f, true, half, same);
  wg_sync();
  reaches = 10 * reaches + sum_down(s.l, s.groups, all, x, 1.f, most, false, half, same);
  wg_sync();
  reaches = 10 * reaches + reach_of(s.groups);
  load(a, s.l);
  store(out + 256 + 8 * 4096 + 64, 64, a, 64, 64);
  wg_sync();
  reaches = 10 * reaches + sum_down(s.l, s.groups, all, x, 0.5f, 1e30f, false, half, same);
  wg_sync();
  store(out, all, 61);
  fill(v, (float)reaches);
  map(v, v, [](float x) { return x + 0.5f; });
  store(out + 64, v, 64);
  load_steps(steps, p.y, 3, p.m);
  store_steps(out + 128, steps, 2, p.m);
  float *numbers = out + 256 + 9 * 4096 + 64;      // four sums of groups, numbers of channels, what all have
  store_sums(s.parts, 64, x);
  wg_sync();
  for (int g = 0; g < 4; g++) {
    load(v, s.parts[g], 64);
    store(numbers + 64 * g, v, 64);
  }
  load(all, p.x, 64);
  map_index(v, [](int c) { return (float)(c + 1); });
  map(v, v, all, [](float c, float x) { return c * x; });
  store(numbers + 4 * 64, v, 64);
  fill(all, max_of(v));
  store(numbers + 5 * 64, all, 64);
  fill(all, sum_of(v));
  store(numbers + 6 * 64, all, 64);
  wg_sync();
  out += 256;
  load(a, s.l);
  store(out, 64, a, 64, 64);
  fill(b, 0.f);
  for (int c = 0; c < 64; c += 16) {
    fill(t, 0.f);
    each_part(c, [](int, int, float &t, float &b, float l, float middle) {
      t = l;
      b = l + middle;
    }, t, b, s.l, middle);
    store_groups(s.left, 0, t, c);
    load_part(u, s.l, c);
    each_part(c, [](int, int, float &t, float l) { t = 2.f * l; }, t, (const rt<float, 16> &)u);
    store_groups(s.left, 1, t, c);
  }
  wg_sync();
  for (int c = 0; c < 64; c += 16) {
    each_part(c, [](int, int, float &t, float l) { t = 3.f * l; }, t, s.l);
    store_group(s.left[3], 1, t, c, 2);
  }
  store(out + 4096, 64, b, 64, 64);
  for (int c = 0; c < 64; c += 16)
    each_part(c, [](int, int, float &b, float l, float end) { b = end - l; }, b, (const rt<float, 64> &)a, end);
  store(out + 2 * 4096, 64, b, 64, 64);
  carry_to_group(a, s.groups.between[1], 2);
  store(out + 3 * 4096, 64, a, 64, 64);
  convert_group(d, a, 2);
  for (int c = 0; c < 64; c += 16)
    each_part(c, [](int, int, float &b, float d) { b = d; }, b, (const rt<elem, 64> &)d);
  store(out + 4 * 4096, 64, b, 64, 64);
  fence_async();
  wg_sync();
  mma_fence();
  mma_ABt_halves<ZERO>(t, u, d, s.left[1], 0);
  mma_commit();
  mma_wait<0>(t, u, d);
  mma_fence();
  mma_ABt_halves<ACC>(t, u, d, s.left[1], 0);
  mma_commit();
  mma_wait<0>(t, u, d);
  mma_ABt_halves_by_warps(of_warps, others, d, s.left[1]);
  fill(a, 1.f);
  put_group(a, of_warps, 1);
  put_group(a, others, 2);
  put_group(a, t, 3);
  store(out + 5 * 4096, 64, a, 64, 64);
  hand_over(s.sums, t, 0);
  hand_over(s.sums, t, 1);
  hand_over(s.sums, t, 2);
  hand_over(s.sums, u, 3);
  wg_sync();
  fill(a, 2.f);
  add(a, s.sums);
  store(out + 6 * 4096, 64, a, 64, 64);
  for (int c = 0; c < 64; c += 16) {
    each_part(c, [](int, int, float &t, float b) { t = b; }, t, (const rt<float, 64> &)b);
    store_own(s.own, t, c);
    store_own(s.panels, t, 1, c);
  }
  wg_sync();
  const own_rows<elem> own = own_rows_of(s.own);
  for (int c = 0; c < 32; c += 16) {
    load(own_part, s.panels, 64 + c);
    each_part(c, [](int, int, float &a, float own, float more) { a = own + more; }, a, own,
              (const rt<elem, 16> &)own_part);
  }
  for (int c = 32; c < 64; c += 16) {
    load_part(own_part, own, c);
    each_part(c, [](int, int, float &a, float own) { a = 2.f * own; }, a, (const rt<elem, 16> &)own_part);
  }
  store(out + 7 * 4096, 64, a, 64, 64);
  fill(v, infinity() - infinity());
  map(x, v, p.m, [](float x, float v) { return x + v; });
  at_least(x, -1.f);
  fill(v, (float)sum_down(s.l, s.groups, all, x, 1.f, 1e30f, false, half, same));
  store(out + 8 * 4096, v, 64);
  for (int g = 0; g < 4; g++) tma_store(p.c, s.left[g], 32 * g, 0, 0, 0);
  tma_store_wait();
}

// ---- matrices of global memory: one of floats in `out`, one of elements in `e`, both at `row` with rows `col` apart
struct matrix_shared { sv<4 * 64> sums; sv<32> y; sv<64> x; };
TILE void matrix_init(matrix_shared &) {}
template<int A> TILE void matrix_steps(const op_params &p, matrix_shared &s, int) {
  mt<32, 64> t, u;
  mr<32> r, e;
  mc<64> c, d;
  ml<32> y, one;
  ml<64> x, two;
  mrsum<32> rows;
  mcsum<64> cols;
  float k;
  float *first = p.out + p.row;
  elem *second = (elem *)p.e + p.row;
  load_begin<A>(t, first, p.col, p.m, p.n);
  load_begin<A>(u, second, p.col, p.m, p.n);
  load_begin(y, p.y, p.m);
  load_begin(one, p.e, p.m);
  load_begin(x, p.x, p.n);
  load_begin(two, p.e, p.n);
  load_begin(r, p.y, p.m);
  load_begin(e, p.e, p.m);
  load_begin<A>(c, p.x, p.n);
  load_begin<A>(d, p.e, p.n);
  load_begin(k, p.e + 3);
  load_end<float>(t);
  load_end<elem>(u);
  load_end<float>(r);
  load_end<elem>(e);
  load_end<float>(c);
  load_end<elem>(d);
  load_end<elem>(k);
  map(e, e, [](float x) { return 2.f * x; });
  map(r, r, e, [](float x, float y) { return x + y; });
  map(d, d, [](float x) { return 2.f * x; });
  map(c, c, d, [](float x, float y) { return x + y; });
  clear(rows);
  clear(cols);
  each(t, [=](float &t, float &u, float r, float c, float &row, float &col) {
    t = t * r + k;
    u = u * c;
    row += t;
    col += u;
  }, u, r, c, rows, cols);
  save<A>(first, p.col, t, p.m, p.n);
  save<A>(second, p.col, u, p.m, p.n);
  reduce(r, rows);
  store(s.sums, cols);
  wg_sync();
  load_sum(c, s.sums);
  save(p.out + 4000, r, p.m);
  save<A>(p.out + 4100, c, p.n);
  load_end<float>(y);
  load_end<elem>(one);
  load_end<float>(x);
  load_end<elem>(two);
  map(y, y, one, [](float x, float y) { return x - y; });
  map(x, x, two, [](float x, float y) { return x + y; });
  store(s.y, y);
  store(s.x, x);
  wg_sync();
  load(r, s.y);
  load(c, s.x);
  save(p.out + 4400, r, 32);
  save<A>(p.out + 4500, c, 64);
  fill(e, 5.f);
  fill(d, 6.f);
  save(p.out + 4200, e, p.m);
  save<A>(p.out + 4300, d, p.n);
}

// ---- products of vectors along such a matrix
struct dot_shared { sv<4> d; };
TILE void dot_init(dot_shared &) {}
TILE void dot_products(const op_params &p, dot_shared &s, int) {
  mr<48> r, e;
  mc<64> c, d;
  load_begin(r, p.y, p.m);
  load_begin(e, p.e, p.m);
  load_begin<ONES>(c, p.x, p.n);
  load_begin<ONES>(d, p.e, p.n);
  load_end<float>(r);
  load_end<elem>(e);
  load_end<float>(c);
  load_end<elem>(d);
  float across = dot(c, d);
  store_dot(s.d, r, e);
  wg_sync();
  float down = load_dot(s.d);
  fill(r, across);                  // everybody has both
  fill(c, down);
  save(p.out, r, 48);
  save<ONES>(p.out + 48, c, 64);
}

// ---- several tiles in one pass: block 0 visits all places alike, block 1 those right of, on and left of the
// diagonal's blocks in ways of their own
struct visit_shared {
  st<elem, 64, 128> a;
  sv<64> v;
  sv<256> columns;
  sem full, summed;
};
TILE void visit_init(visit_shared &s) {
  sem_init(s.full, arrivals(1, 0, 0));
  sem_init(s.summed, arrivals(0, 0, 1));
}
TILE void visit_loader(const op_params &p, visit_shared &s, int) {
  sem_expect(s.full, tile_bytes(s.a) + 64 * 4);
  tma_load(s.a, p.a, s.full, p.row, p.col, p.head, p.batch);
  tma_load(s.v, p.x, s.full);
}
TILE void visit_tiles(const op_params &p, visit_shared &s, int) {
  rt<float, 64> t, u;
  rv y;
  rsum l;
  csum<64> c;
  float *out = p.out + block_index() * 4352;
  sem_wait(s.full, 0);
  outer(t, p, s.v);
  outer(u, p, s.v);
  load(y, p.y, 64, 0.f);
  fill(l, 1.f);
  clear(c);
  const rt<float, 64> &same = u;
  auto all = [](int row, int col, float &t, float u, float a, float y, float x, float &l, float &c) {
    l = fused(u, a, l);
    c = fused(t, x, c);
    t = fused(t, a, y) + (float)(row - 2 * col);
  };
  if (block_index() == 0) each<64>(all, t, same, s.a, y, s.v, l, c);
  else each_of_triangles<64>(all, [](int row, int col, float &t, float, float, float, float, float &l, float &c) {
    t = (float)(1000 + 64 * row + col);
    l += 1.f;
    c += 2.f;
  }, [](int, int, float &t, float, float, float, float, float &, float &) { t = -1.f; }, t, same, s.a, y, s.v, l, c);
  store(out, 64, t, 64, 64);
  reduce(y, l);
  store(out + 4096, y, 64);
  store(s.columns, c);
  sem_arrive(s.summed);
}
TILE void visit_columns(const op_params &p, visit_shared &s, int) {
  wv<64> sum, part;
  fill(sum, 0.f);
  sem_wait(s.summed, 0);
  for (int i = 0; i < 4; i++) {
    load(part, slice<64>(s.columns, 64 * i));
    map(sum, sum, part, [](float a, float b) { return a + b; });
  }
  store(p.out + block_index() * 4352 + 4160, sum, 64);
}

// ---- protocol: tasks from the queue, stages through a ring, turns. out[row of a task] = sum over p.n tiles of its row
// sums
struct ring_shared {
  st<elem, 64, 64> a[2];
  ring<2> stages;
  task_queue queue;
};
TILE void ring_test_init(ring_shared &s) {
  ring_init(s.stages, arrivals(1, 0, 0), arrivals(0, 0, 2));
  queue_init(s.queue, arrivals(0, 0, 2));
}
TILE void ring_test_loader(const op_params &p, ring_shared &s, int) {
  ring_pos at = {};
  int task = 0;
  for (uint32_t count = 0; (task = queue_draw(s.queue, count, task, p.counter)) < p.m; count++)
    for (int i = 0; i < p.n; i++) {
      ring_acquire(s.stages, at);
      ring_expect(s.stages, at, tile_bytes(s.a[0]));
      tma_load(s.a[at.stage], p.a, s.stages.full[at.stage], task * 64, i * 64, 0, 0);
      ring_next(s.stages, at);
    }
}
TILE void ring_test_compute(const op_params &p, ring_shared &s, int wg) {
  ring_pos at = {};
  turn_begin<2>(wg);
  for (uint32_t count = 0; queue_take(s.queue, count) < p.m; count++) {
    rsum l;
    rv y;
    fill(l, 0.f);
    for (int i = 0; i < p.n; i++) {
      rt<float, 64> t;
      ring_wait(s.stages, at);
      turn_wait<2>(wg);
      load(t, s.a[at.stage]);
      turn_pass<2>(wg);
      ring_release(s.stages, at);
      ring_next(s.stages, at);
      row_sum_add(l, t);
    }
    reduce(y, l);
    store(p.out + (queue_again(s.queue, count) * 2 + wg) * 64, y, 64);
    queue_release(s.queue, count);
  }
  turn_end<2>(wg);
}

// ---- clusters: each of two blocks loads its half of tile a (rows) and of tile b (columns) into both
struct cluster_shared {
  st<elem, 64, 64> a;
  st<elem, 64, 128> b;
  ring<1, ASYNC_READS> stages;
};
TILE void cluster_init(cluster_shared &s) { cluster_ring_init<2>(s.stages, arrivals(1, 0, 0), arrivals(0, 0, 1)); }
TILE void cluster_loader(const op_params &p, cluster_shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.n; i++) {
    int half = cluster_rank();
    ring_acquire(s.stages, at);
    ring_expect(s.stages, at, tile_bytes(s.a) + tile_bytes(s.b));
    tma_load_rows_multicast<32>(s.a, 32 * half, p.a, s.stages.full[0], i * 64 + 32 * half, 0, 0, 0, 3);
    tma_load_cols_multicast<64>(s.b, 64 * half, p.b, s.stages.full[0], i * 64, 64 * half, 0, 0, 3);
    ring_next(s.stages, at);
  }
}
TILE void cluster_compute(const op_params &p, cluster_shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.n; i++) {
    rt<float, 128> d;
    ring_wait(s.stages, at);
    mma_fence();
    mma_AB<ZERO>(d, s.a, s.b);
    mma_commit();
    mma_wait<0>(d);
    cluster_ring_release<2>(s.stages, at);
    ring_next(s.stages, at);
    store(p.out + (int64_t)(block_index() * p.n + i) * 64 * 128, 128, d, 64, 128);
  }
}

// ---- the blocks of a pair take tasks together and send each other a tile that says whose it is; each writes out the
// other's
struct exchange_shared {
  st<elem, 64, 64> mine, other;
  sem full, there, sent, read;         // mine is written; other is there; mine has arrived at the other block, which
                                       // has read it
  task_queue queue;
};
TILE void exchange_init(exchange_shared &s) {
  cluster_queue_init(s.queue, 2, arrivals(1, 0, 1));
  sem_init(s.full, arrivals(0, 0, 1));
  sem_init(s.there, arrivals(1, 0, 0));
  sem_init(s.sent, arrivals(1, 0, 0));
  sem_init(s.read, arrivals(0, 0, 1));
}
TILE void exchange_loader(const op_params &p, exchange_shared &s, int) {
  int task = 0;
  for (uint32_t count = 0; (task = cluster_queue_draw<2>(s.queue, count, task, p.counter)) < p.m; count++) {}
}
TILE void exchange_sender(const op_params &p, exchange_shared &s, int) {
  for (uint32_t count = 0; queue_take(s.queue, count) < p.m; count++) {
    sem_wait(s.full, count & 1);
    sem_wait(s.read, ~count & 1);
    tma_send(s.other, s.mine, s.there, cluster_rank() ^ 1);
    sem_wait(s.there, count & 1);
    sem_arrive_at<THREAD>(s.sent, cluster_rank() ^ 1);
    cluster_queue_release<THREAD>(s.queue, count);
  }
}
TILE void exchange_compute(const op_params &p, exchange_shared &s, int) {
  int rank = cluster_rank(), task;
  for (uint32_t count = 0; (task = queue_take(s.queue, count)) < p.m; count++) {
    rt<float, 64> t;
    fill(t, (float)(task * 2 + rank));
    sem_wait(s.sent, ~count & 1);
    store(s.mine, t);
    fence_async();
    sem_arrive(s.full);
    sem_wait(s.there, count & 1);
    load(t, s.other);
    fence_async();
    sem_arrive_at<WARPGROUP, ORDERED>(s.read, rank ^ 1);
    store(p.out + (int64_t)(task * 2 + rank) * 64 * 64, 64, t, 64, 64);
    cluster_queue_release(s.queue, count);
  }
}

// ---- the blocks of a pair send each other a tile and a vector from their registers; each writes out the product of
// what the other sent
struct mail_shared {
  st<elem, 64, 64> tile;
  mail<elem, 64> box;
  mail_rows rows;
  mail<float, 64> numbers;
  mail<elem, 64> words;
  ring<1> boxes;
};
TILE void mail_init(mail_shared &s) { ring_init(s.boxes, arrivals(0, 0, 2), arrivals(0, 0, 1)); }
TILE void mail_compute(const op_params &p, mail_shared &s, int) {
  ring_pos at = {};
  for (int i = 0; i < p.m; i++) {
    int other = cluster_rank() ^ 1, block = block_index();
    rt<float, 64> t;
    rt<elem, 64> sent;
    rv rows;
    fill(t, 0.f);
    map_rc(t, [=](float, int row, int col) { return (float)(row + col + i - 64 * block); });
    mail_put(s.numbers, t);
    wg_sync();
    fill(t, 0.f);
    mail_take(t, s.numbers);
    convert(sent, t);
    mail_put(s.words, sent);
    wg_sync();
    mail_take(sent, s.words);
    map_rows(rows, [=](int row) { return (float)(1000 * i + row); });
    ring_acquire(s.boxes, at);
    mail_send(s.box, sent, s.boxes.full[0], other);
    mail_send(s.rows, rows, s.boxes.full[0], other);
    ring_wait(s.boxes, at);
    mail_take(sent, s.box);
    mail_take(rows, s.rows);
    store(s.tile, sent);
    wg_sync();
    load(t, s.tile);
    map_row(t, rows, [](float x, float y) { return x * y; });
    mail_done(s.boxes.empty[0], other);
    store(p.out + (int64_t)(block * p.m + i) * 64 * 64, 64, t, 64, 64);
    wg_sync();
    ring_next(s.boxes, at);
  }
}

#ifndef __CUDACC__
// ---- a mistake: nobody makes the stage full (CPU only, where it is reported)
struct stuck_shared {
  ring<1> stages;
};
TILE void stuck_init(stuck_shared &s) { ring_init(s.stages, arrivals(1, 0, 0), arrivals(0, 0, 2)); }
TILE void stuck_compute(const op_params &, stuck_shared &s, int wg) {
  ring_pos at = {};
  if (wg == 1) bar_sync(3, 256);
  ring_wait(s.stages, at);
}
#endif

// ---- entries: extern "C" int NAME(const op_params *, int blocks), 0 when it ran
#ifdef __CUDACC__
#define EXPORT extern "C"
#define RUN_OP(name, K) \
  extern "C" __global__ void __launch_bounds__(K::threads, 1) device_##name(const __grid_constant__ op_params p) { \
    K::run(p); \
  } \
  EXPORT int name(const op_params *p, int blocks) { \
    return launch((const void *)device_##name, p, blocks, K::threads, K::cluster); \
  }
#include <cuda.h>
#include <cuda_runtime.h>
static int launch(const void *f, const op_params *p, int blocks, int threads, int cluster) {
  enum { BYTES = 220 * 1024 };
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
  void *args[] = {(void *)p};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = BYTES;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (int e = cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES)) return e;
  if (int e = cudaLaunchKernelExC(&config, f, args)) return e;
  return cudaDeviceSynchronize();
}
EXPORT void *op_buffer(const void *host, size_t bytes) {
  void *p = nullptr;
  if (cudaMalloc(&p, bytes) || cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice)) return nullptr;
  return p;
}
EXPORT int op_fetch(void *host, const void *p, size_t bytes) {
  return cudaMemcpy(host, p, bytes, cudaMemcpyDeviceToHost);
}
EXPORT void op_release(void *p) { cudaFree(p); }
// size and stride[1..3] (bytes), columns first; the box is rows x cols elements
EXPORT int op_map(gmap *m, void *p, int element_bytes, const int64_t *size, const int64_t *stride, int rows, int cols) {
  typedef decltype(&cuTensorMapEncodeTiled) encode;
  void *f = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (int e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found))
    return e;
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4] = {(cuuint32_t)cols, (cuuint32_t)rows, 1, 1}, step[4] = {1, 1, 1, 1};
  for (int i = 0; i < 4; i++) sizes[i] = size[i];
  for (int i = 0; i < 3; i++) strides[i] = stride[i + 1];
  bool wide = element_bytes == 4, narrow = element_bytes * cols == 64;
  CUtensorMapDataType type = wide               ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 :
                             element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 :
                                                  CU_TENSOR_MAP_DATA_TYPE_UINT16;
  CUtensorMapSwizzle swizzle = wide   ? CU_TENSOR_MAP_SWIZZLE_NONE :
                               narrow ? CU_TENSOR_MAP_SWIZZLE_64B :
                                        CU_TENSOR_MAP_SWIZZLE_128B;
  return ((encode)f)((CUtensorMap *)m, type, 4, p, sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#define RUN_OP(name, K)                                                    \
  EXPORT int name(const op_params *p, int blocks) {                        \
    for (int i = 0; i < blocks; i += K::SIZE) run_kernel<K>(p, i, blocks); \
    return 0;                                                              \
  }
EXPORT void *op_buffer(const void *host, size_t bytes) {
  void *p = aligned_alloc(128, (bytes + 127) / 128 * 128);
  return p ? memcpy(p, host, bytes) : p;
}
EXPORT int op_fetch(void *host, const void *p, size_t bytes) { memcpy(host, p, bytes); return 0; }
EXPORT void op_release(void *p) { free(p); }
EXPORT int op_map(gmap *m, void *p, int element_bytes, const int64_t *size, const int64_t *stride, int, int) {
  gmap_cpu c = {(char *)p, {}, {}};
  for (int i = 0; i < 4; i++) {
    c.size[i] = size[i];
    c.stride[i] = i ? stride[i] : element_bytes;
  }
  memcpy(m->bytes, &c, sizeof c);
  return 0;
}
#endif
#define OP_NAMED(name, body, ...) \
  typedef block<op_params, tiles<__VA_ARGS__>, init<__VA_ARGS__>, role<body<__VA_ARGS__>, WARPGROUP, 1, 0>, \
                role<loader<__VA_ARGS__>, THREAD, 1, 0>> \
      name##_kernel; \
  RUN_OP(name, name##_kernel)
#define OP(body, RA, CA, RB, CB, N, I) \
  OP_NAMED(body##_##RA##_##CA##_##RB##_##CB##_##N##_##I, body, RA, CA, RB, CB, N, I)
#include "ops.def"
#define E4M3(N, K)                                                                                                     \
  typedef block<op_params, e4m3_shared<N, K>, e4m3_init<N, K>, role<e4m3_ABt<N, K>, WARPGROUP, 1, 0>,                  \
                role<e4m3_loader<N, K>, THREAD, 1, 0>>                                                                 \
      e4m3_##N##_##K##_kernel;                                                                                         \
  RUN_OP(e4m3_##N##_##K, e4m3_##N##_##K##_kernel)
#define TURNED(K, N)                                                                                                   \
  typedef block<op_params, turned_shared<K, N>, turned_init<K, N>, role<turned_AB<K, N>, WARPGROUP, 1, 0>,             \
                role<turned_loader<K, N>, THREAD, 1, 0>, role<turned_warps<K, N>, WARP, 3, 0>>                         \
      turned_##K##_##N##_kernel;                                                                                       \
  RUN_OP(turned_##K##_##N, turned_##K##_##N##_kernel)
E4M3(64, 64)
E4M3(128, 64)
E4M3(128, 128)
E4M3(192, 128)
E4M3(128, 256)
TURNED(64, 64)
TURNED(128, 64)
TURNED(128, 128)
TURNED(192, 128)
TURNED(128, 256)
typedef block<op_params, scan_shared, scan_init, role<scan_out, WARPGROUP, 1, 0>, role<scan_loader, THREAD, 1, 0>,
              role<scan_warp, WARP, 1, 0>>
    scan_kernel;
RUN_OP(scan, scan_kernel)
typedef block<op_params, parts_shared, parts_init, role<parts_out, WARPGROUP, 1, 0>, role<parts_loader, THREAD, 1, 0>>
              parts_kernel;
RUN_OP(parts, parts_kernel)
typedef block<op_params, zero_shared, zero_init, role<zero_compute, WARPGROUP, 1, 0>, role<zero_thread, THREAD, 1, 0>>
              zero_kernel;
RUN_OP(zeros, zero_kernel)
typedef block<op_params, twins_shared, twins_init, role<twins_group, WARPGROUP, 1, 0>, role<twins_loader, THREAD, 1, 0>,
              role<twins_warp, WARP, 1, 0>>
    twins_kernel;
RUN_OP(twins, twins_kernel)
typedef block<op_params, warp_shared, warp_init, role<warp_vectors, WARP, 1, 0>> warp_kernel;
RUN_OP(warp, warp_kernel)
typedef block<op_params, levels_shared, levels_init, role<levels_group, WARPGROUP, 1, 0>> levels_kernel;
RUN_OP(levels, levels_kernel)
typedef block<op_params, own_shared, own_init, role<own_group, WARPGROUP, 1, 0>> own_kernel;
RUN_OP(own, own_kernel)
typedef block<op_params, channels_shared, channels_init, role<channels_group, WARPGROUP, 1, 0>> channels_kernel;
RUN_OP(channels, channels_kernel)
typedef block<op_params, matrix_shared, matrix_init, role<matrix_steps<FOURS>, WARPGROUP, 1, 0>> matrix_fours_kernel;
RUN_OP(matrix_fours, matrix_fours_kernel)
typedef block<op_params, matrix_shared, matrix_init, role<matrix_steps<ONES>, WARPGROUP, 1, 0>> matrix_ones_kernel;
RUN_OP(matrix_ones, matrix_ones_kernel)
typedef block<op_params, matrix_shared, matrix_init, role<matrix_steps<FOURS_AT_ONCE>, WARPGROUP, 1, 0>>
    matrix_at_once_kernel;
RUN_OP(matrix_at_once, matrix_at_once_kernel)
typedef block<op_params, dot_shared, dot_init, role<dot_products, WARPGROUP, 1, 0>> dot_kernel;
RUN_OP(dots, dot_kernel)
typedef block<op_params, visit_shared, visit_init, role<visit_tiles, WARPGROUP, 1, 0>,
              role<visit_loader, THREAD, 1, 0>, role<visit_columns, WARP, 1, 0>>
    visit_kernel;
RUN_OP(visits, visit_kernel)
typedef block<op_params, ring_shared, ring_test_init, role<ring_test_compute, WARPGROUP, 2, 0>,
              role<ring_test_loader, THREAD, 1, 0>>
    ring_kernel;
RUN_OP(rings, ring_kernel)
typedef block<op_params, cluster_shared, cluster_init, role<cluster_compute, WARPGROUP, 1, 0>,
              role<cluster_loader, THREAD, 1, 0>,
              CLUSTER<2>>
    cluster_kernel;
RUN_OP(clusters, cluster_kernel)
typedef block<op_params, exchange_shared, exchange_init, role<exchange_compute, WARPGROUP, 1, 0>,
              role<exchange_loader, THREAD, 1, 0>,
              role<exchange_sender, THREAD, 1, 0>, CLUSTER<2>>
    exchange_kernel;
RUN_OP(exchange, exchange_kernel)
typedef block<op_params, mail_shared, mail_init, role<mail_compute, WARPGROUP, 1, 0>, CLUSTER<2>> mail_kernel;
RUN_OP(mails, mail_kernel)
#ifndef __CUDACC__
typedef block<op_params, stuck_shared, stuck_init, role<stuck_compute, WARPGROUP, 2, 0>> stuck_kernel;
RUN_OP(stuck, stuck_kernel)
#endif
