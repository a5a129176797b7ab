// Vectors of one warp, and scans over them (warp). Contracts; bodies in sm90/ and cpu/.
#pragma once
template<int N> TILE void fill(wv<N> &v, float x);
template<int N, class F> TILE void map(wv<N> &d, const wv<N> &a, const wv<N> &b, F f);   // d = f(a, b)
template<int N> TILE void cumsum(wv<N> &v);             // inclusive
template<int N> TILE float last(const wv<N> &v);        // element N - 1, in every thread
template<int N> TILE void store(sv<N> &d, const wv<N> &v);
template<int R, int C> TILE void load_col(wv<R> &v, const sm<R, C> &s, int col);
