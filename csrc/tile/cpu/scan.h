// Bodies of tile/scan.h.
#pragma once
template<int N> TILE void fill(wv<N> &v, float x) { for (int i = 0; i < N; i++) v.d[i] = x; }
template<int N, class F> __attribute__((flatten)) TILE void map(wv<N> &d, const wv<N> &a, const wv<N> &b, F f) {
#pragma GCC ivdep
  for (int i = 0; i < N; i++) d.d[i] = f(a.d[i], b.d[i]);
}
template<int N> TILE void cumsum(wv<N> &v) { for (int i = 1; i < N; i++) v.d[i] += v.d[i - 1]; }
template<int N> TILE float last(const wv<N> &v) { return v.d[N - 1]; }
template<int N> TILE void store(sv<N> &d, const wv<N> &v) { memcpy(d.d, v.d, sizeof v.d); }
template<int R, int C> TILE void load_col(wv<R> &v, const sm<R, C> &s, int col) { for (int i = 0; i < R; i++) v.d[i] = s.d[i * C + col]; }
