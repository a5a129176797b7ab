// Inverses of triangular tiles (warpgroup). Contracts; bodies in sm90/ and cpu/. tile.h does not include this file: the
// kernels that want it do.
//
// Of I + R, R the strict upper triangle of a tile, in blocks of 16 x 16, a warp has a row of blocks X_w of the inverse:
//   X_ww = (I + R_ww)^-1,  X_01 = -X_00 R_01 X_11,  X_23 = -X_22 R_23 X_33,
//   X_wv = -(sum over u, v' of X_wu R_uv' X_v'v) for w, u < 2 <= v', v
// A block on the diagonal comes of blocks of 8 x 8: the inverses of its two on the diagonal, and R_01 (I + R_11)^-1, by
// substitution in fp32; then one product gives the third. In products every factor is the sum of two parts of type T, x
// = hi + lo, hi x rounded, lo what is left; of the four products the one of lo and lo is left out, sums are fp32.
//
// IN_HALVES: X_01 and X_23 are all that is made of what is beside the diagonal, and in the place of X_wv for w < 2 <= v
// stands -R_wv. Of the halves a and b of a tile's columns the product with the inverse is then x = a X and
// (b - x R) X', in three products of which each waits for the one before (tile/quarters.h).
//
//   tri<T>   the blocks R_uv and X_vv of column v = 1 to 3 of blocks, u < v, each in two parts, and room for a block
#pragma once
#include "tile/tile.h"
template<typename T> struct tri;
TILE constexpr int block_of(int u, int v) { return v * (v + 1) / 2 + u; }   // u <= v; (0, 0): the room

enum inverse { IN_ONE, IN_HALVES };
// These three one after the other, IN_HALVES the first two, between them a wg_sync(), and another before s is written
// again.
// x: the blocks on the diagonal, IN_HALVES those of -R, and 0 elsewhere. What stands on the diagonal of t or below is
// not looked at.
template<inverse I = IN_ONE, typename T> TILE void invert_diagonal(rt<float, 64> &x, tri<T> &s, const rt<float, 64> &t);
// x: the blocks (0, 1) and (2, 3); IN_ONE: and what block (0, 0) adds to the sums of row 0. s: X_23 in the room
template<inverse I = IN_ONE, typename T> TILE void invert_pairs(rt<float, 64> &x, tri<T> &s);
// x: all blocks
template<typename T> TILE void invert_rest(rt<float, 64> &x, const tri<T> &s);
// store(), but what rounding takes from two neighbouring elements, the first in an even column, goes to the first of
// those eight columns further, and in the last eight columns from the first to the second, where carried() takes it. So
// errors of a row's sums do not grow with its length where its elements are alike in size. IN_HALVES: in each half of a
// row. T: fp16, or float.
template<inverse I = IN_ONE, typename T> TILE void store_carried(st<T, 64, 64> &d, const rt<float, 64> &t);
// x += left, unless that is more than 2^-10 of x
TILE float carried(float x, float left) { return x + (fabsf(left) <= fabsf(x) * 0x1p-10f ? left : 0.f); }
#ifdef __CUDACC__
#include "tile/sm90/triangle.h"
#else
#include "tile/cpu/triangle.h"
#endif
