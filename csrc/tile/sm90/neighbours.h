// N = 4 or 8 neighbours of a row in a thread's registers, for lines.h, matrix.h and stretch.h. all_: one access, of
// eight floats two; some_: one for each of the first n. Between the halves of a load 16-bit numbers stay as they are:
// pairs, in the first registers.
#pragma once
template<int N> TILE void clear_all(float (&d)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) d[e] = 0.f;
}
template<int N> TILE void all_begin(float (&d)[N], const float *g) {
  float4 x[N / 4];
#pragma unroll
  for (int i = 0; i < N / 4; i++) x[i] = ((const float4 *)g)[i];
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    d[4 * i] = x[i].x;
    d[4 * i + 1] = x[i].y;
    d[4 * i + 2] = x[i].z;
    d[4 * i + 3] = x[i].w;
  }
}
template<int N, typename T> TILE void all_begin(float (&d)[N], const T *g) {
  if constexpr (N == 8) {
    uint4 x = *(const uint4 *)g;
    d[0] = __uint_as_float(x.x);
    d[1] = __uint_as_float(x.y);
    d[2] = __uint_as_float(x.z);
    d[3] = __uint_as_float(x.w);
  } else {
    uint2 x = *(const uint2 *)g;
    d[0] = __uint_as_float(x.x);
    d[1] = __uint_as_float(x.y);
  }
}
// d begins as zeros.
template<int N> TILE void some_begin(float (&d)[N], const float *g, int n) {
#pragma unroll
  for (int e = 0; e < N; e++)
    if (e < n) d[e] = g[e];
}
template<int N, typename T> TILE void some_begin(float (&d)[N], const T *g, int n) {
  uint32_t x[N];
#pragma unroll
  for (int e = 0; e < N; e++) x[e] = e < n ? g[e].u : 0;
#pragma unroll
  for (int e = 0; e < N; e += 2) d[e / 2] = __uint_as_float(x[e + 1] << 16 | x[e]);
}
template<typename T, int N> TILE void all_end(float (&d)[N]) {
  if constexpr (sizeof(T) == 2 && N == 4) {                   // the order decides what ptxas makes of steps
    float2 low = unpack<T>(__float_as_uint(d[0])), high = unpack<T>(__float_as_uint(d[1]));
    d[0] = low.x;
    d[1] = low.y;
    d[2] = high.x;
    d[3] = high.y;
  } else if constexpr (sizeof(T) == 2)
#pragma unroll
    for (int e = N / 2 - 1; e >= 0; e--) {
      float2 x = unpack<T>(__float_as_uint(d[e]));
      d[2 * e] = x.x;
      d[2 * e + 1] = x.y;
    }
}
template<int N> TILE void all_store(float *g, const float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N / 4; i++)
    ((float4 *)g)[i] = make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
}
template<int N, typename T> TILE void all_store(T *g, const float (&d)[N]) {
  if constexpr (N == 8)
    *(uint4 *)g = make_uint4(pack<T>(d[0], d[1]), pack<T>(d[2], d[3]), pack<T>(d[4], d[5]), pack<T>(d[6], d[7]));
  else *(uint2 *)g = make_uint2(pack<T>(d[0], d[1]), pack<T>(d[2], d[3]));
}
template<int N> TILE void all_store(e4m3 *g, const float (&d)[N]) {
  static_assert(N == 8, "one access of 8 bytes");
  *(uint2 *)g = make_uint2(pack_e4m3(d[0], d[1], d[2], d[3]), pack_e4m3(d[4], d[5], d[6], d[7]));
}
// Four numbers to global memory at once: of all_store()'s ptxas makes four where that spares it moves.
TILE void store_four(float *g, const float (&d)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
    ::"l"(g), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]) : "memory");
}
template<typename T> TILE void store_four(T *g, const float (&d)[4]) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};"
    ::"l"(g), "r"(pack<T>(d[0], d[1])), "r"(pack<T>(d[2], d[3])) : "memory");
}
TILE void round_to(e4m3 &g, float x) { g.u = (uint8_t)pack_e4m3(x, 0.f, 0.f, 0.f); }
template<int N, typename T> TILE void some_store(T *g, const float (&d)[N], int n) {
#pragma unroll
  for (int e = 0; e < N; e++)
    if (e < n) round_to(g[e], d[e]);
}
