// Vectors of the instruction set this object is compiled for, and conversion of rows between element types.
#pragma once
#include <string.h>
#if defined(__AVX__)           // the baseline needs no intrinsics, and this header is half of the time of a small row's object
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { VW = 16 };             // floats in a vector
#elif defined(__AVX__)
enum { VW = 8 };
#else
enum { VW = 4 };
#endif
typedef float vf __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));

TILE vf vload(const void *p) { vf x; memcpy(&x, p, sizeof x); return x; }
TILE void vstore(void *p, vf x) { memcpy(p, &x, sizeof x); }
TILE vf vset(float x) { return x - vf{}; }

TILE uint32_t float_bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
TILE float bits_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

TILE float widen(float x) { return x; }
TILE float widen(bf16 x) { return bits_float((uint32_t)x.u << 16); }
// The exponent is moved by a multiplication, so that subnormals come out right; 0x1p112f has no effect on what infinity
// and NaN become.
TILE float widen(fp16 x) {
  uint32_t sign = (uint32_t)(x.u & 0x8000) << 16, rest = (uint32_t)(x.u & 0x7fff) << 13;
  float y = bits_float(rest) * 0x1p112f;
  uint32_t u = rest >= 0x0f800000 ? rest | 0x7f800000 : float_bits(y);
  return bits_float(sign | u);
}
TILE float widen(e4m3 x) {
  float y = bits_float((uint32_t)(x.u & 0x7f) << 20) * 0x1p120f;
  uint32_t sign = (uint32_t)(x.u & 0x80) << 24, u = (x.u & 0x7f) == 0x7f ? 0x7fc00000 : float_bits(y);
  return bits_float(sign | u);
}
TILE void narrow(float &d, float x) { d = x; }
TILE void narrow(e4m3 &d, float x) {
  uint32_t u = float_bits(x), sign = u >> 24 & 0x80, a = u & 0x7fffffff;
  uint32_t normal = (a - 0x3c000000 + 0x7ffff + (a >> 20 & 1)) >> 20;
  uint32_t subnormal = float_bits(bits_float(a) + 0x1p14f) - 0x46800000;   // the sum's last bit is worth 2^-9
  uint32_t b = a < 0x3c800000 ? subnormal : normal < 0x7e ? normal : 0x7e;
  d.u = (uint8_t)(sign | (a > 0x7f800000 ? 0x7f : b));
}
TILE void narrow(bf16 &d, float x) {
  uint32_t u = float_bits(x), rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  d.u = (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded);
}
TILE void narrow(fp16 &d, float x) {
  uint32_t u = float_bits(x), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  uint32_t normal = (a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13;
  uint32_t subnormal = float_bits(bits_float(a) + 0.5f) - 0x3f000000;   // the sum's last bit is worth 2^-24
  uint32_t h = a > 0x7f800000 ? 0x7fff : a >= 0x477ff000 ? 0x7c00 : a < 0x38800000 ? subnormal : normal;
  d.u = (uint16_t)(sign | h);
}

template<typename T> TILE void widen_row(float *d, const T *s, int n) {
#pragma GCC ivdep
  for (int i = 0; i < n; i++) d[i] = widen(s[i]);
}
template<typename T> TILE void narrow_row(T *d, const float *s, int n) {
#pragma GCC ivdep
  for (int i = 0; i < n; i++) narrow(d[i], s[i]);
}
#if defined(__F16C__)
TILE void widen_row(float *d, const fp16 *s, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(d + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + i))));
  for (; i < n; i++) d[i] = widen(s[i]);
}
TILE void narrow_row(fp16 *d, const float *s, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i *)(d + i), _mm256_cvtps_ph(_mm256_loadu_ps(s + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; i++) narrow(d[i], s[i]);
}
#endif
#if defined(__AVX512BF16__)
// The instruction drops subnormals.
TILE void narrow_row(bf16 *d, const float *s, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    enum { SUBNORMAL = 0x20 };
    __m512 x = _mm512_loadu_ps(s + i);
    if (__builtin_expect(_mm512_fpclass_ps_mask(x, SUBNORMAL), 0)) {
      for (int j = i; j < i + 16; j++) narrow(d[j], s[j]);
      continue;
    }
    __m256bh y = _mm512_cvtneps_pbh(x);
    memcpy(d + i, &y, sizeof y);
  }
  for (; i < n; i++) narrow(d[i], s[i]);
}
#endif
