// Bodies of tile/matrix.h on the CPU, and for the checker. Loads are whole in their first half.
#pragma once
#ifdef CHECK
#define MATRIX_STATE state_of_registers state;
#else
#define MATRIX_STATE
#endif
enum { SUM_PARTS = 16 };          // of a row's sum, so that loops over columns vectorise
template<int R, int C> struct mt { MATRIX_RULES(R, C); alignas(64) float d[R][C]; MATRIX_STATE };
template<int R> struct mr { MATRIX_RULES(R, 32); alignas(64) float d[R]; MATRIX_STATE };
template<int C> struct mc { MATRIX_RULES(16, C); alignas(64) float d[C]; MATRIX_STATE };
template<int N> struct ml { alignas(64) float d[N]; MATRIX_STATE };
template<int R> struct mrsum { alignas(64) float d[R][SUM_PARTS]; MATRIX_STATE };
template<int C> struct mcsum { alignas(64) float d[C]; MATRIX_STATE };
#undef MATRIX_STATE


template<int, typename T, int R, int C> TILE void load_begin(mt<R, C> &t, const T *g, int64_t ld, int m, int n) {
  called_by<WARPGROUP>();
  writes(t);
  n = n < 0 ? 0 : n < C ? n : C;
  for (int r = 0; r < R; r++) {
    const int columns = r < m ? n : 0;
    touches_global(g + r * ld, columns * sizeof(T), GLOBAL_READ);
    if (columns) widen_row(t.d[r], g + r * ld, columns);
    for (int c = columns; c < C; c++) t.d[r][c] = 0.f;
  }
}
template<typename T, int R, int C> TILE void load_end(mt<R, C> &t) { changes(t); }
template<int, typename T, int R, int C> TILE void save(T *g, int64_t ld, const mt<R, C> &t, int m, int n) {
  reads(t);
  n = n < 0 ? 0 : n < C ? n : C;
  for (int r = 0; r < R && r < m; r++) {
    touches_global(g + r * ld, n * sizeof(T), GLOBAL_WRITE);
    narrow_row(g + r * ld, t.d[r], n);
  }
}
template<typename T> TILE void load_begin(float &x, const T *g) { x = widen(*g); }
template<typename T> TILE void load_end(float &) {}

// Vectors of N floats, along either side of a tile.
template<typename T, class V> TILE void begin_vector(V &v, const T *g, int n) {
  enum { N = sizeof v.d / sizeof(float) };
  called_by<WARPGROUP>();
  writes(v);
  n = n < 0 ? 0 : n < N ? n : N;
  touches_global(g, n * sizeof(T), GLOBAL_READ);
  if (n) widen_row(v.d, g, n);
  for (int i = n; i < N; i++) v.d[i] = 0.f;
}
template<typename T, class V> TILE void store_vector(T *g, const V &v, int n) {
  enum { N = sizeof v.d / sizeof(float) };
  reads(v);
  n = n < 0 ? 0 : n < N ? n : N;
  touches_global(g, n * sizeof(T), GLOBAL_WRITE);
  if (n) narrow_row(g, v.d, n);
}
template<class V> TILE void fill_vector(V &v, float x) {
  writes(v);
  for (float &d : v.d) d = x;
}
template<class V, class F> __attribute__((flatten)) TILE void map_vector(V &d, const V &a, F f) {
  reads(a);
  writes(d);
#pragma GCC ivdep
  for (size_t i = 0; i < sizeof d.d / sizeof(float); i++) d.d[i] = f(a.d[i]);
}
template<class V, class F> __attribute__((flatten)) TILE void map_vector(V &d, const V &a, const V &b, F f) {
  reads(a, b);
  writes(d);
#pragma GCC ivdep
  for (size_t i = 0; i < sizeof d.d / sizeof(float); i++) d.d[i] = f(a.d[i], b.d[i]);
}
template<typename T, int R> TILE void load_begin(mr<R> &v, const T *g, int m) { begin_vector(v, g, m); }
template<int, typename T, int C> TILE void load_begin(mc<C> &v, const T *g, int n) { begin_vector(v, g, n); }
template<typename T, int R> TILE void save(T *g, const mr<R> &v, int m) { store_vector(g, v, m); }
template<int, typename T, int C> TILE void save(T *g, const mc<C> &v, int n) { store_vector(g, v, n); }
template<typename T, int N> TILE void load_begin(ml<N> &v, const T *g, int n) { begin_vector(v, g, n); }
#define VECTOR(V) \
  template<typename T, int N> TILE void load_end(V<N> &v) { changes(v); } \
  template<int N> TILE void fill(V<N> &v, float x) { fill_vector(v, x); } \
  template<int N, class F> TILE void map(V<N> &d, const V<N> &a, F f) { map_vector(d, a, f); } \
  template<int N, class F> TILE void map(V<N> &d, const V<N> &a, const V<N> &b, F f) { map_vector(d, a, b, f); }
