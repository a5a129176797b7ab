// Decays of channels on sm_90a.
#pragma once
// Rows have 8 floats more than channels. Then the rows of a register tile lie in all banks.
enum { CT_ROW = 64 + 8 };
struct alignas(128) ct { float d[64 * CT_ROW]; };
struct cg { sv<64> sum[4], middle[4], end[4], between[3]; };
struct alignas(128) handed { float4 d[8][128]; };
struct hv { float d[2]; };          // channels lane and lane + 32
struct hm { float d[2][16]; };      // their rows

TILE void fill(hv &v, float x) { v.d[0] = v.d[1] = x; }
TILE void load(hv &v, const float *g, int n) {
#pragma unroll
  for (int k = 0; k < 2; k++) v.d[k] = lane() + 32 * k < n ? g[lane() + 32 * k] : 0.f;
}
TILE void store(float *g, const hv &v, int n) {
  if (warp_in_group()) return;
#pragma unroll
  for (int k = 0; k < 2; k++)
    if (lane() + 32 * k < n) g[lane() + 32 * k] = v.d[k];
}
template<class F> TILE void map(hv &d, const hv &a, F f) {
  d.d[0] = f(a.d[0]);
  d.d[1] = f(a.d[1]);
}
template<typename T> TILE void load(hm &x, const T *g, int64_t ld, int m, int n) {
  m -= 16 * warp_in_group();
  int first = lane() < n ? m : 0, second = lane() + 32 < n ? m : 0;
  const T *from = g + 16 * warp_in_group() * ld + lane();
#pragma unroll
  for (int i = 0; i < 16; i++, from += ld) {
    x.d[0][i] = i < first ? to_float(from[0]) : 0.f;
    x.d[1][i] = i < second ? to_float(from[32]) : 0.f;
  }
}
template<typename T> TILE void prefetch(const T *g, int64_t ld, int m, int n) {
  enum { LINE = 128 / sizeof(T) };
  int t = thread_in_group();
  if (t / 2 >= m) return;
  for (int c = t % 2 * LINE; c < n; c += 2 * LINE) asm volatile("prefetch.global.L2 [%0];" ::"l"(g + t / 2 * ld + c));
}
template<class F> TILE void map(hm &x, const hv &v, int m, F f) {
  m -= 16 * warp_in_group();
#pragma unroll
  for (int i = 0; i < 16; i++)
#pragma unroll
    for (int k = 0; k < 2; k++) x.d[k][i] = i < m ? f(x.d[k][i], v.d[k]) : x.d[k][i];
}
TILE float at_least(float x, float low) {  // NaN stays
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(low));
  return x;
}
// A wg_sync(); whether some thread has x.
TILE bool any_of_group(bool x) {
  trace(TRACE_WG_SYNC, nullptr, 0);
  uint32_t mine = x, all;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}\n"
               : "=r"(all) : "r"(mine), "r"(8 + (int)(threadIdx.x >> 7)) : "memory");
  return all;
}
// Sums within the groups, then what groups before have. between[g] holds what group g has behind its middle, until the
// thread with these channels of the next group has taken it.
template<class F> TILE bool sum_down(ct &s, cg &groups, hv &end, const hm &x, float low, F f) {
  int w = warp_in_group();
  float y[2][16], middle[2];
  bool less = false;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      less |= x.d[k][i] < low;
      y[k][i] = sum += at_least(x.d[k][i], low);
    }
    middle[k] = 0.5f * (y[k][7] + y[k][8]);
    groups.sum[w].d[lane() + 32 * k] = sum;
    if (w < 3) groups.between[w].d[lane() + 32 * k] = sum - middle[k];
  }
  less = any_of_group(less);
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int c = lane() + 32 * k;
    float before = 0.f, all = 0.f, rest = y[k][15] - middle[k];
#pragma unroll
    for (int g = 0; g < 4; g++) {
      float sum = groups.sum[g].d[c];
      all += sum;
      before = g < w ? all : before;
      rest += g > w ? sum : 0.f;
    }
    if (w > 0) groups.between[w - 1].d[c] = f(groups.between[w - 1].d[c] + middle[k]);
    end.d[k] = all;
    groups.middle[w].d[c] = before + middle[k];
    groups.end[w].d[c] = rest;
