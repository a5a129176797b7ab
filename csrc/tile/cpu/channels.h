// Bodies of tile/channels.h.
#pragma once
template<int C> struct alignas(128) ct { CHANNEL_RULES(C); float d[64 * (C + 8)]; };
#ifdef CHECK
template<int C> struct hv { CHANNEL_RULES(C); alignas(64) float d[C]; state_of_registers state; };
template<int C> struct hm { CHANNEL_RULES(C); alignas(64) float d[64][C]; state_of_registers state; };
#else
template<int C> struct hv { CHANNEL_RULES(C); alignas(64) float d[C]; };
template<int C> struct hm { CHANNEL_RULES(C); alignas(64) float d[64][C]; };
#endif

template<int C> TILE void fill(hv<C> &v, float x) {
  writes(v);
  for (int c = 0; c < C; c++) v.d[c] = x;
}
template<int C> TILE void load(hv<C> &v, const float *g, int n) {
  n = n < C ? n : C;
  touches_global(g, n * sizeof(float), GLOBAL_READ);
  writes(v);
  for (int c = 0; c < C; c++) v.d[c] = c < n ? g[c] : 0.f;
}
template<int C> TILE void store(float *g, const hv<C> &v, int n) {
  n = n < C ? n : C;
  reads(v);
  touches_global(g, n * sizeof(float), GLOBAL_WRITE);
  memcpy(g, v.d, n * sizeof(float));
}
template<int C, class F> __attribute__((flatten)) TILE void map(hv<C> &d, const hv<C> &a, F f) {
  reads(a);
  writes(d);
  for (int c = 0; c < C; c++) d.d[c] = f(a.d[c]);
}
template<int C, class F> TILE bool any(const hv<C> &v, F f) {
  reads(v);
  bool all = false;
  for (int c = 0; c < C; c++) all = all || f(v.d[c]);
  wg_sync();
  return all;
}
template<typename T, int C> TILE void load(hm<C> &x, const T *g, int64_t ld, int m, int n) {
  writes(x);
  n = n < C ? n : C;
  memset((void *)x.d, 0, sizeof x.d);
  for (int i = 0; i < 64 && i < m; i++) {
    touches_global(g + i * ld, n * sizeof(T), GLOBAL_READ);
    widen_row(x.d[i], g + i * ld, n);
  }
}
template<typename T> TILE void prefetch(const T *, int64_t, int, int) {}
template<int C, class F> __attribute__((flatten)) TILE void map(hm<C> &x, const hv<C> &v, int m, F f) {
  reads(v);
  changes(x);
  for (int i = 0; i < 64 && i < m; i++) {
#pragma GCC ivdep
    for (int c = 0; c < C; c++) x.d[i][c] = f(x.d[i][c], v.d[c]);
  }
}
template<int C> TILE void least_of(hv<C> &d, const hm<C> &x) {
  reads(x);
  writes(d);
  for (int c = 0; c < C; c++) d.d[c] = 0.f;
  for (int i = 0; i < 64; i++)
    for (int c = 0; c < C; c++) d.d[c] = x.d[i][c] < d.d[c] ? x.d[i][c] : d.d[c];
}
template<int C> TILE void sum_down(ct<C> &s, hv<C> &end, const hm<C> &x, float low) {
  reads(x);
  writes(end);
  writes_shared(*(const sv<32> *)&s, whole(s));
  for (int c = 0; c < C; c++) end.d[c] = 0.f;
  for (int i = 0; i < 64; i++) {
    for (int c = 0; c < C; c++) end.d[c] += x.d[i][c] < low ? low : x.d[i][c];
    memcpy(s.d + i * (C + 8), end.d, C * sizeof(float));
  }
}
template<int C, class F>
__attribute__((flatten)) TILE void sum_down(ct<C> &s, hv<C> &end, const hm<C> &x, float low, sv<C> (&between)[3], F f) {
  sum_down(s, end, x, low);
  writes_shared(between[0], whole(between[0]));
  writes_shared(between[1], whole(between[1]));
  writes_shared(between[2], whole(between[2]));
  for (int g = 0; g < 3; g++) {
    const float *m = s.d + (16 * g + 7) * (C + 8), *n = m + 16 * (C + 8);
#pragma GCC ivdep
    for (int c = 0; c < C; c++) between[g].d[c] = f(0.5f * (n[c] + n[c + C + 8]) - 0.5f * (m[c] + m[c + C + 8]));
  }
}
template<int C> TILE region rows_of(const ct<C> &s, int row, int rows, int c0, int cols) {
  return {s.d + row * (C + 8) + c0, rows, (C + 8) * (int)sizeof(float), cols * (int)sizeof(float)};
}
template<int C> TILE void load(rt<float, 64> &t, const ct<C> &s, int c0) {
  reads_shared(rows_of(s, 0, 64, c0, 64));
  writes(t);
  for (int r = 0; r < 64; r++) memcpy(t.d[r], s.d + r * (C + 8) + c0, sizeof t.d[r]);
}
template<int C> TILE void load_from_middle(rt<float, 64> &t, const ct<C> &s, int c0) {
  reads_shared(rows_of(s, 0, 64, c0, 64));
  writes(t);
  for (int r = 0; r < 64; r++) {
    const float *x = s.d + r * (C + 8) + c0, *m = s.d + (r / 16 * 16 + 7) * (C + 8) + c0;
    for (int c = 0; c < 64; c++) t.d[r][c] = x[c] - 0.5f * (m[c] + m[c + C + 8]);
  }
}
template<int C, class F>
__attribute__((flatten)) TILE void map_last_row(rt<float, 64> &t, const ct<C> &s, int c0, F f) {
  reads_shared(rows_of(s, 63, 1, c0, 64));
  changes(t);
  const float *last = s.d + 63 * (C + 8) + c0;
  for (int r = 0; r < 64; r++) {
#pragma GCC ivdep
    for (int c = 0; c < 64; c++) t.d[r][c] = f(t.d[r][c], last[c]);
  }
}
template<int C> TILE void carry_to_group(rt<float, 64> &x, const sv<C> &f, int c0, int group) {
  reads_shared({f.d + c0, 1, 0, 64 * (int)sizeof(float)});
  changes(x);
  for (int r = 0; r < 16 * group; r++)
    for (int c = 0; c < 64; c++) x.d[r][c] = x.d[r][c] * f.d[c0 + c] * f.d[c0 + c];
}
template<typename W> TILE void convert_group(rt<W, 64> &d, const rt<float, 64> &x, int group) {
  reads(x);
  writes(d);
  memset((void *)d.d, 0, sizeof d.d);
  narrow_row(d.d[0], x.d[0], 64 * 16 * (group + 1));
}
template<typename T, int C> TILE void store_groups(st<T, 32, C> (&d)[4], int half, const rt<float, 64> &t, int c0) {
  reads(t);
  for (int w = 0; w < 4; w++) writes_shared(d[w], part(d[w], 16 * half, 16, c0, 64));
  for (int r = 0; r < 64; r++) narrow_row(d[r / 16].d + (16 * half + r % 16) * C + c0, t.d[r], 64);
}
TILE void put_group(rt<float, 64> &a, rt<float, 64> &b, const rt<float, 32> &t, int group) {
  reads(t);
  writes(a, b);
  for (int r = 0; r < 64; r++) {
    memcpy(a.d[r] + 16 * group, t.d[r], 16 * sizeof(float));
    memcpy(b.d[r] + 16 * group, t.d[r] + 16, 16 * sizeof(float));
  }
}
template<typename T> TILE void load_steps(rv &v, const T *g, int64_t stride, int n) {
  for (int r = 0; r < 64 && r < n; r++) touches_global(g + r * stride, sizeof(T), GLOBAL_READ);
  writes(v);
  for (int r = 0; r < 64; r++) v.d[r] = r < n ? widen(g[r * stride]) : 0.f;
}
TILE void store_steps(float *g, const rv &v, int64_t stride, int n) {
  for (int r = 0; r < 64 && r < n; r++) touches_global(g + r * stride, sizeof(float), GLOBAL_WRITE);
  reads(v);
  for (int r = 0; r < 64 && r < n; r++) g[r * stride] = v.d[r];
}
// To the compiler, tiles of different types have nothing to do with each other: accesses might change places.
template<class Tile, class Other> TILE Tile &in_place_of(Other &t) {
  IN_PLACE_RULES(Tile, Other);
  asm volatile("" ::: "memory");
  return *(Tile *)&t;
}
