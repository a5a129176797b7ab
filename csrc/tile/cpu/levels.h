// Bodies of tile/levels.h.
#pragma once
template<int C, class F>
__attribute__((flatten)) TILE void map_level(rt<float, 64> &d, const ct<C> &s, int c0, int h, F f) {
  reads_shared(rows_of(s, 0, 64, c0, 64));
  writes(d);
  for (int r = 0; r < 64; r++) {
    const float *x = s.d + r * (C + 8) + c0, *m = s.d + ((r & -2 * h) | (h - 1)) * (C + 8) + c0;
#pragma GCC ivdep
    for (int c = 0; c < 64; c++) d.d[r][c] = f(x[c] - m[c]);
  }
}
template<typename T> TILE void keep_level(rt<T, 64> &d, const rt<T, 64> &s, int h) {
  reads(s);
  writes(d);
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < 64; c++) d.d[r][c] = ((r ^ c) & -h) == h ? s.d[r][c] : T{};
}
template<int C> TILE void store(ct<C> &d, int c0, const rt<float, 64> &t) {
  reads(t);
  writes_shared(*(const sv<32> *)&d, rows_of(d, 0, 64, c0, 64));
  for (int r = 0; r < 64; r++) memcpy(d.d + r * (C + 8) + c0, t.d[r], sizeof t.d[r]);
}
template<int C> TILE void load(hm<C> &x, const ct<C> &s) {
  reads_shared(rows_of(s, 0, 64, 0, C));
  writes(x);
  for (int r = 0; r < 64; r++) memcpy(x.d[r], s.d + r * (C + 8), sizeof x.d[r]);
}
template<int C> TILE void sum_up(hm<C> &x) {
  changes(x);
  for (int r = 62; r >= 0; r--)
    for (int c = 0; c < C; c++) x.d[r][c] += x.d[r + 1][c];
}
template<int C, class F>
__attribute__((flatten)) TILE void map(hm<C> &x, const hm<C> &y, const hv<C> &v, hv<C> &sum, int m, F f) {
  reads(y, v);
  changes(x, sum);
  for (int r = 0; r < 64; r++) {
#pragma GCC ivdep
    for (int c = 0; c < C; c++) x.d[r][c] = r < m ? f(x.d[r][c], y.d[r][c], v.d[c], sum.d[c]) : 0.f;
  }
}
template<int C> TILE void sum_of(hv<C> &d, const hm<C> &x) {
  reads(x);
  writes(d);
  for (int c = 0; c < C; c++) d.d[c] = 0.f;
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < C; c++) d.d[c] += x.d[r][c];
}
template<int C> TILE void store(float *g, int64_t ld, const hm<C> &x, int m, int n) {
  n = n < C ? n : C;
  reads(x);
  for (int r = 0; r < 64 && r < m; r++) {
    touches_global(g + r * ld, n * sizeof(float), GLOBAL_WRITE);
    memcpy(g + r * ld, x.d[r], n * sizeof(float));
  }
}
template<int C> TILE void store(float *g, int64_t stride, const hv<C> &v, int n) {
  reads(v);
  for (int c = 0; c < C && c < n; c++) {
    touches_global(g + c * stride, sizeof(float), GLOBAL_WRITE);
    g[c * stride] = v.d[c];
  }
}
