// Bodies of tile/halves.h on the CPU, and for the checker.
#pragma once
struct __attribute__((may_alias)) half { float x; };      // it stands for a float of a row
TILE half half_of(float x) {
  fp16 h;
  narrow(h, x);
  return {widen(h)};
}
TILE half fused(half a, half b, half c) { return half_of(fused(a.x, b.x, c.x)); }
TILE half operator+(half a, half b) { return half_of(a.x + b.x); }
TILE half operator-(half a, half b) { return half_of(a.x - b.x); }
TILE half operator*(half a, half b) { return half_of(a.x * b.x); }
TILE half operator-(half a) { return {-a.x}; }
template<int N> TILE void half_uses(rt<fp16, N> &t) { changes(t); }
template<int N> TILE void half_uses(const rt<fp16, N> &t) { reads(t); }
TILE void half_uses(const rv &v) { reads(v); }
template<int N> TILE void half_uses(const sv<N> &v) { reads_shared(whole(v)); }
// Row r of an argument. What f has changed goes back.
template<int N> TILE row_buffer<N> half_row(const rt<fp16, N> &t, int r) {
  row_buffer<N> b;
  widen_row(b.d, t.d[r], N);
  return b;
}
template<int N> TILE row_value half_row(const rv &v, int r) { return {half_of(v.d[r]).x}; }
template<int N> TILE row_buffer<N> half_row(const sv<N> &v, int) {
  row_buffer<N> b;
  for (int c = 0; c < N; c++) b.d[c] = half_of(v.d[c]).x;
  return b;
}
template<int N> TILE half &half_at(row_buffer<N> &b, int c) { return *(half *)&b.d[c]; }
TILE half half_at(row_value b, int) { return {b.x}; }
template<int N, class X, class B> TILE void half_end(const X &, const B &, int) {}
template<int N> TILE void half_end(rt<fp16, N> &t, const row_buffer<N> &b, int r) { narrow_row(t.d[r], b.d, N); }
template<int N, class F, class... X> __attribute__((flatten)) TILE void each_half(F f, X &...x) {
  (half_uses(x), ...);
  for (int r = 0; r < 64; r++) {
    auto run = [&](auto... b) __attribute__((always_inline)) {
#pragma GCC ivdep
      for (int c = 0; c < N; c++) f(half_at(b, c)...);
      (half_end<N>(x, b, r), ...);
    };
    run(half_row<N>(x, r)...);
  }
}
template<int N> TILE void unpack_halves(rt<fp16, N> &first, rt<fp16, N> &second, const rt<float, N> &t, bool opposite) {
  reads(t);
  writes(first, second);
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < N; c++) {
      uint32_t u = float_bits(t.d[r][c]);
      first.d[r][c].u = (uint16_t)u;
      second.d[r][c].u = (uint16_t)(u >> 16 ^ (opposite ? 0x8000u : 0u));
    }
}
template<int N> TILE void convert(rt<float, N> &d, const rt<fp16, N> &s) {
  reads(s);
  writes(d);
  for (int r = 0; r < 64; r++) widen_row(d.d[r], s.d[r], N);
}
TILE void load_acc(rt<float, 32> &even, rt<float, 32> &odd, const float *g) {
  touches_global(g, 64 * 64 * sizeof(float), GLOBAL_READ);
  writes(even, odd);
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < 32; c++) {
      even.d[r][c] = g[64 * r + 2 * c];
      odd.d[r][c] = g[64 * r + 2 * c + 1];
    }
}
