// What operations tell about themselves: what they read and write, and which of them are asynchronous on the GPU. Here
// asynchronous work is done at once and only writes of shared tiles matter, because packed forms of them (mma.h) are
// stale then. The checker's backend (tile/check) uses the same bodies with hooks of its own.
#pragma once
enum { KEEPS_PACKED = 1 };   // packed forms stay valid until the tile is written
struct region { const void *p; int rows, pitch, bytes; };   // of shared memory: `bytes` in each of `rows` rows, `pitch`
                                                            // bytes apart

template<typename T, int R, int C> TILE region part(const st<T, R, C> &t, int r0, int rows, int c0, int cols) {
  return {t.d + r0 * C + c0, rows, C * (int)sizeof(T), cols * (int)sizeof(T)};
}
template<typename T, int R, int C> TILE region whole(const st<T, R, C> &t) {
  return {t.d, 1, 0, R * C * (int)sizeof(T)};
}
template<class Plain> TILE region whole(const Plain &t) { return {&t, 1, 0, (int)sizeof t}; }

// Contracts: the width of the role that calls, and where a window of a tile begins.
template<int W> TILE void called_by() {}
// a row or column that is a multiple of the second number
template<class Tile> TILE void begins_at(const Tile &, int, int) {}
// Registers of the calling role.
template<class... X> TILE void reads(const X &...) {}
template<class... X> TILE void writes(X &...) {}
template<class... X> TILE void changes(X &...) {}            // reads and writes
// Shared memory, through registers.
TILE void reads_shared(const region &) {}
TILE void tile_written(const void *p) { mg_machine->written[((const char *)p - mg_machine->shared) / GRANULE]++; }
TILE void reads_parked(const region &) {}
TILE void writes_parked(const region &) {}
template<class Tile> TILE void writes_shared(const Tile &t, const region &) { tile_written(&t); }
template<int N> TILE void writes_shared(const sv<N> &, const region &) {}
TILE void writes_shared(const int &, const region &) {}
// Global memory, through registers: n floats from g; kind of access.
enum global_access { GLOBAL_READ, GLOBAL_WRITE, GLOBAL_ADD };
// the column where a copy through a tensor map begins
template<class Tile> TILE void through_map(const Tile &, const gmap &, int) {}
// a copy of a vector, which begins at 16 bytes
TILE void global_vector(const void *, const float *) {}
TILE void copy_reads_global(const void *, size_t, const sem &) {}
TILE void store_writes_global(const void *, size_t) {}
TILE void touches_global(const void *, size_t, enum global_access) {}

// Asynchronous work. The product reads d too if A is ACC; operands are regions of shared memory or register tiles.
template<int A, class D, class First, class F> TILE void issue_product(D &, const First &, const region &, F f) { f(); }
// fills the region, then counts on s
template<class Tile, class F> TILE void issue_load(Tile &t, const region &, sem &s, int bytes, F f);
// arrives, then the same
template<class Tile, class F> TILE void issue_send(const region &, Tile &t, const region &, sem &s, int bytes, F f);
template<class F> TILE void issue_store(const region &, F f) { f(); }
