// What the compiler is not to keep. It keeps whatever a loop does not change: the addresses of all blocks of all tiles,
// if they are worked out in it, and spills what it lacks registers for.
#pragma once
// The same number.
TILE uint32_t anew_word(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
// As block_address(), of column `col` of a panel of 64. What all tiles have in common is kept.
template<typename T, int C> TILE uint32_t block_address_anew(const st<T, 64, C> &t, uint32_t panel, uint32_t col) {
  int r = warp_in_group() * 16 + (lane() & 15), chunk = lane() >> 4;
  uint32_t first = anew_word(r * 128 + ((chunk ^ (r & 7)) << 4));
  return (first ^ col / 8 << 4) + (shared_address(&t) + panel * 64 * 128);
}
template<typename T, int C> TILE uint32_t block_address_anew(const st<T, 64, C> &t, uint32_t col) {
  return block_address_anew(t, C > 64 ? col / 64 : 0, col % 64);
}
