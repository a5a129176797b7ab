// Bodies of tile/math.h. Loops over a row vectorise: a map inlines its lambda (flatten), the scalar functions have no
// branches or calls.
#pragma once
#define MAP template<int N, class F> __attribute__((flatten)) TILE
#define MAP_VECTOR template<class F> __attribute__((flatten)) TILE

// ---- scalars
TILE float infinity() { return __builtin_inff(); }
TILE float fused(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  return (float)((double)a * b + c);   // the product is exact
#endif
}
TILE float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }
TILE float fast_exp2(float x) {
  x = x < -127.f ? -127.f : x;         // NaN passes
  x = x > 128.f ? 128.f : x;
  float t = x + 0x1.8p23f, f = x - (t - 0x1.8p23f);   // t's low bits: x rounded to an integer
  float p = 1.32647e-3f;
  p = p * f + 9.67151e-3f;
  p = p * f + 5.550734e-2f;
  p = p * f + 2.4022242e-1f;
  p = p * f + 6.9314698e-1f;
  p = p * f + 1.f;
  float y = bits_float(float_bits(p) + (float_bits(t) << 23));
  return x >= -126.f ? y : x - x;
}
TILE float fast_log2(float x) {
  uint32_t u = float_bits(x) - 0x3f3504f3;            // x = 2^e m, sqrt(1/2) <= m < sqrt(2)
  int32_t e = (int32_t)u >> 23;
  float m = bits_float((u & 0x7fffff) + 0x3f3504f3), s = (m - 1.f) / (m + 1.f), z = s * s;
  float p = 0.43173588f;
  p = p * z + 0.57671438f;
  p = p * z + 0.96179885f;
  p = p * z + 2.88539008f;
  float y = fused(p, s, (float)e);
  y = x < 0x1p-126f ? -infinity() : y;
  y = x < 0.f ? __builtin_nanf("") : y;
  return x < infinity() ? y : x;
}
TILE float fast_rcp(float x) { return 1.f / x; }
TILE float fast_rsqrt(float x) { return 1.f / __builtin_sqrtf(x); }

// ---- maps
template<int N> TILE void fill(rt<float, N> &t, float x) {
  writes(t);
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < N; c++) t.d[r][c] = x;
}
TILE void fill(rv &v, float x) {
  writes(v);
  for (int r = 0; r < 64; r++) v.d[r] = x;
}
TILE void fill(rsum &v, float x) {
  writes(v);
  for (int r = 0; r < 64; r++) v.d[r] = x;
}
template<int N> TILE void clear(csum<N> &v) {
  writes(v);
  for (int c = 0; c < N; c++) v.d[c] = 0.f;
}

