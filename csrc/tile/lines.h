// Lines of global memory, as the rows that norms are of, that a warpgroup holds in registers. How many lines it has at
// a time is known at run time, so that one kernel takes short lines and long ones. Contracts; bodies in sm90/ and cpu/.
// tile.h does not include this file: the kernels that want it do.
//
//   lt<J>   1024 J floats: `lines` lines, which is 1, 2, 4, 8 or 16, each of 1024 J / lines columns. A thread holds J
//           times 8 neighbouring columns of one line
//   lv      a float of each line: one register
//   lsum    sums along lines, or largest numbers, in the making, partial per thread
//   sl<T,C> C neighbouring T of a line in shared memory, as a bulk copy brings them
//   begun<T, J>   a tile between the halves of a load of T, as an argument of each(): every number is unpacked where it
//           is used, and 16 bits take half of a register until then
//   pl<J>   a tile of one line in shared memory, in an order of its own
//
// All operations are a warpgroup's. `lines` is the same in all that belong together. T is float or 16 bits, and of what
// is written also e4m3. EIGHTS: eight numbers are one access, or two of floats. Lines then begin at multiples of 16
// bytes (e4m3: 8), and the columns are a multiple of 8. SINGLES: they may lie anywhere.
#pragma once
#include "tile/tile.h"
#define LINE_RULES(J) static_assert((J) >= 1 && (J) <= 4, "tile of lines lt<J>: J is 1 to 4")
enum line_access { EIGHTS, SINGLES, WHOLE };
template<int J> struct lt;
struct lv;
struct lsum;
template<typename T, int C> struct sl;
template<int J> struct pl;
template<typename T, int J> struct begun { lt<J> &t; };

// Line i begins at g + i * ld. Lines >= m and columns >= n are not read and become 0. A load has two halves, so that
// several are under way at a time: load_begin, and load_end<T> of the same T, before which nothing may use the tile.
template<int A, typename T, int J> TILE void load_begin(lt<J> &t, const T *g, int64_t ld, int lines, int m, int n);
template<typename T, int J> TILE void load_end(lt<J> &t);
// T of 16 bits. Back to between the halves, rounded; and there: t + other, rounded, and save<EIGHTS>.
template<typename T, int J> TILE void unend(lt<J> &t);
template<typename T, int J> TILE void add_begun(lt<J> &t, const lt<J> &other);
template<typename T, int J> TILE void save_begun(T *g, int64_t ld, const lt<J> &t, int lines, int m, int n);
// Thread. The first n of a line's C numbers; the rest is as it was. g is a multiple of 16 bytes, and so is
// line_bytes<T>(n), which counts on s.
template<typename T> TILE uint32_t line_bytes(int n) { return (uint32_t)(n * sizeof(T)); }
template<typename T, int C> TILE void bulk_load(sl<T, C> &d, const T *g, int n, sem &s);
// Columns c0 to n - 1 of it become the tile's one line, the rest 0; c0: a multiple of 1024. Also a load in two halves.
template<typename T, int C, int J> TILE void load_begin(lt<J> &t, const sl<T, C> &s, int c0, int n);
template<int J> TILE void load(lt<J> &t, const pl<J> &s);
template<int J> TILE void store(pl<J> &d, const lt<J> &t);         // others want a sync
// Rounds to T; e4m3: at most +-448, NaN stays. Lines >= m and columns >= n are not written. A thread writes the places
// that it reads.
template<int A, typename T, int J> TILE void save(T *g, int64_t ld, const lt<J> &t, int lines, int m, int n);
// Element i at g[i * stride]. Those of i >= m are not read and become 0, or are not written.
TILE void load(lv &v, const float *g, int64_t stride, int lines, int m);
TILE void save(float *g, int64_t stride, const lv &v, int lines, int m);

template<typename T, int J> TILE void round_lines(lt<J> &t);      // every element to the nearest T
template<int J> TILE void fill(lt<J> &t, float x);
TILE void fill(lv &v, float x);
TILE void clear(lsum &s);
template<int J> TILE void copy(lt<J> &d, const lt<J> &s);
template<class F> TILE void map(lv &d, const lv &a, F f);                            // d = f(a)
template<class F> TILE void map(lv &d, const lv &a, const lv &b, F f);               // d = f(a, b)
template<class F> TILE void map(lv &d, const lv &a, const lv &b, const lv &c, F f);  // d = f(a, b, c)
// f(t, ...) for every element of t in columns < n, with what each further argument has in its place or its line. f may
// change t, sums and other tiles: f(float &t, float line, float &sum). WHOLE: f may see columns >= n too, which is
// cheaper than to ask.
template<int A, int J, class F, class... X> TILE void each(lt<J> &t, int lines, int n, F f, X &...x);
// f(float *x, int line, int column) of every 8 neighbouring columns from a multiple of 8 on; may see columns >= n too.
template<int J, class F> TILE void each_eight(lt<J> &t, int lines, int n, F f);
// Some line's element has f. Everybody gets the same answer, of 4 lines or more everybody in a warp. Of two lines it is
// a wg_sync().
template<class F> TILE bool any(const lv &v, int lines, F f);

// Sums of 4 lines or more stay in a warp.
TILE void reduce(lv &v, const lsum &s, int lines);
// Those of 1 or 2 lines go through shared memory: the sums of the four warps, and the sums of a line's warps. Between
// the two stands a barrier.
TILE void put_sums(sv<4> &d, const lsum &s);
TILE void take_sums(lv &v, const sv<4> &d, int lines);
// The same of largest numbers, none of them negative. NaN may be lost.
TILE void reduce_most(lv &v, const lsum &s, int lines);
TILE void put_most(sv<4> &d, const lsum &s);
TILE void take_most(lv &v, const sv<4> &d, int lines);
// Of 16 lines: sums down the columns, in four parts, and what these add up to. Between the two stands a barrier. The
// sum is every line.
TILE void put_columns(sv<256> &d, const lt<1> &t);
TILE void take_columns(lt<1> &t, const sv<256> &d);
#ifdef __CUDACC__
#include "tile/sm90/lines.h"
#else
#include "tile/cpu/lines.h"
#endif
