// Bodies of tile/copy.h, on the hooks of hooks.h.
#pragma once

// ---- global <-> shared
// The part of a tile that lies inside the tensor; p: element (0, 0) of the tile.
struct window { char *p; int64_t row_stride; int r0, r1, c0, c1; };
template<typename T, int R, int C> TILE window tile_window(const gmap &map, int row, int col, int head, int batch) {
  const gmap_cpu &m = *(const gmap_cpu *)&map;
  window w;
  w.row_stride = m.stride[1];
  w.p = m.data + batch * m.stride[3] + head * m.stride[2] + row * m.stride[1] + col * (int64_t)sizeof(T);
  bool inside = head >= 0 && head < m.size[2] && batch >= 0 && batch < m.size[3];
  int64_t rows = inside ? m.size[1] - row : 0, cols = inside ? m.size[0] - col : 0;
  w.r0 = row < 0 ? -row : 0;
  w.c0 = col < 0 ? -col : 0;
  w.r1 = rows < R ? (int)rows : R;
  w.c1 = cols < C ? (int)cols : C;
  return w;
}
// R x C elements into rows of ld elements
template<typename T, int R, int C>
TILE void copy_in(T *d, int ld, const gmap &map, int row, int col, int head, int batch) {
  window w = tile_window<T, R, C>(map, row, col, head, batch);
  for (int r = 0; r < R; r++, d += ld) {
    const T *g = (const T *)(w.p + r * w.row_stride);
    if (r >= w.r0 && r < w.r1 && w.c0 == 0 && w.c1 == C) memcpy(d, g, C * sizeof(T));
    else {
      memset((void *)d, 0, C * sizeof(T));
      if (r >= w.r0 && r < w.r1 && w.c0 < w.c1) memcpy(d + w.c0, g + w.c0, (w.c1 - w.c0) * sizeof(T));
    }
  }
}
template<typename T, int R, int C>
TILE void copy_out(const gmap &map, const T *d, int row, int col, int head, int batch) {
  window w = tile_window<T, R, C>(map, row, col, head, batch);
  for (int r = w.r0; r < w.r1 && w.c0 < w.c1; r++)
    memcpy((T *)(w.p + r * w.row_stride) + w.c0, d + r * C + w.c0, (w.c1 - w.c0) * sizeof(T));
}
// What a tile's copy or store touches in global memory.
template<typename T, int R, int C, class F>
TILE void each_row(const gmap &map, int row, int col, int head, int batch, F f) {
  window w = tile_window<T, R, C>(map, row, col, head, batch);
  for (int r = w.r0; r < w.r1 && w.c0 < w.c1; r++) f((T *)(w.p + r * w.row_stride) + w.c0, (w.c1 - w.c0) * sizeof(T));
}
template<typename T, int R, int C>
TILE void tma_load(st<T, R, C> &t, const gmap &m, sem &s, int row, int col, int head, int batch) {
  through_map(t, m, col);
  each_row<T, R, C>(m, row, col, head, batch, [&](const T *p, size_t bytes) { copy_reads_global(p, bytes, s); });
  issue_load(t, whole(t), s, R * C * sizeof(T), [=, &t, &m] { copy_in<T, R, C>(t.d, C, m, row, col, head, batch); });
}
template<typename T, int R, int C>
TILE void tma_load_rows(st<T, R, C> &t, int r0, int rows, const gmap &m, sem &s, int row, int col, int head,
                        int batch) {
  through_map(t, m, col);
  for (int r = 0; r < rows; r++)
    each_row<T, 1, C>(m, row + r, col, head, batch, [&](const T *p, size_t bytes) { copy_reads_global(p, bytes, s); });
  issue_load(t, part(t, r0, rows, 0, C), s, rows * C * (int)sizeof(T), [=, &t, &m] {
    for (int r = 0; r < rows; r++) copy_in<T, 1, C>(t.d + (r0 + r) * C, C, m, row + r, col, head, batch);
  });
}
// The same part of tile t in every block of the mask
template<int RN, int CN, typename T, int R, int C>
TILE void multicast(st<T, R, C> &t, int r0, int c0, const gmap &m, sem &s, int row, int col, int head, int batch,
                    int mask) {
  through_map(t, m, col);
  for (int rank = 0; mask >> rank; rank++) {
    if (!(mask >> rank & 1)) continue;
    st<T, R, C> &u = at_rank(t, rank);
    issue_load(u, part(u, r0, RN, c0, CN), at_rank(s, rank), RN * CN * sizeof(T),
               [=, &u, &m] { copy_in<T, RN, CN>(u.d + r0 * C + c0, C, m, row, col, head, batch); });
  }
}
template<int RN, typename T, int R, int C>
TILE void tma_load_rows_multicast(st<T, R, C> &t, int r0, const gmap &m, sem &s, int row, int col, int head, int batch,
                                  int mask) {
  multicast<RN, C>(t, r0, 0, m, s, row, col, head, batch, mask);
}
template<int CN, typename T, int R, int C>
TILE void tma_load_cols_multicast(st<T, R, C> &t, int c0, const gmap &m, sem &s, int row, int col, int head, int batch,
                                  int mask) {
  multicast<R, CN>(t, 0, c0, m, s, row, col, head, batch, mask);
}
template<int N> TILE void tma_load(sv<N> &t, const float *g, sem &s) {
  global_vector(&t, g);
  issue_load(t, whole(t), s, N * sizeof(float), [=, &t] { memcpy(t.d, g, N * sizeof(float)); });
}
template<int R, int C> TILE void tma_load(sm<R, C> &t, const gmap &m, sem &s, int row, int col, int head, int batch) {
  through_map(t, m, col);
  issue_load(t, whole(t), s, R * C * sizeof(float),
             [=, &t, &m] { copy_in<float, R, C>(t.d, C, m, row, col, head, batch); });
}
template<typename T, int R, int C> TILE void tma_send(st<T, R, C> &d, const st<T, R, C> &t, sem &s, int rank) {
  st<T, R, C> &u = at_rank(d, rank);
  issue_send(whole(t), u, whole(u), at_rank(s, rank), R * C * sizeof(T), [&t, &u] { memcpy(u.d, t.d, sizeof u.d); });
}
template<typename T, int R, int C>
TILE void tma_store(const gmap &m, st<T, R, C> &t, int row, int col, int head, int batch) {
  called_by<WARPGROUP>();
  through_map(t, m, col);
  store_begins(t, row, col);
  each_row<T, R, C>(m, row, col, head, batch, [](const T *p, size_t bytes) { store_writes_global(p, bytes); });
  issue_store(whole(t), [=, &t, &m] { copy_out<T, R, C>(m, t.d, row, col, head, batch); });
}

