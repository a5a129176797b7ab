// Numbers of global memory, for lambdas that read or write where no tile lies. A kernel includes this file beside
// tile.h. Contracts; bodies in sm90/ and cpu/. Any width. T is float, bf16 or fp16.
#pragma once
#include "tile/tile.h"
template<typename T> TILE float number(const T &x);
template<typename T> TILE void set_number(T &d, float x);      // rounds to T
#ifdef __CUDACC__
#include "tile/sm90/numbers.h"
#else
#include "tile/cpu/numbers.h"
#endif
