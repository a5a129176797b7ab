// Bodies of tile/matrix.h on sm_90a. Eight threads hold a row, 16 bytes of fp32 each, so that they touch whole lines of
// 128 bytes; a warp four rows at a time, a warpgroup sixteen.
#pragma once
#include "tile/sm90/neighbours.h"
template<int R, int C> struct mt { MATRIX_RULES(R, C); float d[R / 16][C / 32][4]; };
template<int R> struct mr { MATRIX_RULES(R, 32); float d[R / 16]; };      // the same in the eight threads of a row
template<int C> struct mc { MATRIX_RULES(16, C); float d[C / 32][4]; };   // the same in the sixteen of a column
template<int N> struct ml { float d[(N + 127) / 128]; };                  // element t + 128 i in thread t
template<int R> struct mrsum { float d[R / 16]; };                        // this thread's columns only
template<int C> struct mcsum { float d[C / 32][4]; };                     // this thread's rows only

TILE int matrix_row() { return warp_in_group() * 4 + (lane() >> 3); }
TILE int matrix_col() { return (lane() & 7) * 4; }

// n: how many of four numbers there are. d begins as zeros.
template<int A, typename T> TILE void begin_of_row(float (&d)[4], const T *g, int n) {
  clear_all(d);
  if constexpr (A == ONES) some_begin(d, g, n);
  else if (n > 0) all_begin(d, g);
}
template<int A, typename T> TILE void save_of_row(T *g, const float (&d)[4], int n) {
  if constexpr (A == ONES) some_store(g, d, n);
  else if (n > 0) {
    if constexpr (A == FOURS_AT_ONCE) store_four(g, d);
    else all_store(g, d);
  }
}

template<int A, typename T, int R, int C> TILE void load_begin(mt<R, C> &t, const T *g, int64_t ld, int m, int n) {
  int r = matrix_row(), c = matrix_col();
  const T *from = g + r * ld + c;
#pragma unroll
  for (int i = 0; i < R / 16; i++, from += 16 * ld)
#pragma unroll
    for (int j = 0; j < C / 32; j++) begin_of_row<A>(t.d[i][j], from + 32 * j, r + 16 * i < m ? n - c - 32 * j : 0);
}
template<typename T, int R, int C> TILE void load_end(mt<R, C> &t) {
#pragma unroll
  for (int i = 0; i < R / 16; i++)
#pragma unroll
    for (int j = 0; j < C / 32; j++) all_end<T>(t.d[i][j]);
}
template<int A, typename T, int R, int C> TILE void save(T *g, int64_t ld, const mt<R, C> &t, int m, int n) {
  int r = matrix_row(), c = matrix_col();
  T *to = g + r * ld + c;
#pragma unroll
  for (int i = 0; i < R / 16; i++, to += 16 * ld)
#pragma unroll
    for (int j = 0; j < C / 32; j++) save_of_row<A>(to + 32 * j, t.d[i][j], r + 16 * i < m ? n - c - 32 * j : 0);
}

TILE void load_begin(float &x, const float *g) { x = *g; }
template<typename T> TILE void load_begin(float &x, const T *g) { x = __uint_as_float(g->u); }
template<typename T> TILE void load_end(float &x) {
  if constexpr (sizeof(T) == 2) x = unpack<T>(__float_as_uint(x)).x;
}
template<typename T, int R> TILE void load_begin(mr<R> &v, const T *g, int m) {
#pragma unroll
  for (int i = 0; i < R / 16; i++) {
    v.d[i] = 0.f;
    if (matrix_row() + 16 * i < m) load_begin(v.d[i], g + matrix_row() + 16 * i);
  }
}
template<typename T, int R> TILE void load_end(mr<R> &v) {
#pragma unroll
  for (int i = 0; i < R / 16; i++) load_end<T>(v.d[i]);
}
template<typename T, int R> TILE void save(T *g, const mr<R> &v, int m) {
#pragma unroll
  for (int i = 0; i < R / 16; i++)
    if ((lane() & 7) == 0 && matrix_row() + 16 * i < m) round_to(g[matrix_row() + 16 * i], v.d[i]);
}
template<int A, typename T, int C> TILE void load_begin(mc<C> &v, const T *g, int n) {
#pragma unroll
  for (int j = 0; j < C / 32; j++) begin_of_row<A>(v.d[j], g + matrix_col() + 32 * j, n - matrix_col() - 32 * j);
}
template<typename T, int C> TILE void load_end(mc<C> &v) {
#pragma unroll
  for (int j = 0; j < C / 32; j++) all_end<T>(v.d[j]);
}
template<int A, typename T, int C> TILE void save(T *g, const mc<C> &v, int n) {
  if (thread_in_group() >= 8) return;
#pragma unroll
  for (int j = 0; j < C / 32; j++) save_of_row<A>(g + matrix_col() + 32 * j, v.d[j], n - matrix_col() - 32 * j);
}

