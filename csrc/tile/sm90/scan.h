// Warp vectors and scans on sm_90a.
#pragma once
template<int N> TILE void fill(wv<N> &v, float x) {
#pragma unroll
  for (int k = 0; k < N / 32; k++) v.d[k] = x;
}
template<int N, class F> TILE void map(wv<N> &d, const wv<N> &a, const wv<N> &b, F f) {
#pragma unroll
  for (int k = 0; k < N / 32; k++) d.d[k] = f(a.d[k], b.d[k]);
}
template<int N, class F> TILE void map_index(wv<N> &d, F f) {
#pragma unroll
  for (int k = 0; k < N / 32; k++) d.d[k] = f(lane() + 32 * k);
}
template<int N> TILE void cumsum(wv<N> &v) {
  float carry = 0;
#pragma unroll
  for (int k = 0; k < N / 32; k++) {
    float x = v.d[k];
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      float y = __shfl_up_sync(~0u, x, o);
      if (lane() >= o) x += y;
    }
    v.d[k] = x + carry;
    carry += __shfl_sync(~0u, x, 31);
  }
}
template<int N> TILE void cumsum_down(wv<N> &v) {
  float carry = 0;
#pragma unroll
  for (int k = N / 32 - 1; k >= 0; k--) {
    float x = v.d[k];
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      float y = __shfl_down_sync(~0u, x, o);
      if (lane() + o < 32) x += y;
    }
    v.d[k] = x + carry;
    carry += __shfl_sync(~0u, x, 0);
  }
}
template<int N> TILE float last(const wv<N> &v) { return __shfl_sync(~0u, v.d[N / 32 - 1], 31); }
template<int N> TILE void store(sv<N> &d, const wv<N> &v) {
#pragma unroll
  for (int k = 0; k < N / 32; k++) d.d[lane() + 32 * k] = v.d[k];
}
template<int N> TILE float get(const wv<N> &v, int i) {
  float x = v.d[0];
#pragma unroll
  for (int k = 1; k < N / 32; k++) x = i / 32 == k ? v.d[k] : x;
  return __shfl_sync(~0u, x, i & 31);
}
template<int N> TILE float max_of(const wv<N> &v) {
  float x = v.d[0];
#pragma unroll
  for (int k = 1; k < N / 32; k++) x = fmaxf(x, v.d[k]);
#pragma unroll
  for (int o = 16; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}
template<int N> TILE float sum_of(const wv<N> &v) {
  float x = v.d[0];
#pragma unroll
  for (int k = 1; k < N / 32; k++) x += v.d[k];
#pragma unroll
  for (int o = 16; o > 0; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
template<int N> TILE void load(wv<N> &v, const float *g, int64_t stride, int n, float pad) {
#pragma unroll
  for (int k = 0; k < N / 32; k++) v.d[k] = lane() + 32 * k < n ? g[(lane() + 32 * k) * stride] : pad;
}
template<typename T, int N> TILE void store(T *g, const wv<N> &v, int n) {
#pragma unroll
  for (int k = 0; k < N / 32; k++)
    if (lane() + 32 * k < n) g[lane() + 32 * k].u = (uint16_t)pack<T>(v.d[k], 0.f);
}
template<int N> TILE void store(float *g, const wv<N> &v, int n) {
#pragma unroll
  for (int k = 0; k < N / 32; k++)
    if (lane() + 32 * k < n) g[lane() + 32 * k] = v.d[k];
}
template<int N> TILE void store(float *g, int64_t stride, const wv<N> &v, int n) {
#pragma unroll
  for (int k = 0; k < N / 32; k++)
    if (lane() + 32 * k < n) g[(lane() + 32 * k) * stride] = v.d[k];
}
template<typename T> TILE void copy_row(T *d, const T *s, int n) {
  int vectors = (((uintptr_t)d | (uintptr_t)s) & 15) == 0 ? n / 8 : 0;
  for (int i = lane(); i < vectors; i += 32) ((uint4 *)d)[i] = ((const uint4 *)s)[i];
  for (int i = vectors * 8 + lane(); i < n; i += 32) d[i] = s[i];
}
template<int N> TILE void load(wv<N> &v, const sv<N> &s) {
#pragma unroll
  for (int k = 0; k < N / 32; k++) v.d[k] = s.d[lane() + 32 * k];
}
template<int R, int C> TILE void load_col(wv<R> &v, const sm<R, C> &s, int col) {
#pragma unroll
  for (int k = 0; k < R / 32; k++) v.d[k] = s.d[(lane() + 32 * k) * C + col];
}

// ---- gv
template<int N> TILE void fill(gv<N> &v, float x) {
#pragma unroll
  for (int k = 0; k < N / 128; k++) v.d[k] = x;
}
template<int N> TILE void copy(gv<N> &d, const gv<N> &s) { d = s; }
template<int N, class F> TILE void map(gv<N> &d, const gv<N> &a, F f) {
#pragma unroll
  for (int k = 0; k < N / 128; k++) d.d[k] = f(a.d[k]);
}
template<int N, class F> TILE void map(gv<N> &d, const gv<N> &a, const gv<N> &b, F f) {
#pragma unroll
  for (int k = 0; k < N / 128; k++) d.d[k] = f(a.d[k], b.d[k]);
}
template<int N, class F> TILE void map(gv<N> &d, const gv<N> &a, const gv<N> &b, const gv<N> &c, F f) {
#pragma unroll
  for (int k = 0; k < N / 128; k++) d.d[k] = f(a.d[k], b.d[k], c.d[k]);
}
// A thread's 4 or 8 bytes of a row. A warp touches whole rows of panels, which lie in all banks, whatever the swizzle.
template<int N, typename T, int R, int C> TILE char *place_in_row(const st<T, R, C> &t, int row, int c0) {
  static_assert(sizeof(T) == 2 && N <= C, "16-bit rows of at least N columns");
  int byte = thread_in_group() * (N / 64);   // in panels of 128
  return (char *)t.d + (c0 / 64 + byte / 128) * (R * 128) + row * 128 + (byte % 128 ^ (row & 7) << 4);
}
template<typename T, int R, int C, int N> TILE void load_row(gv<N> &v, const st<T, R, C> &s, int row, int c0) {
  const char *from = place_in_row<N>(s, row, c0);
  uint32_t w[N / 256];
  if constexpr (N == 256) w[0] = *(const uint32_t *)from;
  else *(uint2 *)w = *(const uint2 *)from;
#pragma unroll
  for (int k = 0; k < N / 256; k++) {
    float2 x = unpack<T>(w[k]);
    v.d[2 * k] = x.x;
    v.d[2 * k + 1] = x.y;
  }
}
template<typename T, int R, int C, int N> TILE void store_row(st<T, R, C> &d, int row, const gv<N> &v, int c0) {
  char *to = place_in_row<N>(d, row, c0);
  if constexpr (N == 256) *(uint32_t *)to = pack<T>(v.d[0], v.d[1]);
  else *(uint2 *)to = make_uint2(pack<T>(v.d[0], v.d[1]), pack<T>(v.d[2], v.d[3]));
}
TILE float to_float(float x) { return x; }
TILE void round_to(float &d, float x) { d = x; }
template<typename T> TILE void round_to(T &d, float x) { d.u = (uint16_t)pack<T>(x, 0.f); }
template<typename T, int N> TILE void load(gv<N> &v, const T *g, int64_t stride, int n) {
  int first = thread_in_group() * (N / 128);
#pragma unroll
  for (int k = 0; k < N / 128; k++) v.d[k] = first + k < n ? to_float(g[(first + k) * stride]) : 0.f;
}
template<typename T, int N> TILE void store(T *g, int64_t stride, const gv<N> &v, int n) {
  int first = thread_in_group() * (N / 128);
#pragma unroll
  for (int k = 0; k < N / 128; k++)
    if (first + k < n) round_to(g[(first + k) * stride], v.d[k]);
}
