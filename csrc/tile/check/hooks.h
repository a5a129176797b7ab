// The hooks of cpu/hooks.h, for the checker: every one of them notes where in the kernel it was called.
#pragma once
#if defined(__x86_64__)
#define HERE ({ const void *here_; __asm__ volatile("leaq 0(%%rip), %0" : "=r"(here_)); here_; })
#elif defined(__aarch64__)
#define HERE ({ const void *here_; __asm__ volatile("adr %0, ." : "=r"(here_)); here_; })
#endif

// Where packed forms of shared tiles lie (cpu/mma.h). They are made anew for every product.
enum { GRANULE = 1024, PACK_KINDS = 3, PACK_GROWTH = 4, KEEPS_PACKED = 0 };
struct machine {
  char *shared, *packed[PACK_KINDS];
  uint32_t *written;
  uint64_t *packed_tag[PACK_KINDS];
};
inline machine *mg_machine;

typedef ck_region region;
template<typename T, int R, int C> TILE region part(const st<T, R, C> &t, int r0, int rows, int c0, int cols) {
  ck_bounds(HERE, r0 >= 0 && r0 + rows <= R && c0 >= 0 && c0 + cols <= C,
            "a window of a shared tile goes beyond its edge", &t);
  return {t.d + r0 * C + c0, rows, C * (int)sizeof(T), cols * (int)sizeof(T)};
}
template<typename T> constexpr int ELEMENT_BYTES = 4;
template<typename T, int R, int C> constexpr int ELEMENT_BYTES<st<T, R, C>> = sizeof(T);
template<class Tile> TILE void through_map(const Tile &t, const gmap &m, int col) {
  ck_bounds(HERE, ((const gmap_cpu *)&m)->data, "a copy through a gmap that nothing has filled", &t);
  ck_bounds(HERE, col * ELEMENT_BYTES<Tile> % 16 == 0, "a copy begins at a column that is no multiple of 16 bytes", &t);
}
TILE void global_vector(const void *t, const float *g) {
  ck_bounds(HERE, (uintptr_t)g % 16 == 0, "a copy of a vector begins at an address that is no multiple of 16 bytes", t);
}
template<class Tile> TILE void begins_at(const Tile &t, int at, int unit) { ck_begins_at(HERE, at, unit, &t); }
template<int W> TILE void called_by() { ck_called_by(HERE, W); }
template<typename T, int R, int C> TILE region whole(const st<T, R, C> &t) {
  return {t.d, 1, 0, R * C * (int)sizeof(T)};
}
template<int N> TILE region whole(const sv<N> &v) {
  ck_bounds(HERE, (uintptr_t)&v % alignof(sv<N>) == 0,
            "a slice of a vector begins at an element that is no multiple of 32", &v);
  return {&v, 1, 0, (int)sizeof v};
}
template<class Plain> TILE region whole(const Plain &t) { return {&t, 1, 0, (int)sizeof t}; }

// Register tiles and their vectors belong to a warpgroup, wv to a warp: so do all operations on them.
template<class X> constexpr int WIDTH_OF = WARPGROUP;
template<int N> constexpr int WIDTH_OF<wv<N>> = WARP;
template<class... X> TILE void reads(const X &...x) {
  (ck_reads(HERE, WIDTH_OF<X>, const_cast<state_of_registers *>(&x.state)), ...);
}
template<class... X> TILE void writes(X &...x) { (ck_writes(HERE, WIDTH_OF<X>, &x.state), ...); }
template<class... X> TILE void changes(X &...x) {
  ((ck_reads(HERE, WIDTH_OF<X>, &x.state), ck_writes(HERE, WIDTH_OF<X>, &x.state)), ...);
}
TILE void reads_shared(const region &r) { ck_reads_shared(HERE, &r); }
template<class Tile> TILE void writes_shared(const Tile &, const region &r) { ck_writes_shared(HERE, &r); }
TILE void reads_parked(const region &r) { ck_parked(HERE, &r, false); }
TILE void writes_parked(const region &r) { ck_parked(HERE, &r, true); }
enum global_access { GLOBAL_READ, GLOBAL_WRITE, GLOBAL_ADD };
TILE void copy_reads_global(const void *p, size_t bytes, const sem &s) { ck_global_load(HERE, p, bytes, &s); }
TILE void store_writes_global(const void *p, size_t bytes) { ck_global_store(HERE, p, bytes); }
TILE void touches_global(const void *p, size_t bytes, enum global_access kind) {
    ck_global(HERE, p, bytes, (enum ck_global)kind); }

// An effect that comes later, as a copy of the lambda that makes it.
template<class F> static void effect_of(void *closure) {
  (*(F *)closure)();
}
template<class F> TILE void issue_store(const region &r, F f) { ck_store(HERE, &r, effect_of<F>, &f, sizeof f); }
template<class Tile, class F> TILE void issue_load(Tile &, const region &r, sem &s, int bytes, F f) {
  ck_load(HERE, &r, &s, bytes, effect_of<F>, &f, sizeof f);
}
template<class Tile, class F>
TILE void issue_send(const region &from, Tile &, const region &to, sem &s, int bytes, F f) {
  ck_send(HERE, &from, &to, &s, bytes, effect_of<F>, &f, sizeof f);
}
template<int A, class D, class F> TILE void issue_product(D &d, const region &a, const region &b, F f) {
  ck_product(HERE, &d.state, A, nullptr, &a, &b, effect_of<F>, &f, sizeof f);
}
template<int A, class D, typename T, int N, class F>
TILE void issue_product(D &d, const rt<T, N> &a, const region &b, F f) {
  ck_product(HERE, &d.state, A, const_cast<state_of_registers *>(&a.state), nullptr, &b, effect_of<F>, &f, sizeof f);
}
