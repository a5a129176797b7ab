// Pairs of steps by levels, and what goes up the columns of 64 steps (warpgroup). Contracts; bodies in sm90/ and cpu/.
// tile.h does not include this file: the kernels that want it do.
//
// Two rows i > j of 64 are of level h, a power of two, where the highest bit in which they differ is h. Then they lie in
// one block of 2 h rows, j in its first half and i in the other, and row m(h) of both, the last of the first half, lies
// between them: with l falling down the rows, e^(l_i - l_j) = e^(l_i - l_m) e^(l_m - l_j), of which no factor is above 1.
// A row has one such m for each level. Every pair is of one level of 32, 16, 8, 4, 2 and 1.
#pragma once
#include "tile/channels.h"
// d[r][c] = f(s[r][c0 + c] - s[m][c0 + c]), m that of row r at level h
template<int C, class F> TILE void map_level(rt<float, 64> &d, const ct<C> &s, int c0, int h, F f);
// d = s where (row, col) or (col, row) is of level h, else 0
template<typename T> TILE void keep_level(rt<T, 64> &d, const rt<T, 64> &s, int h);
// 64 columns from c0, 0 or 64. Others want a sync.
template<int C> TILE void store(ct<C> &d, int c0, const rt<float, 64> &t);
template<int C> TILE void load(hm<C> &x, const ct<C> &s);
template<int C> TILE void sum_up(hm<C> &x);                                // x[i] = sum of x[j], j >= i
// x = f(x, y, v[column], sum[column]) in rows < m, and 0 in the others. f may change the sum, going down the rows.
template<int C, class F> TILE void map(hm<C> &x, const hm<C> &y, const hv<C> &v, hv<C> &sum, int m, F f);
template<int C> TILE void sum_of(hv<C> &d, const hm<C> &x);                // of each column
// Row i to g + i * ld. Rows >= m and columns >= n are not written.
template<int C> TILE void store(float *g, int64_t ld, const hm<C> &x, int m, int n);
template<int C> TILE void store(float *g, int64_t stride, const hv<C> &v, int n);       // element i to g[i * stride]
#ifdef __CUDACC__
#include "tile/sm90/levels.h"
#else
#include "tile/cpu/levels.h"
#endif
