// Bodies of tile/pairs.h on sm_90a. Neighbouring threads hold neighbouring groups of eight columns, 16 bytes: of the
// first half of the paired columns, and the same of the second.
#pragma once
// EIGHTS: words 0 to 3 are eight columns, 4 to 7 eight others, as they lie. SINGLES: eight pairs' first numbers, and
// their second.
template<typename T> struct pt { uint32_t d[8]; };
struct pa { float first[8], second[8]; };
struct pc { float d[16]; };            // in the order of pt's numbers
template<int R> struct pr { float d[R]; };
struct alignas(128) ps { float d[16][128]; };
template<typename X> struct per_slot { X d; };

// Places are worked out for both kinds of access; what a kernel does not use is not computed.
struct paired {
  pairing p;
  int lane, slot;
  bool with_pairs, full;                 // full: both groups are in the row
  int first, second;                     // EIGHTS: columns where the groups begin
  int angle, second_angle;               // EIGHTS: of pairs 0 to 3 and 4 to 7 of the thread
};
// A register. The compiler would rather work places out again for every row.
TILE int kept(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
TILE paired paired_of(const pairing &p) {
  int lane = thread_in_group() & ((1 << p.lanes_log2) - 1), slot = thread_in_group() >> p.lanes_log2;
  bool with_pairs = lane < p.pairs + 7 >> 3;
  int first = (with_pairs ? 8 : 16) * lane, second = first + (with_pairs ? p.pairs : 8);
  int angle = (p.interleaved ? 4 : 8) * lane, second_angle = angle + (p.interleaved ? p.pairs / 2 : 4);
  return {p, lane, slot, with_pairs, (bool)kept(second < p.width), kept(first), kept(second), angle, second_angle};
}
template<typename X, class F> TILE void set(per_slot<X> &x, const paired &p, F f) { x.d = f(p.slot); }
template<typename X> TILE const X &of_slot(const per_slot<X> &x, int) { return x.d; }
// SINGLES: the column of the thread's number i, 0 to 15, or -1.
TILE int column_of(const paired &c, int i) {
  const pairing &p = c.p;
  int pair = 8 * c.lane + (i & 7), second = i >> 3, alone = 2 * p.pairs + 16 * (c.lane - (p.pairs + 7 >> 3)) + i;
  if (!c.with_pairs) return alone < p.width ? alone : -1;
  return pair >= p.pairs ? -1 : p.interleaved ? 2 * pair + second : pair + second * p.pairs;
}

template<int A, typename T, class F> TILE void load(pt<T> &x, const paired &p, F f) {
  row_of<const T> row = f(p.slot);
  if constexpr (A == EIGHTS) {
    uint4 u = make_uint4(0, 0, 0, 0), v = u;
    if (row.exists && p.full) {
      u = *(const uint4 *)(row.begin + p.first);
      v = *(const uint4 *)(row.begin + p.second);
    }
    x.d[0] = u.x;
    x.d[1] = u.y;
    x.d[2] = u.z;
    x.d[3] = u.w;
    x.d[4] = v.x;
    x.d[5] = v.y;
    x.d[6] = v.z;
    x.d[7] = v.w;
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      int low = column_of(p, 2 * j), high = column_of(p, 2 * j + 1);
      uint32_t a = row.exists && low >= 0 ? row.begin[low].u : 0, b = row.exists && high >= 0 ? row.begin[high].u : 0;
      x.d[j] = b << 16 | a;
    }
  }
}
template<int A, typename T, class F> TILE void save(F f, const pt<T> &x, const paired &p) {
  row_of<T> row = f(p.slot);
  if constexpr (A == EIGHTS) {
    if (!row.exists || !p.full) return;
    *(uint4 *)(row.begin + p.first) = make_uint4(x.d[0], x.d[1], x.d[2], x.d[3]);
    *(uint4 *)(row.begin + p.second) = make_uint4(x.d[4], x.d[5], x.d[6], x.d[7]);
  } else if (row.exists) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int c = column_of(p, i);
      if (c >= 0) row.begin[c].u = (uint16_t)(x.d[i >> 1] >> (i & 1) * 16);
    }
  }
}

