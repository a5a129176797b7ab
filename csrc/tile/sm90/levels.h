// Levels of pairs on sm_90a.
#pragma once
template<int C, class F> TILE void map_level(rt<float, 64> &d, const ct<C> &s, int c0, int h, F f) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int r = thread_row() + 8 * half;
    const float2 *x = pairs_of_row(s, r, c0), *m = pairs_of_row(s, (r & -2 * h) | (h - 1), c0);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      float2 y = x[4 * k], z = m[4 * k];
      d.d[4 * k + 2 * half] = f(y.x - z.x);
      d.d[4 * k + 2 * half + 1] = f(y.y - z.y);
    }
  }
}
// A word has the columns c and c + 1, c even, of a row.
template<typename T> TILE void keep_level(rt<T, 64> &d, const rt<T, 64> &s, int h) {
  int at = thread_row() ^ thread_col();   // bits of 8 and more of a column are in j and k, and those of 8 of a row in j
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int x = at ^ 8 * (j & 1) ^ 16 * k ^ 8 * (j >> 1);
      uint32_t low = (x & -h) == h ? 0xffffu : 0u, high = ((x ^ 1) & -h) == h ? 0xffff0000u : 0u;
      d.d[k][j] = s.d[k][j] & (low | high);
    }
}
template<int C> TILE void store(ct<C> &d, int c0, const rt<float, 64> &t) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float2 *g = (float2 *)pairs_of_row(d, thread_row() + 8 * half, c0);
#pragma unroll
    for (int k = 0; k < 8; k++) g[4 * k] = make_float2(t.d[4 * k + 2 * half], t.d[4 * k + 2 * half + 1]);
  }
}
template<int C> TILE void load(hm<C> &x, const ct<C> &s) {
  int c = thread_in_group();
#pragma unroll
  for (int i = 0; i < 64; i++) x.d[i] = c < C ? s.d[i * (C + 8) + c] : 0.f;
}
template<int C> TILE void sum_up(hm<C> &x) {
#pragma unroll
  for (int i = 62; i >= 0; i--) x.d[i] += x.d[i + 1];
}
template<int C, class F> TILE void map(hm<C> &x, const hm<C> &y, const hv<C> &v, hv<C> &sum, int m, F f) {
#pragma unroll
  for (int i = 0; i < 64; i++) x.d[i] = i < m ? f(x.d[i], y.d[i], v.d, sum.d) : 0.f;
}
template<int C> TILE void sum_of(hv<C> &d, const hm<C> &x) {
  d.d = 0.f;
#pragma unroll
  for (int i = 0; i < 64; i++) d.d += x.d[i];
}
template<int C> TILE void store(float *g, int64_t ld, const hm<C> &x, int m, int n) {
  int c = thread_in_group();
  if (c >= C || c >= n) return;
#pragma unroll
  for (int i = 0; i < 64; i++)
    if (i < m) g[i * ld + c] = x.d[i];
}
template<int C> TILE void store(float *g, int64_t stride, const hv<C> &v, int n) {
  int c = thread_in_group();
  if (c < C && c < n) g[c * stride] = v.d;
}
