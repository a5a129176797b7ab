// Two tiles in one, the rows of the second behind those of the first, for one product with both (warpgroup). Contracts;
// bodies in sm90/ and cpu/. tile.h does not include this file: the kernels that want it do.
#pragma once
#include "tile/tile.h"

// d = a times the transpose of the first half of b's rows, e of the last half, of 64 columns of b from k0 on: products
// as in mma.h.
template<int A, typename T, int H, int W>
TILE void mma_ABt_halves(rt<float, H> &d, rt<float, H> &e, const rt<T, 64> &a, const st<T, 2 * H, W> &b, int k0);
// The same where a is the first half of b, and all columns.
template<int A, typename T, int K>
TILE void mma_ABt_halves(rt<float, 64> &d, rt<float, 64> &e, const st<T, 128, K> &b);
// W: width of the role. Rows >= end of each half become 0.
template<int W = WARPGROUP, typename T, int R, int C> TILE void clear_halves(st<T, R, C> &t, int end);
#ifdef __CUDACC__
#include "tile/sm90/twins.h"
#else
#include "tile/cpu/twins.h"
#endif
