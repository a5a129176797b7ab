// Products with the quarters of a shared tile, whose operands and sums are halves of register tiles (warpgroup): so a
// triangular tile that is inverted in halves (tile/triangle.h) is multiplied with. Contracts; bodies in sm90/ and cpu/.
// tile.h does not include this file: the kernels that want it do.
#pragma once
#include "tile/tile.h"
// The first 32 columns of s and the last ones; and the other way.
template<int N = 32> TILE void split_halves(rt<float, N> &d, rt<float, N> &e, const rt<float, 2 * N> &s);
template<typename T, int N> TILE void join_halves(rt<T, 2 * N> &d, const rt<T, N> &a, const rt<T, N> &b);
// d = a times rows r0 .. r0 + 31, columns c0 .. c0 + 31 of b: a product as in mma.h. r0, c0: 0 or 32
template<int A, typename T>
TILE void mma_AB_quarter(rt<float, 32> &d, const rt<T, 32> &a, const st<T, 64, 64> &b, int r0, int c0);
#ifdef __CUDACC__
#include "tile/sm90/quarters.h"
#else
#include "tile/cpu/quarters.h"
#endif
