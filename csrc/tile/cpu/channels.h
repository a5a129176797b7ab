// Bodies of tile/channels.h.
#pragma once
enum { CT_ROW = 64 + 8 };
struct alignas(128) ct { float d[64 * CT_ROW]; };
struct cg { sv<64> sum[4], middle[4], end[4], between[3]; sv<32> reach; };
struct alignas(128) handed { float d[10][16][16]; };
#ifdef CHECK
struct hv { alignas(64) float d[64]; state_of_registers state; };
struct hm { alignas(64) float d[64][64]; state_of_registers state; };
#else
struct hv { alignas(64) float d[64]; };
struct hm { alignas(64) float d[64][64]; };
#endif

TILE void fill(hv &v, float x) {
  writes(v);
  for (int c = 0; c < 64; c++) v.d[c] = x;
}
TILE void load(hv &v, const float *g, int n) {
  n = n < 64 ? n : 64;
  touches_global(g, n * sizeof(float), GLOBAL_READ);
  writes(v);
  for (int c = 0; c < 64; c++) v.d[c] = c < n ? g[c] : 0.f;
}
TILE void store(float *g, const hv &v, int n) {
  n = n < 64 ? n : 64;
  reads(v);
  touches_global(g, n * sizeof(float), GLOBAL_WRITE);
  memcpy(g, v.d, n * sizeof(float));
}
template<int N> TILE void store(sv<N> &d, int c0, const hv &v) {
  reads(v);
  writes_shared(d, {d.d + c0, 1, 0, 64 * (int)sizeof(float)});
  memcpy(d.d + c0, v.d, sizeof v.d);
}
template<int N> TILE void load(hv &v, const sv<N> &s, int c0) {
  reads_shared({s.d + c0, 1, 0, 64 * (int)sizeof(float)});
  writes(v);
  memcpy(v.d, s.d + c0, sizeof v.d);
}
template<class F> __attribute__((flatten)) TILE void map(hv &d, const hv &a, F f) {
  reads(a);
  writes(d);
  for (int c = 0; c < 64; c++) d.d[c] = f(a.d[c]);
}
template<class F> __attribute__((flatten)) TILE void map(hv &d, const hv &a, const hv &b, F f) {
  reads(a);
  reads(b);
  writes(d);
  for (int c = 0; c < 64; c++) d.d[c] = f(a.d[c], b.d[c]);
}
template<class F> __attribute__((flatten)) TILE void map_index(hv &d, F f) {
  writes(d);
  for (int c = 0; c < 64; c++) d.d[c] = f(c);
}
TILE float max_of(const hv &v) {
  reads(v);
  float x = v.d[0];
  for (int c = 1; c < 64; c++) x = v.d[c] > x ? v.d[c] : x;
  return x;
}
TILE float sum_of(const hv &v) {
  reads(v);
  float x = 0.f;
  for (int c = 0; c < 64; c++) x += v.d[c];
  return x;
}
template<typename T> TILE void load(hm &x, const T *g, int64_t ld, int m, int n) {
  writes(x);
  n = n < 0 ? 0 : n < 64 ? n : 64;
  memset((void *)x.d, 0, sizeof x.d);
  for (int i = 0; i < 64 && i < m; i++) {
    touches_global(g + i * ld, n * sizeof(T), GLOBAL_READ);
    widen_row(x.d[i], g + i * ld, n);
  }
}
template<typename T, class Tile> TILE void load_whole(hm &x, const Tile &s, const T *from) {
  reads_shared(whole(s));
  writes(x);
  for (int i = 0; i < 64; i++) widen_row(x.d[i], from + i * 64, 64);
}
TILE void load(hm &x, const sm<64, 64> &s) { load_whole(x, s, s.d); }
template<typename T> TILE void load(hm &x, const st<T, 64, 64> &s) { load_whole(x, s, s.d); }
TILE void clear_behind(sm<64, 64> &s, int m) {
  called_by<WARPGROUP>();
  writes_shared(s, whole(s));
  for (int i = m > 0 ? m : 0; i < 64; i++) memset(s.d + i * 64, 0, 64 * sizeof *s.d);
}
TILE void store(sm<64, 64> &d, const hm &x) {
  reads(x);
  writes_shared(d, whole(d));
  memcpy(d.d, x.d, sizeof x.d);
}
template<typename T> TILE void prefetch(const T *, int64_t, int, int) {}
template<class F> __attribute__((flatten)) TILE void map(hm &x, const hv &v, int m, F f) {
  reads(v);
  changes(x);
  for (int i = 0; i < 64 && i < m; i++) {
#pragma GCC ivdep
    for (int c = 0; c < 64; c++) x.d[i][c] = f(x.d[i][c], v.d[c]);
  }
}
template<int N> TILE void store_sums(sv<N> (&d)[4], int c0, const hm &x) {
  reads(x);
  for (int g = 0; g < 4; g++) {
    writes_shared(d[g], {d[g].d + c0, 1, 0, 64 * (int)sizeof(float)});
    for (int c = 0; c < 64; c++) {
      float sum = 0.f;
      for (int i = 16 * g; i < 16 * g + 16; i++) sum += x.d[i][c];
      d[g].d[c0 + c] = sum;
    }
  }
}
TILE void at_least(hm &x, float low) {
  changes(x);
  for (int i = 0; i < 64; i++)
    for (int c = 0; c < 64; c++) x.d[i][c] = x.d[i][c] < low ? low : x.d[i][c];
}
template<class F, class G>
__attribute__((flatten)) TILE enum reach sum_down(ct &s, cg &groups, hv &end, const hm &x, float unit, float most,
                                                  bool steep, F f, G g) {
  bool all_near = !steep, all_within = true;
  float sum[64][64], middle[4][64];         // sums from a group's first row on; what is taken off them
  reads(x);
  writes(end);
  writes_shared(groups.sum[0], whole(groups.sum));
  writes_shared(groups.sum[0], whole(groups.between));
  for (int i = 0; i < 64; i++)
    for (int c = 0; c < 64; c++) sum[i][c] = i % 16 ? sum[i - 1][c] + x.d[i][c] : x.d[i][c];
  for (int i = 0; i < 64; i++)
    for (int c = 0; c < 64; c++) sum[i][c] *= unit;
  for (int n = 0; n < 4; n++)
    for (int c = 0; c < 64; c++) {
      middle[n][c] = 0.5f * (sum[16 * n + 7][c] + sum[16 * n + 8][c]);
      float all = sum[16 * n + 15][c], first = sum[16 * n][c], from = middle[n][c];
      all_within = all_within && fabsf(first - from) <= most && fabsf(all - from) <= most;
      all_near = all_near && all_within && fabsf(all) <= most && fabsf(from) <= most && fabsf(first) <= most &&
                 fabsf(first - all) <= most;
    }
  // One vote or two, in one call: what is behind them wants one of them to be a sync.
  for (int votes = all_near || steep ? 1 : 2; votes > 0; votes--) wg_sync();
  if (!all_within && !steep) return BEYOND;
  for (int c = 0; c < 64; c++) end.d[c] = 0.f;
  for (int n = 0; n < 4; n++)
    for (int c = 0; c < 64; c++) {
      float all = sum[16 * n + 15][c];
      if (all_near) middle[n][c] = n & 1 ? 0.f : all;
      groups.middle[n].d[c] = end.d[c] + middle[n][c];
      end.d[c] += all;
      groups.end[n].d[c] = all - middle[n][c];
      for (int b = 0; b < n; b++) groups.end[b].d[c] += all;
      if (n > 0) groups.between[n - 1].d[c] += middle[n][c];
      if (n < 3) groups.between[n].d[c] = all - middle[n][c];
    }
  for (int i = 0; i < 64; i++)
    for (int c = 0; c < 64; c++) s.d[i * CT_ROW + c] = sum[i][c] - middle[i / 16][c];
  for (int n = 0; n < 4; n++)
    for (int c = 0; c < 64; c++) {
      groups.middle[n].d[c] = g(groups.middle[n].d[c]);
      groups.end[n].d[c] = g(groups.end[n].d[c]);
      if (n < 3) groups.between[n].d[c] = f(groups.between[n].d[c]);
    }
  writes_shared(*(const sv<32> *)&s, whole(s));
  writes_shared(groups.sum[0], whole(groups));
  enum reach reach = steep ? BEYOND : all_near ? NEAR : WITHIN;
  groups.reach.d[0] = reach;
  return reach;
}
TILE enum reach reach_of(const cg &groups) {
  reads_shared(whole(groups.reach));
  return (enum reach)(int)groups.reach.d[0];
}
TILE void load(rt<float, 64> &t, const ct &s) {
  reads_shared(whole(s));
  writes(t);
  for (int r = 0; r < 64; r++) memcpy(t.d[r], s.d + r * CT_ROW, sizeof t.d[r]);
}
TILE void part_uses(ct &s, int c0) {
  reads_shared({s.d + c0, 64, CT_ROW * (int)sizeof(float), 16 * (int)sizeof(float)});
}
TILE own_places<const float> part_row(const ct &s, int r, int c0) { return {s.d + r * CT_ROW + c0}; }
TILE void part_uses(const by_group &g, int c0) {
  for (int i = 0; i < 4; i++) part_uses(g.v[i], c0);
}
TILE own_places<const float> part_row(const by_group &g, int r, int c0) { return {g.v[r / 16].d + c0}; }
template<typename T> TILE void part_uses(const own_rows<T> &t, int c0) { reads_own(part(t.s, 0, 64, c0, 16)); }
template<typename T> TILE row_buffer<16> part_row(const own_rows<T> &t, int r, int c0) { return part_row(t.s, r, c0); }
template<typename T> TILE void each_uses(const own_rows<T> &t) { reads_own(whole(t.s)); }
template<int N, typename T> TILE auto each_row(const own_rows<T> &t, int r) {
  return each_row<N>((const st<T, 64, 64> &)t.s, r);
}
template<typename T, int C, int N> TILE void store_own(st<T, 64, C> &d, const rt<float, N> &t, int c0) {
  reads(t);
  writes_own(d, part(d, 0, 64, c0, N));
  for (int r = 0; r < 64; r++) narrow_row(d.d + r * C + c0, t.d[r], N);
}
template<typename T, int C> TILE void store_own(st<T, 64, C> &d, const rt<float, 16> &t, int panel, int c0) {
  store_own(d, t, 64 * panel + c0);
}
template<typename T> TILE void load_part(rt<T, 16> &d, const own_rows<T> &s, int c0) {
  reads_own(part(s.s, 0, 64, c0, 16));
  writes(d);
  for (int r = 0; r < 64; r++) memcpy((void *)d.d[r], s.s.d + r * 64 + c0, sizeof d.d[r]);
}
TILE void load_part(rt<float, 16> &d, const ct &s, int c0) {
  reads_shared({s.d + c0, 64, CT_ROW * (int)sizeof(float), 16 * (int)sizeof(float)});
  writes(d);
  for (int r = 0; r < 64; r++) memcpy(d.d[r], s.d + r * CT_ROW + c0, sizeof d.d[r]);
}
TILE void carry_to_group(rt<float, 64> &x, const sv<64> &f, int group) {
  reads_shared(whole(f));
  changes(x);
  for (int r = 0; r < 16 * group; r++)
    for (int c = 0; c < 64; c++) x.d[r][c] *= f.d[c];
}
template<typename W> TILE void convert_group(rt<W, 64> &d, const rt<float, 64> &x, int group) {
  reads(x);
  writes(d);
  memset((void *)d.d, 0, sizeof d.d);
  narrow_row(d.d[0], x.d[0], 64 * 16 * (group + 1));
}
template<typename T> TILE void store_groups(st<T, 32, 64> (&d)[4], int half, const rt<float, 16> &t, int c0) {
  reads(t);
  for (int w = 0; w < 4; w++) writes_shared(d[w], part(d[w], 16 * half, 16, c0, 16));
  for (int r = 0; r < 64; r++) narrow_row(d[r / 16].d + (16 * half + r % 16) * 64 + c0, t.d[r], 16);
}
template<typename T> TILE void store_group(st<T, 32, 64> &d, int half, const rt<float, 16> &t, int c0, int group) {
  reads(t);
  writes_shared(d, part(d, 16 * half, 16, c0, 16));
  for (int i = 0; i < 16; i++) narrow_row(d.d + (16 * half + i) * 64 + c0, t.d[16 * group + i], 16);
}
template<typename T>
TILE void mma_ABt_halves_by_warps(rt<float, 16> &d, rt<float, 16> &e, const rt<T, 64> &a, const st<T, 32, 64> &b) {
  alignas(64) float scratch[scratch_floats<T, 64>()];
  rt<float, 32> both;
  enum { DEPTH = 64 / word_of<T>::ELEMENTS };
  reads(a);
  reads_shared(whole(b));
  writes(d);
  writes(e);
  product<ZERO, VW>(both, operand(a, scratch), packed<PACK_COLS>(b), DEPTH, DEPTH);
  for (int r = 0; r < 64; r++) {
    memcpy(d.d[r], both.d[r], sizeof d.d[r]);
    memcpy(e.d[r], both.d[r] + 16, sizeof e.d[r]);
  }
}
TILE void put_group(rt<float, 64> &d, const rt<float, 16> &t, int group) {
  reads(t);
  writes(d);
  for (int r = 0; r < 64; r++) memcpy(d.d[r] + 16 * group, t.d[r], sizeof t.d[r]);
}
TILE void hand_over(handed &d, const rt<float, 16> &t, int group) {
  reads(t);
  const int first = group * (group + 1) / 2;
  writes_shared(*(const sv<32> *)&d, {d.d[first], 1, 0, (group + 1) * (int)sizeof d.d[0]});
  memcpy(d.d[first], t.d, (group + 1) * sizeof d.d[0]);
}
TILE void add(rt<float, 64> &t, const handed &s) {
  reads_shared(whole(s));
  changes(t);
  for (int r = 0; r < 64; r++)
    for (int c = r / 16 * 16; c < 64; c++) {
      int group = c / 16;
      t.d[r][c] += s.d[group * (group + 1) / 2 + r / 16][r % 16][c % 16];
    }
}
template<typename T> TILE void load_steps(rv &v, const T *g, int64_t stride, int n) {
  for (int r = 0; r < 64 && r < n; r++) touches_global(g + r * stride, sizeof(T), GLOBAL_READ);
  writes(v);
  for (int r = 0; r < 64; r++) v.d[r] = r < n ? widen(g[r * stride]) : 0.f;
}
template<typename T, int N> TILE void load_steps(wv<N> &v, const T *g, int64_t stride, int n) {
  writes(v);
  for (int i = 0; i < N && i < n; i++) touches_global(g + i * stride, sizeof(T), GLOBAL_READ);
  for (int i = 0; i < N; i++) v.d[i] = i < n ? widen(g[i * stride]) : 0.f;
}
TILE void store_steps(float *g, const rv &v, int64_t stride, int n) {
  for (int r = 0; r < 64 && r < n; r++) touches_global(g + r * stride, sizeof(float), GLOBAL_WRITE);
  reads(v);
  for (int r = 0; r < 64 && r < n; r++) g[r * stride] = v.d[r];
}
// To the compiler, tiles of different types have nothing to do with each other: accesses might change places.
template<class Tile, class Other> TILE Tile &in_place_of(Other &t) {
  IN_PLACE_RULES(Tile, Other);
  asm volatile("" ::: "memory");
  return *(Tile *)&t;
}
