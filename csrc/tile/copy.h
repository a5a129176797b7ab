// Copies between global memory, shared memory and registers. Contracts; bodies in sm90/ and cpu/.
#pragma once

// ---- global <-> shared, asynchronous. A copy through a map begins at a column that is a multiple of 16 bytes; at any
// other the GPU reports an illegal instruction
// Thread. Tile at (row, col) of matrix (head, batch); elements outside the tensor read as zero; all tile_bytes count on
// `s`. The map's box is R rows by 64 columns; of e4m3, 128 columns where C is a multiple of 128.
template<typename T, int R, int C> TILE constexpr uint32_t tile_bytes(const st<T, R, C> &) { return R * C * sizeof(T); }
template<typename T, int R, int C>
TILE void tma_load(st<T, R, C> &t, const gmap &m, sem &s, int row, int col, int head, int batch);
// Thread. Part of a tile: `rows` rows from row r0, which is the height of the map's box. (row, col) is where the loaded
// part begins.
template<typename T, int R, int C>
TILE void tma_load_rows(st<T, R, C> &t, int r0, int rows, const gmap &m, sem &s, int row, int col, int head, int batch);
// Thread. Only RN rows from row r0 of the tile (box: RN rows), into the same place of every block in `mask` (bit =
// cluster rank); each of these blocks counts the bytes on its own `s`. (row, col) in the matrix is where the loaded
// part begins, not the tile.
template<int RN, typename T, int R, int C>
TILE void tma_load_rows_multicast(st<T, R, C> &t, int r0, const gmap &m, sem &s, int row, int col, int head, int batch,
                                  int mask);
// The same for CN columns from column c0 of the tile (box: R rows).
template<int CN, typename T, int R, int C>
TILE void tma_load_cols_multicast(st<T, R, C> &t, int c0, const gmap &m, sem &s, int row, int col, int head, int batch,
                                  int mask);
template<int N> TILE void tma_load(sv<N> &t, const float *g, sem &s);   // thread; g 16-byte aligned, N floats
// Thread. fp32 matrix; the map's box is R rows by C columns.
template<int R, int C> TILE void tma_load(sm<R, C> &t, const gmap &m, sem &s, int row, int col, int head, int batch);
// Thread. A copy of tile t to tile d of block `rank` of this cluster, which counts one arrival and the bytes on its own
// `s`.
template<typename T, int R, int C> TILE void tma_send(st<T, R, C> &d, const st<T, R, C> &t, sem &s, int rank);
// Warpgroup: its first thread issues and commits one group. Elements outside the tensor are not written; but a store
// that begins at a negative row or column is an illegal instruction, which a load may.
template<typename T, int R, int C>
TILE void tma_store(const gmap &m, st<T, R, C> &t, int row, int col, int head, int batch);
template<int G = 0> TILE void tma_store_wait_read();    // warpgroup: the issuing thread, until at most G groups still
                                                        // read shared memory
// ... until at most G groups are not yet written; of a thread, its own
template<int G = 0, int W = WARPGROUP> TILE void tma_store_wait();
template<int N> TILE void tma_store(float *g, const sv<N> &t);       // thread: one group; g 16-byte aligned, N floats
TILE void tma_prefetch(const gmap &m);                  // thread
// Thread. Brings what a copy of C columns and the box's rows would read into the L2. It hands nothing to anybody, so it
// may come before grid_wait().
template<int C> TILE void tma_prefetch_rows(const gmap &m, int row, int col, int head, int batch);
TILE void tma_prefetch(const float *g, int n);          // the same of n floats, a multiple of 4, at 16 aligned bytes

// ---- shared <-> registers (warpgroup). c0: first column of the window in the shared tile, a multiple of 16
template<typename T, int C, int N> TILE void load(rt<float, N> &d, const st<T, 64, C> &s, int c0 = 0);
template<typename T, int C, int N> TILE void load(rt<T, N> &d, const st<T, 64, C> &s, int c0 = 0);
template<typename T, int C, int N> TILE void store(st<T, 64, C> &d, const rt<float, N> &s, int c0 = 0);   // rounds to T
template<typename T, int C, int N> TILE void store(st<T, 64, C> &d, const rt<T, N> &s, int c0 = 0);
template<typename T, int K> TILE void load_t(rt<T, K> &d, const st<T, K, 64> &s);        // transposed: s is K x 64
template<typename T, int K> TILE void store_t(st<T, K, 64> &d, const rt<float, K> &s);   // transposed, rounds to T
TILE void load(rv &v, const sv<64> &s);
TILE void store(sv<64> &d, const rv &v);                // a warp's own 16 rows, which its load() then sees; others want
                                                        // an arrival or a sync
