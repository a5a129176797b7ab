// Bodies of tile/order.h.
#pragma once
TILE void order_tell(int *g) {
  trace(TRACE_ORDER_COUNT, nullptr, 0);
  if (thread_in_group() == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(g) : "memory");
}
// Copies read through another proxy.
template<int W> TILE void grid_wait_part(const int *g, int value) {
  order_wait<W == WARPGROUP ? WARPGROUP : THREAD>(g, value);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
