// Bodies of tile/pairs.h on sm_90a. Neighbouring threads hold neighbouring groups of eight columns, 16 bytes: of the
// first half of the paired columns, and the same of the second.
#pragma once
// EIGHTS: words 0 to 3 are eight columns, 4 to 7 eight others, as they lie. SINGLES: eight pairs' first numbers, and
// their second.
template<typename T> struct pt { uint32_t d[8]; };
struct pa { float first[8], second[8]; };

TILE int pair_lane(const pairing &p) { return thread_in_group() & ((1 << p.lanes_log2) - 1); }
TILE int pair_slot(const pairing &p) { return thread_in_group() >> p.lanes_log2; }
TILE int paired_lanes(const pairing &p) { return p.pairs + 7 >> 3; }

// EIGHTS: where a thread's two groups of columns begin. The second is at `width` or behind where there are none.
struct column_groups { int first, second; };
TILE column_groups groups_of(const pairing &p, int lane) {
  if (lane < paired_lanes(p)) return {8 * lane, 8 * lane + p.pairs};
  return {16 * lane, 16 * lane + 8};
}
// SINGLES: the column of the thread's number i, 0 to 15, or -1.
TILE int column_of(const pairing &p, int lane, int i) {
  int pair = 8 * lane + (i & 7), second = i >> 3, alone = 2 * p.pairs + 16 * (lane - paired_lanes(p)) + i;
  if (lane >= paired_lanes(p)) return alone < p.width ? alone : -1;
  return pair >= p.pairs ? -1 : p.interleaved ? 2 * pair + second : pair + second * p.pairs;
}

template<int A, typename T, class F> TILE void load(pt<T> &x, const pairing &p, F f) {
  const T *row = f(pair_slot(p));
  int lane = pair_lane(p);
  if constexpr (A == EIGHTS) {
    column_groups c = groups_of(p, lane);
    uint4 u = make_uint4(0, 0, 0, 0), v = u;
    if (row && c.second < p.width) {
      u = *(const uint4 *)(row + c.first);
      v = *(const uint4 *)(row + c.second);
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
      int low = column_of(p, lane, 2 * j), high = column_of(p, lane, 2 * j + 1);
      uint32_t a = row && low >= 0 ? row[low].u : 0, b = row && high >= 0 ? row[high].u : 0;
      x.d[j] = b << 16 | a;
    }
  }
}
template<int A, typename T, class F> TILE void save(F f, const pt<T> &x, const pairing &p) {
  T *row = f(pair_slot(p));
  int lane = pair_lane(p);
  if (!row) return;
  if constexpr (A == EIGHTS) {
    column_groups c = groups_of(p, lane);
    if (c.second >= p.width) return;
    *(uint4 *)(row + c.first) = make_uint4(x.d[0], x.d[1], x.d[2], x.d[3]);
    *(uint4 *)(row + c.second) = make_uint4(x.d[4], x.d[5], x.d[6], x.d[7]);
  } else {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int c = column_of(p, lane, i);
      if (c >= 0) row[c].u = (uint16_t)(x.d[i >> 1] >> (i & 1) * 16);
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
template<int A, typename T> TILE void angles_of_row(float (&d)[8], const pairing &p, const T *row) {
  int lane = pair_lane(p);
#pragma unroll
  for (int i = 0; i < 8; i++) d[i] = 0.f;
  if (!row || lane >= paired_lanes(p)) return;
  if constexpr (A == EIGHTS) {
    four_angles(d, row + (p.interleaved ? 4 * lane : 8 * lane));
    four_angles(d + 4, row + (p.interleaved ? p.pairs / 2 + 4 * lane : 8 * lane + 4));
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (8 * lane + i < p.pairs) d[i] = to_float(row[8 * lane + i]);
  }
}
template<int A, class F, class G> TILE void load(pa &a, const pairing &p, F first, G second) {
  int slot = pair_slot(p);
  angles_of_row<A>(a.first, p, first(slot));
  angles_of_row<A>(a.second, p, second(slot));
}

template<int A, typename T, class F> TILE void each_pair(pt<T> &x, const pa &a, const pairing &p, F f) {
  if (pair_lane(p) >= paired_lanes(p)) return;
  if (A == EIGHTS && p.interleaved) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float2 v = unpack<T>(x.d[j]);
      f(v.x, v.y, a.first[j], a.second[j]);
      x.d[j] = pack<T>(v.x, v.y);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 u = unpack<T>(x.d[j]), v = unpack<T>(x.d[4 + j]);
      f(u.x, v.x, a.first[2 * j], a.second[2 * j]);
      f(u.y, v.y, a.first[2 * j + 1], a.second[2 * j + 1]);
      x.d[j] = pack<T>(u.x, u.y);
      x.d[4 + j] = pack<T>(v.x, v.y);
    }
  }
}