MAP void map(rt<float, N> &t, F f) {
  changes(t);
  for (int r = 0; r < 64; r++) {
#pragma GCC ivdep
    for (int c = 0; c < N; c++) t.d[r][c] = f(t.d[r][c]);
  }
}
MAP void map(rt<float, N> &t, const rt<float, N> &u, F f) {
  reads(u);
  changes(t);
  for (int r = 0; r < 64; r++) {
#pragma GCC ivdep
    for (int c = 0; c < N; c++) t.d[r][c] = f(t.d[r][c], u.d[r][c]);
  }
}
MAP void map_row(rt<float, N> &t, const rv &v, F f) {
  reads(v);
  changes(t);
  for (int r = 0; r < 64; r++) {
    float x = v.d[r];
#pragma GCC ivdep
    for (int c = 0; c < N; c++) t.d[r][c] = f(t.d[r][c], x);
  }
}
MAP void map_row(rt<float, N> &d, const rt<float, N> &t, const rv &v, F f) {
  reads(t, v);
  writes(d);
  for (int r = 0; r < 64; r++) {
    float x = v.d[r];
#pragma GCC ivdep
    for (int c = 0; c < N; c++) d.d[r][c] = f(t.d[r][c], x);
  }
}
template<int N> TILE void scale_rows(rt<float, N> &t, const rv &f) {
  map_row(t, f, [](float x, float y) { return x * y; });
}
template<int N> TILE void scale_or_clear(rt<float, N> &t, const rv &f) {
  map_row(t, f, [](float x, float y) { return y == 0.f ? 0.f : x * y; });
}
MAP void map_col(rt<float, N> &t, const cv<N> &v, F f) {
  reads(v);
  changes(t);
  for (int r = 0; r < 64; r++) {
#pragma GCC ivdep
    for (int c = 0; c < N; c++) t.d[r][c] = f(t.d[r][c], v.d[c]);
  }
}
MAP void map_col(rt<float, N> &t, const sv<N> &v, F f) {
  reads_shared(whole(v));
  changes(t);
  for (int r = 0; r < 64; r++) {
#pragma GCC ivdep
    for (int c = 0; c < N; c++) t.d[r][c] = f(t.d[r][c], v.d[c]);
  }
}
MAP void map_col(rt<float, N> &t, const rt<float, N> &u, const cv<N> &v, F f) {
  reads(u, v);
  changes(t);
  for (int r = 0; r < 64; r++) {
#pragma GCC ivdep
    for (int c = 0; c < N; c++) t.d[r][c] = f(t.d[r][c], u.d[r][c], v.d[c]);
  }
}
MAP void map_col(rt<float, N> &t, const rt<float, N> &u, const sv<N> &v, F f) {
  reads(u);
  reads_shared(whole(v));
  changes(t);
  for (int r = 0; r < 64; r++) {
#pragma GCC ivdep
    for (int c = 0; c < N; c++) t.d[r][c] = f(t.d[r][c], u.d[r][c], v.d[c]);
  }
}
template<typename T, int N, class F>
__attribute__((flatten)) TILE void map_col(rt<float, N> &t, const rt<T, N> &u, const sv<N> &v, F f) {
  reads(u);
  reads_shared(whole(v));
  changes(t);
  for (int r = 0; r < 64; r++) {
    alignas(64) float row[N];
    widen_row(row, u.d[r], N);
#pragma GCC ivdep
    for (int c = 0; c < N; c++) t.d[r][c] = f(t.d[r][c], row[c], v.d[c]);
  }
}
template<typename T, int N, class F> __attribute__((flatten)) TILE void map_col(rt<T, N> &t, const sv<N> &v, F f) {
  reads_shared(whole(v));
  changes(t);
  for (int r = 0; r < 64; r++) {
    alignas(64) float row[N];
    widen_row(row, t.d[r], N);
#pragma GCC ivdep
    for (int c = 0; c < N; c++) row[c] = f(row[c], v.d[c]);
    narrow_row(t.d[r], row, N);
  }
}
MAP void map_rc(rt<float, N> &t, F f) {
  changes(t);
  for (int r = 0; r < 64; r++) {
#pragma GCC ivdep
    for (int c = 0; c < N; c++) t.d[r][c] = f(t.d[r][c], r, c);
  }
}
MAP void map_rc(rt<float, N> &t, const rv &v, F f) {
  reads(v);
  changes(t);
  for (int r = 0; r < 64; r++) {
    float x = v.d[r];
#pragma GCC ivdep
    for (int c = 0; c < N; c++) t.d[r][c] = f(t.d[r][c], x, r, c);
  }
}
MAP void map_rc(rt<float, N> &t, const rt<float, N> &u, const sv<N> &v, F f) {
  reads(u);
  reads_shared(whole(v));
  changes(t);
  for (int r = 0; r < 64; r++) {
#pragma GCC ivdep
    for (int c = 0; c < N; c++) t.d[r][c] = f(t.d[r][c], u.d[r][c], v.d[c], r, c);
  }
}
MAP void map_rc(rt<float, N> &t, const rv &u, const sv<N> &v, F f) {
  reads(u);
  reads_shared(whole(v));
  changes(t);
  for (int r = 0; r < 64; r++) {
    float x = u.d[r];
#pragma GCC ivdep
    for (int c = 0; c < N; c++) t.d[r][c] = f(t.d[r][c], x, v.d[c], r, c);
  }
}
MAP void map_row_pairs(rt<float, N> &t, F f) {
  changes(t);
  for (int r = 0; r < 64; r += r % 16 == 7 ? 9 : 1)
    for (int c = 0; c < N; c++) f(t.d[r][c], t.d[r + 8][c], r, c);
}
MAP void map_col_pairs(rt<float, N> &t, F f) {
  changes(t);
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < N; c += c % 16 == 7 ? 9 : 1) f(t.d[r][c], t.d[r][c + 8], r, c);
}
template<int N> TILE void tril(rt<float, N> &t, int diagonal, float x) {
  map_rc(t, [=](float a, int row, int col) { return col > row + diagonal ? x : a; });
}
template<int N> TILE void triu(rt<float, N> &t, int diagonal, float x) {
  map_rc(t, [=](float a, int row, int col) { return col < row + diagonal ? x : a; });
}
MAP_VECTOR void map_rows(rv &d, F f) {
  writes(d);
  for (int r = 0; r < 64; r++) d.d[r] = f(r);
}
MAP_VECTOR void map(rv &d, const rv &a, F f) {
  reads(a);
  writes(d);
#pragma GCC ivdep
  for (int r = 0; r < 64; r++) d.d[r] = f(a.d[r]);
}
MAP_VECTOR void map(rv &d, const rv &a, const rv &b, F f) {
  reads(a, b);
  writes(d);
#pragma GCC ivdep
  for (int r = 0; r < 64; r++) d.d[r] = f(a.d[r], b.d[r]);
}

