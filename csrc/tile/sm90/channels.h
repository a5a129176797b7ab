// Decays of channels on sm_90a.
#pragma once
// Rows have 8 floats more than channels. Then the rows of a register tile lie in all banks.
template<int C> struct alignas(128) ct { CHANNEL_RULES(C); float d[64 * (C + 8)]; };
template<int C> struct hv { CHANNEL_RULES(C); float d; };       // element t of thread t
template<int C> struct hm { CHANNEL_RULES(C); float d[64]; };   // its column

template<int C> TILE void fill(hv<C> &v, float x) { v.d = x; }
template<int C> TILE void load(hv<C> &v, const float *g, int n) {
  int c = thread_in_group();
  v.d = c < C && c < n ? g[c] : 0.f;
}
template<int C> TILE void store(float *g, const hv<C> &v, int n) {
  int c = thread_in_group();
  if (c < C && c < n) g[c] = v.d;
}
template<int C, class F> TILE void map(hv<C> &d, const hv<C> &a, F f) { d.d = f(a.d); }
template<int C, class F> TILE bool any(const hv<C> &v, F f) {
  trace(TRACE_WG_SYNC, nullptr, 0);
  uint32_t mine = thread_in_group() < C && f(v.d), all;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}\n"
               : "=r"(all) : "r"(mine), "r"(8 + (int)(threadIdx.x >> 7)) : "memory");
  return all;
}
template<typename T, int C> TILE void load(hm<C> &x, const T *g, int64_t ld, int m, int n) {
  int c = thread_in_group();
  m = c < C && c < n ? m : 0;
  const T *from = g + c;
#pragma unroll
  for (int i = 0; i < 64; i++, from += ld) x.d[i] = i < m ? to_float(*from) : 0.f;
}
template<typename T> TILE void prefetch(const T *g, int64_t ld, int m, int n) {
  enum { LINE = 128 / sizeof(T) };
  int t = thread_in_group();
  if (t / 2 >= m) return;
  for (int c = t % 2 * LINE; c < n; c += 2 * LINE) asm volatile("prefetch.global.L2 [%0];" ::"l"(g + t / 2 * ld + c));
}
template<int C, class F> TILE void map(hm<C> &x, const hv<C> &v, int m, F f) {
#pragma unroll
  for (int i = 0; i < 64; i++) x.d[i] = i < m ? f(x.d[i], v.d) : x.d[i];
}
template<int C> TILE void least_of(hv<C> &d, const hm<C> &x) {
  d.d = 0.f;
#pragma unroll
  for (int i = 0; i < 64; i++) d.d = fminf(d.d, x.d[i]);
}
TILE float at_least(float x, float low) {  // NaN stays
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(low));
  return x;
}
// f: of a row and the sum down to it
template<int C, class F> TILE void walk_down(ct<C> &s, hv<C> &end, const hm<C> &x, float low, F f) {
  int c = thread_in_group();
  end.d = 0.f;
  if (c >= C) return;
#pragma unroll
  for (int i = 0; i < 64; i++) {
    end.d += at_least(x.d[i], low);
    s.d[i * (C + 8) + c] = end.d;
    f(i, end.d);
  }
}
template<int C> TILE void sum_down(ct<C> &s, hv<C> &end, const hm<C> &x, float low) {
  walk_down(s, end, x, low, [](int, float) {});
}
template<int C, class F>
TILE void sum_down(ct<C> &s, hv<C> &end, const hm<C> &x, float low, sv<C> (&between)[3], F f) {
  float last = 0.f, seventh = 0.f;
  walk_down(s, end, x, low, [&](int i, float y) {
    if (i % 16 == 7) seventh = y;
    if (i % 16 != 8) return;
    float middle = 0.5f * (seventh + y);
    if (i > 8) between[i / 16 - 1].d[thread_in_group()] = f(middle - last);
    last = middle;
  });
}
template<int C> TILE const float2 *pairs_of_row(const ct<C> &s, int row, int c0) {
  return (const float2 *)(s.d + row * (C + 8) + c0 + thread_col());
}
template<int C> TILE void load(rt<float, 64> &t, const ct<C> &s, int c0) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float2 *g = pairs_of_row(s, thread_row() + 8 * h, c0);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      float2 x = g[4 * k];
      t.d[4 * k + 2 * h] = x.x;
      t.d[4 * k + 2 * h + 1] = x.y;
    }
  }
}
// Of two columns, the middle of a group.
template<int C> TILE float2 middle_of(const ct<C> &, const float2 *row7) {
  float2 x = *row7, y = row7[(C + 8) / 2];
  return make_float2(0.5f * (x.x + y.x), 0.5f * (x.y + y.y));
}
template<int C> TILE void load_from_middle(rt<float, 64> &t, const ct<C> &s, int c0) {
  load(t, s, c0);
  const float2 *g = pairs_of_row(s, warp_in_group() * 16 + 7, c0);
#pragma unroll
  for (int k = 0; k < 8; k++) {
    float2 x = middle_of(s, g + 4 * k);
#pragma unroll
    for (int i = 0; i < 4; i++) t.d[4 * k + i] -= i & 1 ? x.y : x.x;
  }
}
template<int C, class F> TILE void map_last_row(rt<float, 64> &t, const ct<C> &s, int c0, F f) {
  const float2 *g = pairs_of_row(s, 63, c0);
#pragma unroll
  for (int k = 0; k < 8; k++) {
    float2 x = g[4 * k];
#pragma unroll
    for (int i = 0; i < 4; i++) t.d[4 * k + i] = f(t.d[4 * k + i], i & 1 ? x.y : x.x);
  }
}
template<int C> TILE void carry_to_group(rt<float, 64> &x, const sv<C> &f, int c0, int group) {
  if (warp_in_group() >= group) return;
  const float2 *g = (const float2 *)(f.d + c0 + thread_col());
#pragma unroll
  for (int k = 0; k < 8; k++) {
    float2 y = g[4 * k];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float f = i & 1 ? y.y : y.x;
      x.d[4 * k + i] = x.d[4 * k + i] * f * f;
    }
  }
}
template<typename W> TILE void convert_group(rt<W, 64> &d, const rt<float, 64> &x, int group) {
  bool in = warp_in_group() <= group;
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) d.d[k][j] = in ? pack<W>(x.d[8 * k + 2 * j], x.d[8 * k + 2 * j + 1]) : 0;
}
template<typename T, int C> TILE void store_groups(st<T, 32, C> (&d)[4], int half, const rt<float, 64> &t, int c0) {
  int r = 16 * half + (lane() & 15);
  uint32_t to = shared_address(&d[0]) + warp_in_group() * (uint32_t)sizeof d[0] + c0 / 64 * 32 * 128 + r * 128;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float *x = t.d + 8 * k;
    store_block(to + ((2 * k + (lane() >> 4) ^ (r & 7)) << 4), pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
                pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
  }
}
TILE void put_group(rt<float, 64> &a, rt<float, 64> &b, const rt<float, 32> &t, int group) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    a.d[8 * group + i] = t.d[i];
    b.d[8 * group + i] = t.d[8 + i];
  }
}
template<typename T> TILE void load_steps(rv &v, const T *g, int64_t stride, int n) {
  int r = thread_row();
  v.d[0] = r < n ? to_float(g[r * stride]) : 0.f;
  v.d[1] = r + 8 < n ? to_float(g[(r + 8) * stride]) : 0.f;
}
TILE void store_steps(float *g, const rv &v, int64_t stride, int n) {
  int r = thread_row();
  if ((threadIdx.x & 3) == 0) {
    if (r < n) g[r * stride] = v.d[0];
    if (r + 8 < n) g[(r + 8) * stride] = v.d[1];
  }
}
// To the compiler, tiles of different types have nothing to do with each other: accesses might change places.
template<class Tile, class Other> TILE Tile &in_place_of(Other &t) {
  IN_PLACE_RULES(Tile, Other);
  asm volatile("" ::: "memory");
  return *(Tile *)&t;
}