VECTOR(mr)
VECTOR(mc)
VECTOR(ml)
#undef VECTOR
template<int N> TILE void store(sv<N> &d, const ml<N> &v) {
  reads(v);
  writes_shared(d, whole(d));
  memcpy(d.d, v.d, sizeof v.d);
}
template<class V, int N> TILE void load_vector(V &v, const sv<N> &s) {
  reads_shared(whole(s));
  writes(v);
  memcpy(v.d, s.d, sizeof v.d);
}
template<int N> TILE void load(mr<N> &v, const sv<N> &s) { load_vector(v, s); }
template<int N> TILE void load(mc<N> &v, const sv<N> &s) { load_vector(v, s); }

template<int R> TILE void clear(mrsum<R> &v) {
  writes(v);
  memset(v.d, 0, sizeof v.d);
}
template<int C> TILE void clear(mcsum<C> &v) {
  writes(v);
  memset(v.d, 0, sizeof v.d);
}
template<int R, int C> TILE float &matrix_at(mt<R, C> &t, int r, int c) { return t.d[r][c]; }
template<int R, int C> TILE float matrix_at(const mt<R, C> &t, int r, int c) { return t.d[r][c]; }
template<int R> TILE float matrix_at(const mr<R> &v, int r, int) { return v.d[r]; }
template<int C> TILE float matrix_at(const mc<C> &v, int, int c) { return v.d[c]; }
template<int R> TILE float &matrix_at(mrsum<R> &v, int r, int c) { return v.d[r][c % SUM_PARTS]; }
template<int C> TILE float &matrix_at(mcsum<C> &v, int, int c) { return v.d[c]; }
template<class X> TILE void visits(X &x) { changes(x); }
template<class X> TILE void visits(const X &x) { reads(x); }
template<int R> TILE void visits(mr<R> &x) { reads(x); }
template<int C> TILE void visits(mc<C> &x) { reads(x); }
template<int R, int C, class F, class... X>
__attribute__((flatten)) TILE void each(mt<R, C> &t, F f, X &...x) {
  visits(t);
  (visits(x), ...);
  for (int r = 0; r < R; r++)
    for (int first = 0; first < C; first += SUM_PARTS) {
#pragma GCC ivdep
      for (int c = first; c < first + SUM_PARTS; c++) f(t.d[r][c], matrix_at(x, r, c)...);
    }
}
template<int R> TILE void reduce(mr<R> &v, const mrsum<R> &l) {
  reads(l);
  writes(v);
  for (int r = 0; r < R; r++) {
    v.d[r] = 0.f;
    for (int i = 0; i < SUM_PARTS; i++) v.d[r] += l.d[r][i];
  }
}
template<int C> TILE void store(sv<4 * C> &d, const mcsum<C> &s) {
  called_by<WARPGROUP>();
  reads(s);
  writes_shared(d, whole(d));
  memset(d.d, 0, sizeof d.d);
  memcpy(d.d, s.d, sizeof s.d);
}
template<int C> TILE void load_sum(mc<C> &v, const sv<4 * C> &s) {
  called_by<WARPGROUP>();
  reads_shared(whole(s));
  writes(v);
  for (int c = 0; c < C; c++) v.d[c] = s.d[c] + s.d[C + c] + s.d[2 * C + c] + s.d[3 * C + c];
}
