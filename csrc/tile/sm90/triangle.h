// Inverses of triangular tiles on sm_90a.
#pragma once
// Warp w has the block of its 16 rows, columns 16 w .. 16 w + 15: its values 8 w .. 8 w + 7. Value 4 ch + 2 rh + e of a
// thread's eight is in row 8 rh + lane / 4, column 8 ch + 2 (lane % 4) + e. From the last row up, row j of the inverse
// is whole when those below it have been taken off; then it is taken off the rows above.
TILE void invert_diagonal(rt<float, 64> &d, rt<float, 64> &t) {
  int w = warp_in_group(), l = lane(), row = l >> 2, col = (l & 3) * 2;
  float a[8], x[8];
#pragma unroll
  for (int e = 0; e < 8; e++) {
    a[e] = w == 0 ? t.d[e] : w == 1 ? t.d[8 + e] : w == 2 ? t.d[16 + e] : t.d[24 + e];
    x[e] = (e >> 1 & 1) * 8 + row == (e >> 2) * 8 + col + (e & 1) ? 1.f : 0.f;
  }
#pragma unroll
  for (int i = 0; i < 32; i++) t.d[i] = i / 8 == w ? 0.f : t.d[i];
#pragma unroll
  for (int j = 15; j >= 1; j--) {
    int from = (j & 7) * 4 + (l & 3), at = (l & ~3) | (j & 7) >> 1;   // lanes with row j of x, and with column j of a
    const int ch = j >> 3, e = j & 1;
#pragma unroll
    for (int rh = 0; rh <= ch; rh++) {
      float f = __shfl_sync(~0u, a[4 * ch + 2 * rh + e], at);
      f = rh * 8 + row < j ? f : 0.f;
#pragma unroll
      for (int c = ch; c < 2; c++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          float y = __shfl_sync(~0u, x[4 * c + 2 * ch + k], from);
          x[4 * c + 2 * rh + k] = fused(-f, y, x[4 * c + 2 * rh + k]);
        }
    }
  }
#pragma unroll
  for (int i = 0; i < 32; i++) d.d[i] = i / 8 == w ? x[i % 8] : 0.f;
}
template<int A, typename T, int N, int K, int R>
TILE void mma_AB_blocks(rt<float, N> &d, const rt<T, K> &a, const st<T, R, N> &b, int r0) {
  mma_AB_rows<A>(d, a, b, r0);   // whose steps are of 16
}
