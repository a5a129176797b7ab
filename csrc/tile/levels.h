// Tiles whose rows are channels and whose columns are 64 steps, and pairs of steps by levels (warpgroup). Contracts;
// bodies in sm90/ and cpu/. tile.h does not include this file: the kernels that want it do.
//
//   tc      64 x 64 floats in shared memory, a row of steps for each channel, which also has four sums behind the last
//           step, one for each group of 16. Steps 64 to 67 are the operations'
//   ht      64 x 64 floats of a warpgroup, half of the steps of a channel a thread: 32 registers
//   hc      64 floats, one per channel, the same in both its threads
//   hcsum   64 sums over steps in the making, partial per thread until they are stored
//
// Two steps i > j of 64 are of level h, a power of two, where the highest bit in which they differ is h. Then they lie
// in one block of 2 h steps, j in its first half and i in the other, and step m(h) of both, the last of the first half,
// lies between them: with l falling along the steps, e^(l_i - l_j) = e^(l_i - l_m) e^(l_m - l_j), of which no factor is
// above 1. A step has one such m for each level.
#pragma once
#include "tile/tile.h"
#include "tile/own.h"
struct tc;
struct ht;
struct hc;
struct hcsum;
// d = s where (row, col) is of level h, else 0
template<typename T> TILE void keep_level(qt<T> &d, const qt<T> &s, int h);
// d = s where row > col, or where row < col, else 0
template<typename T> TILE void keep_below(qt<T> &d, const qt<T> &s);
template<typename T> TILE void keep_above(qt<T> &d, const qt<T> &s);
// warp: some element of both is above x, whatever its sign, or NaN. bf16; fp32 on the CPU
template<typename T> TILE bool exceeds(const qt<T> &a, const qt<T> &b, float x);
TILE void fill(hc &v, float x);
TILE void clear(hcsum &v);
TILE void load(hc &v, const float *g, int n);           // elements >= n become 0 and are not read
// Step i at g + i * ld, floats or 16 bits. Steps >= m and channels >= n become 0 and are not read.
template<typename T> TILE void load(ht &x, const T *g, int64_t ld, int m, int n);
TILE void load(ht &x, const tc &s);
// Step i to g + i * ld. Steps >= m and channels >= n are not written.
TILE void store(float *g, int64_t ld, const ht &x, int m, int n);
// Element i to g[i * stride]. part: 2 or 3, one after another of calls without another sync between them.
TILE void store(float *g, int64_t stride, const hcsum &v, tc &by, int part, int n);
// x = f(x, v[channel]) of steps < m; the others stay.
template<class F> TILE void map(ht &x, const hc &v, int m, F f);
// x = f(x, y, v[channel], sum[channel]) of steps < m, and 0 of the others. f may add to the sum.
template<class F> TILE void map(ht &x, const ht &y, const hc &v, hcsum &sum, int m, F f);
TILE void sum_add(hcsum &d, const ht &x);
// s[c][i] = sum of x[c][j], j <= i, each element counted as `low` where it is less. Others want a sync.
TILE void sum_down(tc &s, const ht &x, float low);
TILE void sum_up(ht &x, tc &by);                        // x[c][i] = sum of x[c][j], j >= i
TILE void load(rv &v, const tc &s, int step);
TILE void store(tc &d, int c0, const rt<float, 16> &t);               // steps from c0 on; others want a sync
TILE void store_sum(tc &d, int group, const rv &v);                     // others want a sync
TILE void add_sums(ht &x, const tc &s);                                // step 63 += the four sums of its channel
// What each() and each_part() also take, beside a tc, of which comes the element:
//   turned_of(s)       s[col][row] of a shared tile
//   level_of(s, h)     s[row][col] - s[row][m], m that of step col at level h
template<typename T> struct turned;
struct level;
template<typename T> TILE turned<T> turned_of(const st<T, 64, 64> &s);
TILE level level_of(const tc &s, int h);
// Row r of a shared tile goes to f(r), a T *, or nowhere where that is NULL; columns >= n are not written. Everybody's
// writes of it have been seen before.
template<typename T, class F> TILE void store_rows(const st<T, 16, 64> &s, F f, int n);
// The same number, which the compiler takes for another each time: of a stride it keeps no multiples throughout a loop.
TILE int64_t anew(int64_t x);
#ifdef __CUDACC__
#include "tile/sm90/levels.h"
#else
#include "tile/cpu/levels.h"
#endif
