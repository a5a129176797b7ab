// Bodies of tile/dots.h on sm_90a. A vector along columns lies in eight threads of a row, whole; one along rows in the
// four rows of a warp at a time, and again in each eight threads.
#pragma once
template<int C> TILE float dot(const mc<C> &a, const mc<C> &b) {
  float x = 0.f;
#pragma unroll
  for (int j = 0; j < C / 32; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) x = fused(a.d[j][e], b.d[j][e], x);
#pragma unroll
  for (int o = 1; o < 8; o *= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
template<int R> TILE void store_dot(sv<4> &d, const mr<R> &a, const mr<R> &b) {
  float x = 0.f;
#pragma unroll
  for (int i = 0; i < R / 16; i++) x = fused(a.d[i], b.d[i], x);
  x += __shfl_xor_sync(~0u, x, 8);
  x += __shfl_xor_sync(~0u, x, 16);
  if (lane() == 0) d.d[warp_in_group()] = x;
}
TILE float load_dot(const sv<4> &s) { return s.d[0] + s.d[1] + s.d[2] + s.d[3]; }
