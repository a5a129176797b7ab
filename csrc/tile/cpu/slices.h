// Bodies of tile/slices.h.
#pragma once
template<int N> TILE void copy_part(rt<float, 16> &d, const rt<float, N> &s, int c0) {
  reads(s);
  writes(d);
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < 16; c++) d.d[r][c] = s.d[r][c0 + c];
}
template<int N> TILE void append_part(rt<float, N> &d, const rt<float, 16> &s) {
  reads(s);
  changes(d);
  for (int r = 0; r < 64; r++) {
    memmove(d.d[r], d.d[r] + 16, (N - 16) * sizeof(float));
    memcpy(d.d[r] + N - 16, s.d[r], 16 * sizeof(float));
  }
}
template<typename T, int N> TILE void convert_to_part(rt<T, N> &d, int c0, const rt<float, 16> &s) {
  reads(s);
  writes(d);
  for (int r = 0; r < 64; r++) narrow_row(d.d[r] + c0, s.d[r], 16);
}
template<int BY> TILE void rotate_cols(rt<float, 16> &t) {
  changes(t);
  for (int r = 0; r < 64; r++) {
    float row[16];
    for (int c = 0; c < 16; c++) row[c] = t.d[r][(c + BY + 16) % 16];
    for (int c = 0; c < 16; c++) t.d[r][c] = row[c];
  }
}
template<int BY, typename T> TILE void rotate_cols(rt<T, 16> &d, const rt<T, 16> &s) {
  static_assert(BY % 2 == 0, "an even number of columns");
  reads(s);
  writes(d);
  for (int r = 0; r < 64; r++) {
    T row[16];
    for (int c = 0; c < 16; c++) row[c] = s.d[r][(c + BY) % 16];
    for (int c = 0; c < 16; c++) d.d[r][c] = row[c];
  }
}
template<typename T> TILE void rotate_by_one(rt<T, 16> &d, const rt<T, 16> &s, const rt<T, 16> &by_two) {
  reads(s, by_two);
  writes(d);
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < 16; c += 2) {
      T left = s.d[r][c + 1], right = by_two.d[r][c];
      d.d[r][c] = left;
      d.d[r][c + 1] = right;
    }
}
template<typename T, int N>
TILE void multiply_to_part(rt<T, N> &d, int c0, const rt<T, 16> &x, const rt<T, 16> &y) {
  reads(x, y);
  writes(d);
  for (int r = 0; r < 64; r++) {
    alignas(64) float a[16], b[16];
    widen_row(a, x.d[r], 16);
    widen_row(b, y.d[r], 16);
#pragma GCC ivdep
    for (int c = 0; c < 16; c++) a[c] *= b[c];
    narrow_row(d.d[r] + c0, a, 16);
  }
}
template<typename T> TILE void widen(rt<float, 16> &d, const rt<T, 16> &s) {
  reads(s);
  writes(d);
  for (int r = 0; r < 64; r++) widen_row(d.d[r], s.d[r], 16);
}
