// Bodies of tile/order.h.
#pragma once
TILE void order_tell(int *g) { ck_order_tell(HERE, g); }
template<int W> TILE void grid_wait_part(const int *g, int value) { ck_grid_wait_part(HERE, W, g, value); }
