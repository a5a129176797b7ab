// Dot products of vectors along matrix tiles (warpgroup). Contracts; bodies in sm90/ and cpu/. Only the kernels that want
// it include this file.
#pragma once
#include "tile/matrix.h"
template<int C> TILE float dot(const mc<C> &a, const mc<C> &b);     // the same for everybody
// Four parts, whose sum it is; and that sum. Between the two stands a wg_sync().
template<int R> TILE void store_dot(sv<4> &d, const mr<R> &a, const mr<R> &b);
TILE float load_dot(const sv<4> &s);
#ifdef __CUDACC__
#include "tile/sm90/dots.h"
#else
#include "tile/cpu/dots.h"
#endif
