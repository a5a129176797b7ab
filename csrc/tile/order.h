// Parts of a kernel's work that the one behind it does not wait for the rest of. Contracts; bodies in sm90/, cpu/ and
// check/. tile.h does not include this file: the kernels that want it do.
#pragma once
#include "tile/tile.h"
// Warpgroup. What its copies wrote into global memory and tma_store_wait() waited for, then 1 is added to *g.
TILE void order_tell(int *g);
// In the place of grid_wait(), where the kernel in front is FOLLOWED and adds to *g what is done: until *g >= value.
// That kernel calls grid_wait() before, so what is in front of it is over then. TMA sees what was written, too.
// W: width of the role.
template<int W> TILE void grid_wait_part(const int *g, int value);
#if defined(__CUDACC__)
#include "tile/sm90/order.h"
#elif defined(CHECK)
#include "tile/check/order.h"
#else
#include "tile/cpu/order.h"
#endif
