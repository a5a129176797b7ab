// Tile types. All are plain structs; the element order inside is private to the backend (sm90/types.h, cpu/types.h).
//
//   bf16, fp16          16-bit storage types; arithmetic happens in float
//   st<T, R, C>         shared tile, R x C. 16-bit types: C a multiple of 64, 128-byte swizzle, panels of 64 columns
//   sv<N>               shared vector of N floats
//   sm<R, C>            shared matrix of floats, plain rows, no matrix instructions
//   rt<T, N>            register tile of a warpgroup, 64 x N: T = float is an accumulator, a 16-bit T a matrix operand
//   rv                  64 floats, one per row of a register tile
//   rsum                64 row sums in the making, partial per thread until reduce(); its own type so that nobody reads it too early
//   cv<N>               N floats, one per column of a register tile
//   wv<N>               N floats held by one warp
//   sem                 mbarrier: counts arrivals and bytes, has a phase (0 or 1) that flips when both are complete
//
// Who calls an operation is its width: one THREAD, one WARP or one WARPGROUP of the block. Every operation is collective over its width
// and elects a thread itself where the hardware wants one.
#pragma once
#include <stdint.h>
enum width { THREAD = 1, WARP = 32, WARPGROUP = 128 };
enum { ZERO = 0, ACC = 1 };   // mma: overwrite the accumulator, or add to it
