// Products of the rows that a warp holds itself (warpgroup). Contracts; bodies in sm90/ and cpu/. tile.h does not
// include this file: the kernels that want it do.
//
// Each of the four warps multiplies its 16 rows of a register tile by 16 x 16 values that it has too. Such a product is
// over when the call returns: it wants no fence, no commit and no wait, and nothing of it has been in shared memory.
//
//   qt<T>    16 x 16 values, the same in every warp: the second operand. Four words of a thread
//   pt       an rt<float, 16> in shared memory, put there by its warpgroup to have its registers back. A thread sees
//            what it has stored itself, without any sync
#pragma once
#include "tile/tile.h"
#define OWN_RULES(N, K) static_assert((N) % 16 == 0 && (K) % 16 == 0, "columns in blocks of 16")
template<typename T> struct qt;
struct pt;
TILE void load(rt<float, 16> &t, const pt &s);
TILE void store(pt &d, const rt<float, 16> &t);
// 16 rows from r0 and 16 columns from c0, both multiples of 16; load_t: their transpose
template<typename T, int R, int C> TILE void load(qt<T> &d, const st<T, R, C> &s, int r0, int c0);
template<typename T, int R, int C> TILE void load_t(qt<T> &d, const st<T, R, C> &s, int r0, int c0);
// 16 columns of d from d0 += 16 columns of a from a0, times b. d0, a0: constants, multiples of 16
template<typename T, int N, int K>
TILE void mma_own(rt<float, N> &d, int d0, const rt<T, K> &a, int a0, const qt<T> &b);
// f(row, col, ...) as each(), for 16 columns from c0. Of tiles and sums of 16 columns they are all these have; with any
// others, c0 is a constant. Register tiles of 16 bits may be read.
template<class F, class... X> TILE void each_part(int c0, F f, X &...x);
// f(a, b, ...) for two neighbouring columns at once, the first an even one: of each argument a couple.
template<class T> struct couple { T a, b; };
template<class F, class... X> TILE void each_couple(int c0, F f, X &...x);
// What each_couple() also takes: s[col + 1][col] of a shared tile, twice.
template<typename T> struct next_below { const st<T, 64, 64> &s; };
template<typename T> TILE next_below<T> next_below_of(const st<T, 64, 64> &s) { return {s}; }
// Four parts of such 16 columns, from c0 in each of four rows of 64 numbers, whose sum it is. Others want a sync.
TILE void store(sv<4 * 64> &d, int c0, const csum<16> &c);
// d = f(sum, v) of these columns, the sum that of all parts. Everybody wants a sync.
template<int P, class F>
TILE void map_parts(sv<64> &d, int c0, const sv<4 * 64> (&parts)[P], const sv<64> &v, F f);
#ifdef __CUDACC__
#include "tile/sm90/own.h"
#else
#include "tile/cpu/own.h"
#endif
