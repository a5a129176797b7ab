// Channels along the rows, and levels of pairs, on sm_90a.
#pragma once
// Rows have 8 floats more than steps. Then the pairs that half a warp reads lie in all banks.
enum { TC_ROW = 64 + 8 };
struct alignas(128) tc { float d[64 * TC_ROW]; };
// Of channel thread % 64: steps 0 to 31 where the thread is below 64, else 32 to 63.
struct ht { float d[32]; };
struct hc { float d; };
struct hcsum { float d; };
TILE int own_channel() { return threadIdx.x & 63; }
TILE int own_half() { return threadIdx.x >> 6 & 1; }

// Word 2 n + k has rows 8 k + 2t and one more of column 8 n + g.
template<typename T> TILE void keep_level(qt<T> &d, const qt<T> &s, int h) {
  int at = lane() >> 2 ^ thread_col();
#pragma unroll
  for (int j = 0; j < 4; j++) {
    int x = at ^ 8 * (j >> 1) ^ 8 * (j & 1);
    uint32_t low = (x & -h) == h ? 0xffffu : 0u, high = ((x ^ 1) & -h) == h ? 0xffff0000u : 0u;
    d.d[j] = s.d[j] & (low | high);
  }
}
// What a thread has of the blocks of 8 x 8 on the diagonal, where f(row, column).
template<class F> TILE uint32_t diagonal_mask(F f) {
  int r = thread_col(), c = lane() >> 2;
  return (f(r, c) ? 0xffffu : 0u) | (f(r + 1, c) ? 0xffff0000u : 0u);
}
template<typename T> TILE void keep_below(qt<T> &d, const qt<T> &s) {
  uint32_t mask = diagonal_mask([](int r, int c) { return r > c; });
  d = {{s.d[0] & mask, s.d[1], 0u, s.d[3] & mask}};
}
template<typename T> TILE void keep_above(qt<T> &d, const qt<T> &s) {
  uint32_t mask = diagonal_mask([](int r, int c) { return r < c; });
  d = {{s.d[0] & mask, 0u, s.d[2], s.d[3] & mask}};
}
TILE uint32_t larger_of_pairs(uint32_t x, uint32_t y) {
  uint32_t d;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(x & 0x7fff7fffu), "r"(y & 0x7fff7fffu));
  return d;
}
template<typename T> TILE uint32_t largest_of(const qt<T> &s) {
  static_assert(is_bf16<T>, "elements of bf16");
  return larger_of_pairs(larger_of_pairs(s.d[0], s.d[1]), larger_of_pairs(s.d[2], s.d[3]));
}
template<typename T> TILE bool exceeds(const qt<T> &a, const qt<T> &b, float x) {
  float2 y = unpack<T>(larger_of_pairs(largest_of(a), largest_of(b)));
  return __any_sync(~0u, !(y.x <= x) || !(y.y <= x));
}
TILE void fill(hc &v, float x) { v.d = x; }
TILE void clear(hcsum &v) { v.d = 0.f; }
TILE void load(hc &v, const float *g, int n) { v.d = own_channel() < n ? g[own_channel()] : 0.f; }
template<typename T> TILE void load(ht &x, const T *g, int64_t ld, int m, int n) {
  m = own_channel() < n ? m - 32 * own_half() : 0;
  const T *from = g + own_channel() + 32 * own_half() * ld;
  if (m >= 32 && (uint64_t)ld < 1 << 24) {
#pragma unroll
    for (int i = 0; i < 32; i++)           // offsets of 32 bits: one instruction each
      x.d[i] = to_float(*(const T *)((const char *)from + i * ((uint32_t)ld * (uint32_t)sizeof(T))));
    return;
  }
#pragma unroll
  for (int i = 0; i < 32; i++, from += ld) x.d[i] = i < m ? to_float(*from) : 0.f;
}
TILE void load(ht &x, const tc &s) {
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    float4 y = *(const float4 *)(s.d + own_channel() * TC_ROW + 32 * own_half() + i);
    x.d[i] = y.x;
    x.d[i + 1] = y.y;
    x.d[i + 2] = y.z;
    x.d[i + 3] = y.w;
  }
}
TILE void store(float *g, int64_t ld, const ht &x, int m, int n) {
  if (own_channel() >= n) return;
  m -= 32 * own_half();
  float *to = g + own_channel() + 32 * own_half() * ld;
  if (m >= 32 && (uint64_t)ld < 1 << 24) {
#pragma unroll
    for (int i = 0; i < 32; i++) *(float *)((char *)to + i * ((uint32_t)ld * 4)) = x.d[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < 32; i++, to += ld)
    if (i < m) *to = x.d[i];
}
TILE float &between_halves(tc &s, int part) { return s.d[own_channel() * TC_ROW + 64 + part]; }
TILE void store(float *g, int64_t stride, const hcsum &v, tc &by, int part, int n) {
  if (own_half()) between_halves(by, part) = v.d;
  wg_sync();
  if (!own_half() && own_channel() < n) g[own_channel() * stride] = v.d + between_halves(by, part);
}
template<class F> TILE void map(ht &x, const hc &v, int m, F f) {
  m -= 32 * own_half();
#pragma unroll
  for (int i = 0; i < 32; i++) {
    float y = f(x.d[i], v.d);              // of all: branches would be more, and their predicates too many
    x.d[i] = i < m ? y : x.d[i];
  }
}
template<class F> TILE void map(ht &x, const ht &y, const hc &v, hcsum &sum, int m, F f) {
  m -= 32 * own_half();
#pragma unroll
  for (int i = 0; i < 32; i++) {
    float more = sum.d, z = f(x.d[i], y.d[i], v.d, more);
    x.d[i] = i < m ? z : 0.f;
    sum.d = i < m ? more : sum.d;
  }
}
TILE void sum_add(hcsum &d, const ht &x) {
#pragma unroll
  for (int i = 0; i < 32; i++) d.d += x.d[i];
}
TILE void sum_down(tc &s, const ht &x, float low) {
  float y[32];
#pragma unroll
  for (int i = 0; i < 32; i++) y[i] = (i ? y[i - 1] : 0.f) + (x.d[i] < low ? low : x.d[i]);
  if (!own_half()) between_halves(s, 0) = y[31];
  wg_sync();
  float before = own_half() ? between_halves(s, 0) : 0.f;
#pragma unroll
  for (int i = 0; i < 32; i += 4)
    *(float4 *)(s.d + own_channel() * TC_ROW + 32 * own_half() + i) =
      make_float4(before + y[i], before + y[i + 1], before + y[i + 2], before + y[i + 3]);
}
TILE void sum_up(ht &x, tc &by) {
#pragma unroll
  for (int i = 30; i >= 0; i--) x.d[i] += x.d[i + 1];
  if (own_half()) between_halves(by, 1) = x.d[0];
  wg_sync();
  float behind = own_half() ? 0.f : between_halves(by, 1);
#pragma unroll
  for (int i = 0; i < 32; i++) x.d[i] += behind;
}
TILE void load(rv &v, const tc &s, int step) {
  const float *x = s.d + thread_row() * TC_ROW + step;
  v.d[0] = x[0];
  v.d[1] = x[8 * TC_ROW];
}
TILE void store(tc &d, int c0, const rt<float, 16> &t) {
  float *to = d.d + thread_row() * TC_ROW + c0 + thread_col();
#pragma unroll
  for (int i = 0; i < 4; i++)
    *(float2 *)(to + (i & 1) * 8 * TC_ROW + i / 2 * 8) = make_float2(t.d[2 * i], t.d[2 * i + 1]);
}
TILE void store_sum(tc &d, int group, const rv &v) {
  if (thread_col()) return;
  d.d[thread_row() * TC_ROW + 68 + group] = v.d[0];
  d.d[(thread_row() + 8) * TC_ROW + 68 + group] = v.d[1];
}
TILE void add_sums(ht &x, const tc &s) {
  if (!own_half()) return;
  float4 y = *(const float4 *)(s.d + own_channel() * TC_ROW + 68);
  x.d[31] += y.x + y.y + y.z + y.w;
}
template<typename T> struct turned { const st<T, 64, 64> &s; };
struct level { const tc &s; int h; };
template<typename T> TILE turned<T> turned_of(const st<T, 64, 64> &s) { return {s}; }
TILE level level_of(const tc &s, int h) { return {s, h}; }
// Word j: row 8 (j & 1) of the thread's, column pair j >> 1.
struct block_steps { float2 x[4]; };
TILE block_steps each_block(const tc &s, int k) {
  const float *x = s.d + thread_row() * TC_ROW + 16 * k + thread_col();
  block_steps b;
#pragma unroll
  for (int j = 0; j < 4; j++) b.x[j] = *(const float2 *)(x + (j & 1) * 8 * TC_ROW + (j >> 1) * 8);
  return b;
}
TILE block_steps each_block(tc &s, int k) { return each_block((const tc &)s, k); }
TILE block_steps each_block(const level &l, int k) {
  block_steps b = each_block(l.s, k);
  const float *row = l.s.d + thread_row() * TC_ROW;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    int step = 16 * k + (j >> 1) * 8 + thread_col();
    float m = row[(j & 1) * 8 * TC_ROW + (step & -2 * l.h | l.h - 1)];
    b.x[j].x -= m;
    b.x[j].y -= m;
  }
  return b;
}
TILE float each_at(const block_steps &b, int, int j) { return j & 1 ? b.x[j >> 1].y : b.x[j >> 1].x; }
template<typename T> TILE block_words<T> each_block(const turned<T> &t, int k) {
  block_words<T> b;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(b.w[0]), "=r"(b.w[1]), "=r"(b.w[2]), "=r"(b.w[3]) : "r"(block_address_t(t.s, k)) : "memory");
  return b;
}
// Eight threads have a row: a warp writes whole lines.
template<typename T, class F> TILE void store_rows(const st<T, 16, 64> &s, F f, int n) {
  int c = (thread_in_group() & 7) * 8, r = thread_in_group() / 8;
  T *g = f(r);
  if (!g || c >= n) return;
  uint4 x = *(const uint4 *)((const char *)s.d + r * 128 + ((c / 8 ^ r & 7) << 4));
  if (c + 8 <= n && ((uintptr_t)g & 15) == 0) {
    *(uint4 *)(g + c) = x;
    return;
  }
  uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (c + i < n) g[c + i].u = (uint16_t)(w[i / 2] >> 16 * (i & 1));
}
TILE int64_t anew(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
