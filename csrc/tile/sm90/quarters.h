// Bodies of tile/quarters.h on sm_90a.
#pragma once
#include "tile/sm90/anew.h"
template<int N> TILE void split_halves(rt<float, N> &d, rt<float, N> &e, const rt<float, 2 * N> &s) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    d.d[i] = s.d[i];
    e.d[i] = s.d[N / 2 + i];
  }
}
template<typename T, int N> TILE void join_halves(rt<T, 2 * N> &d, const rt<T, N> &a, const rt<T, N> &b) {
#pragma unroll
  for (int k = 0; k < N / 16; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      d.d[k][j] = a.d[k][j];
      d.d[N / 16 + k][j] = b.d[k][j];
    }
}
// The swizzle is a function of the address, so that the second half of a row begins as its first.
template<int A, typename T>
TILE void mma_AB_quarter(rt<float, 32> &d, const rt<T, 32> &a, const st<T, 64, 64> &b, int r0, int c0) {
  mma_begin<A>(d);
  uint32_t db = anew_word(desc(&b, 64 * 128)) + (across(r0 / 16) + (c0 * 2 >> 4));
#pragma unroll
  for (int k = 0; k < 2; k++) wgmma<T, 1>(d.d, a.d[k], db + across(k), A || k);
}