#pragma unroll
    for (int i = 0; i < 16; i++) s.d[(16 * w + i) * CT_ROW + c] = y[k][i] - middle[k];
  }
  return less;
}
TILE void load(rt<float, 64> &t, const ct &s) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float2 *g = (const float2 *)(s.d + (thread_row() + 8 * h) * CT_ROW + thread_col());
#pragma unroll
    for (int k = 0; k < 8; k++) {
      float2 x = g[4 * k];
      t.d[4 * k + 2 * h] = x.x;
      t.d[4 * k + 2 * h + 1] = x.y;
    }
  }
}
// Word j: row 8 (j & 1) of the thread's, column pair j >> 1.
struct block_sums { float2 x[4]; };
TILE block_sums each_block(const ct &s, int k) {
  const float *x = s.d + thread_row() * CT_ROW + 16 * k + thread_col();
  block_sums b;
#pragma unroll
  for (int j = 0; j < 4; j++) b.x[j] = *(const float2 *)(x + (j & 1) * 8 * CT_ROW + (j >> 1) * 8);
  return b;
}
TILE block_sums each_block(ct &s, int k) { return each_block((const ct &)s, k); }
TILE float each_at(const block_sums &b, int, int j) { return j & 1 ? b.x[j >> 1].y : b.x[j >> 1].x; }
TILE block_pairs each_block(const by_group &g, int k) { return each_block(g.v[warp_in_group()], k); }
TILE void carry_to_group(rt<float, 64> &x, const sv<64> &f, int group) {
  if (warp_in_group() < group) map_col(x, f, [](float x, float f) { return x * f * f; });
}
template<typename W> TILE void convert_group(rt<W, 64> &d, const rt<float, 64> &x, int group) {
  bool in = warp_in_group() <= group;
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) d.d[k][j] = in ? pack<W>(x.d[8 * k + 2 * j], x.d[8 * k + 2 * j + 1]) : 0;
}
template<typename T> TILE void store_groups(st<T, 32, 64> (&d)[4], int half, const rt<float, 16> &t, int c0) {
  int r = 16 * half + (lane() & 15), chunk = c0 / 8 + (lane() >> 4) ^ r & 7;
  const float *x = t.d;
  store_block(shared_address(&d[0]) + warp_in_group() * (uint32_t)sizeof d[0] + r * 128 + (chunk << 4),
              pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
}
template<typename T> TILE void store_group(st<T, 32, 64> &d, int half, const rt<float, 16> &t, int c0, int group) {
  int r = 16 * half + (lane() & 15), chunk = c0 / 8 + (lane() >> 4) ^ r & 7;
  const float *x = t.d;
  if (warp_in_group() != group) return;
  store_block(shared_address(&d) + r * 128 + (chunk << 4), pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
              pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
}
template<int A, typename T>
TILE void mma_ABt_halves(rt<float, 16> &d, rt<float, 16> &e, const rt<T, 64> &a, const st<T, 32, 64> &b) {
#pragma unroll
  for (int i = 0; i < 8 && A == ZERO; i++) asm volatile("" : "=f"(d.d[i]), "=f"(e.d[i]));   // as mma_begin()
  uint32_t db = desc(&b, 16);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    wgmma<T, 0>(d.d, a.d[k], db + along<32>(k), A || k);
    wgmma<T, 0>(e.d, a.d[k], db + (16 * 128 >> 4) + along<32>(k), A || k);
  }
}
TILE void put_group(rt<float, 64> &d, const rt<float, 16> &t, int group) {
#pragma unroll
  for (int i = 0; i < 8; i++) d.d[8 * group + i] = t.d[i];
}
TILE void hand_over(handed &d, const rt<float, 16> &t, int group) {
  if (warp_in_group() > group) return;
  int place = parking_place();
  d.d[2 * group][place] = make_float4(t.d[0], t.d[1], t.d[2], t.d[3]);
  d.d[2 * group + 1][place] = make_float4(t.d[4], t.d[5], t.d[6], t.d[7]);
}
TILE void add(rt<float, 64> &t, const handed &s) {
  int place = parking_place();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (i / 2 < warp_in_group()) continue;
    float4 x = s.d[i][place];
    t.d[4 * i] += x.x;
    t.d[4 * i + 1] += x.y;
    t.d[4 * i + 2] += x.z;
    t.d[4 * i + 3] += x.w;
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
