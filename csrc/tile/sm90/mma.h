// wgmma on sm_90a.
#pragma once
#include "tile/sm90/wgmma.h"
TILE void mma_fence() {
  trace(TRACE_MMA_FENCE, nullptr, 0);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
TILE void mma_commit() {
  trace(TRACE_COMMIT, nullptr, 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// An empty asm that "changes" a tile keeps the compiler from moving uses of it above the wait that frees it.
template<int N> TILE void mma_pin(rt<float, N> &t) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) asm volatile("" : "+f"(t.d[i])::"memory");
}
template<typename T, int N> TILE void mma_pin(rt<T, N> &t) {
#pragma unroll
  for (int i = 0; i < (int)sizeof t.d / 16; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) asm volatile("" : "+r"(t.d[i][j])::"memory");
}
template<int G, class... Tile> TILE void mma_wait(Tile &...tiles) {
  trace(TRACE_MMA_WAIT, nullptr, G);
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(G) : "memory");
  (mma_pin(tiles), ...);
}
// Ends the live range of an accumulator's old value before an overwriting product; without it the value stays in
// registers.
template<int A, int N> TILE void mma_begin(rt<float, N> &t) {
  PRODUCT_RULES(N);
  if (A == ZERO) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) asm volatile("" : "=f"(t.d[i]));
  }
}
// Low word of a descriptor: address and, for an MN-major operand, the distance of its 64-column panels; both in units
// of 16 bytes. In a cluster an address has the block's rank above its 18 bits, which would end up in the distance.
TILE uint32_t desc(const void *p, uint32_t panel_bytes) {
  return (shared_address(p) & 0x3ffff) >> 4 | (panel_bytes >> 4) << 16;
}
// Step k (32 bytes of the reduction) of an operand stored along it (R rows, panels of BYTES), or across it.
template<int R, int BYTES = 128> TILE uint32_t along(int k) {
  return ((k / (BYTES / 32)) * R * BYTES + (k % (BYTES / 32)) * 32) >> 4;
}
TILE uint32_t across(int k) { return (k * 16 * 128) >> 4; }

template<int A, typename T, int N, int K, int R>
TILE void mma_ABt_rows(rt<float, N> &d, const st<T, 64, K> &a, const st<T, R, K> &b, int r0) {
  mma_begin<A>(d);
  constexpr int BYTES = panel_bytes<T, K>;
  uint32_t da = desc(&a, 16), db = desc(&b, 16) + r0 * BYTES / 16;
#pragma unroll
  for (int k = 0; k < K * (int)sizeof(T) / 32; k++)
    if constexpr (sizeof(T) == 1) wgmma_e4m3<BYTES>(d.d, da + along<64, BYTES>(k), db + along<R, BYTES>(k), A || k);
    else wgmma<T, 0, 0>(d.d, da + along<64>(k), db + along<R>(k), A || k);
}
template<int A, typename T, int N, int K>
TILE void mma_ABt(rt<float, N> &d, const st<T, 64, K> &a, const st<T, N, K> &b) {
  mma_ABt_rows<A>(d, a, b, 0);
}
template<int A, typename T, int N, int K, int W>
TILE void mma_AB_cols(rt<float, N> &d, const st<T, 64, K> &a, const st<T, K, W> &b, int cb) {
  mma_begin<A>(d);
  uint32_t da = desc(&a, 16), db = desc(&b, K * 128) + ((cb / 64 * K * 128) >> 4);
#pragma unroll
  for (int k = 0; k < K / 16; k++) wgmma<T, 0, 1>(d.d, da + along<64>(k), db + across(k), A || k);
}
template<int A, typename T, int N, int K, int W>
TILE void mma_AB_cols(rt<float, N> &d, const rt<T, K> &a, const st<T, K, W> &b, int cb) {
  mma_begin<A>(d);
  uint32_t db = desc(&b, K * 128) + ((cb / 64 * K * 128) >> 4);
#pragma unroll
  for (int k = 0; k < K / 16; k++) wgmma<T, 1>(d.d, a.d[k], db + across(k), A || k);
}
template<int A, typename T, int N, int K>
TILE void mma_AB(rt<float, N> &d, const st<T, 64, K> &a, const st<T, K, N> &b) {
  mma_AB_cols<A>(d, a, b, 0);
}
template<int A, typename T, int N, int K, int WA, int WB>
TILE void mma_AtB(rt<float, N> &d, const st<T, K, WA> &a, int ca, const st<T, K, WB> &b, int cb) {
  mma_begin<A>(d);
  uint32_t da = desc(&a, K * 128) + ((ca / 64 * K * 128) >> 4), db = desc(&b, K * 128) + ((cb / 64 * K * 128) >> 4);
  // Half of a panel: the swizzle is a function of the address, so that a row's second half begins as its first.
  if constexpr (N == 32) db += (cb & 32) * 2 >> 4;
#pragma unroll
  for (int k = 0; k < K / 16; k++) wgmma<T, 1, 1>(d.d, da + across(k), db + across(k), A || k);
}
template<int A, typename T, int N, int K, int R>
TILE void mma_AtBt_rows(rt<float, N> &d, const st<T, K, 64> &a, const st<T, R, K> &b, int r0) {
  mma_begin<A>(d);
  uint32_t da = desc(&a, K * 128), db = desc(&b, 16) + r0 * 128 / 16;
#pragma unroll
  for (int k = 0; k < K / 16; k++) wgmma<T, 1, 0>(d.d, da + across(k), db + along<R>(k), A || k);
}
template<int A, typename T, int N, int K>
TILE void mma_AtBt(rt<float, N> &d, const st<T, K, 64> &a, const st<T, N, K> &b) {
  mma_AtBt_rows<A>(d, a, b, 0);
}
template<int A, typename T, int N, int K, int R>
TILE void mma_AB_rows(rt<float, N> &d, const rt<T, K> &a, const st<T, R, N> &b, int r0) {
  mma_begin<A>(d);
  uint32_t db = desc(&b, R * 128) + across(r0 / 16);
#pragma unroll
  for (int k = 0; k < K / 16; k++) wgmma<T, 1>(d.d, a.d[k], db + across(k), A || k);
}
template<int A, typename T, int N, int K> TILE void mma_AB(rt<float, N> &d, const rt<T, K> &a, const st<T, K, N> &b) {
  mma_AB_rows<A>(d, a, b, 0);
}
template<int A, int N, int K> TILE void mma_AB(rt<float, N> &d, const rt<e4m3, K> &a, const tt<e4m3, K, N> &b) {
  mma_begin<A>(d);
  constexpr int BYTES = panel_bytes<e4m3, K>;
  uint32_t db = desc(&b, 16);
#pragma unroll
  for (int k = 0; k < K / 32; k++) wgmma_e4m3<BYTES>(d.d, a.d[k], db + along<N, BYTES>(k), A || k);
}
template<int A, typename T, int N, int K, int W>
TILE void mma_ABt_part(rt<float, N> &d, const rt<T, K> &a, const st<T, N, W> &b, int k0) {
  mma_begin<A>(d);
  uint32_t db = desc(&b, 16) + ((k0 / 64 * N * 128) >> 4);
#pragma unroll
  for (int k = 0; k < K / 16; k++) wgmma<T, 0>(d.d, a.d[k], db + along<N>(k), A || k);
}
template<int A, typename T, int N, int K> TILE void mma_ABt(rt<float, N> &d, const rt<T, K> &a, const st<T, N, K> &b) {
  mma_ABt_part<A>(d, a, b, 0);
}