template<int N> TILE void tma_store(float *g, const sv<N> &t) {
  called_by<THREAD>();
  global_vector(&t, g);
  store_writes_global(g, sizeof t.d);
  issue_store(whole(t.d), [=, &t] { memcpy(g, t.d, sizeof t.d); });
}

// ---- shared <-> registers. The overloads for float settle which of the two general forms takes fp32 elements.
template<typename T, int C, int N> TILE void load(rt<float, N> &d, const st<T, 64, C> &s, int c0) {
  begins_at(s, c0, 16);
  reads_shared(part(s, 0, 64, c0, N));
  writes(d);
  for (int r = 0; r < 64; r++) widen_row(d.d[r], s.d + r * C + c0, N);
}
template<typename T, int C, int N> TILE void load(rt<T, N> &d, const st<T, 64, C> &s, int c0) {
  begins_at(s, c0, 16);
  reads_shared(part(s, 0, 64, c0, N));
  writes(d);
  for (int r = 0; r < 64; r++) memcpy(d.d[r], s.d + r * C + c0, N * sizeof(T));
}
template<int C, int N> TILE void load(rt<float, N> &d, const st<float, 64, C> &s, int c0 = 0) {
  begins_at(s, c0, 16);
  reads_shared(part(s, 0, 64, c0, N));
  writes(d);
  for (int r = 0; r < 64; r++) memcpy(d.d[r], s.d + r * C + c0, N * sizeof(float));
}
template<typename T, int C, int N> TILE void store(st<T, 64, C> &d, const rt<float, N> &s, int c0) {
  begins_at(d, c0, 16);
  reads(s);
  writes_shared(d, part(d, 0, 64, c0, N));
  for (int r = 0; r < 64; r++) narrow_row(d.d + r * C + c0, s.d[r], N);
}
template<typename T, int C, int N> TILE void store(st<T, 64, C> &d, const rt<T, N> &s, int c0) {
  begins_at(d, c0, 16);
  reads(s);
  writes_shared(d, part(d, 0, 64, c0, N));
  for (int r = 0; r < 64; r++) memcpy(d.d + r * C + c0, s.d[r], N * sizeof(T));
}
template<int C, int N> TILE void store(st<float, 64, C> &d, const rt<float, N> &s, int c0 = 0) {
  begins_at(d, c0, 16);
  reads(s);
  writes_shared(d, part(d, 0, 64, c0, N));
  for (int r = 0; r < 64; r++) memcpy(d.d + r * C + c0, s.d[r], N * sizeof(float));
}
template<typename T, int K> TILE void load_t(rt<T, K> &d, const st<T, K, 64> &s) {
  reads_shared(whole(s));
  writes(d);
  for (int r = 0; r < 64; r++)
    for (int k = 0; k < K; k++) d.d[r][k] = s.d[k * 64 + r];
}
template<typename T, int K> TILE void store_t(st<T, K, 64> &d, const rt<float, K> &s) {
  reads(s);
  writes_shared(d, whole(d));
  for (int k = 0; k < K; k++) {
    alignas(64) float row[64];
    for (int r = 0; r < 64; r++) row[r] = s.d[r][k];
    narrow_row(d.d + k * 64, row, 64);
  }
}
template<int W, typename T, int R, int C> TILE void clear_rows(st<T, R, C> &t, int first, int end) {
  called_by<W>();
  first = first < 0 ? 0 : first < R ? first : R;
  end = end < first ? first : end < R ? end : R;
  if (first > 0) writes_shared(t, part(t, 0, first, 0, C));
  if (end < R) writes_shared(t, part(t, end, R - end, 0, C));
  memset((void *)t.d, 0, first * C * sizeof(T));
  memset((void *)(t.d + end * C), 0, (R - end) * C * sizeof(T));
}
template<typename T, int C, class F> TILE void load_rows(st<T, 64, C> &t, F f, int n) {
  called_by<WARPGROUP>();
  writes_shared(t, whole(t));
  memset((void *)t.d, 0, sizeof t.d);
  for (int r = 0; r < 64; r++) {
    const T *g = f(r);
    if (!g) continue;
    touches_global(g, (n < C ? n : C) * sizeof(T), GLOBAL_READ);
    memcpy(t.d + r * C, g, (n < C ? n : C) * sizeof(T));
  }
}
TILE void load(rv &v, const sv<64> &s) {
  reads_shared(whole(s));
  writes(v);
  memcpy(v.d, s.d, sizeof v.d);
}
TILE void store(sv<64> &d, const rv &v) {
  reads(v);
  writes_shared(d, whole(d));
  memcpy(d.d, v.d, sizeof v.d);
}
template<int N> TILE void store(sv<4 * N> &d, const csum<N> &c) {
  reads(c);
  writes_shared(d, whole(d));
  memset(d.d, 0, sizeof d.d);
  memcpy(d.d, c.d, sizeof c.d);
}
TILE void load(rv &v, const parked &s) {
  reads_parked(whole(s));
  writes(v);
  memcpy(v.d, s.d, sizeof v.d);
}
TILE void store(parked &d, const rv &v) {
  reads(v);
  writes_parked(whole(d));
  memcpy(d.d, v.d, sizeof v.d);
}
template<int N> TILE void load(cv<N> &v, const sv<N> &s) {
  reads_shared(whole(s));
  writes(v);
  memcpy(v.d, s.d, sizeof v.d);
}
template<int N> TILE float get(const sv<N> &s, int i) {
  reads_shared(whole(s.d[i]));
  return s.d[i];
}
template<int N> TILE void clear(sv<N> &s) {
  called_by<THREAD>();
  writes_shared(s, whole(s.d));
  memset(s.d, 0, sizeof s.d);
}
TILE void put(int &s, int v) {
  called_by<THREAD>();
  writes_shared(s, whole(s));
  s = v;
}
TILE void put_at(int &s, int v, sem &full, int rank) {
  put(at_rank(s, rank), v);
  sem_arrive_at<THREAD, ORDERED>(full, rank);
}
TILE int get(const int &s) {
  reads_shared(whole(s));
  return s;
}
TILE void put(int64_t &s, int64_t v) {
  called_by<THREAD>();
  writes_shared(s, whole(s));
  s = v;
}
TILE int64_t get(const int64_t &s) {
  reads_shared(whole(s));
  return s;
}
template<typename T, int K, int N>
TILE void transpose_part(tt<T, K, N> &d, int k0, const st<T, 64, N> &s, int index, int count) {
  called_by<WARP>();
  begins_at(d, k0, 64);
  for (int n0 = 16 * index; n0 < N; n0 += 16 * count) {
    reads_shared(part(s, 0, 64, n0, 16));
    writes_shared(d.t, part(d.t, n0, 16, k0, 64));
    for (int k = 0; k < 64; k++)
      for (int n = n0; n < n0 + 16; n++) d.t.d[n * K + k0 + k] = s.d[k * N + n];
  }
}

