// Bodies of tile/triangle.h.
#pragma once
template<typename T> struct alignas(1024) tri { T d[9][2][16 * 16]; };
// Of float, hi is all of x.
template<typename T> TILE void split_row(T *hi, T *lo, const float *x, int n) {
  alignas(64) float rounded[16 * 16];
  narrow_row(hi, x, n);
  if constexpr (sizeof(T) == 4) return;
  widen_row(rounded, hi, n);
  for (int i = 0; i < n; i++) rounded[i] = x[i] - rounded[i];
  narrow_row(lo, rounded, n);
}
template<typename T> TILE void invert_diagonal(rt<float, 64> &x, tri<T> &s, const rt<float, 64> &t) {
  reads(t);
  writes(x);
  writes_shared(s, whole(s));
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < 64; c++) x.d[r][c] = r == c ? 1.f : 0.f;
  for (int b = 0; b < 64; b += 16)
    for (int j = 15; j >= 1; j--)
      for (int i = 0; i < j; i++)
        for (int c = j; c < 16; c++)
          x.d[b + i][b + c] = fused(-t.d[b + i][b + j], x.d[b + j][b + c], x.d[b + i][b + c]);
  for (int v = 1; v < 4; v++)
    for (int u = 0; u <= v; u++)
      for (int r = 0; r < 16; r++) {
        T(&to)[2][256] = s.d[block_of(u, v)];
        split_row(to[0] + 16 * r, to[1] + 16 * r, (u == v ? x : t).d[16 * u + r] + 16 * v, 16);
      }
}
// d (+)= a block; its rows are 64 floats apart.
template<int A, typename T> TILE void add_product(float *d, const float *a, const T (&b)[2][256]) {
  alignas(64) float b_hi[256], b_lo[256] = {}, row[16];
  T part[16], rest[16];
  widen_row(b_hi, b[0], 256);
  if (sizeof(T) == 2) widen_row(b_lo, b[1], 256);
  for (int i = 0; i < 16; i++, d += 64, a += 64) {
    alignas(64) float a_hi[16], a_lo[16] = {};
    split_row(part, rest, a, 16);
    widen_row(a_hi, part, 16);
    if (sizeof(T) == 2) widen_row(a_lo, rest, 16);
    for (int c = 0; c < 16; c++) row[c] = A ? d[c] : 0.f;
    for (int k = 0; k < 16; k++)
#pragma GCC ivdep
      for (int c = 0; c < 16; c++) {
        row[c] = fused(a_hi[k], b_hi[16 * k + c], row[c]);
        if (sizeof(T) == 2) row[c] = fused(a_hi[k], b_lo[16 * k + c], fused(a_lo[k], b_hi[16 * k + c], row[c]));
      }
    memcpy(d, row, sizeof row);
  }
}
template<typename T> TILE void invert_rest(rt<float, 64> &x, const tri<T> &s) {
  reads_shared(whole(s));
  changes(x);
  for (int v = 1; v < 4; v++)
    for (int w = 0; w < v; w++) {
      for (int u = v; u < 4; u++)
        add_product<ACC>(x.d[16 * w] + 16 * u, x.d[16 * w] + 16 * (v - 1), s.d[block_of(v - 1, u)]);
      alignas(64) float sum[16][64];
      add_product<ZERO>(sum[0], x.d[16 * w] + 16 * v, s.d[block_of(v, v)]);
      for (int r = 0; r < 16; r++)
        for (int c = 0; c < 16; c++) x.d[16 * w + r][16 * v + c] = -sum[r][c];
    }
}
template<typename T> TILE void store_carried(st<T, 64, 64> &d, const rt<float, 64> &t) {
  reads(t);
  writes_shared(d, whole(d));
  for (int r = 0; r < 64; r++) {
    float left[4] = {}, y;
    for (int c = 0; c < 64; c++) {
      float &from = left[c / 2 % 4], x = t.d[r][c];
      x += fabsf(from) <= fabsf(x) * 0x1p-10f ? from : 0.f;
      narrow_row(d.d + 64 * r + c, &x, 1);
      widen_row(&y, d.d + 64 * r + c, 1);
      from = x - y;
    }
  }
}