TILE void four_angles(float *d, const float *g) {
  float4 x = *(const float4 *)g;
  d[0] = x.x;
  d[1] = x.y;
  d[2] = x.z;
  d[3] = x.w;
}
template<typename T> TILE void four_angles(float *d, const T *g) {
  uint2 x = *(const uint2 *)g;
  float2 low = unpack<T>(x.x), high = unpack<T>(x.y);
  d[0] = low.x;
  d[1] = low.y;
  d[2] = high.x;
  d[3] = high.y;
}
// Numbers 4 to 7 are of the second group of columns where pairs are neighbours.
template<int A, typename T> TILE void angles_of_row(float (&d)[8], const paired &p, row_of<const T> row) {
#pragma unroll
  for (int i = 0; i < 8; i++) d[i] = 0.f;
  if (!row.exists || !p.with_pairs) return;
  if constexpr (A == EIGHTS) {
    four_angles(d, row.begin + p.angle);
    four_angles(d + 4, row.begin + p.second_angle);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (8 * p.lane + i < p.p.pairs) d[i] = to_float(row.begin[8 * p.lane + i]);
  }
}
template<int A, class F, class G> TILE void load(pa &a, const paired &p, F first, G second) {
  angles_of_row<A>(a.first, p, first(p.slot));
  angles_of_row<A>(a.second, p, second(p.slot));
}

template<int A, int R, typename T, class F> TILE void each_pair(pt<T> (&x)[R], const pa &a, const paired &p, F f) {
  if (!p.with_pairs) return;
  if (A == EIGHTS && p.p.interleaved) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float2 v = unpack<T>(x[r].d[j]);
        f(v.x, v.y, a.first[j], a.second[j]);
        x[r].d[j] = pack<T>(v.x, v.y);
      }
  } else {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float2 u = unpack<T>(x[r].d[j]), v = unpack<T>(x[r].d[4 + j]);
        f(u.x, v.x, a.first[2 * j], a.second[2 * j]);
        f(u.y, v.y, a.first[2 * j + 1], a.second[2 * j + 1]);
        x[r].d[j] = pack<T>(u.x, u.y);
        x[r].d[4 + j] = pack<T>(v.x, v.y);
      }
  }
}

template<int A, typename T> TILE void load(pc &x, const paired &p, row_of<T> row) {
#pragma unroll
  for (int i = 0; i < 16; i++) x.d[i] = 0.f;
  if constexpr (A == EIGHTS) {
    if (!p.full) return;
#pragma unroll
    for (int i = 0; i < 16; i += 4) four_angles(x.d + i, row.begin + (i < 8 ? p.first : p.second) + i % 8);
  } else {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int c = column_of(p, i);
      if (c >= 0) x.d[i] = to_float(row.begin[c]);
    }
  }
}
TILE void fill(pc &x, float y) {
#pragma unroll
  for (int i = 0; i < 16; i++) x.d[i] = y;
}
template<int R> TILE void fill(pr<R> &x, float y) {
#pragma unroll
  for (int r = 0; r < R; r++) x.d[r] = y;
}
// A row's sum of what its lanes have, then f of it.
template<int R, class F> TILE void over_lanes(pr<R> &x, const paired &p, F f) {
  for (int o = 1; o < 1 << p.p.lanes_log2; o *= 2)
#pragma unroll
    for (int r = 0; r < R; r++) x.d[r] += __shfl_xor_sync(~0u, x.d[r], o);
#pragma unroll
  for (int r = 0; r < R; r++) x.d[r] = f(x.d[r]);
}
template<int A, int R, typename T, class F> TILE void squares(pr<R> &x, const pt<T> (&rows)[R], const paired &p, F f) {
#pragma unroll
  for (int r = 0; r < R; r++) {
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float2 v = unpack<T>(rows[r].d[j]);
      sum.x = fused(v.x, v.x, sum.x);
      sum.y = fused(v.y, v.y, sum.y);
    }
    x.d[r] = sum.x + sum.y;
  }
  over_lanes(x, p, f);
}
template<int A, int R, typename T, class F, class G>
TILE void each_pair(pt<T> (&x)[R], const pa &a, const pc &columns, const pr<R> &rows, const paired &p, F f, G g) {
  const float (&w)[16] = columns.d;
  if (!p.with_pairs) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float2 v = unpack<T>(x[r].d[j]);
        g(v.x, w[2 * j], rows.d[r]);
        g(v.y, w[2 * j + 1], rows.d[r]);
        x[r].d[j] = pack<T>(v.x, v.y);
      }
  } else if (A == EIGHTS && p.p.interleaved) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float2 v = unpack<T>(x[r].d[j]);
        f(v.x, v.y, a.first[j], a.second[j], w[2 * j], w[2 * j + 1], rows.d[r]);
        x[r].d[j] = pack<T>(v.x, v.y);
      }
  } else {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float2 u = unpack<T>(x[r].d[j]), v = unpack<T>(x[r].d[4 + j]);
        f(u.x, v.x, a.first[2 * j], a.second[2 * j], w[2 * j], w[8 + 2 * j], rows.d[r]);
        f(u.y, v.y, a.first[2 * j + 1], a.second[2 * j + 1], w[2 * j + 1], w[9 + 2 * j], rows.d[r]);
        x[r].d[j] = pack<T>(u.x, u.y);
        x[r].d[4 + j] = pack<T>(v.x, v.y);
      }
  }
}

