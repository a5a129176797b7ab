// Bodies of tile/pairs.h on the CPU, and for the checker. A row lies as its pairs' first numbers, their second ones, the
// columns without a partner. Numbers are rounded when they are saved.
#pragma once
#ifdef CHECK
#define PAIRS_STATE state_of_registers state;
#else
#define PAIRS_STATE
#endif
enum { PAIRED_NUMBERS = 128 * 16 };
template<typename T> struct pt { alignas(64) float d[PAIRED_NUMBERS]; PAIRS_STATE };
struct pa { alignas(64) float first[PAIRED_NUMBERS / 2], second[PAIRED_NUMBERS / 2]; PAIRS_STATE };
#undef PAIRS_STATE
struct paired : pairing {};
TILE paired paired_of(const pairing &p) { return {p}; }
template<typename X> struct per_slot { X d[WARPGROUP]; };
template<typename X, class F> TILE void set(per_slot<X> &x, const paired &p, F f) {
  for (int slot = 0; slot < slots_of(p); slot++) x.d[slot] = f(slot);
}
template<typename X> TILE const X &of_slot(const per_slot<X> &x, int slot) { return x.d[slot]; }

template<int A, typename T, class F> TILE void load(pt<T> &x, const paired &p, F f) {
  called_by<WARPGROUP>();
  writes(x);
  float *d = x.d;
  for (int slot = 0; slot < slots_of(p); slot++, d += 16 << p.lanes_log2) {
    const auto [row, exists] = f(slot);
    if (!exists) {
      memset(d, 0, p.width * sizeof(float));
      continue;
    }
    touches_global(row, p.width * sizeof(T), GLOBAL_READ);
    const int paired = p.interleaved ? 2 * p.pairs : 0;
    for (int i = 0; i < paired; i += 2) {
      d[i >> 1] = widen(row[i]);
      d[(i >> 1) + p.pairs] = widen(row[i + 1]);
    }
    widen_row(d + paired, row + paired, p.width - paired);
  }
}
template<int A, typename T, class F> TILE void save(F f, const pt<T> &x, const paired &p) {
  called_by<WARPGROUP>();
  reads(x);
  const float *d = x.d;
  for (int slot = 0; slot < slots_of(p); slot++, d += 16 << p.lanes_log2) {
    const auto [row, exists] = f(slot);
    if (!exists) continue;
    touches_global(row, p.width * sizeof(T), GLOBAL_WRITE);
    const int paired = p.interleaved ? 2 * p.pairs : 0;
    for (int i = 0; i < paired; i += 2) {
      narrow(row[i], d[i >> 1]);
      narrow(row[i + 1], d[(i >> 1) + p.pairs]);
    }
    narrow_row(row + paired, d + paired, p.width - paired);
  }
}

template<typename T> TILE void angles_of_row(float *d, const paired &p, row_of<const T> row) {
  if (!row.exists) {
    memset(d, 0, p.pairs * sizeof(float));
    return;
  }
  touches_global(row.begin, p.pairs * sizeof(T), GLOBAL_READ);
  widen_row(d, row.begin, p.pairs);
}
template<int A, class F, class G> TILE void load(pa &a, const paired &p, F first, G second) {
  called_by<WARPGROUP>();
  writes(a);
  for (int slot = 0, at = 0; slot < slots_of(p); slot++, at += 8 << p.lanes_log2) {
    angles_of_row(a.first + at, p, first(slot));
    angles_of_row(a.second + at, p, second(slot));
  }
}

template<int A, int R, typename T, class F>
__attribute__((flatten)) TILE void each_pair(pt<T> (&x)[R], const pa &a, const paired &p, F f) {
  reads(a);
  for (pt<T> &row : x) {
    changes(row);
    for (int slot = 0; slot < slots_of(p); slot++) {
      float *u = row.d + slot * (16 << p.lanes_log2), *v = u + p.pairs;
      const float *first = a.first + slot * (8 << p.lanes_log2), *second = a.second + slot * (8 << p.lanes_log2);
#pragma GCC ivdep
      for (int i = 0; i < p.pairs; i++) f(u[i], v[i], first[i], second[i]);
    }
  }
}
