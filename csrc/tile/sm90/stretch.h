// Bodies of tile/stretch.h on sm_90a. A thread has two groups of eight numbers, 1024 apart: a warp touches whole lines.
#pragma once
// Between the halves of a load 16-bit numbers stay as they are: pairs in the first four registers of eight.
struct stretch { float d[2][8]; };
struct partial { float d; };

TILE int stretch_index(int group) { return 1024 * group + 8 * thread_in_group(); }
TILE void eight_begin(float (&d)[8], const float *g) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float4 x = ((const float4 *)g)[i];
    d[4 * i] = x.x;
    d[4 * i + 1] = x.y;
    d[4 * i + 2] = x.z;
    d[4 * i + 3] = x.w;
  }
}
template<typename T> TILE void eight_begin(float (&d)[8], const T *g) {
  uint4 x = *(const uint4 *)g;
  d[0] = __uint_as_float(x.x);
  d[1] = __uint_as_float(x.y);
  d[2] = __uint_as_float(x.z);
  d[3] = __uint_as_float(x.w);
}
TILE void fewer_begin(float (&d)[8], const float *g, int n) {
#pragma unroll
  for (int e = 0; e < 8; e++) d[e] = e < n ? g[e] : 0.f;
}
template<typename T> TILE void fewer_begin(float (&d)[8], const T *g, int n) {
#pragma unroll
  for (int e = 0; e < 4; e++) {
    uint32_t low = 2 * e < n ? g[2 * e].u : 0, high = 2 * e + 1 < n ? g[2 * e + 1].u : 0;
    d[e] = __uint_as_float(high << 16 | low);
  }
}
template<typename T> TILE void load_begin(stretch &x, const T *g, int n, bool in_eights) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int c = stretch_index(k);
    if (in_eights && c + 8 <= n) eight_begin(x.d[k], g + c);
    else fewer_begin(x.d[k], g + c, n - c);
  }
}
template<typename T> TILE void load_end(stretch &x) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int e = 3; e >= 0; e--) {
        float2 y = unpack<T>(__float_as_uint(x.d[k][e]));
        x.d[k][2 * e + 1] = y.y;
        x.d[k][2 * e] = y.x;
      }
  }
}
TILE void eight_store(float *g, const float (&d)[8]) {
  ((float4 *)g)[0] = make_float4(d[0], d[1], d[2], d[3]);
  ((float4 *)g)[1] = make_float4(d[4], d[5], d[6], d[7]);
}
template<typename T> TILE void eight_store(T *g, const float (&d)[8]) {
  *(uint4 *)g = make_uint4(pack<T>(d[0], d[1]), pack<T>(d[2], d[3]), pack<T>(d[4], d[5]), pack<T>(d[6], d[7]));
}
template<typename T> TILE void save(T *g, const stretch &x, int n, bool in_eights) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int c = stretch_index(k);
    if (in_eights && c + 8 <= n) eight_store(g + c, x.d[k]);
    else {
#pragma unroll
      for (int e = 0; e < 8; e++)
        if (c + e < n) round_to(g[c + e], x.d[k][e]);
    }
  }
}
template<typename T> TILE float number_at(const T *g) { return to_float(*g); }
TILE void put_number(float *g, float x) {
  if (thread_in_group() == 0) *g = x;
}

TILE void fill(stretch &x, float y) {
#pragma unroll
  for (int k = 0; k < 2; k++)
#pragma unroll
    for (int e = 0; e < 8; e++) x.d[k][e] = y;
}
TILE void fill(partial &x, float y) { x.d = y; }
template<class F, class... X> TILE void each(stretch &x, int n, F f, X &...parts) {
#pragma unroll
  for (int k = 0; k < 2; k++)
#pragma unroll
    for (int e = 0; e < 8; e++) {
      int i = stretch_index(k) + e;
      if (i < n) f(x.d[k][e], i, parts.d...);
    }
}
template<class F> TILE void map(partial &d, const partial &a, const partial &b, F f) { d.d = f(d.d, a.d, b.d); }
template<class F> TILE float join(const partial &x, sv<32> &room, F f) {
  float y = x.d;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) y = f(y, __shfl_xor_sync(~0u, y, o));
  if (lane() == 0) room.d[warp_in_group()] = y;
  wg_sync();
  return f(f(room.d[0], room.d[1]), f(room.d[2], room.d[3]));
}
