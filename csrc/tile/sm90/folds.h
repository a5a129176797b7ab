// Bodies of tile/folds.h on sm_90a.
#pragma once
TILE uint32_t folded_block_address(uint32_t tile, int col, int log) {
  int r = folded_row(warp_in_group() * 16 + (lane() & 15), log), chunk = col / 8 + (lane() >> 4);
  return tile + r * 128 + ((chunk ^ (r & 7)) << 4);
}
template<typename T, int N> TILE void load_folded(rt<float, N> &d, const st<T, 64, 64> &s, int c0, int log) {
#pragma unroll
  for (int k = 0; k < N / 16; k++) {
    uint32_t w[4];
    load_block(w, folded_block_address(shared_address(&s), c0 + 16 * k, log));
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 x = unpack<T>(w[j]);
      d.d[8 * k + 2 * j] = x.x;
      d.d[8 * k + 2 * j + 1] = x.y;
    }
  }
}
template<typename T, int N> TILE void store_folded(st<T, 64, 64> &d, const rt<float, N> &s, int c0, int log) {
#pragma unroll
  for (int k = 0; k < N / 16; k++) {
    const float *x = s.d + 8 * k;
    store_block(folded_block_address(shared_address(&d), c0 + 16 * k, log), pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
                pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
  }
}
template<class X> TILE void trade(X &a, X &b) {
  X x = a;
  a = b;
  b = x;
}
template<typename T, int N> TILE void trade_rows(rt<T, N> &a, rt<T, N> &b) {
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    if constexpr (sizeof(T) == 4) {
      trade(a.d[4 * i + 2], b.d[4 * i]);
      trade(a.d[4 * i + 3], b.d[4 * i + 1]);
    } else trade(a.d[i / 2][i % 2 * 2 + 1], b.d[i / 2][i % 2 * 2]);
  }
}
TILE void trade_rows(rv &a, rv &b) { trade(a.d[1], b.d[0]); }
// Of a thread's pairs of columns the first ones are column 4 n + c of the even ones.
TILE void store_columns(float *g, const rt<float, 64> &t, bool folded) {
  int thread = parking_place(), i = thread >> 2 & 7, c = thread & 3;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int row = 8 * h + i, half = folded ? row & 1 : h, at = folded ? row >> 1 : i;
    float *p = g + 4 * ((thread & 96) + 4 * at + (c >> 1)) + 2 * half + (c & 1);
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++) p[2048 * odd + 512 * (n / 2) + 8 * (n & 1)] = t.d[4 * n + 2 * h + odd];
  }
}
// As load_acc(). Its place is asked for anew: kept it would take a register.
TILE void load_columns(rt<float, 32> &t, const float *g, int odd) {
  const float4 *p = (const float4 *)g + 512 * odd + parking_place();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float4 x = p[128 * i];
    t.d[4 * i] = x.x;
    t.d[4 * i + 1] = x.y;
    t.d[4 * i + 2] = x.z;
    t.d[4 * i + 3] = x.w;
  }
}
TILE void group_largest_folded(rv &d, const sv<64> &rows, int log) {
  group_largest(d, rows, log < 4 ? log - (log > 0) : log);
  if (log > 0 && log < 4) d.d[0] = d.d[1] = fmaxf(d.d[0], d.d[1]);
}
