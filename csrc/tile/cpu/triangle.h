// Bodies of tile/triangle.h.
#pragma once
TILE void invert_diagonal(rt<float, 64> &d, rt<float, 64> &t) {
  changes(t);
  writes(d);
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < 64; c++) d.d[r][c] = r == c ? 1.f : 0.f;
  for (int b = 0; b < 64; b += 16) {
    for (int j = 15; j >= 1; j--)
      for (int i = 0; i < j; i++)
        for (int c = j; c < 16; c++)
          d.d[b + i][b + c] = fused(-t.d[b + i][b + j], d.d[b + j][b + c], d.d[b + i][b + c]);
    for (int r = 0; r < 16; r++)
      for (int c = 0; c < 16; c++) t.d[b + r][b + c] = 0.f;
  }
}
template<int A, typename T, int N, int K, int R>
TILE void mma_AB_blocks(rt<float, N> &d, const rt<T, K> &a, const st<T, R, N> &b, int r0) {
  enum { E = word_of<T>::ELEMENTS };
  static_assert(K % 16 == 0, "whole blocks of 16 rows");
  begins_at(b, r0, 16);
  issue_product<A>(d, a, part(b, r0, K, 0, N), [=, &d, &a, &b] {
    alignas(64) float scratch[scratch_floats<T, K>()];
    product<A, PW>(d, operand(a, scratch), packed<PACK_ROWS>(b) + r0 / E * PW, R / E, K / E);
  });
}