// ---- reductions along rows
// Lanes meet in halves; each step is a rotation by H lanes.
template<int H> TILE vf rotate(vf x) {
  vu at;
#pragma GCC unroll 16
  for (int i = 0; i < VW; i++) at[i] = (uint32_t)((i + H) % VW);
  return __builtin_shuffle(x, at);
}
TILE vf vmax(vf a, vf b) { return b > a ? b : a; }
template<int H = VW / 2> TILE float max_lanes(vf x) {
  x = vmax(x, rotate<H>(x));
  if constexpr (H > 1) return max_lanes<H / 2>(x);
  return x[0];
}
template<int H = VW / 2> TILE float sum_lanes(vf x) {
  x += rotate<H>(x);
  if constexpr (H > 1) return sum_lanes<H / 2>(x);
  return x[0];
}
template<int N> TILE void row_max(rv &m, const rt<float, N> &t) {
  reads(t);
  changes(m);
  for (int r = 0; r < 64; r++) {
    vf x = vset(m.d[r]);
    for (int c = 0; c < N; c += VW) x = vmax(x, vload(&t.d[r][c]));
    m.d[r] = max_lanes(x);
  }
}
TILE void add(rsum &l, const rsum &m) {
  reads(m);
  changes(l);
  for (int r = 0; r < 64; r++) l.d[r] += m.d[r];
}
TILE bool exceeds(const rsum &l, float x) {
  reads(l);
  for (int r = 0; r < 64; r++) {
    if (!(l.d[r] <= x)) return true;
  }
  return false;
}
template<int N> TILE bool rows_within(const rt<float, N> &t, float least, float most) {
  reads(t);
  bool within = true;
  for (int r = 0; r < 64; r++) {
    float part[8] = {};                   // columns 8 i + 2 thread + e, and of e its own
    for (int c = 0; c < N; c++) {
      float x = __builtin_fabsf(t.d[r][c]);
      part[c % 8] = x > part[c % 8] ? x : part[c % 8];
    }
    for (int i = 0; i < 8; i += 2) {
      float x = part[i] > part[i + 1] ? part[i] : part[i + 1];
      within = within && x <= most && (x >= least || x == 0.f);
    }
  }
  wg_sync();
  return within;
}
template<int N> TILE bool saturated(const rt<e4m3, N> &t) {
  reads(t);
  uint8_t most = 0;
  for (int r = 0; r < 64; r++) {
    for (int c = 0; c < N; c++) most = most > t.d[r][c].u ? most : t.d[r][c].u;
  }
  return most >= 0x7e;
}
template<int N> TILE void row_sum(rsum &l, const rt<float, N> &t) {
  reads(t);
  writes(l);
  for (int r = 0; r < 64; r++) {
    vf x = {};
    for (int c = 0; c < N; c += VW) x += vload(&t.d[r][c]);
    l.d[r] = sum_lanes(x);
  }
}
template<int N> TILE void row_sum_add(rsum &l, const rt<float, N> &t) {
  rsum m;
  row_sum(m, t);
  add(l, m);
}
template<int N> TILE void row_dot_add(rsum &l, const rt<float, N> &x, const rt<float, N> &y) {
  reads(x, y);
  changes(l);
  for (int r = 0; r < 64; r++) {
    vf s = {};
    for (int c = 0; c < N; c += VW) s += vload(&x.d[r][c]) * vload(&y.d[r][c]);
    l.d[r] += sum_lanes(s);
  }
}
TILE void scale(rsum &l, const rv &f) {
  reads(f);
  changes(l);
  for (int r = 0; r < 64; r++) l.d[r] *= f.d[r];
}
TILE void reduce(rv &v, const rsum &l) {
  reads(l);
  writes(v);
  memcpy(v.d, l.d, sizeof v.d);
}

