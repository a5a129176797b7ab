// Decays of channels: sums down the columns of 64 steps, and tiles that are weighted with them (warpgroup). Contracts;
// bodies in sm90/ and cpu/. tile.h does not include this file: the kernels that want it do.
//
//   ct<C>    64 x C floats in shared memory, for threads that go down the columns and for register tiles
//   hv<C>    C floats of a warpgroup, one a thread; C is 64 or 128
//   hm<C>    64 x C floats of a warpgroup, a column a thread: 64 registers
#pragma once
#include "tile/tile.h"
#define CHANNEL_RULES(C) static_assert((C) == 64 || (C) == 128, "channels of a tile of sums: 64 or 128")
#define IN_PLACE_RULES(Tile, Other) \
  static_assert(alignof(Tile) <= alignof(Other), "as aligned as the tile whose memory it takes")
template<int C> struct ct;
template<int C> struct hv;
template<int C> struct hm;

template<int C> TILE void fill(hv<C> &v, float x);
template<int C> TILE void load(hv<C> &v, const float *g, int n);        // elements >= n become 0 and are not read
template<int C> TILE void store(float *g, const hv<C> &v, int n);       // elements >= n are not written
template<int C, class F> TILE void map(hv<C> &d, const hv<C> &a, F f);  // d = f(a)
// Some element has f. Everybody gets the same answer, and it is a wg_sync().
template<int C, class F> TILE bool any(const hv<C> &v, F f);
// Row i at g + i * ld, floats or 16 bits. Rows >= m and columns >= n become 0 and are not read.
template<typename T, int C> TILE void load(hm<C> &x, const T *g, int64_t ld, int m, int n);
// Brings what such a load would read into the L2. It hands nothing to anybody.
template<typename T> TILE void prefetch(const T *g, int64_t ld, int m, int n);
// x = f(x, v[column]) in rows < m; the others stay.
template<int C, class F> TILE void map(hm<C> &x, const hv<C> &v, int m, F f);
template<int C> TILE void least_of(hv<C> &d, const hm<C> &x);           // of each column, at most 0; NaN may be lost
// s[i][c] is the sum of column c of x down to row i, each element counted as `low` where it is less; end that of all
// rows. Others want a sync.
template<int C> TILE void sum_down(ct<C> &s, hv<C> &end, const hm<C> &x, float low);
// Also between[g] = f(the middle of group g + 1, less that of group g). A group's middle is the mean of what stands in
// its rows 7 and 8; groups have 16 rows.
template<int C, class F>
TILE void sum_down(ct<C> &s, hv<C> &end, const hm<C> &x, float low, sv<C> (&between)[3], F f);
// 64 columns from c0, 0 or 64
template<int C> TILE void load(rt<float, 64> &t, const ct<C> &s, int c0);
// The same, less the middle of the row's group.
template<int C> TILE void load_from_middle(rt<float, 64> &t, const ct<C> &s, int c0);
// t = f(t, s[63][c0 + col])
template<int C, class F> TILE void map_last_row(rt<float, 64> &t, const ct<C> &s, int c0, F f);
// Rows in groups before `group`: x = (x f) f with f[c0 + col], whose square may be below what a float holds.
template<int C> TILE void carry_to_group(rt<float, 64> &x, const sv<C> &f, int c0, int group);
// x, rounded, in the rows of the groups 0 to `group`; 0 below.
template<typename W> TILE void convert_group(rt<W, 64> &d, const rt<float, 64> &x, int group);
// Row 16 w + i of t becomes row 16 half + i of tile w of d, columns from c0 on, rounded. A row's tile is written by one
// warp.
template<typename T, int C> TILE void store_groups(st<T, 32, C> (&d)[4], int half, const rt<float, 64> &t, int c0);
// Columns 0 to 15 of t become columns 16 group .. of a, 16 to 31 those of b. group: a constant
TILE void put_group(rt<float, 64> &a, rt<float, 64> &b, const rt<float, 32> &t, int group);
// Element i at g[i * stride], a float or 16 bits; rows >= n are not read and become 0.
template<typename T> TILE void load_steps(rv &v, const T *g, int64_t stride, int n);
// Element i to g[i * stride]; rows >= n are not written.
TILE void store_steps(float *g, const rv &v, int64_t stride, int n);

// A shared tile in the memory of another, whose values are lost.
template<class Tile, class Other> TILE Tile &in_place_of(Other &t);
#ifdef __CUDACC__
#include "tile/sm90/channels.h"
#else
#include "tile/cpu/channels.h"
#endif
