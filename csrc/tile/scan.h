// Vectors of one warp, and scans over them (warp). Vectors of a warpgroup, for what goes down the rows of a tile.
// Contracts; bodies in sm90/ and cpu/.
#pragma once
template<int N> TILE void fill(wv<N> &v, float x);
template<int N, class F> TILE void map(wv<N> &d, const wv<N> &a, const wv<N> &b, F f);   // d = f(a, b)
template<int N, class F> TILE void map_index(wv<N> &d, F f);   // d = f(index)
template<int N> TILE void cumsum(wv<N> &v);             // inclusive
template<int N> TILE void cumsum_down(wv<N> &v);        // v[i] = sum of v[j], j >= i
template<int N> TILE float last(const wv<N> &v);        // element N - 1, in every thread
template<int N> TILE void store(sv<N> &d, const wv<N> &v);
template<int N> TILE float get(const wv<N> &v, int i);   // element i, in every thread
template<int N> TILE float max_of(const wv<N> &v);      // in every thread; NaN may be lost
template<int N> TILE float sum_of(const wv<N> &v);      // in every thread
// element i at g[i * stride]; i >= n become pad and are not read
template<int N> TILE void load(wv<N> &v, const float *g, int64_t stride, int n, float pad);
// rounds to T; elements >= n are not written
template<typename T, int N> TILE void store(T *g, const wv<N> &v, int n);
// element i to g[i * stride]; i >= n are not written
template<int N> TILE void store(float *g, int64_t stride, const wv<N> &v, int n);
// n elements of global memory, at any alignment
template<typename T> TILE void copy_row(T *d, const T *s, int n);
template<int N> TILE void load(wv<N> &v, const sv<N> &s);
template<int R, int C> TILE void load_col(wv<R> &v, const sm<R, C> &s, int col);

// ---- gv (warpgroup): a loop over the rows of a shared tile keeps what it needs of the rows before in vectors.
template<int N> TILE void fill(gv<N> &v, float x);
template<int N> TILE void copy(gv<N> &d, const gv<N> &s);
// d = f(a), f(a, b), f(a, b, c). d may be one of the others.
template<int N, class F> TILE void map(gv<N> &d, const gv<N> &a, F f);
template<int N, class F> TILE void map(gv<N> &d, const gv<N> &a, const gv<N> &b, F f);
template<int N, class F> TILE void map(gv<N> &d, const gv<N> &a, const gv<N> &b, const gv<N> &c, F f);
// Columns c0 .. c0 + N - 1 of a row; c0 is a multiple of N. A thread stores to the places that it loads from and to no
// others, so that a row may be replaced, and read again, without a sync. Other accesses to the tile want one.
template<typename T, int R, int C, int N> TILE void load_row(gv<N> &v, const st<T, R, C> &s, int row, int c0 = 0);
template<typename T, int R, int C, int N> TILE void store_row(st<T, R, C> &d, int row, const gv<N> &v, int c0 = 0);
// Element i at g[i * stride], a float or 16 bits, at any alignment. Those of i >= n become 0 and are not read, or are
// not written. store_row and store round to T.
template<typename T, int N> TILE void load(gv<N> &v, const T *g, int64_t stride, int n);
template<typename T, int N> TILE void store(T *g, int64_t stride, const gv<N> &v, int n);