// each(): row r of an argument, and its element c. Sums of a row are made in its places, so that the loop has no order.
template<int N> struct row_buffer { alignas(64) float d[N]; };
struct row_places { float *d; };
struct row_values { const float *d; };
struct row_value { float x; };
template<int N> TILE void each_uses(rt<float, N> &t) { changes(t); }
template<int N> TILE void each_uses(const rt<float, N> &t) { reads(t); }
template<int N> TILE void each_uses(csum<N> &c) { changes(c); }
TILE void each_uses(rsum &l) { changes(l); }
TILE void each_uses(const rv &v) { reads(v); }
template<int N> TILE void each_uses(const sv<N> &v) { reads_shared(whole(v)); }
template<typename T, int C> TILE void each_uses(const st<T, 64, C> &s) { reads_shared(whole(s)); }
template<int N, int M> TILE row_places each_row(rt<float, M> &t, int r) { return {t.d[r]}; }
template<int N, int M> TILE row_values each_row(const rt<float, M> &t, int r) { return {t.d[r]}; }
template<int N, int M> TILE row_places each_row(csum<M> &c, int) { return {c.d}; }
template<int N> TILE row_buffer<N> each_row(rsum &, int) { return {}; }
template<int N> TILE row_value each_row(const rv &v, int r) { return {v.d[r]}; }
template<int N, int M> TILE row_values each_row(const sv<M> &v, int) { return {v.d}; }
template<int N, int C> TILE row_values each_row(const st<float, 64, C> &s, int r) { return {s.d + r * C}; }
template<int N, typename T, int C> TILE row_buffer<N> each_row(const st<T, 64, C> &s, int r) {
  row_buffer<N> b;
  widen_row(b.d, s.d + r * C, N);
  return b;
}
TILE float &each_at(row_places b, int c) { return b.d[c]; }
TILE float each_at(row_values b, int c) { return b.d[c]; }
TILE float each_at(row_value b, int) { return b.x; }
template<int N> TILE float &each_at(row_buffer<N> &b, int c) { return b.d[c]; }
template<int N, class X, class B> TILE void each_end(X &, const B &, int) {}
template<int N> TILE void each_end(rsum &l, const row_buffer<N> &b, int r) {
  vf x = {};
  int c = 0;
  for (; c + VW <= N; c += VW) x += vload(b.d + c);
  l.d[r] += sum_lanes(x);
}
template<int N, class F, class D, class G, class... X>
__attribute__((flatten)) TILE void each_of_triangles(F right, D diagonal, G left, X &...x) {
  (each_uses(x), ...);
  for (int r = 0; r < 64; r++) {
    auto run = [&](auto... b) __attribute__((always_inline)) {
      const int block = r / 16 * 16, end = block + 16 < N ? block + 16 : N;
#pragma GCC ivdep
      for (int c = 0; c < block && c < N; c++) left(r, c, each_at(b, c)...);
#pragma GCC ivdep
      for (int c = block; c < end; c++) diagonal(r, c, each_at(b, c)...);
#pragma GCC ivdep
      for (int c = end; c < N; c++) right(r, c, each_at(b, c)...);
      (each_end<N>(x, b, r), ...);
    };
    run(each_row<N>(x, r)...);
  }
}
template<int N, class F, class... X> __attribute__((flatten)) TILE void each(F f, X &...x) {
  (each_uses(x), ...);
  for (int r = 0; r < 64; r++) {
    auto run = [&](auto... b) __attribute__((always_inline)) {
#pragma GCC ivdep
      for (int c = 0; c < N; c++) f(r, c, each_at(b, c)...);
      (each_end<N>(x, b, r), ...);
    };
    run(each_row<N>(x, r)...);
  }
}

