// Decays of 64 channels: sums down the columns of 64 steps, and tiles that are weighted with them (warpgroup).
// Contracts; bodies in sm90/ and cpu/. tile.h does not include this file: the kernels that want it do.
//
// Groups have 16 rows. A group's middle is the mean of the sums down to its rows 7 and 8.
//   hv       64 floats, one per channel, the same in every warp: two a thread
//   hm       64 x 64 floats, a column per channel. A warp has a group, a thread two columns of it: 32 registers
//   ct       64 x 64 sums down the columns in shared memory, each less its group's middle
//   cg       what the groups of a ct are to each other, a row of 64 floats per group. Of sums down from the first row:
//            middle[g], and end[g], the last row less that middle; between[g], which takes from group g to g + 1
//   handed   of an rt<float, 64> the blocks of 16 x 16 on the diagonal and right of it, in shared memory, from one
//            warpgroup to another: 10 KB, those of group g in front of KB 4 (g + 1)
#pragma once
#include "tile/own.h"
#include "tile/triangle.h"         // products of warps
#include "tile/twins.h"
#define IN_PLACE_RULES(Tile, Other) \
  static_assert(alignof(Tile) <= alignof(Other), "as aligned as the tile whose memory it takes")
struct hv;
struct hm;
struct ct;
struct cg;
struct handed;

TILE void fill(hv &v, float x);
TILE void load(hv &v, const float *g, int n);                   // elements >= n become 0 and are not read
TILE void store(float *g, const hv &v, int n);                  // elements >= n are not written
template<int N> TILE void store(sv<N> &d, int c0, const hv &v); // 64 elements from c0
template<int N> TILE void load(hv &v, const sv<N> &s, int c0);  // the same
template<class F> TILE void map(hv &d, const hv &a, F f);       // d = f(a)
template<class F> TILE void map(hv &d, const hv &a, const hv &b, F f);
template<class F> TILE void map_index(hv &d, F f);              // d = f(channel)
TILE float max_of(const hv &v);                                 // in every thread; NaN may be lost
TILE float sum_of(const hv &v);                                 // in every thread
// Row i at g + i * ld, floats or 16 bits. Rows >= m and columns >= n become 0 and are not read.
template<typename T> TILE void load(hm &x, const T *g, int64_t ld, int m, int n);
TILE void load(hm &x, const sm<64, 64> &s);
template<typename T> TILE void load(hm &x, const st<T, 64, 64> &s);
TILE void clear_behind(sm<64, 64> &s, int m);                   // rows >= m become 0; others see it behind a sync
TILE void store(sm<64, 64> &d, const hm &x);                    // others see it behind a sync
// Brings what such a load of any number of columns would read into the L2. It hands nothing to anybody.
template<typename T> TILE void prefetch(const T *g, int64_t ld, int m, int n);
// x = f(x, v[column]) in rows < m; the others stay.
template<class F> TILE void map(hm &x, const hv &v, int m, F f);
// Element c0 + c of d[g]: the sum of column c over group g. Others see it behind a sync.
template<int N> TILE void store_sums(sv<N> (&d)[4], int c0, const hm &x);
TILE void at_least(hm &x, float low);                           // what is less becomes `low`; NaN stays
// Sums down the columns of x, times `unit`; end of all rows. NEAR: of each group the first sum, the middle and the last
// one are at most `most` from the sum in front of it, and from the last one. WITHIN: a group's first and last sum are
// so from its middle. BEYOND: further, or NaN: then nothing else is worked out. Where all are NEAR, groups 0 and 1 have
// one middle instead, the sum between them, and groups 2 and 3. Gates that are `steep` are told to be BEYOND in any
// case, and all is worked out. Everybody gets the same answer, others from reach_of(). between[g] = f(what lies between
// the middles of groups g and g + 1); g of the groups' middles and ends. In it is a wg_sync(), behind which s is
// written; others want one before they read.
enum reach { NEAR, WITHIN, BEYOND };
template<class F, class G>
TILE enum reach sum_down(ct &s, cg &groups, hv &end, const hm &x, float unit, float most, bool steep, F f, G g);
TILE enum reach reach_of(const cg &groups);
TILE void load(rt<float, 64> &t, const ct &s);
// What each_part() also takes, beside a ct, of which comes the element: of v[row / 16] the column's.
struct by_group { const sv<64> (&v)[4]; };
// What each() and each_part() also take: a shared tile each of whose rows is read, and written by store_own(), by the
// warp alone that has this row of register tiles. So it needs no sync in between.
template<typename T> struct own_rows { st<T, 64, 64> &s; };
template<typename T> TILE own_rows<T> own_rows_of(st<T, 64, 64> &s) { return {s}; }
template<typename T, int C, int N> TILE void store_own(st<T, 64, C> &d, const rt<float, N> &t, int c0);
// The same in columns c0 .. of a panel of 64.
template<typename T, int C> TILE void store_own(st<T, 64, C> &d, const rt<float, 16> &t, int panel, int c0);
// Columns c0 .. c0 + 15, ahead of an each_part() that takes them, behind what the parts before have stored.
template<typename T> TILE void load_part(rt<T, 16> &d, const own_rows<T> &s, int c0);
TILE void load_part(rt<float, 16> &d, const ct &s, int c0);
// Rows in groups before `group`: x *= f[col].
TILE void carry_to_group(rt<float, 64> &x, const sv<64> &f, int group);
// x, rounded, in the rows of the groups 0 to `group`; 0 below.
template<typename W> TILE void convert_group(rt<W, 64> &d, const rt<float, 64> &x, int group);
// Row 16 w + i of t becomes row 16 half + i of tile w of d, rounded, columns from c0 on. A row's tile is written by one
// warp.
template<typename T> TILE void store_groups(st<T, 32, 64> (&d)[4], int half, const rt<float, 16> &t, int c0);
// ... rows of that group alone, by the warp whose they are: row 16 group + i of t becomes row 16 half + i of d.
template<typename T> TILE void store_group(st<T, 32, 64> &d, int half, const rt<float, 16> &t, int c0, int group);
// mma_ABt_halves<ZERO>() by products of each warp, which are done behind it: where no other ones may be, in a function
// that is called.
template<typename T>
TILE void mma_ABt_halves_by_warps(rt<float, 16> &d, rt<float, 16> &e, const rt<T, 64> &a, const st<T, 32, 64> &b);
// t becomes columns 16 group .. of d. group: a constant
TILE void put_group(rt<float, 64> &d, const rt<float, 16> &t, int group);
TILE void hand_over(handed &d, const rt<float, 16> &t, int group);
TILE void add(rt<float, 64> &t, const handed &s);                     // t += s; others' are seen behind a sync
// Element i at g[i * stride], a float or 16 bits; rows >= n are not read and become 0.
template<typename T> TILE void load_steps(rv &v, const T *g, int64_t stride, int n);
template<typename T, int N> TILE void load_steps(wv<N> &v, const T *g, int64_t stride, int n);      // warp
// Element i to g[i * stride]; rows >= n are not written.
TILE void store_steps(float *g, const rv &v, int64_t stride, int n);

// A shared tile in the memory of another, whose values are lost.
template<class Tile, class Other> TILE Tile &in_place_of(Other &t);
#ifdef __CUDACC__
#include "tile/sm90/channels.h"
#else
#include "tile/cpu/channels.h"
#endif
