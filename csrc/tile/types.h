// Tile types. All are plain structs; the element order inside is private to the backend (sm90/types.h, cpu/types.h).
//
//   bf16, fp16          16-bit storage types; arithmetic happens in float
//   e4m3                8-bit storage type: 4 exponent bits, 3 mantissa bits, largest 448, no infinities (OCP 8-bit
//                       floating point, 2023)
//   st<T, R, C>         shared tile, R x C. C a multiple of 64, R of 8 (rules.h; a copy through a map has at most 256
//                       rows); 16-bit types and e4m3
//   tt<T, K, N>         shared tile K x N that is kept transposed. Only transpose_part() writes it and only mma_AB
//                       reads it. Matrix instructions take 8-bit operands along the reduction only, and v comes across
//   sv<N>               shared vector of N floats
//   parked              an rv in shared memory, put there by its warpgroup to have its registers back. A thread sees
//                       its own part only, so nothing need be ordered. Another warpgroup's access is an error
//   sm<R, C>            shared matrix of floats, plain rows, no matrix instructions
//   rt<T, N>            register tile of a warpgroup, 64 x N: T = float is an accumulator, any other T a matrix
//                       operand. N is a multiple of 16, of e4m3 of 32; of a product one of 32, 64, 80, 96, 128, 160,
//                       176, 192, 256. A thread holds N / 2 words of an accumulator, N / 4 of a 16-bit operand
//   rv                  64 floats, one per row of a register tile
//   rsum                64 row sums in the making, partial per thread until reduce(). It is a type of its own, so that
//                       nobody reads it too early
//   cv<N>               N floats, one per column of a register tile
//   csum<N>             N column sums in the making, partial per thread until they are stored
//   wv<N>               N floats held by one warp
//   gv<N>               N floats held by a warpgroup, N / 128 neighbouring ones by each thread; N is 256 or 512. Made for
//                       rows of shared tiles: a thread has the same columns of every row, so that what goes down the
//                       rows never leaves it
//   sem                 mbarrier: counts arrivals and bytes, has a phase (0 or 1) that flips when both are complete
//
// OVERLAY(T, N, name, other) declares a register tile in the registers of `other`, an rt<T, ...> whose values are lost.
//
// An operation's width is who calls it: one THREAD, one WARP or one WARPGROUP of the block. Every operation is
// collective over its width and elects a thread itself where the hardware wants one.
#pragma once
#include <stdint.h>
enum width { THREAD = 1, WARP = 32, WARPGROUP = 128 };
enum { ZERO = 0, ACC = 1 };   // mma: overwrite the accumulator, or add to it