// ---- rounding
template<typename T, int N> TILE void convert(rt<T, N> &d, const rt<float, N> &s) {
  reads(s);
  writes(d);
  for (int r = 0; r < 64; r++) narrow_row(d.d[r], s.d[r], N);
}
template<typename T, int K, int N> TILE void convert_part(rt<T, K> &d, const rt<float, N> &s, int c0) {
  begins_at(s, c0, 16);
  reads(s);
  writes(d);
  for (int r = 0; r < 64; r++) narrow_row(d.d[r], s.d[r] + c0, K);
}
template<typename T, int N, class F>
__attribute__((flatten)) TILE void store_rc(st<T, 64, N> &s, const rt<float, N> &t, const rv &u, const sv<N> &v, F f) {
  reads(t, u);
  reads_shared(whole(v));
  writes_shared(s, whole(s));
  for (int r = 0; r < 64; r++) {
    alignas(64) float row[N];
    float x = u.d[r];
#pragma GCC ivdep
    for (int c = 0; c < N; c++) row[c] = f(t.d[r][c], x, v.d[c], r, c);
    narrow_row(s.d + r * N, row, N);
  }
}
template<bool UPPER, typename T, int N, class F>
__attribute__((flatten)) TILE void store_triangle(st<T, 64, N> &s, const rt<float, N> &t, const rv &u, const sv<N> &v,
                                                  float diag, F f) {
  reads(t, u);
  reads_shared(whole(v));
  writes_shared(s, whole(s));
  for (int r = 0; r < 64; r++) {
    alignas(64) float row[N];
    float x = u.d[r];
#pragma GCC ivdep
    for (int c = 0; c < N; c++) {
      float y = f(t.d[r][c], x, v.d[c]);
      row[c] = (UPPER ? c < r : c > r) ? 0.f : y;
    }
    if (r < N) row[r] += diag;
    narrow_row(s.d + r * N, row, N);
  }
}
template<typename T, int N, class F>
TILE void store_tril(st<T, 64, N> &s, const rt<float, N> &t, const rv &u, const sv<N> &v, float diag, F f) {
  store_triangle<false>(s, t, u, v, diag, f);
}
template<typename T, int N, class F>
TILE void store_triu(st<T, 64, N> &s, const rt<float, N> &t, const rv &u, const sv<N> &v, float diag, F f) {
  store_triangle<true>(s, t, u, v, diag, f);
}
#undef MAP
#undef MAP_VECTOR
