// Slices of register tiles on sm_90a. A thread's eight values of 16 columns are d[4 half + 2 row + odd]: column 8 half +
// 2 (lane & 3) + odd.
#pragma once
template<int N> TILE void copy_part(rt<float, 16> &d, const rt<float, N> &s, int c0) {
#pragma unroll
  for (int i = 0; i < 8; i++) d.d[i] = s.d[c0 / 2 + i];
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
