// Slices of register tiles on sm_90a. A thread's eight values of 16 columns are d[4 half + 2 row + odd]: column 8 half
// + 2 (lane & 3) + odd.
#pragma once
template<int N> TILE void copy_part(rt<float, 16> &d, const rt<float, N> &s, int c0) {
#pragma unroll
  for (int i = 0; i < 8; i++) d.d[i] = s.d[c0 / 2 + i];
}
template<int N> TILE void append_part(rt<float, N> &d, const rt<float, 16> &s) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) d.d[i] = i + 8 < N / 2 ? d.d[i + 8] : s.d[i + 8 - N / 2];
}
template<typename T, int N> TILE void convert_to_part(rt<T, N> &d, int c0, const rt<float, 16> &s) {
#pragma unroll
  for (int j = 0; j < 4; j++) d.d[c0 / 16][j] = pack<T>(s.d[2 * j], s.d[2 * j + 1]);
}
// One of a column pair from the neighbour FROM lanes away in the row's four. Around the end of eight columns lie the
// other eight: lane `wrap` hands out of these.
template<int FROM> TILE float neighbour(float here, float there, bool wrap) {
  return __shfl_sync(~0u, wrap ? there : here, (threadIdx.x + FROM) & 3, 4);
}
template<int BY> TILE void rotate_cols(rt<float, 16> &t) {
  constexpr int TURN = (BY + 16) % 16, PAIRS = TURN / 2 % 4;
  int c = threadIdx.x & 3;
  if constexpr (TURN == 15) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {   // both halves of a row
      float a = neighbour<3>(t.d[i + 1], t.d[i + 5], c == 3), b = neighbour<3>(t.d[i + 5], t.d[i + 1], c == 3);
      t.d[i + 1] = t.d[i];
      t.d[i + 5] = t.d[i + 4];
      t.d[i] = a;
      t.d[i + 4] = b;
    }
    return;
  }
  if constexpr (TURN >= 8) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float x = t.d[i];
      t.d[i] = t.d[i + 4];
      t.d[i + 4] = x;
    }
  }
  if constexpr (PAIRS > 0) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float a = neighbour<PAIRS>(t.d[i], t.d[i + 4], c < PAIRS), b = neighbour<PAIRS>(t.d[i + 4], t.d[i], c < PAIRS);
      t.d[i] = a;
      t.d[i + 4] = b;
    }
  }
  if constexpr (TURN % 2) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float a = neighbour<1>(t.d[i], t.d[i + 4], c == 0), b = neighbour<1>(t.d[i + 4], t.d[i], c == 0);
      t.d[i] = t.d[i + 1];
      t.d[i + 4] = t.d[i + 5];
      t.d[i + 1] = a;
      t.d[i + 5] = b;
    }
  }
}
// The words of rt<T, 16>: w[2 half + row].
template<int BY, typename T> TILE void rotate_cols(rt<T, 16> &d, const rt<T, 16> &s) {
  static_assert(BY % 2 == 0 && sizeof(T) == 2, "an even number of columns, of 16 bits");
  constexpr int TURN = BY % 16, PAIRS = TURN / 2 % 4, SWAP = TURN >= 8 ? 2 : 0;
  int c = threadIdx.x & 3;
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t here = s.d[0][i ^ SWAP], there = s.d[0][i ^ SWAP ^ 2];
    w[i] = PAIRS ? __shfl_sync(~0u, c < PAIRS ? there : here, c + PAIRS & 3, 4) : here;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) d.d[0][i] = w[i];
}
template<typename T> TILE void rotate_by_one(rt<T, 16> &d, const rt<T, 16> &s, const rt<T, 16> &by_two) {
#pragma unroll
  for (int i = 0; i < 4; i++) d.d[0][i] = __byte_perm(s.d[0][i], by_two.d[0][i], 0x5432);
}
template<typename T> TILE uint32_t multiply_pair(uint32_t x, uint32_t y) {
  static_assert(sizeof(T) == 2, "a pair of 16-bit values");
  uint32_t r;
  if constexpr (is_bf16<T>) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
template<typename T, int N>
TILE void multiply_to_part(rt<T, N> &d, int c0, const rt<T, 16> &x, const rt<T, 16> &y) {
#pragma unroll
  for (int j = 0; j < 4; j++) d.d[c0 / 16][j] = multiply_pair<T>(x.d[0][j], y.d[0][j]);
}
template<typename T> TILE void widen(rt<float, 16> &d, const rt<T, 16> &s) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float2 x = unpack<T>(s.d[0][j]);
    d.d[2 * j] = x.x;
    d.d[2 * j + 1] = x.y;
  }
}
