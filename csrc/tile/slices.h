// Slices of 16 columns of register tiles, of which features are built (warpgroup). Contracts; bodies in sm90/ and cpu/.
// tile.h does not include this file: the kernels that want it do.
#pragma once
#include "tile/tile.h"
// c0: a multiple of 16, and a constant
template<int N> TILE void copy_part(rt<float, 16> &d, const rt<float, N> &s, int c0);               // 16 columns of s
// The columns of d move 16 to the left, and s are the last ones. So a loop that is not unrolled fills a tile.
template<int N> TILE void append_part(rt<float, N> &d, const rt<float, 16> &s);
template<typename T, int N> TILE void convert_to_part(rt<T, N> &d, int c0, const rt<float, 16> &s); // 16 columns of d
template<int BY> TILE void rotate_cols(rt<float, 16> &t);   // t[row][col] = t[row][(col + BY) % 16]
// 16-bit tiles. BY is even.
template<int BY, typename T> TILE void rotate_cols(rt<T, 16> &d, const rt<T, 16> &s);   // d = s, rotated so
// by_two: s, rotated by 2
template<typename T> TILE void rotate_by_one(rt<T, 16> &d, const rt<T, 16> &s, const rt<T, 16> &by_two);
template<typename T> TILE void widen(rt<float, 16> &d, const rt<T, 16> &s);
// 16 columns of d from c0 become x y, rounded once.
template<typename T, int N>
TILE void multiply_to_part(rt<T, N> &d, int c0, const rt<T, 16> &x, const rt<T, 16> &y);
#ifdef __CUDACC__
#include "tile/sm90/slices.h"
#else
#include "tile/cpu/slices.h"
#endif
