// Bodies of tile/pairs.h on the CPU, and for the checker. A row lies as its pairs' first numbers, their second ones,
// the columns without a partner. Numbers are rounded when they are saved.
#pragma once
#ifdef CHECK
#define PAIRS_STATE state_of_registers state;
#else
#define PAIRS_STATE
#endif
enum { PAIRED_NUMBERS = 128 * 16 };
template<typename T> struct pt { alignas(64) float d[PAIRED_NUMBERS]; PAIRS_STATE };
struct pa { alignas(64) float first[PAIRED_NUMBERS / 2], second[PAIRED_NUMBERS / 2]; PAIRS_STATE };
struct pc { alignas(64) float d[PAIRED_NUMBERS]; PAIRS_STATE };
template<int R> struct pr { float d[R][WARPGROUP]; PAIRS_STATE };
#undef PAIRS_STATE
struct alignas(128) ps { float d[PAIRED_NUMBERS]; };
struct paired : pairing {};
TILE paired paired_of(const pairing &p) { return {p}; }
template<typename X> struct per_slot { X d[WARPGROUP]; };
template<typename X, class F> TILE void set(per_slot<X> &x, const paired &p, F f) {
  for (int slot = 0; slot < slots_of(p); slot++) x.d[slot] = f(slot);
}
template<typename X> TILE const X &of_slot(const per_slot<X> &x, int slot) { return x.d[slot]; }

template<typename T> TILE void read_row(float *d, const T *row, const paired &p) {
  touches_global(row, p.width * sizeof(T), GLOBAL_READ);
  const int paired = p.interleaved ? 2 * p.pairs : 0;
  for (int i = 0; i < paired; i += 2) {
    d[i >> 1] = widen(row[i]);
    d[(i >> 1) + p.pairs] = widen(row[i + 1]);
  }
  widen_row(d + paired, row + paired, p.width - paired);
}
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
    read_row(d, row, p);
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

template<int A, typename T> TILE void load(pc &x, const paired &p, row_of<T> row) {
  called_by<WARPGROUP>();
  writes(x);
  read_row(x.d, row.begin, p);
}
TILE void fill(pc &x, float y) {
  writes(x);
  for (float &d : x.d) d = y;
}
template<int R> TILE void fill(pr<R> &x, float y) {
  writes(x);
  for (auto &row : x.d)
    for (float &d : row) d = y;
}
template<int A, int R, typename T, class F> TILE void squares(pr<R> &x, const pt<T> (&rows)[R], const paired &p, F f) {
  writes(x);
  for (int r = 0; r < R; r++) {
    reads(rows[r]);
    for (int slot = 0; slot < slots_of(p); slot++) {
      const float *d = rows[r].d + slot * (16 << p.lanes_log2);
      float parts[16] = {}, sum = 0.f;
      int i = 0;
      for (; i + 16 <= p.width; i += 16)
#pragma GCC ivdep
        for (int j = 0; j < 16; j++) parts[j] += d[i + j] * d[i + j];
      for (; i < p.width; i++) parts[i % 16] += d[i] * d[i];
      for (float part : parts) sum += part;
      x.d[r][slot] = f(sum);
    }
  }
}
template<int A, int R, typename T, class F, class G>
__attribute__((flatten)) TILE void each_pair(pt<T> (&x)[R], const pa &a, const pc &columns, const pr<R> &rows,
                                             const paired &p, F f, G g) {
  reads(a, columns, rows);
  for (int r = 0; r < R; r++) {
    changes(x[r]);
    for (int slot = 0; slot < slots_of(p); slot++) {
      float *u = x[r].d + slot * (16 << p.lanes_log2), *v = u + p.pairs, of_row = rows.d[r][slot];
      const float *first = a.first + slot * (8 << p.lanes_log2), *second = a.second + slot * (8 << p.lanes_log2),
                  *w = columns.d;
#pragma GCC ivdep
      for (int i = 0; i < p.pairs; i++) f(u[i], v[i], first[i], second[i], w[i], w[i + p.pairs], of_row);
#pragma GCC ivdep
      for (int i = 2 * p.pairs; i < p.width; i++) g(u[i], w[i], of_row);
    }
  }
}

// ---- rows of two tensors
template<int A, int R, typename T, class F, class G, class H>
__attribute__((flatten)) TILE void dots(pr<R> &d, const pt<T> (&x)[R], const pt<T> (&u)[R], const pa &a,
                                        const pc &columns, const pr<R> &rows, const paired &p, F f, G g, H h) {
  reads(a, columns, rows);
  writes(d);
  const float *w = columns.d;
  for (int r = 0; r < R; r++) {
    reads(x[r], u[r]);
    for (int slot = 0; slot < slots_of(p); slot++) {
      const float *v = x[r].d + slot * (16 << p.lanes_log2), *o = u[r].d + slot * (16 << p.lanes_log2),
                  *first = a.first + slot * (8 << p.lanes_log2), *second = a.second + slot * (8 << p.lanes_log2);
      const float row = rows.d[r][slot];
      float parts[16] = {}, sum = 0.f;
      for (int i = 0; i < p.pairs; i++)
        parts[i % 16] += f(v[i], v[i + p.pairs], o[i], o[i + p.pairs], first[i], second[i], w[i], w[i + p.pairs], row);
      for (int i = 2 * p.pairs; i < p.width; i++) parts[i % 16] += g(v[i], o[i], w[i], row);
      for (float part : parts) sum += part;
      d.d[r][slot] = h(sum);
    }
  }
}
// Sums are whole: of all slots.
template<int A, int R, typename T, class F, class G>
__attribute__((flatten)) TILE void each_pair(pt<T> (&x)[R], const pt<T> (&u)[R], const pa &a, const pc &columns,
                                             const pr<R> &rows, const pr<R> &others, pc &sums, const paired &p, F f,
                                             G g) {
  reads(a, columns, rows, others);
  changes(sums);
  const float *w = columns.d;
  float *s = sums.d;
  for (int r = 0; r < R; r++) {
    changes(x[r]);
    reads(u[r]);
    for (int slot = 0; slot < slots_of(p); slot++) {
      float *v = x[r].d + slot * (16 << p.lanes_log2);
      const float *o = u[r].d + slot * (16 << p.lanes_log2), *first = a.first + slot * (8 << p.lanes_log2),
                  *second = a.second + slot * (8 << p.lanes_log2);
      const float row = rows.d[r][slot], other = others.d[r][slot];
#pragma GCC ivdep
      for (int i = 0; i < p.pairs; i++)
        f(v[i], v[i + p.pairs], o[i], o[i + p.pairs], first[i], second[i], w[i], w[i + p.pairs], row, other, s[i],
          s[i + p.pairs]);
#pragma GCC ivdep
      for (int i = 2 * p.pairs; i < p.width; i++) g(v[i], o[i], w[i], row, other, s[i]);
    }
  }
}
TILE void put(ps &d, const pc &sums, const paired &p) {
  called_by<WARPGROUP>();
  reads(sums);
  writes_shared(d, whole(d));
  memcpy(d.d, sums.d, p.width * sizeof(float));
}
template<int A> TILE void save(float *g, const ps &s, const paired &p) {
  called_by<WARPGROUP>();
  reads_shared(whole(s));
  touches_global(g, p.width * sizeof(float), GLOBAL_WRITE);
  const int paired = p.interleaved ? 2 * p.pairs : 0;
  for (int i = 0; i < paired; i += 2) {
    g[i] = s.d[i >> 1];
    g[i + 1] = s.d[(i >> 1) + p.pairs];
  }
  for (int i = paired; i < p.width; i++) g[i] = s.d[i];
}
