// Bodies of tile/lines.h on sm_90a. Neighbouring threads hold neighbouring eights of a line, 128 / lines threads a
// line: a warp's access is 512 bytes in a row, or a few lines' shorter ones.
#pragma once
#include "tile/sm90/neighbours.h"
template<int J> struct lt { LINE_RULES(J); float d[J][8]; };
struct lv { float d; };          // the same in all threads of a line
struct lsum { float d; };        // this thread's columns only
template<typename T, int C> struct alignas(128) sl { T d[C]; };
template<int J> struct alignas(128) pl { float4 d[J][2][128]; };     // halves of eights apart: no bank conflicts

TILE int line_bits(int lines) { return __clz(lines) - 24; }              // of the number of threads of a line
TILE int thread_line(int lines) { return thread_in_group() >> line_bits(lines); }
TILE int line_column(int lines) { return (thread_in_group() & ((1 << line_bits(lines)) - 1)) * 8; }

template<int A, typename T, int J> TILE void load_begin(lt<J> &t, const T *g, int64_t ld, int lines, int m, int n) {
  int line = thread_line(lines), col = line_column(lines), step = 8 << line_bits(lines);
  const T *from = g + line * ld + col;
#pragma unroll
  for (int j = 0; j < J; j++, col += step, from += step) {
    clear_all(t.d[j]);
    if (line < m && col < n) {
      if constexpr (A == EIGHTS) all_begin(t.d[j], from);
      else some_begin(t.d[j], from, n - col);
    }
  }
}
template<typename T, int C> TILE void bulk_load(sl<T, C> &d, const T *g, int n, sem &s) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
    ::"r"(shared_address(&d)), "l"(g), "r"(line_bytes<T>(n)), "r"(shared_address(&s)) : "memory");
}
template<int J> TILE void load(lt<J> &t, const pl<J> &s) {
#pragma unroll
  for (int j = 0; j < J; j++) {
    float4 low = s.d[j][0][thread_in_group()], high = s.d[j][1][thread_in_group()];
    t.d[j][0] = low.x;
    t.d[j][1] = low.y;
    t.d[j][2] = low.z;
    t.d[j][3] = low.w;
    t.d[j][4] = high.x;
    t.d[j][5] = high.y;
    t.d[j][6] = high.z;
    t.d[j][7] = high.w;
  }
}
template<int J> TILE void store(pl<J> &d, const lt<J> &t) {
#pragma unroll
  for (int j = 0; j < J; j++) {
    d.d[j][0][thread_in_group()] = make_float4(t.d[j][0], t.d[j][1], t.d[j][2], t.d[j][3]);
    d.d[j][1][thread_in_group()] = make_float4(t.d[j][4], t.d[j][5], t.d[j][6], t.d[j][7]);
  }
}
template<typename T, int C, int J> TILE void load_begin(lt<J> &t, const sl<T, C> &s, int c0, int n) {
  int col = c0 + line_column(1);
#pragma unroll
  for (int j = 0; j < J; j++, col += 1024) {
    clear_all(t.d[j]);
    if (col < n) all_begin(t.d[j], s.d + col);
  }
}
template<typename T, int J> TILE void load_end(lt<J> &t) {
#pragma unroll
  for (int j = 0; j < J; j++) all_end<T>(t.d[j]);
}
template<typename T, int J> TILE void unend(lt<J> &t) {
#pragma unroll
  for (int j = 0; j < J; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) t.d[j][e] = __uint_as_float(pack<T>(t.d[j][2 * e], t.d[j][2 * e + 1]));
}
// A sum of two numbers of 16 bits that is rounded to 24 bits first is the same.
TILE uint32_t add_pair(bf16, uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
TILE uint32_t add_pair(fp16, uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
template<typename T, int J> TILE void add_begun(lt<J> &t, const lt<J> &other) {
#pragma unroll
  for (int j = 0; j < J; j++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      t.d[j][e] = __uint_as_float(add_pair(T(), __float_as_uint(t.d[j][e]), __float_as_uint(other.d[j][e])));
}
template<typename T, int J> TILE void save_begun(T *g, int64_t ld, const lt<J> &t, int lines, int m, int n) {
  int line = thread_line(lines), col = line_column(lines), step = 8 << line_bits(lines);
  T *to = g + line * ld + col;
#pragma unroll
  for (int j = 0; j < J; j++, col += step, to += step)
    if (line < m && col < n)
      *(uint4 *)to = make_uint4(__float_as_uint(t.d[j][0]), __float_as_uint(t.d[j][1]), __float_as_uint(t.d[j][2]),
                                __float_as_uint(t.d[j][3]));
}
// ptxas makes four of all_store()'s where that spares it moves.
template<typename T> TILE void store_eight(T *g, const float (&d)[8]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
    ::"l"(g), "r"(pack<T>(d[0], d[1])), "r"(pack<T>(d[2], d[3])), "r"(pack<T>(d[4], d[5])), "r"(pack<T>(d[6], d[7]))
    : "memory");
}
template<int A, typename T, int J> TILE void save(T *g, int64_t ld, const lt<J> &t, int lines, int m, int n) {
  int line = thread_line(lines), col = line_column(lines), step = 8 << line_bits(lines);
  T *to = g + line * ld + col;
#pragma unroll
  for (int j = 0; j < J; j++, col += step, to += step)
    if (line < m && col < n) {
      if constexpr (A == EIGHTS && sizeof(T) == 2) store_eight(to, t.d[j]);
      else if constexpr (A == EIGHTS) all_store(to, t.d[j]);
      else some_store(to, t.d[j], n - col);
    }
}
TILE void load(lv &v, const float *g, int64_t stride, int lines, int m) {
  int line = thread_line(lines);
  v.d = line < m ? g[line * stride] : 0.f;
}
TILE void save(float *g, int64_t stride, const lv &v, int lines, int m) {
  int line = thread_line(lines);
  if (line_column(lines) == 0 && line < m) g[line * stride] = v.d;
}

template<typename T, int J> TILE void round_lines(lt<J> &t) {
  if constexpr (sizeof(T) == 2)
#pragma unroll
    for (int j = 0; j < J; j++)
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        float2 x = unpack<T>(pack<T>(t.d[j][e], t.d[j][e + 1]));
        t.d[j][e] = x.x;
        t.d[j][e + 1] = x.y;
      }
}
template<int J> TILE void fill(lt<J> &t, float x) {
#pragma unroll
  for (int j = 0; j < J; j++)
#pragma unroll
    for (int e = 0; e < 8; e++) t.d[j][e] = x;
}
TILE void fill(lv &v, float x) { v.d = x; }
TILE void clear(lsum &s) { s.d = 0.f; }
template<int J> TILE void copy(lt<J> &d, const lt<J> &s) { d = s; }
template<class F> TILE void map(lv &d, const lv &a, F f) { d.d = f(a.d); }
template<class F> TILE void map(lv &d, const lv &a, const lv &b, F f) { d.d = f(a.d, b.d); }
template<class F> TILE void map(lv &d, const lv &a, const lv &b, const lv &c, F f) { d.d = f(a.d, b.d, c.d); }

template<int J> TILE float &line_at(lt<J> &t, int j, int e) { return t.d[j][e]; }
template<int J> TILE float line_at(const lt<J> &t, int j, int e) { return t.d[j][e]; }
template<int J> TILE float line_at(const begun<float, J> &b, int j, int e) { return b.t.d[j][e]; }
template<typename T, int J> TILE float line_at(const begun<T, J> &b, int j, int e) {
  float2 x = unpack<T>(__float_as_uint(b.t.d[j][e / 2]));
  return e & 1 ? x.y : x.x;
}
TILE float line_at(const lv &v, int, int) { return v.d; }
TILE float &line_at(lsum &s, int, int) { return s.d; }
template<int A, int J, class F, class... X> TILE void each(lt<J> &t, int lines, int n, F f, X &...x) {
  int col = line_column(lines), step = 8 << line_bits(lines);
#pragma unroll
  for (int j = 0; j < J; j++, col += step)
    if (A == WHOLE || col < n) {
#pragma unroll
      for (int e = 0; e < 8; e++)
        if (A != SINGLES || col + e < n) f(t.d[j][e], line_at(x, j, e)...);
    }
}
template<int J, class F> TILE void each_eight(lt<J> &t, int lines, int, F f) {
  int line = thread_line(lines), col = line_column(lines), step = 8 << line_bits(lines);
#pragma unroll
  for (int j = 0; j < J; j++, col += step) f(t.d[j], line, col);
}
template<class F> TILE bool any(const lv &v, int lines, F f) {
  if (lines != 2) return __any_sync(~0u, f(v.d));      // of one line too: what depends on a vote lies out of the way
  trace(TRACE_WG_SYNC, nullptr, 0);
  uint32_t mine = f(v.d), all;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}\n"
               : "=r"(all) : "r"(mine), "r"(8 + (int)(threadIdx.x >> 7)) : "memory");
  return all;
}

