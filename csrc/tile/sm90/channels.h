// Decays of channels on sm_90a.
#pragma once
#include "tile/sm90/anew.h"
// Rows have 8 floats more than channels. Then the rows of a register tile lie in all banks.
enum { CT_ROW = 64 + 8 };
struct alignas(128) ct { float d[64 * CT_ROW]; };
struct cg { sv<64> sum[4], middle[4], end[4], between[3]; sv<32> reach; };
struct alignas(128) handed { float4 d[10][2][32]; };   // of columns of blocks, one after another
struct hv { float d[2]; };          // channels 2 lane and 2 lane + 1
struct hm { float d[2][16]; };      // their rows

TILE void fill(hv &v, float x) { v.d[0] = v.d[1] = x; }
TILE void load(hv &v, const float *g, int n) {
#pragma unroll
  for (int k = 0; k < 2; k++) v.d[k] = 2 * lane() + k < n ? g[2 * lane() + k] : 0.f;
}
TILE void store(float *g, const hv &v, int n) {
  if (warp_in_group()) return;
#pragma unroll
  for (int k = 0; k < 2; k++)
    if (2 * lane() + k < n) g[2 * lane() + k] = v.d[k];
}
template<int N> TILE void store(sv<N> &d, int c0, const hv &v) {
  if (warp_in_group() == 0) ((float2 *)(d.d + c0))[lane()] = make_float2(v.d[0], v.d[1]);
}
template<int N> TILE void load(hv &v, const sv<N> &s, int c0) {
  float2 y = ((const float2 *)(s.d + c0))[lane()];
  v.d[0] = y.x;
  v.d[1] = y.y;
}
template<class F> TILE void map(hv &d, const hv &a, F f) {
  d.d[0] = f(a.d[0]);
  d.d[1] = f(a.d[1]);
}
template<class F> TILE void map(hv &d, const hv &a, const hv &b, F f) {
  d.d[0] = f(a.d[0], b.d[0]);
  d.d[1] = f(a.d[1], b.d[1]);
}
template<class F> TILE void map_index(hv &d, F f) {
  d.d[0] = f(2 * lane());
  d.d[1] = f(2 * lane() + 1);
}
TILE float max_of(const hv &v) {
  float x = fmaxf(v.d[0], v.d[1]);
#pragma unroll
  for (int o = 16; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}
TILE float sum_of(const hv &v) {
  float x = v.d[0] + v.d[1];
#pragma unroll
  for (int o = 16; o > 0; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
TILE float2 pair_at(const float *g) { return *(const float2 *)g; }
template<typename T> TILE float2 pair_at(const T *g) { return unpack<T>(*(const uint32_t *)g); }
template<typename T> TILE void load(hm &x, const T *g, int64_t ld, int m, int n) {
  int thread = parking_place(), w = thread >> 5;
  m -= 16 * w;
  const T *from = g + 16 * w * ld + 2 * (thread % 32);
  bool pairs = ((uintptr_t)from & (2 * sizeof(T) - 1)) == 0 && (ld & 1) == 0 && (uint64_t)ld < 1 << 24;
  if (m >= 16 && n >= 64 && pairs) {
#pragma unroll
    for (int i = 0; i < 16; i++) {       // offsets of 32 bits: one instruction each
      float2 y = pair_at((const T *)((const char *)from + i * ((uint32_t)ld * (uint32_t)sizeof(T))));
      x.d[0][i] = y.x;
      x.d[1][i] = y.y;
    }
    return;
  }
  int first = 2 * (thread % 32) < n ? m : 0, second = 2 * (thread % 32) + 1 < n ? m : 0;
#pragma unroll
  for (int i = 0; i < 16; i++, from += ld) {
    x.d[0][i] = i < first ? to_float(from[0]) : 0.f;
    x.d[1][i] = i < second ? to_float(from[1]) : 0.f;
  }
}
// Where a thread reads is worked out anew each time: kept, it would cost registers.
TILE void load(hm &x, const sm<64, 64> &s) {
  int thread = parking_place(), w = thread >> 5;
  const float2 *from = (const float2 *)s.d + 16 * w * 32 + thread % 32;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float2 y = from[32 * i];
    x.d[0][i] = y.x;
    x.d[1][i] = y.y;
  }
}
template<typename T> TILE void load(hm &x, const st<T, 64, 64> &s) {
  int thread = parking_place(), w = thread >> 5, chunk = thread % 32 >> 2;
  const char *from = (const char *)&s + 16 * w * 128 + thread % 4 * 4;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float2 y = unpack<T>(*(const uint32_t *)(from + i * 128 + ((chunk ^ i & 7) << 4)));
    x.d[0][i] = y.x;
    x.d[1][i] = y.y;
  }
}
TILE void clear_behind(sm<64, 64> &s, int m) {
#pragma unroll 4
  for (int i = thread_in_group(); i < 64 * 64 / 4; i += 128)
    if (i / 16 >= m) ((float4 *)s.d)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}
TILE void store(sm<64, 64> &d, const hm &x) {
  float2 *to = (float2 *)d.d + 16 * warp_in_group() * 32 + lane();
#pragma unroll
  for (int i = 0; i < 16; i++) to[32 * i] = make_float2(x.d[0][i], x.d[1][i]);
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
template<int N> TILE void store_sums(sv<N> (&d)[4], int c0, const hm &x) {
  float sum[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    sum[k] = x.d[k][0];
#pragma unroll
    for (int i = 1; i < 16; i++) sum[k] += x.d[k][i];
  }
  ((float2 *)(d[warp_in_group()].d + c0))[lane()] = make_float2(sum[0], sum[1]);
}
TILE void at_least(hm &x, float low) {
#pragma unroll
  for (int i = 0; i < 32; i++) asm("max.NaN.f32 %0, %0, %1;" : "+f"(x.d[i / 16][i % 16]) : "f"(low));
}
// A wg_sync(); whether some thread has x.
TILE bool any_of_group(bool x) {
  trace(TRACE_WG_SYNC, nullptr, 0);
  uint32_t mine = x, all;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}\n"
               : "=r"(all) : "r"(mine), "r"(8 + (int)(threadIdx.x >> 7)) : "memory");
  return __any_sync(~0u, all);             // for the compiler, that lanes stay together
}
TILE float further(float a, float b) {      // NaN stays
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(fabsf(b)));
  return a;
}
// Sums within the groups, then what groups before have. between[g] holds what group g has behind its middle, until the
// thread with these channels of the next group has taken it.
TILE float2 &pair_of(sv<64> &v) { return ((float2 *)v.d)[lane()]; }
template<class F, class G>
TILE enum reach sum_down(ct &s, cg &groups, hv &end, const hm &x, float unit, float most, bool steep, F f, G g) {
  int w = parking_place() / 32;
  float y[2][16], middle[2], sum[2], behind[2];
  float far = 0.f, wide = 0.f;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    y[k][0] = x.d[k][0];
#pragma unroll
    for (int i = 1; i < 16; i++) y[k][i] = y[k][i - 1] + x.d[k][i];
    middle[k] = 0.5f * unit * (y[k][7] + y[k][8]);
    sum[k] = y[k][15] * unit;
    behind[k] = fused(y[k][15], unit, -middle[k]);
    far = further(further(far, fused(y[k][0], unit, -middle[k])), behind[k]);
    wide = further(further(wide, sum[k]), middle[k]);
    wide = further(further(wide, y[k][0] * unit), fused(y[k][0], unit, -sum[k]));
  }
  pair_of(groups.sum[w]) = make_float2(sum[0], sum[1]);
  if (w < 3) pair_of(groups.between[w]) = make_float2(behind[0], behind[1]);
  wide = further(wide, far);
  enum reach reach = any_of_group(steep || !(wide <= most)) ? steep ? BEYOND : WITHIN : NEAR;
  if (reach == WITHIN && any_of_group(!(far <= most))) return BEYOND;
  if (thread_in_group() == 0) groups.reach.d[0] = __int_as_float(reach);
