// Numbers of global memory, for lambdas that read or write where no tile lies; largest numbers of rows. A kernel
// includes this file beside tile.h. Contracts; bodies in sm90/ and cpu/.
#pragma once
#include "tile/tile.h"
// Any width. T is float, bf16 or fp16.
template<typename T> TILE float number(const T &x);
template<typename T> TILE void set_number(T &d, float x);      // rounds to T
// Two numbers, rounded to fp16, in the bits of one; and back.
TILE float halves(float a, float b);
TILE float first_half(float x);
TILE float second_half(float x);
// Warpgroup. A tile in global memory in load_acc()'s order.
template<int N> TILE void store_acc(float *g, const rt<float, N> &t);
// Warpgroup. The largest |x| of each row; NaN counts as infinity. A warp's own 16 rows; others want a sync.
template<int N> TILE void row_largest(sv<64> &rows, const rt<float, N> &t);
// Warpgroup. The largest of the row's group of 1 << log rows.
TILE void group_largest(rv &d, const sv<64> &rows, int log);
template<int N> TILE void tile_largest(rv &d, const sv<64> (&rows)[N]);   // of N tiles' rows, for every row
#ifdef __CUDACC__
#include "tile/sm90/numbers.h"
#else
#include "tile/cpu/numbers.h"
#endif