TILE float sum_of_warp(float x) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
TILE void reduce(lv &v, const lsum &s, int lines) {
  float x = s.d;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    float other = __shfl_xor_sync(~0u, x, o);
    if (o < 1 << line_bits(lines)) x += other;
  }
  v.d = x;
}
TILE void put_sums(sv<4> &d, const lsum &s) {
  float x = sum_of_warp(s.d);
  if (lane() == 0) d.d[warp_in_group()] = x;
}
TILE void take_sums(lv &v, const sv<4> &d, int lines) {
  float4 x = *(const float4 *)d.d;
  v.d = lines == 1 ? x.x + x.y + (x.z + x.w) : warp_in_group() < 2 ? x.x + x.y : x.z + x.w;
}
TILE void reduce_most(lv &v, const lsum &s, int lines) {
  float x = s.d;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    float other = __shfl_xor_sync(~0u, x, o);
    if (o < 1 << line_bits(lines)) x = fmaxf(x, other);
  }
  v.d = x;
}
TILE void put_most(sv<4> &d, const lsum &s) {
  float x = s.d;
#pragma unroll
  for (int o = 16; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  if (lane() == 0) d.d[warp_in_group()] = x;
}
TILE void take_most(lv &v, const sv<4> &d, int lines) {
  float4 x = *(const float4 *)d.d;
  float low = fmaxf(x.x, x.y), high = fmaxf(x.z, x.w);
  v.d = lines == 1 ? fmaxf(low, high) : warp_in_group() < 2 ? low : high;
}
// Threads 0 to 7 of a warp have the columns of its first line.
TILE void put_columns(sv<256> &d, const lt<1> &t) {
  float x[8];
#pragma unroll
  for (int e = 0; e < 8; e++) {
    x[e] = t.d[0][e] + __shfl_xor_sync(~0u, t.d[0][e], 8);
    x[e] += __shfl_xor_sync(~0u, x[e], 16);
  }
  if (lane() < 8) all_store(d.d + warp_in_group() * 64 + lane() * 8, x);
}
TILE void take_columns(lt<1> &t, const sv<256> &d) {
  clear_all(t.d[0]);
#pragma unroll
  for (int w = 0; w < 4; w++) {
    float x[8];
    all_begin(x, d.d + w * 64 + (lane() & 7) * 8);
#pragma unroll
    for (int e = 0; e < 8; e++) t.d[0][e] += x[e];
  }
}
