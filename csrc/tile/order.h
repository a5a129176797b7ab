// Parts of a kernel's work that the one behind it need not wait for the rest of. Contracts; bodies in sm90/, cpu/ and
// check/. tile.h does not include this file: the kernels that want it do.
#pragma once
#include "tile/tile.h"
// Warpgroup. Everything that it wrote into global memory is told: what its stores wrote, all of which tma_store_wait()
// has waited for, and what it wrote through registers before its last sync. So is what others wrote that its first
// thread knows of by a sync or a semaphore, their stores where they had waited for them so. Then 1 is added to *g.
TILE void order_tell(int *g);
// In the place of grid_wait(), where the kernel in front is FOLLOWED and tells *g: until *g >= value. What has been
// told then is seen, by copies too, and all is over that is in front of that kernel, which has called grid_wait()
// before or is not DEPENDENT. W: width of the role.
template<int W> TILE void grid_wait_part(const int *g, int value);
#if defined(__CUDACC__)
#include "tile/sm90/order.h"
#elif defined(CHECK)
#include "tile/check/order.h"
#else
#include "tile/cpu/order.h"
#endif
