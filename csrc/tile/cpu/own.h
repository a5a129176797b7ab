// Bodies of tile/own.h.
#pragma once
#ifdef CHECK
template<typename T> struct qt { alignas(64) T d[16][16]; state_of_registers state; };
#else
template<typename T> struct qt { alignas(64) T d[16][16]; };
#endif
struct alignas(128) pt { float d[64][16]; };
TILE void load(rt<float, 16> &t, const pt &s) {
  reads_own(whole(s));
  writes(t);
  memcpy((void *)t.d, s.d, sizeof s.d);
}
TILE void store(pt &d, const rt<float, 16> &t) {
  reads(t);
  writes_own(d, whole(d));
  memcpy(d.d, t.d, sizeof d.d);
}
template<typename T, int R, int C> TILE void load(qt<T> &d, const st<T, R, C> &s, int r0, int c0) {
  begins_at(s, r0, 16);
  begins_at(s, c0, 16);
  reads_shared(part(s, r0, 16, c0, 16));
  writes(d);
  for (int r = 0; r < 16; r++) memcpy(d.d[r], s.d + (r0 + r) * C + c0, sizeof d.d[r]);
}
template<typename T, int R, int C> TILE void load_t(qt<T> &d, const st<T, R, C> &s, int r0, int c0) {
  begins_at(s, r0, 16);
  begins_at(s, c0, 16);
  reads_shared(part(s, r0, 16, c0, 16));
  writes(d);
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < 16; c++) d.d[c][r] = s.d[(r0 + r) * C + c0 + c];
}
template<typename T, int N, int K>
TILE void mma_own(rt<float, N> &d, int d0, const rt<T, K> &a, int a0, const qt<T> &b) {
  OWN_RULES(N, K);
  reads(a, b);
  changes(d);
  alignas(64) float y[16][16];
  for (int k = 0; k < 16; k++) widen_row(y[k], b.d[k], 16);
  for (int r = 0; r < 64; r++) {
    alignas(64) float x[16], sum[16];
    widen_row(x, a.d[r] + a0, 16);
    memcpy(sum, d.d[r] + d0, sizeof sum);
    for (int k = 0; k < 16; k++) {
#pragma GCC ivdep
      for (int c = 0; c < 16; c++) sum[c] += x[k] * y[k][c];
    }
    memcpy(d.d[r] + d0, sum, sizeof sum);
  }
}
TILE void store(sv<4 * 64> &d, int c0, const csum<16> &c) {
  reads(c);
  writes_shared(d, {d.d + c0, 4, 64 * (int)sizeof(float), 16 * (int)sizeof(float)});
  for (int w = 0; w < 4; w++)
    for (int i = 0; i < 16; i++) d.d[64 * w + c0 + i] = w ? 0.f : c.d[i];
}
template<int P, class F>
TILE void map_parts(sv<64> &d, int c0, const sv<4 * 64> (&parts)[P], const sv<64> &v, F f) {
  for (const sv<4 * 64> &p : parts) reads_shared({p.d + c0, 4, 64 * (int)sizeof(float), 16 * (int)sizeof(float)});
  reads_shared({v.d + c0, 1, 0, 16 * (int)sizeof(float)});
  writes_shared(d, {d.d + c0, 1, 0, 16 * (int)sizeof(float)});
  for (int c = c0; c < c0 + 16; c++) {
    float sum = 0.f;
    for (int i = 0; i < 4 * P; i++) sum += parts[i / 4].d[64 * (i % 4) + c];
    d.d[c] = f(sum, v.d[c]);
  }
}
// Row r of an argument in the 16 columns from c0.
template<typename T> struct own_places { T *d; };
TILE float &each_at(own_places<float> b, int c) { return b.d[c]; }
TILE float each_at(own_places<const float> b, int c) { return b.d[c]; }
template<typename T, int N> TILE void each_uses(const rt<T, N> &t) { reads(t); }
template<int N> TILE own_places<float> part_row(rt<float, N> &t, int r, int c0) {
  return {t.d[r] + (N == 16 ? 0 : c0)};
}
template<int N> TILE own_places<const float> part_row(const rt<float, N> &t, int r, int c0) {
  return {t.d[r] + (N == 16 ? 0 : c0)};
}
template<typename T, int N> TILE row_buffer<16> part_row(const rt<T, N> &t, int r, int c0) {
  row_buffer<16> b;
  widen_row(b.d, t.d[r] + (N == 16 ? 0 : c0), 16);
  return b;
}
template<int N> TILE own_places<float> part_row(csum<N> &c, int, int c0) { return {c.d + (N == 16 ? 0 : c0)}; }
TILE row_buffer<16> part_row(rsum &, int, int) { return {}; }
TILE row_value part_row(const rv &v, int r, int) { return {v.d[r]}; }
template<int N> TILE own_places<const float> part_row(const sv<N> &v, int, int c0) { return {v.d + c0}; }
template<typename T, int C> TILE row_buffer<16> part_row(const st<T, 64, C> &s, int r, int c0) {
  row_buffer<16> b;
  widen_row(b.d, s.d + r * C + c0, 16);
  return b;
}
template<class X> TILE void part_uses(X &x, int) { each_uses(x); }
template<int N> TILE void part_uses(const sv<N> &v, int c0) { reads_shared({v.d + c0, 1, 0, 16 * (int)sizeof(float)}); }
template<int N> TILE void part_uses(sv<N> &v, int c0) { part_uses((const sv<N> &)v, c0); }
template<class F, class... X> __attribute__((flatten)) TILE void each_part(int c0, F f, X &...x) {
  (part_uses(x, c0), ...);
  for (int r = 0; r < 64; r++) {
    auto run = [&](auto... b) __attribute__((always_inline)) {
#pragma GCC ivdep
      for (int c = 0; c < 16; c++) f(r, c0 + c, each_at(b, c)...);
      (each_end<16>(x, b, r), ...);
    };
    run(part_row(x, r, c0)...);
  }
}
template<typename T> TILE void part_uses(const next_below<T> &t, int c0) { reads_shared(part(t.s, c0, 16, c0, 16)); }
template<typename T> TILE row_buffer<16> part_row(const next_below<T> &t, int, int c0) {
  row_buffer<16> b;
  for (int c = 0; c < 16; c += 2) b.d[c] = b.d[c + 1] = widen(t.s.d[(c0 + c + 1) * 64 + c0 + c]);
  return b;
}
template<class B> TILE auto couple_at(B &b, int c) -> couple<decltype(each_at(b, c))> {
  return {each_at(b, c), each_at(b, c + 1)};
}
TILE couple<float> couple_at(row_buffer<16> &b, int c) { return {b.d[c], b.d[c + 1]}; }
template<class F, class... X> __attribute__((flatten)) TILE void each_couple(int c0, F f, X &...x) {
  (part_uses(x, c0), ...);
  for (int r = 0; r < 64; r++) {
    auto run = [&](auto... b) __attribute__((always_inline)) {
      for (int c = 0; c < 16; c += 2) f(couple_at(b, c)...);
    };
    run(part_row(x, r, c0)...);
  }
}
