// Warp vectors and scans on sm_90a.
#pragma once
template<int N> TILE void fill(wv<N> &v, float x) {
#pragma unroll
  for (int k = 0; k < N / 32; k++) v.d[k] = x;
}
template<int N, class F> TILE void map(wv<N> &d, const wv<N> &a, const wv<N> &b, F f) {
#pragma unroll
  for (int k = 0; k < N / 32; k++) d.d[k] = f(a.d[k], b.d[k]);
}
template<int N> TILE void cumsum(wv<N> &v) {
  float carry = 0;
#pragma unroll
  for (int k = 0; k < N / 32; k++) {
    float x = v.d[k];
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      float y = __shfl_up_sync(~0u, x, o);
      if (lane() >= o) x += y;
    }
    v.d[k] = x + carry;
    carry += __shfl_sync(~0u, x, 31);
  }
}
template<int N> TILE float last(const wv<N> &v) { return __shfl_sync(~0u, v.d[N / 32 - 1], 31); }
template<int N> TILE void store(sv<N> &d, const wv<N> &v) {
#pragma unroll
  for (int k = 0; k < N / 32; k++) d.d[lane() + 32 * k] = v.d[k];
}
template<int R, int C> TILE void load_col(wv<R> &v, const sm<R, C> &s, int col) {
#pragma unroll
  for (int k = 0; k < R / 32; k++) v.d[k] = s.d[(lane() + 32 * k) * C + col];
}
