// Bodies of tile/scan.h.
#pragma once
template<int N> TILE void fill(wv<N> &v, float x) {
  writes(v);
  for (int i = 0; i < N; i++) v.d[i] = x;
}
template<int N, class F> __attribute__((flatten)) TILE void map(wv<N> &d, const wv<N> &a, const wv<N> &b, F f) {
  reads(a, b);
  writes(d);
#pragma GCC ivdep
  for (int i = 0; i < N; i++) d.d[i] = f(a.d[i], b.d[i]);
}
template<int N, class F> __attribute__((flatten)) TILE void map_index(wv<N> &d, F f) {
  writes(d);
  for (int i = 0; i < N; i++) d.d[i] = f(i);
}
template<int N> TILE void cumsum(wv<N> &v) {
  changes(v);
  for (int i = 1; i < N; i++) v.d[i] += v.d[i - 1];
}
template<int N> TILE void cumsum_down(wv<N> &v) {
  changes(v);
  for (int i = N - 2; i >= 0; i--) v.d[i] += v.d[i + 1];
}
template<int N> TILE float last(const wv<N> &v) {
  reads(v);
  return v.d[N - 1];
}
template<int N> TILE void store(sv<N> &d, const wv<N> &v) {
  reads(v);
  writes_shared(d, whole(d));
  memcpy(d.d, v.d, sizeof v.d);
}
template<int N> TILE float get(const wv<N> &v, int i) {
  reads(v);
  return v.d[i];
}
template<int N> TILE float max_of(const wv<N> &v) {
  reads(v);
  float x = v.d[0];
  for (int i = 1; i < N; i++) x = v.d[i] > x ? v.d[i] : x;
  return x;
}
template<int N> TILE float sum_of(const wv<N> &v) {
  reads(v);
  float x = 0.f;
  for (int i = 0; i < N; i++) x += v.d[i];
  return x;
}
template<int N> TILE void load(wv<N> &v, const float *g, int64_t stride, int n, float pad) {
  writes(v);
  for (int i = 0; i < N && i < n; i++) touches_global(g + i * stride, sizeof(float), GLOBAL_READ);
  for (int i = 0; i < N; i++) v.d[i] = i < n ? g[i * stride] : pad;
}
template<typename T, int N> TILE void store(T *g, const wv<N> &v, int n) {
  touches_global(g, n > 0 ? (n < N ? n : N) * sizeof(T) : 0, GLOBAL_WRITE);
  reads(v);
  narrow_row(g, v.d, n < N ? n : N);
}
template<int N> TILE void store(float *g, int64_t stride, const wv<N> &v, int n) {
  for (int i = 0; i < N && i < n; i++) touches_global(g + i * stride, sizeof(float), GLOBAL_WRITE);
  reads(v);
  for (int i = 0; i < N && i < n; i++) g[i * stride] = v.d[i];
}
template<typename T> TILE void copy_row(T *d, const T *s, int n) {
  called_by<WARP>();
  touches_global(s, n * sizeof(T), GLOBAL_READ);
  touches_global(d, n * sizeof(T), GLOBAL_WRITE);
  memcpy((void *)d, s, n * sizeof(T));
}
template<int N> TILE void load(wv<N> &v, const sv<N> &s) {
  reads_shared(whole(s));
  writes(v);
  memcpy(v.d, s.d, sizeof v.d);
}
template<int R, int C> TILE void load_col(wv<R> &v, const sm<R, C> &s, int col) {
  reads_shared(whole(s));
  writes(v);
  for (int i = 0; i < R; i++) v.d[i] = s.d[i * C + col];
}

template<int N> TILE void fill(gv<N> &v, float x) {
  writes(v);
  for (int i = 0; i < N; i++) v.d[i] = x;
}
template<int N> TILE void copy(gv<N> &d, const gv<N> &s) {
  reads(s);
  writes(d);
  memcpy(d.d, s.d, sizeof s.d);
}
template<int N, class F> __attribute__((flatten)) TILE void map(gv<N> &d, const gv<N> &a, F f) {
  reads(a);
  writes(d);
#pragma GCC ivdep
  for (int i = 0; i < N; i++) d.d[i] = f(a.d[i]);
}
template<int N, class F> __attribute__((flatten)) TILE void map(gv<N> &d, const gv<N> &a, const gv<N> &b, F f) {
  reads(a, b);
  writes(d);
#pragma GCC ivdep
  for (int i = 0; i < N; i++) d.d[i] = f(a.d[i], b.d[i]);
}
template<int N, class F>
__attribute__((flatten)) TILE void map(gv<N> &d, const gv<N> &a, const gv<N> &b, const gv<N> &c, F f) {
  reads(a, b, c);
  writes(d);
#pragma GCC ivdep
  for (int i = 0; i < N; i++) d.d[i] = f(a.d[i], b.d[i], c.d[i]);
}
template<typename T, int R, int C, int N> TILE void load_row(gv<N> &v, const st<T, R, C> &s, int row, int c0) {
  begins_at(s, c0, N);
  reads_own(part(s, row, 1, c0, N));
  writes(v);
  widen_row(v.d, s.d + row * C + c0, N);
}
template<typename T, int R, int C, int N> TILE void store_row(st<T, R, C> &d, int row, const gv<N> &v, int c0) {
  begins_at(d, c0, N);
  reads(v);
  writes_own(d, part(d, row, 1, c0, N));
  narrow_row(d.d + row * C + c0, v.d, N);
}
template<typename T, int N> TILE void load(gv<N> &v, const T *g, int64_t stride, int n) {
  writes(v);
  n = n < 0 ? 0 : n < N ? n : N;
  if (n) touches_global(g, ((n - 1) * stride + 1) * sizeof(T), GLOBAL_READ);
  if (n && stride == 1) widen_row(v.d, g, n);
  else for (int i = 0; i < n; i++) v.d[i] = widen(g[i * stride]);
  for (int i = n; i < N; i++) v.d[i] = 0.f;
}
template<typename T, int N> TILE void store(T *g, int64_t stride, const gv<N> &v, int n) {
  reads(v);
  n = n < 0 ? 0 : n < N ? n : N;
  for (int i = 0; stride != 1 && i < n; i++) {
    touches_global(g + i * stride, sizeof(T), GLOBAL_WRITE);
    narrow(g[i * stride], v.d[i]);
  }
  if (stride != 1 || !n) return;
  touches_global(g, n * sizeof(T), GLOBAL_WRITE);
  narrow_row(g, v.d, n);
}
