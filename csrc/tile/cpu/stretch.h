// Bodies of tile/stretch.h on the CPU, and for the checker. Loads are whole in their first half.
#pragma once
#ifdef CHECK
#define STRETCH_STATE state_of_registers state;
#else
#define STRETCH_STATE
#endif
enum { PARTS_OF_STRETCH = 16 };       // so that loops over numbers vectorise
struct stretch { alignas(64) float d[STRETCH]; STRETCH_STATE };
struct partial { alignas(64) float d[PARTS_OF_STRETCH]; STRETCH_STATE };
#undef STRETCH_STATE

TILE int numbers_in_stretch(int n) { return n < 0 ? 0 : n < STRETCH ? n : (int)STRETCH; }
template<typename T> TILE void load_begin(stretch &x, const T *g, int n, bool) {
  called_by<WARPGROUP>();
  writes(x);
  n = numbers_in_stretch(n);
  touches_global(g, n * sizeof(T), GLOBAL_READ);
  widen_row(x.d, g, n);
  for (int i = n; i < STRETCH; i++) x.d[i] = 0.f;
}
template<typename T> TILE void load_end(stretch &x) { changes(x); }
template<typename T> TILE void save(T *g, const stretch &x, int n, bool) {
  reads(x);
  n = numbers_in_stretch(n);
  touches_global(g, n * sizeof(T), GLOBAL_WRITE);
  narrow_row(g, x.d, n);
}
template<typename T> TILE float number_at(const T *g) {
  touches_global(g, sizeof(T), GLOBAL_READ);
  return widen(*g);
}
TILE void put_number(float *g, float x) {
  called_by<WARPGROUP>();
  touches_global(g, sizeof(float), GLOBAL_WRITE);
  *g = x;
}

TILE void fill(stretch &x, float y) {
  writes(x);
  for (float &d : x.d) d = y;
}
TILE void fill(partial &x, float y) {
  writes(x);
  for (float &d : x.d) d = y;
}
template<class F, class... X> __attribute__((flatten)) TILE void each(stretch &x, int n, F f, X &...parts) {
  changes(x);
  (changes(parts), ...);
  n = numbers_in_stretch(n);
  int first = 0;
  for (; first + PARTS_OF_STRETCH <= n; first += PARTS_OF_STRETCH) {
#pragma GCC ivdep
    for (int i = 0; i < PARTS_OF_STRETCH; i++) f(x.d[first + i], first + i, parts.d[i]...);
  }
  for (int i = 0; first + i < n; i++) f(x.d[first + i], first + i, parts.d[i]...);
}
template<class F> __attribute__((flatten)) TILE void map(partial &d, const partial &a, const partial &b, F f) {
  reads(a, b);
  changes(d);
#pragma GCC ivdep
  for (int i = 0; i < PARTS_OF_STRETCH; i++) d.d[i] = f(d.d[i], a.d[i], b.d[i]);
}
template<class F> __attribute__((flatten)) TILE float join(const partial &x, sv<32> &room, F f) {
  reads(x);
  writes_shared(room, whole(room));
  float y = x.d[0];
  for (int i = 1; i < PARTS_OF_STRETCH; i++) y = f(y, x.d[i]);
  room.d[0] = y;
  wg_sync();
  reads_shared(whole(room));
  return room.d[0];
}
