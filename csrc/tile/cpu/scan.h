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
template<int N> TILE void cumsum(wv<N> &v) {
  changes(v);
  for (int i = 1; i < N; i++) v.d[i] += v.d[i - 1];
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
template<int R, int C> TILE void load_col(wv<R> &v, const sm<R, C> &s, int col) {
  reads_shared(whole(s));
  writes(v);
  for (int i = 0; i < R; i++) v.d[i] = s.d[i * C + col];
}
