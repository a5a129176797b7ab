// Folded register tiles, for transforms that begin or end with a step of radix 2 along the rows (warpgroup). Row 16 w +
// 8 h + i of such a tile, i < 8, is row j = 8 w + i of the halves h of all groups of 1 << log rows, log 1 to 6: the two
// rows that a step takes are in one thread. Contracts; bodies in sm90/ and cpu/. tile.h does not include this file: the
// kernels that want it do.
#pragma once
#include "tile/halves.h"
#include "tile/numbers.h"
TILE int fold_of(int r) { return r >> 4 << 3 | (r & 7); }              // j
TILE int folded_row(int r, int log) {
  int j = fold_of(r), half = log - 1;
  return j >> half << log | (r >> 3 & 1) << half | (j & ((1 << half) - 1));
}
// The tile's rows folded_row() in their places.
template<typename T, int N> TILE void load_folded(rt<float, N> &d, const st<T, 64, 64> &s, int c0, int log);
template<typename T, int N> TILE void store_folded(st<T, 64, 64> &d, const rt<float, N> &s, int c0, int log);
// Rows 16 w + 8 + i of a and rows 16 w + i of b change places. On the GPU that moves nothing.
template<typename T, int N> TILE void trade_rows(rt<T, N> &a, rt<T, N> &b);
TILE void trade_rows(rv &a, rv &b);
// A tile in global memory: its even columns in load_acc()'s order, and behind them the odd ones. folded: row 2 j + h
// becomes row 16 w + 8 h + i.
TILE void store_columns(float *g, const rt<float, 64> &t, bool folded);
TILE void load_columns(rt<float, 32> &t, const float *g, int odd);
// Of row_largest()'s rows of a folded tile: the largest of a row's group of 1 << log rows. log 0: the tile is folded as
// for log 1, and each row is a group.
TILE void group_largest_folded(rv &d, const sv<64> &rows, int log);
#ifdef __CUDACC__
#include "tile/sm90/folds.h"
#else
#include "tile/cpu/folds.h"
#endif
