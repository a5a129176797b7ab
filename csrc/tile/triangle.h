// Inverses of triangular tiles (warpgroup). Contracts; bodies in sm90/ and cpu/. tile.h does not include this file: the
// kernels that want it do.
#pragma once
#include "tile/tile.h"
// The 16 x 16 blocks on the diagonal of t, of which R is the strict upper triangle: those of d become (I + R)^-1, by
// substitution in fp32, and those of t become 0. The rest of d becomes 0, the rest of t stays. What stands on the
// diagonal of t or below is not looked at.
TILE void invert_diagonal(rt<float, 64> &d, rt<float, 64> &t);
// mma_AB_rows with K and r0 multiples of 16: the other blocks of 16 of a reduction are 0, and left out.
template<int A, typename T, int N, int K, int R>
TILE void mma_AB_blocks(rt<float, N> &d, const rt<T, K> &a, const st<T, R, N> &b, int r0);
#ifdef __CUDACC__
#include "tile/sm90/triangle.h"
#else
#include "tile/cpu/triangle.h"
#endif