// ---- global <-> registers
TILE void load(rv &v, const float *g, int n, float pad) {
  touches_global(g, n > 0 ? (n < 64 ? n : 64) * sizeof(float) : 0, GLOBAL_READ);
  writes(v);
  for (int r = 0; r < 64; r++) v.d[r] = r < n ? g[r] : pad;
}
TILE void store(float *g, const rv &v, int n) {
  touches_global(g, n > 0 ? (n < 64 ? n : 64) * sizeof(float) : 0, GLOBAL_WRITE);
  reads(v);
  for (int r = 0; r < 64 && r < n; r++) g[r] = v.d[r];
}
template<typename T, int N> TILE void load(cv<N> &v, const T *g, int n) {
  writes(v);
  for (int c = 0; c < N; c++) v.d[c] = c < n ? widen(g[c]) : 0.f;
}
template<int N> TILE void load(rt<float, N> &t, const float *g, int64_t ld, int m, int n) {
  writes(t);
  for (int r = 0; r < 64; r++) {
    const int columns = r < m && n > 0 ? n < N ? n : N : 0;
    touches_global(g + r * ld, columns * sizeof(float), GLOBAL_READ);
    for (int c = 0; c < N; c++) t.d[r][c] = c < columns ? g[r * ld + c] : 0.f;
  }
}
template<int N> TILE void store(float *g, int64_t ld, const rt<float, N> &t, int m, int n) {
  reads(t);
  for (int r = 0; r < 64 && r < m; r++) {
    touches_global(g + r * ld, n > 0 ? (n < N ? n : N) * sizeof(float) : 0, GLOBAL_WRITE);
    for (int c = 0; c < N && c < n; c++) g[r * ld + c] = t.d[r][c];
  }
}
template<int N> TILE void load(rt<float, N> &t, const float *g, int row, int col, int m, int n) {
  writes(t);
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < N; c++) {
      if (r < m && c < n) touches_global(g + r * row + c * col, sizeof(float), GLOBAL_READ);
      t.d[r][c] = r < m && c < n ? g[r * row + c * col] : 0.f;
    }
}
template<int N> TILE void store(float *g, int row, int col, const rt<float, N> &t, int m, int n) {
  reads(t);
  for (int r = 0; r < 64 && r < m; r++)
    for (int c = 0; c < N && c < n; c++) {
      touches_global(g + r * row + c * col, sizeof(float), GLOBAL_WRITE);
      g[r * row + c * col] = t.d[r][c];
    }
}
template<typename T, int N, class F> TILE void store_rows(const rt<float, N> &t, F f, int n) {
  reads(t);
  for (int r = 0; r < 64; r++) {
    T *g = f(r);
    if (!g) continue;
    touches_global(g, (n < N ? n : N) * sizeof(T), GLOBAL_WRITE);
    narrow_row(g, t.d[r], n < N ? n : N);
  }
}
// An accumulator is row-major tiles of at most 64 columns. Additions of several threads to one: a lock each, hashed by
// its address.
static int acc_locks[256];
static int *lock_acc(const float *g) {
  int *lock = &acc_locks[(uint32_t)((uintptr_t)g >> 8) * 2654435761u >> 24];
  while (__atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE)) sched_yield();
  return lock;
}
template<int N> TILE void add_acc_cols(float *g, int c0, const rt<float, N> &t) {
  begins_at(t, c0, 32);
  for (int r = 0; r < 64; r++) touches_global(g + r * 64 + c0, N * sizeof(float), GLOBAL_ADD);
  reads(t);
  int *lock = lock_acc(g);
  for (int r = 0; r < 64; r++)
#pragma GCC ivdep
    for (int c = 0; c < N; c++) g[r * 64 + c0 + c] += t.d[r][c];
  __atomic_store_n(lock, 0, __ATOMIC_RELEASE);
}
template<int N> TILE void add_acc(float *g, const rt<float, N> &t) {
  enum { W = N < 64 ? N : 64 };
  touches_global(g, 64 * N * sizeof(float), GLOBAL_ADD);
  reads(t);
  int *lock = lock_acc(g);
  for (int col = 0; col < N; col += W)
    for (int r = 0; r < 64; r++)
#pragma GCC ivdep
      for (int c = 0; c < W; c++) g[col * 64 + r * W + c] += t.d[r][col + c];
  __atomic_store_n(lock, 0, __ATOMIC_RELEASE);
}
template<int N> TILE void load_acc(rt<float, N> &t, const float *g) {
  enum { W = N < 64 ? N : 64 };
  touches_global(g, 64 * N * sizeof(float), GLOBAL_READ);
  writes(t);
  for (int col = 0; col < N; col += W)
    for (int r = 0; r < 64; r++) memcpy(&t.d[r][col], g + col * 64 + r * W, W * sizeof(float));
}
template<int N> TILE void zero_acc(float *g) {
  called_by<WARPGROUP>();
  touches_global(g, 64 * N * sizeof(float), GLOBAL_WRITE);
  memset(g, 0, 64 * N * sizeof(float));
}
TILE void zero_words(int *g, int n) {
  called_by<WARPGROUP>();
  touches_global(g, (size_t)n * sizeof(int), GLOBAL_WRITE);
  memset(g, 0, (size_t)n * sizeof(int));
}
