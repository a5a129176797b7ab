// What the L2 is told of what copies read and write. Contracts; bodies in sm90/ and cpu/. tile.h does not include this
// file: the kernels that want it do.
#pragma once
#include "tile/tile.h"
// Nothing; that it may leave first, as nobody wants it again; or that it stays until a copy says otherwise.
enum l2 { USUAL, LEAVES, STAYS };
// As without.
template<typename T, int R, int C>
TILE void tma_load(st<T, R, C> &t, const gmap &m, sem &s, int row, int col, int head, int batch, enum l2 hint);
template<int R, int C>
TILE void tma_load(sm<R, C> &t, const gmap &m, sem &s, int row, int col, int head, int batch, enum l2 hint);
template<typename T, int R, int C>
TILE void tma_store(const gmap &m, st<T, R, C> &t, int row, int col, int head, int batch, enum l2 hint);
#ifdef __CUDACC__
#include "tile/sm90/l2.h"
#else
#include "tile/cpu/l2.h"
#endif