// ---- rows of two tensors
template<typename T> TILE void numbers_of(float (&v)[16], const pt<T> &x) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    float2 pair = unpack<T>(x.d[j]);
    v[2 * j] = pair.x;
    v[2 * j + 1] = pair.y;
  }
}
template<int A, int R, typename T, class F, class G, class H>
TILE void dots(pr<R> &d, const pt<T> (&x)[R], const pt<T> (&u)[R], const pa &a, const pc &columns, const pr<R> &rows,
               const paired &p, F f, G g, H h) {
  const float (&w)[16] = columns.d;
#pragma unroll
  for (int r = 0; r < R; r++) {
    float v[16], o[16], sum = 0.f;
    numbers_of(v, x[r]);
    numbers_of(o, u[r]);
    if (!p.with_pairs) {
#pragma unroll
      for (int i = 0; i < 16; i++) sum += g(v[i], o[i], w[i], rows.d[r]);
    } else if (A == EIGHTS && p.p.interleaved) {
#pragma unroll
      for (int j = 0; j < 8; j++)
        sum += f(v[2 * j], v[2 * j + 1], o[2 * j], o[2 * j + 1], a.first[j], a.second[j], w[2 * j], w[2 * j + 1],
                 rows.d[r]);
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++)
        sum += f(v[j], v[j + 8], o[j], o[j + 8], a.first[j], a.second[j], w[j], w[j + 8], rows.d[r]);
    }
    d.d[r] = sum;
  }
  over_lanes(d, p, h);
}
template<int A, int R, typename T, class F, class G>
TILE void each_pair(pt<T> (&x)[R], const pt<T> (&u)[R], const pa &a, const pc &columns, const pr<R> &rows,
                    const pr<R> &others, pc &sums, const paired &p, F f, G g) {
  const float (&w)[16] = columns.d;
  float (&s)[16] = sums.d;
#pragma unroll
  for (int r = 0; r < R; r++) {
    float v[16], o[16], row = rows.d[r], other = others.d[r];
    numbers_of(v, x[r]);
    numbers_of(o, u[r]);
    if (!p.with_pairs) {
#pragma unroll
      for (int i = 0; i < 16; i++) g(v[i], o[i], w[i], row, other, s[i]);
    } else if (A == EIGHTS && p.p.interleaved) {
#pragma unroll
      for (int j = 0; j < 16; j += 2)
        f(v[j], v[j + 1], o[j], o[j + 1], a.first[j / 2], a.second[j / 2], w[j], w[j + 1], row, other, s[j], s[j + 1]);
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++)
        f(v[j], v[j + 8], o[j], o[j + 8], a.first[j], a.second[j], w[j], w[j + 8], row, other, s[j], s[j + 8]);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) x[r].d[j] = pack<T>(v[2 * j], v[2 * j + 1]);
  }
}
TILE void put(ps &d, const pc &sums, const paired &) {
#pragma unroll
  for (int i = 0; i < 16; i++) d.d[i][thread_in_group()] = sums.d[i];
}
// Number i of every slot's thread `lane`.
template<int A> TILE void save(float *g, const ps &s, const paired &p) {
  for (int n = thread_in_group(); n < 16 << p.p.lanes_log2; n += 128) {
    paired of = p;
    int i = n & 15, lane = n >> 4;
    of.lane = lane;
    of.with_pairs = lane < p.p.pairs + 7 >> 3;
    int first = (of.with_pairs ? 8 : 16) * lane, second = first + (of.with_pairs ? p.p.pairs : 8);
    int c = A == SINGLES ? column_of(of, i) : second >= p.p.width ? -1 : i < 8 ? first + i : second + i - 8;
    float sum = 0.f;
    for (int slot = 0; slot < slots_of(p.p); slot++) sum += s.d[i][slot << p.p.lanes_log2 | lane];
    if (c >= 0) g[c] = sum;
  }
}