// Four parts, N floats each, whose sum it is. Others want an arrival or a sync.
template<int N> TILE void store(sv<4 * N> &d, const csum<N> &c);
TILE void load(rv &v, const parked &s);                 // without any sync
TILE void store(parked &d, const rv &v);
template<int N> TILE void load(cv<N> &v, const sv<N> &s);
template<int N> TILE float get(const sv<N> &s, int i);  // any width
// N of them; first: a multiple of 32
template<int N, int M> TILE const sv<N> &slice(const sv<M> &s, int first) { return *(const sv<N> *)(s.d + first); }
template<int N> TILE void clear(sv<N> &s);              // thread: zeros
TILE void put(int &s, int v);                           // thread: a scalar in shared memory, ordered by semaphores like
                                                        // a tile
TILE void put_at(int &s, int v, sem &full, int rank);   // thread: put() in block `rank` of this cluster, and an arrival
                                                        // at its `full`
TILE int get(const int &s);
TILE void put(int64_t &s, int64_t v);
TILE int64_t get(const int64_t &s);
// Warp, through registers. 64 rows of d from k0, a multiple of 64, become s. Each call does one of `count` parts; the
// parts of index 0 to count - 1 together are the whole.
template<typename T, int K, int N>
TILE void transpose_part(tt<T, K, N> &d, int k0, const st<T, 64, N> &s, int index, int count);

// Warpgroup or warp. Rows >= end and < first become 0.
template<int W = WARPGROUP, typename T, int R, int C> TILE void clear_rows(st<T, R, C> &t, int first, int end);
// Warpgroup. Rows from anywhere in global memory, through registers, at any alignment: row r begins at f(r), or is 0
// where f(r) is NULL; columns >= n become 0. A warp writes its own 16 rows.
template<typename T, int C, class F> TILE void load_rows(st<T, 64, C> &t, F f, int n);

// ---- global <-> registers (warpgroup)
TILE void load(rv &v, const float *g, int n, float pad);   // rows >= n become pad and are not read
TILE void store(float *g, const rv &v, int n);             // rows >= n are not written
template<typename T, int N> TILE void load(cv<N> &v, const T *g, int n);   // columns >= n become 0
// fp32 row-major, `ld` floats per row; rows >= m and columns >= n are not read and become 0
template<int N> TILE void load(rt<float, N> &t, const float *g, int64_t ld, int m, int n);
// ... and are not written
template<int N> TILE void store(float *g, int64_t ld, const rt<float, N> &t, int m, int n);
// The same of a matrix in any order, less than 2^31 floats: element (r, c) at g[r * row + c * col].
template<int N> TILE void load(rt<float, N> &t, const float *g, int row, int col, int m, int n);
template<int N> TILE void store(float *g, int row, int col, const rt<float, N> &t, int m, int n);
// Rounds to T; row r goes to f(r), a T *, or nowhere where that is NULL; columns >= n are not written.
template<typename T, int N, class F> TILE void store_rows(const rt<float, N> &t, F f, int n);
// Accumulator tiles in global memory: 64 * N floats whose order is private to the backend; more than 64 columns are
// tiles of 64, one after another.
template<int N> TILE void add_acc(float *g, const rt<float, N> &t);    // atomic fp32 additions
// to N < 64 columns from c0 of a tile of 64, both multiples of 32
template<int N> TILE void add_acc_cols(float *g, int c0, const rt<float, N> &t);
template<int N> TILE void load_acc(rt<float, N> &t, const float *g);
template<int N> TILE void zero_acc(float *g);                          // 64 * N zeros
TILE void zero_words(int *g, int n);                                   // n zeros
