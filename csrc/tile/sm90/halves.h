// Bodies of tile/halves.h on sm_90a. A half stands for two neighbours.
#pragma once
struct half { uint32_t u; };
TILE half half_of(float x) { return {pack<fp16>(x, x)}; }
TILE half fused(half a, half b, half c) {
  half d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d.u) : "r"(a.u), "r"(b.u), "r"(c.u));
  return d;
}
TILE half operator+(half a, half b) {
  half d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d.u) : "r"(a.u), "r"(b.u));
  return d;
}
TILE half operator-(half a, half b) {
  half d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d.u) : "r"(a.u), "r"(b.u));
  return d;
}
TILE half operator*(half a, half b) {
  half d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d.u) : "r"(a.u), "r"(b.u));
  return d;
}
TILE half operator-(half a) {
  half d;
  asm("neg.f16x2 %0, %1;" : "=r"(d.u) : "r"(a.u));
  return d;
}
// What an argument has in block k of 16 columns, and of that word j, 0 to 3.
struct half_rows { half r[2]; };
struct half_columns { half c[2]; };
template<int N> TILE rt<fp16, N> &half_block(rt<fp16, N> &t, int) { return t; }
template<int N> TILE const rt<fp16, N> &half_block(const rt<fp16, N> &t, int) { return t; }
TILE half_rows half_block(const rv &v, int) { return {{half_of(v.d[0]), half_of(v.d[1])}}; }
TILE half_rows half_block(rv &v, int k) { return half_block((const rv &)v, k); }
template<int N> TILE half_columns half_block(const sv<N> &v, int k) {
  const float2 *g = (const float2 *)(v.d + thread_col());
  float2 x = g[k * 8], y = g[k * 8 + 4];
  return {{{pack<fp16>(x.x, x.y)}, {pack<fp16>(y.x, y.y)}}};
}
template<int N> TILE half_columns half_block(sv<N> &v, int k) { return half_block((const sv<N> &)v, k); }
template<int N> TILE half &half_at(rt<fp16, N> &t, int k, int j) { return *(half *)&t.d[k][j]; }
template<int N> TILE half half_at(const rt<fp16, N> &t, int k, int j) { return {t.d[k][j]}; }
TILE half half_at(const half_rows &v, int, int j) { return v.r[j & 1]; }
TILE half half_at(const half_columns &v, int, int j) { return v.c[j >> 1]; }
template<class F, class... B> TILE void each_half_of_block(F f, int k, B &&...b) {
#pragma unroll
  for (int j = 0; j < 4; j++) f(half_at(b, k, j)...);
}
template<int N, class F, class... X> TILE void each_half(F f, X &...x) {
#pragma unroll
  for (int k = 0; k < N / 16; k++) each_half_of_block(f, k, half_block(x, k)...);
}
template<int N> TILE void unpack_halves(rt<fp16, N> &first, rt<fp16, N> &second, const rt<float, N> &t, bool opposite) {
  uint32_t sign = opposite ? 0x80008000u : 0u;
#pragma unroll
  for (int k = 0; k < N / 16; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t a = __float_as_uint(t.d[8 * k + 2 * j]), b = __float_as_uint(t.d[8 * k + 2 * j + 1]);
      first.d[k][j] = __byte_perm(a, b, 0x5410);
      second.d[k][j] = __byte_perm(a, b, 0x7632) ^ sign;
    }
}
template<int N> TILE void convert(rt<float, N> &d, const rt<fp16, N> &s) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float2 x = unpack<fp16>(s.d[i / 4][i % 4]);
    d.d[2 * i] = x.x;
    d.d[2 * i + 1] = x.y;
  }
}
// Thread t of a row has columns 2 t and 2 t + 1 of each 8: of the even ones they are columns 16 i + 4 t and + 2 of the
// tile, which two neighbours have there.
TILE void load_acc(rt<float, 32> &even, rt<float, 32> &odd, const float *g) {
  int t = thread_in_group();
  const float4 *p = (const float4 *)g + 128 * (t >> 1 & 1) + (t & ~3) + 2 * (t & 1);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float4 x = p[256 * i], y = p[256 * i + 1];
    even.d[4 * i] = x.x;
    even.d[4 * i + 1] = y.x;
    even.d[4 * i + 2] = x.z;
    even.d[4 * i + 3] = y.z;
    odd.d[4 * i] = x.y;
    odd.d[4 * i + 1] = y.y;
    odd.d[4 * i + 2] = x.w;
    odd.d[4 * i + 3] = y.w;
  }
}
