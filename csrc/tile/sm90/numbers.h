// Bodies of tile/numbers.h on sm_90a.
#pragma once
template<typename T> TILE float number(const T &x) { return to_float(x); }
template<typename T> TILE void set_number(T &d, float x) { d.u = (uint16_t)pack<T>(x, 0.f); }
TILE float halves(float a, float b) { return __uint_as_float(pack<fp16>(a, b)); }
TILE float first_half(float x) { return unpack<fp16>(__float_as_uint(x)).x; }
TILE float second_half(float x) { return unpack<fp16>(__float_as_uint(x)).y; }
template<int N> TILE void store_acc(float *g, const rt<float, N> &t) {
  float4 *p = (float4 *)g + thread_in_group();
#pragma unroll
  for (int i = 0; i < N / 8; i++) p[128 * i] = make_float4(t.d[4 * i], t.d[4 * i + 1], t.d[4 * i + 2], t.d[4 * i + 3]);
}
TILE float largest_or_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(fabsf(b)));
  return m;
}
template<int N> TILE void row_largest(sv<64> &rows, const rt<float, N> &t) {
  float m[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float a = fabsf(t.d[2 * h]), b = fabsf(t.d[2 * h + 1]);
#pragma unroll
    for (int i = 1; i < N / 8; i++) {
      a = largest_or_nan(a, t.d[4 * i + 2 * h]);
      b = largest_or_nan(b, t.d[4 * i + 2 * h + 1]);
    }
    a = largest_or_nan(a, b);
    a = largest_or_nan(a, __shfl_xor_sync(~0u, a, 1));
    a = largest_or_nan(a, __shfl_xor_sync(~0u, a, 2));
    m[h] = a < __int_as_float(0x7f800000) ? a : __int_as_float(0x7f800000);
  }
  rv v = {{m[0], m[1]}};
  store(rows, v);
}
// Of numbers that are neither negative nor NaN the bits are in the numbers' order.
TILE float warp_largest(float x) { return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x))); }
template<int N> TILE void tile_largest(rv &d, const sv<64> (&rows)[N]) {
  float m = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) {
    float2 both = *((const float2 *)rows[i].d + lane());
    m = fmaxf(m, fmaxf(both.x, both.y));
  }
  d.d[0] = d.d[1] = warp_largest(m);
}
// Lane i holds rows 2 i and 2 i + 1.
TILE void group_largest(rv &d, const sv<64> &rows, int log) {
  int r = thread_row();
  if (log == 0) {
    d.d[0] = rows.d[r];
    d.d[1] = rows.d[r + 8];
    return;
  }
  float2 both = *((const float2 *)rows.d + lane());
  float m = fmaxf(both.x, both.y);
  if (log == 6) {
    d.d[0] = d.d[1] = warp_largest(m);
    return;
  }
  for (int i = 1; i < 1 << (log - 1); i *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, i));
  d.d[0] = __shfl_sync(~0u, m, r / 2);
  d.d[1] = __shfl_sync(~0u, m, r / 2 + 4);
}
