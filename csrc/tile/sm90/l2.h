// Bodies of tile/l2.h.
#pragma once
// As createpolicy makes them for all that is accessed.
TILE uint64_t policy_of(enum l2 hint) {
  return (uint64_t)(hint == LEAVES ? 0x12F00000u : hint == STAYS ? 0x14F00000u : 0x10000000u) << 32;
}
TILE void tma_panel(uint32_t dst, const gmap &m, sem &s, int row, int col, int head, int batch, enum l2 hint) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
    ::"r"(dst), "l"(&m), "r"(shared_address(&s)), "r"(col), "r"(row), "r"(head), "r"(batch), "l"(policy_of(hint))
    : "memory");
}
template<typename T, int R, int C>
TILE void tma_load(st<T, R, C> &t, const gmap &m, sem &s, int row, int col, int head, int batch, enum l2 hint) {
  constexpr int WIDTH = panel_columns<T, C>;
#pragma unroll
  for (int p = 0; p < C / WIDTH; p++)
    tma_panel(shared_address(&t) + p * R * panel_bytes<T, C>, m, s, row, col + p * WIDTH, head, batch, hint);
}
template<int R, int C>
TILE void tma_load(sm<R, C> &t, const gmap &m, sem &s, int row, int col, int head, int batch, enum l2 hint) {
  tma_panel(shared_address(&t), m, s, row, col, head, batch, hint);
}
template<typename T, int R, int C>
TILE void tma_store(const gmap &m, st<T, R, C> &t, int row, int col, int head, int batch, enum l2 hint) {
  static_assert(sizeof(T) == 2, "panels of 64 columns");
  if (thread_in_group() == 0) {
#pragma unroll
    for (int p = 0; p < C / 64; p++)
      asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], %6;"
        ::"l"(&m), "r"(shared_address(&t) + p * R * 128), "r"(col + p * 64), "r"(row), "r"(head), "r"(batch),
        "l"(policy_of(hint)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}
