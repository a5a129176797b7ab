// Bodies of tile/twins.h on sm_90a.
#pragma once
#include "tile/sm90/anew.h"
// f makes one product of `both`, whose registers are those of d and e: named anew, not copied.
template<int A, int H, class F> TILE void product_of_halves(rt<float, H> &d, rt<float, H> &e, F f) {
  float both[H];
#pragma unroll
  for (int i = 0; i < H / 2; i++) {
    if (A == ZERO) asm volatile("" : "=f"(d.d[i]), "=f"(e.d[i]));   // as mma_begin()
    both[i] = d.d[i];
    both[H / 2 + i] = e.d[i];
  }
  f(both);
#pragma unroll
  for (int i = 0; i < H / 2; i++) {
    d.d[i] = both[i];
    e.d[i] = both[H / 2 + i];
  }
}
template<int A, typename T, int H, int W>
TILE void mma_ABt_halves(rt<float, H> &d, rt<float, H> &e, const rt<T, 64> &a, const st<T, 2 * H, W> &b, int k0) {
  uint32_t db = anew_word(desc(&b, 16)) + (k0 / 64 * 2 * H * 128 >> 4);
  product_of_halves<A>(d, e, [&](float (&both)[H]) {
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<T, 0>(both, a.d[k], db + along<2 * H>(k), A || k);
  });
}
template<int A, typename T, int K>
TILE void mma_ABt_halves(rt<float, 64> &d, rt<float, 64> &e, const st<T, 128, K> &b) {
  uint32_t db = desc(&b, 16);
  product_of_halves<A>(d, e, [&](float (&both)[64]) {
#pragma unroll
    for (int k = 0; k < K / 16; k++) wgmma<T, 0, 0>(both, db + along<128>(k), db + along<128>(k), A || k);
  });
}
template<int W, typename T, int R, int C> TILE void clear_halves(st<T, R, C> &t, int end) {
#pragma unroll 4
  for (int i = W == WARP ? lane() : thread_in_group(); i < R * C / 8; i += W == WARP ? 32 : 128)
    if (i / 8 % (R / 2) >= end) ((uint4 *)t.d)[i] = make_uint4(0, 0, 0, 0);
}
