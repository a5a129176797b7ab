// Arithmetic in fp16 on register operands (warpgroup): on the GPU two neighbours in one instruction, and what comes of it
// is an operand again. Contracts; bodies in sm90/ and cpu/. tile.h does not include this file: the kernels that want it
// do.
//
// half: a number of fp16. Every operation rounds once, a * b + c with fused() too. There are +, - and *.
#pragma once
#include "tile/tile.h"
struct half;
TILE half half_of(float x);                             // rounds
TILE half fused(half a, half b, half c);
// f(...) for every place of 64 x N, with what each argument has there: of an rt<fp16, N> its number, which f may
// change; of an rv the row's value and of an sv<N> the column's, rounded.
template<int N, class F, class... X> TILE void each_half(F f, X &...x);
// What halves() has packed. Where `opposite` says so, the second ones change their sign.
template<int N> TILE void unpack_halves(rt<fp16, N> &first, rt<fp16, N> &second, const rt<float, N> &t, bool opposite);
template<int N> TILE void convert(rt<float, N> &d, const rt<fp16, N> &s);
// An accumulator tile of 64 columns in global memory: its even columns, and its odd ones.
TILE void load_acc(rt<float, 32> &even, rt<float, 32> &odd, const float *g);
#ifdef __CUDACC__
#include "tile/sm90/halves.h"
#else
#include "tile/cpu/halves.h"
#endif
