// Bodies of tile/slices.h.
#pragma once
template<int N> TILE void copy_part(rt<float, 16> &d, const rt<float, N> &s, int c0) {
  reads(s);
  writes(d);
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < 16; c++) d.d[r][c] = s.d[r][c0 + c];
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