template<typename T, int N> TILE void load_begin(ml<N> &v, const T *g, int n) {
#pragma unroll
  for (int i = 0; i < (N + 127) / 128; i++) {
    int at = thread_in_group() + 128 * i;
    v.d[i] = 0.f;
    if (at < N && at < n) load_begin(v.d[i], g + at);
  }
}
template<typename T, int N> TILE void load_end(ml<N> &v) {
#pragma unroll
  for (int i = 0; i < (N + 127) / 128; i++) load_end<T>(v.d[i]);
}
template<int N, class F> TILE void map(ml<N> &d, const ml<N> &a, const ml<N> &b, F f) {
#pragma unroll
  for (int i = 0; i < (N + 127) / 128; i++) d.d[i] = f(a.d[i], b.d[i]);
}
template<int N> TILE void store(sv<N> &d, const ml<N> &v) {
#pragma unroll
  for (int i = 0; i < (N + 127) / 128; i++)
    if (N % 128 == 0 || thread_in_group() + 128 * i < N) d.d[thread_in_group() + 128 * i] = v.d[i];
}
template<int N> TILE void load(mr<N> &v, const sv<N> &s) {
#pragma unroll
  for (int i = 0; i < N / 16; i++) v.d[i] = s.d[matrix_row() + 16 * i];
}
template<int N> TILE void load(mc<N> &v, const sv<N> &s) {
#pragma unroll
  for (int j = 0; j < N / 32; j++) {
    float4 x = *(const float4 *)(s.d + matrix_col() + 32 * j);
    v.d[j][0] = x.x;
    v.d[j][1] = x.y;
    v.d[j][2] = x.z;
    v.d[j][3] = x.w;
  }
}

template<int R> TILE void fill(mr<R> &v, float x) {
#pragma unroll
  for (int i = 0; i < R / 16; i++) v.d[i] = x;
}
template<int C> TILE void fill(mc<C> &v, float x) {
#pragma unroll
  for (int j = 0; j < C / 32; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) v.d[j][e] = x;
}
template<int R> TILE void clear(mrsum<R> &v) {
#pragma unroll
  for (int i = 0; i < R / 16; i++) v.d[i] = 0.f;
}
template<int C> TILE void clear(mcsum<C> &v) {
#pragma unroll
  for (int j = 0; j < C / 32; j++) clear_all(v.d[j]);
}
template<int R, class F> TILE void map(mr<R> &d, const mr<R> &a, F f) {
#pragma unroll
  for (int i = 0; i < R / 16; i++) d.d[i] = f(a.d[i]);
}
template<int R, class F> TILE void map(mr<R> &d, const mr<R> &a, const mr<R> &b, F f) {
#pragma unroll
  for (int i = 0; i < R / 16; i++) d.d[i] = f(a.d[i], b.d[i]);
}
template<int C, class F> TILE void map(mc<C> &d, const mc<C> &a, F f) {
#pragma unroll
  for (int j = 0; j < C / 32; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) d.d[j][e] = f(a.d[j][e]);
}
template<int C, class F> TILE void map(mc<C> &d, const mc<C> &a, const mc<C> &b, F f) {
#pragma unroll
  for (int j = 0; j < C / 32; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) d.d[j][e] = f(a.d[j][e], b.d[j][e]);
}

template<int R, int C> TILE float &matrix_at(mt<R, C> &t, int i, int j, int e) { return t.d[i][j][e]; }
template<int R, int C> TILE float matrix_at(const mt<R, C> &t, int i, int j, int e) { return t.d[i][j][e]; }
template<int R> TILE float matrix_at(const mr<R> &v, int i, int, int) { return v.d[i]; }
template<int C> TILE float matrix_at(const mc<C> &v, int, int j, int e) { return v.d[j][e]; }
template<int R> TILE float &matrix_at(mrsum<R> &v, int i, int, int) { return v.d[i]; }
template<int C> TILE float &matrix_at(mcsum<C> &v, int, int j, int e) { return v.d[j][e]; }
template<int R, int C, class F, class... X> TILE void each(mt<R, C> &t, F f, X &...x) {
#pragma unroll
  for (int j = 0; j < C / 32; j++)
#pragma unroll
    for (int e = 0; e < 4; e++)
#pragma unroll
      for (int i = 0; i < R / 16; i++) f(t.d[i][j][e], matrix_at(x, i, j, e)...);
}
template<int R> TILE void reduce(mr<R> &v, const mrsum<R> &l) {
#pragma unroll
  for (int i = 0; i < R / 16; i++) {
    float x = l.d[i];
#pragma unroll
    for (int o = 1; o < 8; o *= 2) x += __shfl_xor_sync(~0u, x, o);
    v.d[i] = x;
  }
}
template<int C> TILE void store(sv<4 * C> &d, const mcsum<C> &s) {
#pragma unroll
  for (int j = 0; j < C / 32; j++) {
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      x[e] = s.d[j][e] + __shfl_xor_sync(~0u, s.d[j][e], 8);
      x[e] += __shfl_xor_sync(~0u, x[e], 16);
    }
    if (lane() < 8) all_store(d.d + warp_in_group() * C + 32 * j + matrix_col(), x);
  }
}
template<int C> TILE void load_sum(mc<C> &v, const sv<4 * C> &s) {
#pragma unroll
  for (int j = 0; j < C / 32; j++) {
    clear_all(v.d[j]);
#pragma unroll
    for (int w = 0; w < 4; w++) {
      float4 x = *(const float4 *)(s.d + w * C + 32 * j + matrix_col());
      v.d[j][0] += x.x;
      v.d[j][1] += x.y;
      v.d[j][2] += x.z;
      v.d[j][3] += x.w;
    }
  }
}
