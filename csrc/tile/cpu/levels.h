// Bodies of tile/levels.h.
#pragma once
enum { TC_ROW = 64 + 8 };
struct alignas(128) tc { float d[64 * TC_ROW]; };
#ifdef CHECK
struct ht { alignas(64) float d[64][64]; state_of_registers state; };
struct hc { alignas(64) float d[64]; state_of_registers state; };
struct hcsum { alignas(64) float d[64]; state_of_registers state; };
#else
struct ht { alignas(64) float d[64][64]; };     // a row for each step
struct hc { alignas(64) float d[64]; };
struct hcsum { alignas(64) float d[64]; };
#endif
TILE region columns_of(const tc &s, int c0, int cols) {
  return {s.d + c0, 64, TC_ROW * (int)sizeof(float), cols * (int)sizeof(float)};
}
template<typename T> TILE void keep_level(qt<T> &d, const qt<T> &s, int h) {
  reads(s);
  writes(d);
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < 16; c++) d.d[r][c] = ((r ^ c) & -h) == h ? s.d[r][c] : T{};
}
template<typename T> TILE void keep_below(qt<T> &d, const qt<T> &s) {
  reads(s);
  writes(d);
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < 16; c++) d.d[r][c] = r > c ? s.d[r][c] : T{};
}
template<typename T> TILE void keep_above(qt<T> &d, const qt<T> &s) {
  reads(s);
  writes(d);
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < 16; c++) d.d[r][c] = r < c ? s.d[r][c] : T{};
}
template<typename T> TILE bool exceeds(const qt<T> &a, const qt<T> &b, float x) {
  reads(a, b);
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < 16; c++)
      if (!(fabsf(widen(a.d[r][c])) <= x && fabsf(widen(b.d[r][c])) <= x)) return true;
  return false;
}
TILE void fill(hc &v, float x) {
  writes(v);
  for (int c = 0; c < 64; c++) v.d[c] = x;
}
TILE void clear(hcsum &v) {
  writes(v);
  memset(v.d, 0, sizeof v.d);
}
TILE void load(hc &v, const float *g, int n) {
  n = n < 64 ? n : 64;
  touches_global(g, n * sizeof(float), GLOBAL_READ);
  writes(v);
  for (int c = 0; c < 64; c++) v.d[c] = c < n ? g[c] : 0.f;
}
template<typename T> TILE void load(ht &x, const T *g, int64_t ld, int m, int n) {
  writes(x);
  n = n < 64 ? n : 64;
  memset((void *)x.d, 0, sizeof x.d);
  for (int i = 0; i < 64 && i < m; i++) {
    touches_global(g + i * ld, n * sizeof(T), GLOBAL_READ);
    widen_row(x.d[i], g + i * ld, n);
  }
}
TILE void load(ht &x, const tc &s) {
  reads_shared(columns_of(s, 0, 64));
  writes(x);
  for (int i = 0; i < 64; i++)
    for (int c = 0; c < 64; c++) x.d[i][c] = s.d[c * TC_ROW + i];
}
TILE void store(float *g, int64_t ld, const ht &x, int m, int n) {
  n = n < 64 ? n : 64;
  reads(x);
  for (int i = 0; i < 64 && i < m; i++) {
    touches_global(g + i * ld, n * sizeof(float), GLOBAL_WRITE);
    memcpy(g + i * ld, x.d[i], n * sizeof(float));
  }
}
// What a channel's two threads on the GPU tell each other, for the checker.
TILE void between_halves(tc &s, int part) {
  writes_shared(*(const sv<32> *)&s, columns_of(s, 64 + part, 1));
  wg_sync();
  reads_shared(columns_of(s, 64 + part, 1));
}
TILE void store(float *g, int64_t stride, const hcsum &v, tc &by, int part, int n) {
  reads(v);
  between_halves(by, part);
  for (int c = 0; c < 64 && c < n; c++) {
    touches_global(g + c * stride, sizeof(float), GLOBAL_WRITE);
    g[c * stride] = v.d[c];
  }
}
template<class F> __attribute__((flatten)) TILE void map(ht &x, const hc &v, int m, F f) {
  reads(v);
  changes(x);
  for (int i = 0; i < 64 && i < m; i++) {
#pragma GCC ivdep
    for (int c = 0; c < 64; c++) x.d[i][c] = f(x.d[i][c], v.d[c]);
  }
}
template<class F>
__attribute__((flatten)) TILE void map(ht &x, const ht &y, const hc &v, hcsum &sum, int m, F f) {
  reads(y, v);
  changes(x, sum);
  for (int i = 0; i < 64; i++) {
#pragma GCC ivdep
    for (int c = 0; c < 64; c++) x.d[i][c] = i < m ? f(x.d[i][c], y.d[i][c], v.d[c], sum.d[c]) : 0.f;
  }
}
TILE void sum_add(hcsum &d, const ht &x) {
  reads(x);
  changes(d);
  for (int i = 0; i < 64; i++)
    for (int c = 0; c < 64; c++) d.d[c] += x.d[i][c];
}
TILE void sum_down(tc &s, const ht &x, float low) {
  reads(x);
  between_halves(s, 0);
  writes_shared(*(const sv<32> *)&s, columns_of(s, 0, 64));
  for (int c = 0; c < 64; c++) {
    float sum = 0.f;
    for (int i = 0; i < 64; i++) s.d[c * TC_ROW + i] = sum += x.d[i][c] < low ? low : x.d[i][c];
  }
}
TILE void sum_up(ht &x, tc &by) {
  changes(x);
  between_halves(by, 1);
  for (int i = 62; i >= 0; i--)
    for (int c = 0; c < 64; c++) x.d[i][c] += x.d[i + 1][c];
}
TILE void load(rv &v, const tc &s, int step) {
  reads_shared(columns_of(s, step, 1));
  writes(v);
  for (int c = 0; c < 64; c++) v.d[c] = s.d[c * TC_ROW + step];
}
TILE void store(tc &d, int c0, const rt<float, 16> &t) {
  begins_at(d, c0, 16);
  reads(t);
  writes_shared(*(const sv<32> *)&d, columns_of(d, c0, 16));
  for (int c = 0; c < 64; c++) memcpy(d.d + c * TC_ROW + c0, t.d[c], sizeof t.d[c]);
}
TILE void store_sum(tc &d, int group, const rv &v) {
  reads(v);
  writes_shared(*(const sv<32> *)&d, columns_of(d, 68 + group, 1));
  for (int c = 0; c < 64; c++) d.d[c * TC_ROW + 68 + group] = v.d[c];
}
TILE void add_sums(ht &x, const tc &s) {
  reads_shared(columns_of(s, 68, 4));
  changes(x);
  for (int c = 0; c < 64; c++) {
    const float *y = s.d + c * TC_ROW + 68;
    x.d[63][c] += y[0] + y[1] + y[2] + y[3];
  }
}
template<typename T> struct turned { const st<T, 64, 64> &s; };
struct level { const tc &s; int h; };
template<typename T> TILE turned<T> turned_of(const st<T, 64, 64> &s) { return {s}; }
TILE level level_of(const tc &s, int h) { return {s, h}; }
TILE void each_uses(const tc &s) { reads_shared(columns_of(s, 0, 64)); }
TILE void each_uses(const level &l) { reads_shared(columns_of(l.s, 0, 64)); }
template<typename T> TILE void each_uses(const turned<T> &t) { reads_shared(whole(t.s)); }
TILE void part_uses(const tc &s, int c0) { reads_shared(columns_of(s, c0, 16)); }
TILE void part_uses(const level &l, int c0) { reads_shared(columns_of(l.s, c0, 16)); }
template<typename T> TILE void part_uses(const turned<T> &t, int c0) { reads_shared(part(t.s, c0, 16, 0, 64)); }
template<int N> TILE void turn_row(float (&d)[N], const tc &s, int r, int c0) {
  memcpy(d, s.d + r * TC_ROW + c0, sizeof d);
}
template<int N> TILE void turn_row(float (&d)[N], const level &l, int r, int c0) {
  const float *x = l.s.d + r * TC_ROW;
  for (int c = 0; c < N; c++) d[c] = x[c0 + c] - x[((c0 + c) & -2 * l.h) | (l.h - 1)];
}
template<int N, typename T> TILE void turn_row(float (&d)[N], const turned<T> &t, int r, int c0) {
  for (int c = 0; c < N; c++) d[c] = widen(t.s.d[(c0 + c) * 64 + r]);
}
// The two that call this, each_row and part_row, of each of the three.
template<int N, class X> TILE row_buffer<N> turned_row(const X &x, int r, int c0) {
  row_buffer<N> b;
  turn_row(b.d, x, r, c0);
  return b;
}
template<int N> TILE row_buffer<N> each_row(const tc &s, int r) { return turned_row<N>(s, r, 0); }
template<int N> TILE row_buffer<N> each_row(const level &l, int r) { return turned_row<N>(l, r, 0); }
template<int N, typename T> TILE row_buffer<N> each_row(const turned<T> &t, int r) { return turned_row<N>(t, r, 0); }
TILE row_buffer<16> part_row(const tc &s, int r, int c0) { return turned_row<16>(s, r, c0); }
TILE row_buffer<16> part_row(const level &l, int r, int c0) { return turned_row<16>(l, r, c0); }
template<typename T> TILE row_buffer<16> part_row(const turned<T> &t, int r, int c0) {
  return turned_row<16>(t, r, c0);
}
template<typename T, class F> TILE void store_rows(const st<T, 16, 64> &s, F f, int n) {
  n = n < 64 ? n : 64;
  reads_shared(whole(s));
  for (int r = 0; r < 16; r++) {
    T *g = f(r);
    if (!g) continue;
    touches_global(g, n * sizeof(T), GLOBAL_WRITE);
    memcpy(g, s.d + r * 64, n * sizeof(T));
  }
}
TILE int64_t anew(int64_t x) { return x; }
