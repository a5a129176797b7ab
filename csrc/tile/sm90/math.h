// Register-tile arithmetic on sm_90a.
#pragma once
TILE float fast_exp2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
TILE float fast_log2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
TILE float fast_rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
TILE float fast_rsqrt(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
TILE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TILE float clamp(float x, float low, float high) {
  asm("max.NaN.f32 %0, %0, %1;\nmin.NaN.f32 %0, %0, %2;" : "+f"(x) : "f"(low), "f"(high));
  return x;
}
TILE float infinity() { return __int_as_float(0x7f800000); }

template<int N> TILE void fill(rt<float, N> &t, float x) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) t.d[i] = x;
}
TILE void fill(rv &v, float x) { v.d[0] = v.d[1] = x; }
TILE void fill(rsum &v, float x) { v.d[0] = v.d[1] = x; }
template<int N> TILE void clear(csum<N> &v) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) v.d[i] = 0.f;
}
template<int N, class F> TILE void map(rt<float, N> &t, F f) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) t.d[i] = f(t.d[i]);
}
template<int N, class F> TILE void map(rt<float, N> &t, const rt<float, N> &u, F f) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) t.d[i] = f(t.d[i], u.d[i]);
}
template<int N, class F> TILE void map_row(rt<float, N> &t, const rv &v, F f) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) t.d[i] = f(t.d[i], v.d[(i >> 1) & 1]);
}
template<int N, class F> TILE void map_row(rt<float, N> &d, const rt<float, N> &t, const rv &v, F f) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) d.d[i] = f(t.d[i], v.d[(i >> 1) & 1]);
}
template<int N> TILE void scale_rows(rt<float, N> &t, const rv &f) {
  if (__any_sync(~0u, f.d[0] != 1.f || f.d[1] != 1.f)) map_row(t, f, [](float x, float y) { return x * y; });
}
template<int N> TILE void scale_or_clear(rt<float, N> &t, const rv &f) {
  if (__any_sync(~0u, f.d[0] == 0.f || f.d[1] == 0.f))
    map_row(t, f, [](float x, float y) { return y == 0.f ? 0.f : x * y; });
  else map_row(t, f, [](float x, float y) { return x * y; });
}
template<int N, class F> TILE void map_col(rt<float, N> &t, const cv<N> &v, F f) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) t.d[i] = f(t.d[i], v.d[(i >> 2) * 2 + (i & 1)]);
}
template<int N, class F> TILE void map_col(rt<float, N> &t, const sv<N> &v, F f) {
  const float2 *g = (const float2 *)(v.d + thread_col());
#pragma unroll
  for (int k = 0; k < N / 8; k++) {
    float2 c = g[k * 4];
    t.d[4 * k] = f(t.d[4 * k], c.x);
    t.d[4 * k + 1] = f(t.d[4 * k + 1], c.y);
    t.d[4 * k + 2] = f(t.d[4 * k + 2], c.x);
    t.d[4 * k + 3] = f(t.d[4 * k + 3], c.y);
  }
}
template<int N, class F> TILE void map_col(rt<float, N> &t, const rt<float, N> &u, const cv<N> &v, F f) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) t.d[i] = f(t.d[i], u.d[i], v.d[(i >> 2) * 2 + (i & 1)]);
}
template<int N, class F> TILE void map_col(rt<float, N> &t, const rt<float, N> &u, const sv<N> &v, F f) {
  const float2 *g = (const float2 *)(v.d + thread_col());
#pragma unroll
  for (int k = 0; k < N / 8; k++) {
    float2 c = g[k * 4];
#pragma unroll
    for (int i = 0; i < 4; i++) t.d[4 * k + i] = f(t.d[4 * k + i], u.d[4 * k + i], i & 1 ? c.y : c.x);
  }
}
template<typename T, int N, class F> TILE void map_col(rt<float, N> &t, const rt<T, N> &u, const sv<N> &v, F f) {
  const float2 *g = (const float2 *)(v.d + thread_col());
#pragma unroll
  for (int k = 0; k < N / 16; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 c = g[k * 8 + (j >> 1) * 4], x = unpack<T>(u.d[k][j]);
      float *d = t.d + 8 * k + 4 * (j >> 1) + 2 * (j & 1);
      d[0] = f(d[0], x.x, c.x);
      d[1] = f(d[1], x.y, c.y);
    }
}
template<typename T, int N, class F> TILE void map_col(rt<T, N> &t, const sv<N> &v, F f) {
  const float2 *g = (const float2 *)(v.d + thread_col());
#pragma unroll
  for (int k = 0; k < N / 16; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 c = g[k * 8 + (j >> 1) * 4], x = unpack<T>(t.d[k][j]);
      t.d[k][j] = pack<T>(f(x.x, c.x), f(x.y, c.y));
    }
}
template<int N, class F> TILE void map_rc(rt<float, N> &t, F f) {
  int r = thread_row(), c = thread_col();
#pragma unroll
  for (int i = 0; i < N / 2; i++) t.d[i] = f(t.d[i], r + ((i >> 1) & 1) * 8, c + (i >> 2) * 8 + (i & 1));
}
template<int N, class F> TILE void map_rc(rt<float, N> &t, const rv &v, F f) {
  int r = thread_row(), c = thread_col();
#pragma unroll
  for (int i = 0; i < N / 2; i++)
    t.d[i] = f(t.d[i], v.d[(i >> 1) & 1], r + ((i >> 1) & 1) * 8, c + (i >> 2) * 8 + (i & 1));
}
template<int N, class F> TILE void map_rc(rt<float, N> &t, const rt<float, N> &u, const sv<N> &v, F f) {
  const float2 *g = (const float2 *)(v.d + thread_col());
  int r = thread_row(), c = thread_col();
#pragma unroll
  for (int k = 0; k < N / 8; k++) {
    float2 x = g[k * 4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      t.d[4 * k + i] = f(t.d[4 * k + i], u.d[4 * k + i], i & 1 ? x.y : x.x, r + (i >> 1) * 8, c + k * 8 + (i & 1));
  }
}
template<int N, class F> TILE void map_rc(rt<float, N> &t, const rv &u, const sv<N> &v, F f) {
  const float2 *g = (const float2 *)(v.d + thread_col());
  int r = thread_row(), c = thread_col();
#pragma unroll
  for (int k = 0; k < N / 8; k++) {
    float2 x = g[k * 4];
#pragma unroll
    for (int i = 0; i < 4; i++) t.d[4 * k + i] = f(t.d[4 * k + i], u.d[i >> 1], i & 1 ? x.y : x.x, r + (i >> 1) * 8, c + k * 8 + (i & 1));
  }
}
template<int N, class F> TILE void map_row_pairs(rt<float, N> &t, F f) {
  int r = thread_row(), c = thread_col();
#pragma unroll
  for (int i = 0; i < N / 4; i++)
    f(t.d[(i >> 1) * 4 + (i & 1)], t.d[(i >> 1) * 4 + (i & 1) + 2], r, c + (i >> 1) * 8 + (i & 1));
}
template<int N, class F> TILE void map_col_pairs(rt<float, N> &t, F f) {
  int r = thread_row(), c = thread_col();
#pragma unroll
  for (int i = 0; i < N / 4; i++)
    f(t.d[(i >> 2) * 8 + (i & 3)], t.d[(i >> 2) * 8 + (i & 3) + 4], r + ((i >> 1) & 1) * 8,
      c + (i >> 2) * 16 + (i & 1));
}
// Each comparison is of a constant with one number. Rows r + 8 of an 8-column group compare with the same number as
// rows r of the group before.
template<int N> TILE void tril(rt<float, N> &t, int diagonal, float x) {
  int last = thread_row() + diagonal - thread_col();
#pragma unroll
  for (int i = 0; i < N / 2; i++) t.d[i] = (i >> 2) * 8 + (i & 1) - ((i >> 1) & 1) * 8 > last ? x : t.d[i];
}
template<int N> TILE void triu(rt<float, N> &t, int diagonal, float x) {
  int first = thread_row() + diagonal - thread_col();
#pragma unroll
  for (int i = 0; i < N / 2; i++) t.d[i] = (i >> 2) * 8 + (i & 1) - ((i >> 1) & 1) * 8 < first ? x : t.d[i];
}
template<class F> TILE void map_rows(rv &d, F f) {
  d.d[0] = f(thread_row());
  d.d[1] = f(thread_row() + 8);
}
template<class F> TILE void map(rv &d, const rv &a, F f) { d.d[0] = f(a.d[0]); d.d[1] = f(a.d[1]); }
template<class F> TILE void map(rv &d, const rv &a, const rv &b, F f) {
  d.d[0] = f(a.d[0], b.d[0]);
  d.d[1] = f(a.d[1], b.d[1]);
}

template<int N> TILE void row_max(rv &m, const rt<float, N> &t) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float a = t.d[2 * h], b = t.d[2 * h + 1];
#pragma unroll
    for (int i = 1; i < N / 8; i++) { a = fmaxf(a, t.d[4 * i + 2 * h]); b = fmaxf(b, t.d[4 * i + 2 * h + 1]); }
    a = fmaxf(a, b);
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 2));
    m.d[h] = fmaxf(m.d[h], a);
  }
}
TILE void add(rsum &l, const rsum &m) { l.d[0] += m.d[0]; l.d[1] += m.d[1]; }
template<int N> TILE void row_sum(rsum &l, const rt<float, N> &t) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float a = t.d[2 * h], b = t.d[2 * h + 1];
#pragma unroll
    for (int i = 1; i < N / 8; i++) { a += t.d[4 * i + 2 * h]; b += t.d[4 * i + 2 * h + 1]; }
    l.d[h] = a + b;
  }
}
template<int N> TILE void row_sum_add(rsum &l, const rt<float, N> &t) {
  rsum m;
  row_sum(m, t);
  add(l, m);
}
template<int N> TILE void row_dot_add(rsum &l, const rt<float, N> &x, const rt<float, N> &y) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) l.d[(i >> 1) & 1] = fused(x.d[i], y.d[i], l.d[(i >> 1) & 1]);
}
TILE bool exceeds(const rsum &l, float x) { return __any_sync(~0u, !(l.d[0] <= x) || !(l.d[1] <= x)); }
template<int N> TILE bool rows_within(const rt<float, N> &t, float least, float most) {
  uint32_t outside = 0, some;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float a = fabsf(t.d[2 * h]), b = fabsf(t.d[2 * h + 1]);
#pragma unroll
    for (int i = 1; i < N / 8; i++) {
      a = fmaxf(a, fabsf(t.d[4 * i + 2 * h]));
      b = fmaxf(b, fabsf(t.d[4 * i + 2 * h + 1]));
    }
    a = fmaxf(a, b);
    outside |= a > most || (a < least && a != 0.f);
  }
  trace(TRACE_WG_SYNC, nullptr, 0);
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}\n"
               : "=r"(some) : "r"(outside), "r"(8 + (int)(threadIdx.x >> 7)) : "memory");
  return !some;
}
TILE void scale(rsum &l, const rv &f) { l.d[0] *= f.d[0]; l.d[1] *= f.d[1]; }
TILE void reduce(rv &v, const rsum &l) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float x = l.d[h] + __shfl_xor_sync(~0u, l.d[h], 1);
    v.d[h] = x + __shfl_xor_sync(~0u, x, 2);
  }
}
template<typename T, int K, int N> TILE void convert_part(rt<T, K> &d, const rt<float, N> &s, int c0) {
#pragma unroll
  for (int k = 0; k < K / 16; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) d.d[k][j] = pack<T>(s.d[c0 / 2 + 8 * k + 2 * j], s.d[c0 / 2 + 8 * k + 2 * j + 1]);
}
template<int K, int N> TILE void convert_part(rt<float, K> &d, const rt<float, N> &s, int c0) {
#pragma unroll
  for (int i = 0; i < K / 2; i++) d.d[i] = s.d[c0 / 2 + i];
}
template<typename T, int N> TILE void convert(rt<T, N> &d, const rt<float, N> &s) { convert_part(d, s, 0); }
template<int N> TILE void convert(rt<e4m3, N> &d, const rt<float, N> &s) {
#pragma unroll
  for (int k = 0; k < N / 32; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float *x = s.d + 16 * k + 8 * (j >> 1) + 2 * (j & 1);
      d.d[k][j] = pack_e4m3(x[0], x[1], x[4], x[5]);
    }
}
template<int N> TILE bool saturated(const rt<e4m3, N> &t) {   // 448 is 0x7e, NaN 0x7f
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < N / 8; i++) any |= t.d[i / 4][i % 4] + 0x02020202u;
  return __any_sync(~0u, any & 0x80808080u);
}
