// Matrices of global memory that a warpgroup reads once, changes in registers and writes back where they were: the
// states of steps of generation. A kernel includes this file beside tile.h. Contracts; bodies in sm90/ and cpu/.
//
//   mt<R, C>    matrix tile of floats, R x C, R a multiple of 16, C of 32. A thread holds four neighbouring columns of
//               each of its rows, R C / 128 floats. No products
//   mr<R>       R floats, one per row of such a tile: R / 16 registers of a thread
//   mc<C>       C floats, one per column: C / 8 registers
//   ml<N>       N floats, each in one thread alone, for what costs more to make than to pass on
//   mrsum<R>    R sums along rows in the making, partial per thread until reduce()
//   mcsum<C>    C sums down columns in the making, partial per thread until they are stored
//
// All operations are a warpgroup's. T is float or 16 bits. FOURS: four numbers are one access. Rows then begin at
// multiples of four of them, and n is such a multiple, or the width or more. ONES: they may lie anywhere.
// FOURS_AT_ONCE: as FOURS, but ptxas may not make four stores of one, which spares it moves and costs the memory.
#pragma once
#include "tile/tile.h"
#define MATRIX_RULES(R, C) \
  static_assert((R) % 16 == 0 && (C) % 32 == 0, "matrix tile mt<R, C>: R is a multiple of 16, C of 32")
enum access { FOURS, ONES, FOURS_AT_ONCE };
template<int R, int C> struct mt;
template<int R> struct mr;
template<int C> struct mc;
template<int N> struct ml;
template<int R> struct mrsum;
template<int C> struct mcsum;

// A load has two halves, so that several are under way at a time: load_begin, and load_end<T> of the same T, before which
// nothing may use the value. Rows >= m and columns >= n are not read and become 0.
template<int A, typename T, int R, int C> TILE void load_begin(mt<R, C> &t, const T *g, int64_t ld, int m, int n);
template<typename T, int R> TILE void load_begin(mr<R> &v, const T *g, int m);
template<int A, typename T, int C> TILE void load_begin(mc<C> &v, const T *g, int n);
template<typename T, int N> TILE void load_begin(ml<N> &v, const T *g, int n);
template<typename T> TILE void load_begin(float &x, const T *g);        // the same number for everybody
template<typename T, int R, int C> TILE void load_end(mt<R, C> &t);
template<typename T, int R> TILE void load_end(mr<R> &v);
template<typename T, int C> TILE void load_end(mc<C> &v);
template<typename T, int N> TILE void load_end(ml<N> &v);
template<typename T> TILE void load_end(float &x);
// Rounds to T. Rows >= m and columns >= n are not written. A thread writes the places of a matrix that it reads.
template<int A, typename T, int R, int C> TILE void save(T *g, int64_t ld, const mt<R, C> &t, int m, int n);
template<typename T, int R> TILE void save(T *g, const mr<R> &v, int m);
template<int A, typename T, int C> TILE void save(T *g, const mc<C> &v, int n);

template<int R> TILE void fill(mr<R> &v, float x);
template<int C> TILE void fill(mc<C> &v, float x);
template<int R> TILE void clear(mrsum<R> &v);
template<int C> TILE void clear(mcsum<C> &v);
template<int R, class F> TILE void map(mr<R> &d, const mr<R> &a, F f);                       // d = f(a)
template<int R, class F> TILE void map(mr<R> &d, const mr<R> &a, const mr<R> &b, F f);       // d = f(a, b)
template<int C, class F> TILE void map(mc<C> &d, const mc<C> &a, F f);
template<int C, class F> TILE void map(mc<C> &d, const mc<C> &a, const mc<C> &b, F f);
template<int N, class F> TILE void map(ml<N> &d, const ml<N> &a, const ml<N> &b, F f);
// Passed on: between the store and the load stands a wg_sync().
template<int N> TILE void store(sv<N> &d, const ml<N> &v);
template<int N> TILE void load(mr<N> &v, const sv<N> &s);
template<int N> TILE void load(mc<N> &v, const sv<N> &s);
// f(t, ...) for every element of t, with what each further argument has in its row, its column or its place. f may
// change t, sums and other tiles: f(float &t, float row, float &sum).
template<int R, int C, class F, class... X> TILE void each(mt<R, C> &t, F f, X &...x);
template<int R> TILE void reduce(mr<R> &v, const mrsum<R> &l);
// Four parts, C floats each, whose sum it is; and that sum. Between the two stands a wg_sync().
template<int C> TILE void store(sv<4 * C> &d, const mcsum<C> &s);
template<int C> TILE void load_sum(mc<C> &v, const sv<4 * C> &s);
#ifdef __CUDACC__
#include "tile/sm90/matrix.h"
#else
#include "tile/cpu/matrix.h"
#endif
