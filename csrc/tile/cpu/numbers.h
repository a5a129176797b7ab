// Bodies of tile/numbers.h.
#pragma once
template<typename T> TILE float number(const T &x) { return widen(x); }
template<typename T> TILE void set_number(T &d, float x) { narrow(d, x); }
TILE float halves(float a, float b) {
  fp16 x, y;
  narrow(x, a);
  narrow(y, b);
  return bits_float((uint32_t)x.u | (uint32_t)y.u << 16);
}
TILE float first_half(float x) {
  fp16 h;
  h.u = (uint16_t)float_bits(x);
  return widen(h);
}
TILE float second_half(float x) {
  fp16 h;
  h.u = (uint16_t)(float_bits(x) >> 16);
  return widen(h);
}
template<int N> TILE void store_acc(float *g, const rt<float, N> &t) {
  enum { W = N < 64 ? N : 64 };
  called_by<WARPGROUP>();
  touches_global(g, 64 * N * sizeof(float), GLOBAL_WRITE);
  reads(t);
  for (int col = 0; col < N; col += W)
    for (int r = 0; r < 64; r++) memcpy(g + col * 64 + r * W, &t.d[r][col], W * sizeof(float));
}
template<int N> TILE void row_largest(sv<64> &rows, const rt<float, N> &t) {
  called_by<WARPGROUP>();
  reads(t);
  writes_shared(rows, whole(rows));
  for (int r = 0; r < 64; r++) {
    uint32_t m = 0;                     // as integers NaN is above infinity
    for (int c = 0; c < N; c++) {
      uint32_t x = float_bits(t.d[r][c]) & 0x7fffffffu;
      m = x > m ? x : m;
    }
    rows.d[r] = bits_float(m < 0x7f800000u ? m : 0x7f800000u);
  }
}
template<int N> TILE void tile_largest(rv &d, const sv<64> (&rows)[N]) {
  called_by<WARPGROUP>();
  float m = 0.f;
  for (const sv<64> &own : rows) {
    reads_shared(whole(own));
    for (float x : own.d) m = x > m ? x : m;
  }
  writes(d);
  for (int r = 0; r < 64; r++) d.d[r] = m;
}
TILE void group_largest(rv &d, const sv<64> &rows, int log) {
  called_by<WARPGROUP>();
  reads_shared(whole(rows));
  writes(d);
  for (int first = 0; first < 64; first += 1 << log) {
    float m = 0.f;
    for (int r = first; r < first + (1 << log); r++) m = rows.d[r] > m ? rows.d[r] : m;
    for (int r = first; r < first + (1 << log); r++) d.d[r] = m;
  }
}