#pragma unroll
  for (int k = 0; k < 2 && reach == NEAR; k++) {
    middle[k] = w & 1 ? 0.f : sum[k];
    behind[k] = sum[k] - middle[k];
  }
  float2 before = make_float2(0.f, 0.f), all = before, rest = make_float2(behind[0], behind[1]);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float2 sum = pair_of(groups.sum[i]);
    all.x += sum.x;
    all.y += sum.y;
    if (i < w) before = all;
    if (i > w) {
      rest.x += sum.x;
      rest.y += sum.y;
    }
  }
  end.d[0] = all.x;
  end.d[1] = all.y;
  if (w > 0) {
    float2 last = pair_of(reach == NEAR ? groups.sum[w - 1] : groups.between[w - 1]);
    if (reach == NEAR && w % 2 == 1) last = make_float2(0.f, 0.f);
    pair_of(groups.between[w - 1]) = make_float2(f(last.x + middle[0]), f(last.y + middle[1]));
  }
  pair_of(groups.middle[w]) = make_float2(g(before.x + middle[0]), g(before.y + middle[1]));
  pair_of(groups.end[w]) = make_float2(g(rest.x), g(rest.y));
  float *to = s.d + 16 * w * CT_ROW + 2 * lane();
#pragma unroll
  for (int i = 0; i < 16; i++)
    *(float2 *)(to + i * CT_ROW) = make_float2(fused(y[0][i], unit, -middle[0]), fused(y[1][i], unit, -middle[1]));
  return reach;
}
TILE enum reach reach_of(const cg &groups) { return (enum reach)__float_as_int(groups.reach.d[0]); }
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
template<typename T> TILE block_words<T> each_block(const own_rows<T> &t, int k) {
  block_words<T> b;
  load_block(b.w, block_address_anew(t.s, 16 * k));
  return b;
}
template<typename T, int C, int N> TILE void store_own(st<T, 64, C> &d, const rt<float, N> &t, int c0) {
#pragma unroll
  for (int k = 0; k < N / 16; k++) {
    const float *x = t.d + 8 * k;
    store_block(block_address_anew(d, c0 + 16 * k), pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]),
                pack<T>(x[6], x[7]));
  }
}
template<typename T, int C> TILE void store_own(st<T, 64, C> &d, const rt<float, 16> &t, int panel, int c0) {
  const float *x = t.d;
  store_block(block_address_anew(d, panel, c0), pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]),
              pack<T>(x[6], x[7]));
}
template<typename T> TILE void load_part(rt<T, 16> &d, const own_rows<T> &s, int c0) {
  load_block(d.d[0], block_address_anew(s.s, c0));
}
TILE void load_part(rt<float, 16> &d, const ct &s, int c0) {
  block_sums b = each_block(s, c0 / 16);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    d.d[2 * j] = b.x[j].x;
    d.d[2 * j + 1] = b.x[j].y;
  }
}
TILE void carry_to_group(rt<float, 64> &x, const sv<64> &f, int group) {
  if (warp_in_group() < group) map_col(x, f, [](float x, float f) { return x * f; });
}
template<typename W> TILE void convert_group(rt<W, 64> &d, const rt<float, 64> &x, int group) {
  bool in = warp_in_group() <= group;
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) d.d[k][j] = in ? pack<W>(x.d[8 * k + 2 * j], x.d[8 * k + 2 * j + 1]) : 0;
}
template<typename T> TILE void store_groups(st<T, 32, 64> (&d)[4], int half, const rt<float, 16> &t, int c0) {
  int r = warp_in_group() * 16 + (lane() & 15), chunk = (lane() >> 4) ^ r & 7;
  const float *x = t.d;
  uint32_t first = anew_word(r * 128 + (chunk << 4));      // as in block_address_anew()
  store_block((first ^ (uint32_t)c0 / 8 << 4) + (shared_address(&d[0]) + (warp_in_group() + half) * 16 * 128),
              pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
}
template<typename T> TILE void store_group(st<T, 32, 64> &d, int half, const rt<float, 16> &t, int c0, int group) {
  int r = 16 * half + (lane() & 15), chunk = c0 / 8 + (lane() >> 4) ^ r & 7;
  const float *x = t.d;
  if (warp_in_group() != group) return;
  store_block(shared_address(&d) + r * 128 + (chunk << 4), pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
              pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
}
template<typename T>
TILE void mma_ABt_halves_by_warps(rt<float, 16> &d, rt<float, 16> &e, const rt<T, 64> &a, const st<T, 32, 64> &b) {
  int r = lane() & 15, chunk = (lane() >> 4) ^ r & 7;
  uint32_t first = shared_address(&b) + r * 128 + (chunk << 4);
#pragma unroll
  for (int i = 0; i < 8; i++) d.d[i] = e.d[i] = 0.f;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    uint32_t x[4], y[4];
    load_block(x, first ^ k << 5);
    load_block(y, (first ^ k << 5) + 16 * 128);
#pragma unroll
    for (int c = 0; c < 2; c++) {
      warp_mma<T>(d.d + 4 * c, a.d[k], x[c], x[c + 2]);
      warp_mma<T>(e.d + 4 * c, a.d[k], y[c], y[c + 2]);
    }
  }
}
TILE void put_group(rt<float, 64> &d, const rt<float, 16> &t, int group) {
#pragma unroll
  for (int i = 0; i < 8; i++) d.d[8 * group + i] = t.d[i];
}
// Of the warp's block in the first column.
TILE int handed_place() {
  int thread = parking_place();
  return thread / 32 * 64 + thread % 32;
}
TILE void hand_over(handed &d, const rt<float, 16> &t, int group) {
  if (warp_in_group() > group) return;
  float4 *to = d.d[0][0] + handed_place() + group * (group + 1) / 2 * 64;
  to[0] = make_float4(t.d[0], t.d[1], t.d[2], t.d[3]);
  to[32] = make_float4(t.d[4], t.d[5], t.d[6], t.d[7]);
}
TILE void add(rt<float, 64> &t, const handed &s) {
  const float4 *from = s.d[0][0] + handed_place();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (i / 2 < warp_in_group()) continue;
    float4 x = from[i / 2 * (i / 2 + 1) / 2 * 64 + i % 2 * 32];
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
template<typename T, int N> TILE void load_steps(wv<N> &v, const T *g, int64_t stride, int n) {
#pragma unroll
  for (int k = 0; k < N / 32; k++) v.d[k] = lane() + 32 * k < n ? to_float(g[(lane() + 32 * k) * stride]) : 0.f;
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
