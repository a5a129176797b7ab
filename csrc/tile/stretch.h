// Long rows that a warpgroup walks over, 2048 numbers at a time. Contracts; bodies in sm90/ and cpu/. tile.h does not
// include this file: the kernels that want it do.
//
//   stretch    2048 neighbouring numbers of a row in global memory, 16 a thread. A thread keeps its places: it may
//              write where it has read without a sync
//   partial    a number in the making, partial per thread until it is joined
//
// n: how many numbers there are; those behind are neither read nor written, and no f sees them. T is float or 16 bits.
// in_eights: the row begins at a multiple of 16 bytes, so that eight numbers of 16 bits are one access.
#pragma once
#include "tile/tile.h"
enum { STRETCH = 2048 };
struct stretch;
struct partial;

// A load has two halves, so that several are under way at a time: load_begin, and load_end<T> of the same T, before
// which nothing may use the numbers.
template<typename T> TILE void load_begin(stretch &x, const T *g, int n, bool in_eights);
template<typename T> TILE void load_end(stretch &x);
template<typename T> TILE void save(T *g, const stretch &x, int n, bool in_eights);      // rounds to T
template<typename T> TILE float number_at(const T *g);                                   // in every thread
TILE void put_number(float *g, float x);                                                 // one thread writes it

TILE void fill(stretch &x, float y);
TILE void fill(partial &x, float y);
// f(number, its index, ...) of each, with each further argument's part. f may change the number, and the parts.
template<class F, class... X> TILE void each(stretch &x, int n, F f, X &...parts);
template<class F> TILE void map(partial &d, const partial &a, const partial &b, F f);     // d = f(d, a, b)
// f of all parts, in an order of its own that is always the same; f(a, b) = f(b, a). In every thread. A
// wg_sync(), behind which `room` is read: another join wants another room.
template<class F> TILE float join(const partial &x, sv<32> &room, F f);
#ifdef __CUDACC__
#include "tile/sm90/stretch.h"
#else
#include "tile/cpu/stretch.h"
#endif
