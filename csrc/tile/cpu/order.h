// Bodies of tile/order.h.
#pragma once
TILE void order_tell(int *g) { order_count<THREAD>(g); }
template<int W> TILE void grid_wait_part(const int *g, int value) { order_wait<W>(g, value); }
