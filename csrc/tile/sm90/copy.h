// Copies on sm_90a: TMA, stmatrix and ldmatrix, plain global accesses.
#pragma once

// ---- TMA
TILE void tma_panel(uint32_t dst, const gmap &m, sem &s, int row, int col, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%0], [%1, {%3, %4, %5, %6}], [%2];"
    ::"r"(dst), "l"(&m), "r"(shared_address(&s)), "r"(col), "r"(row), "r"(head), "r"(batch) : "memory");
}
TILE void tma_panel_multicast(uint32_t dst, const gmap &m, sem &s, int row, int col, int head, int batch, int mask) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
    "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
    ::"r"(dst), "l"(&m), "r"(shared_address(&s)), "r"(col), "r"(row), "r"(head), "r"(batch), "h"((uint16_t)mask)
    : "memory");
}
template<typename T, int R, int C>
TILE void tma_load(st<T, R, C> &t, const gmap &m, sem &s, int row, int col, int head, int batch) {
  constexpr int WIDTH = panel_columns<T, C>;
#pragma unroll
  for (int p = 0; p < C / WIDTH; p++)
    tma_panel(shared_address(&t) + p * R * panel_bytes<T, C>, m, s, row, col + p * WIDTH, head, batch);
}
template<typename T, int R, int C>
TILE void tma_load_rows(st<T, R, C> &t, int r0, int, const gmap &m, sem &s, int row, int col, int head, int batch) {
  static_assert(sizeof(T) == 2, "panels of 64 columns");
#pragma unroll
  for (int p = 0; p < C / 64; p++)
    tma_panel(shared_address(&t) + p * R * 128 + r0 * 128, m, s, row, col + p * 64, head, batch);
}
template<int RN, typename T, int R, int C>
TILE void tma_load_rows_multicast(st<T, R, C> &t, int r0, const gmap &m, sem &s, int row, int col, int head, int batch,
                                  int mask) {
  static_assert(sizeof(T) == 2, "panels of 64 columns");
#pragma unroll
  for (int p = 0; p < C / 64; p++)
    tma_panel_multicast(shared_address(&t) + p * R * 128 + r0 * 128, m, s, row, col + p * 64, head, batch, mask);
}
template<int CN, typename T, int R, int C>
TILE void tma_load_cols_multicast(st<T, R, C> &t, int c0, const gmap &m, sem &s, int row, int col, int head, int batch,
                                  int mask) {
  static_assert(sizeof(T) == 2, "panels of 64 columns");
#pragma unroll
  for (int p = 0; p < CN / 64; p++)
    tma_panel_multicast(shared_address(&t) + (c0 / 64 + p) * R * 128, m, s, row, col + p * 64, head, batch, mask);
}
template<int N> TILE void tma_load(sv<N> &t, const float *g, sem &s) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
    ::"r"(shared_address(&t)), "l"(g), "n"(N * 4), "r"(shared_address(&s)) : "memory");
}
template<int R, int C> TILE void tma_load(sm<R, C> &t, const gmap &m, sem &s, int row, int col, int head, int batch) {
  tma_panel(shared_address(&t), m, s, row, col, head, batch);
}
template<typename T, int R, int C> TILE void tma_send(st<T, R, C> &d, const st<T, R, C> &t, sem &s, int rank) {
  asm volatile("{\n.reg .b32 to, at;\nmapa.shared::cluster.u32 to, %0, %4;\nmapa.shared::cluster.u32 at, %2, %4;\n"
    "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [at], %3;\n"
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%1], %3, [at];\n}\n"
    ::"r"(shared_address(&d)), "r"(shared_address(&t)), "r"(shared_address(&s)), "r"(tile_bytes(t)), "r"(rank)
    : "memory");
}
template<typename T, int R, int C>
TILE void tma_store(const gmap &m, st<T, R, C> &t, int row, int col, int head, int batch) {
  static_assert(sizeof(T) == 2, "panels of 64 columns");
  if (thread_in_group() == 0) {
#pragma unroll
    for (int p = 0; p < C / 64; p++)
      asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
        ::"l"(&m), "r"(shared_address(&t) + p * R * 128), "r"(col + p * 64), "r"(row), "r"(head), "r"(batch)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}
template<int N> TILE void tma_store(float *g, const sv<N> &t) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;"
    ::"l"(g), "r"(shared_address(&t)), "n"(N * 4) : "memory");
}
template<int G> TILE void tma_store_wait_read() {
  trace(TRACE_STORE_WAIT, nullptr, G);
  if (thread_in_group() == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(G) : "memory");
}
template<int G, int W> TILE void tma_store_wait() {
  trace(TRACE_STORE_WAIT, nullptr, G);
  if (W == THREAD || thread_in_group() == 0) asm volatile("cp.async.bulk.wait_group %0;" ::"n"(G) : "memory");
}
template<int C> TILE void tma_prefetch_rows(const gmap &m, int row, int col, int head, int batch) {
#pragma unroll
  for (int c = 0; c < C; c += 64)
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];"
        ::"l"(&m), "r"(col + c), "r"(row), "r"(head), "r"(batch) : "memory");
}
TILE void tma_prefetch(const float *g, int n) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(g), "r"(4 * n) : "memory");
}
TILE void tma_prefetch(const gmap &m) { asm volatile("prefetch.tensormap [%0];" ::"l"(&m) : "memory"); }

// ---- shared <-> registers. stmatrix/ldmatrix x4 move 16 x 16 blocks: lanes 0-15 address the rows of the left 8
// columns, 16-31 of the right 8.
template<typename T, int C> TILE uint32_t block_address(const st<T, 64, C> &t, int col) {
  static_assert(sizeof(T) == 2, "8 columns are 16 bytes");
  int r = warp_in_group() * 16 + (lane() & 15), chunk = (col & 63) / 8 + (lane() >> 4);
  return shared_address(&t) + (col / 64) * 64 * 128 + r * 128 + ((chunk ^ (r & 7)) << 4);
}
// Address for the .trans forms: block k of 16 rows of a K x 64 tile, this warp's 16 columns.
template<typename T, int K> TILE uint32_t block_address_t(const st<T, K, 64> &t, int k) {
  int r = 16 * k + 8 * (lane() >> 4) + (lane() & 7), chunk = warp_in_group() * 2 + ((lane() >> 3) & 1);
  return shared_address(&t) + r * 128 + ((chunk ^ (r & 7)) << 4);
}
TILE void store_block(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
      ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
TILE void load_block(uint32_t (&d)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(a) : "memory");
}
template<typename T, int C, int N> TILE void load(rt<T, N> &d, const st<T, 64, C> &s, int c0) {
#pragma unroll
  for (int k = 0; k < N / 16; k++) load_block(d.d[k], block_address(s, c0 + 16 * k));
}
template<typename T, int C, int N> TILE void load(rt<float, N> &d, const st<T, 64, C> &s, int c0) {
#pragma unroll
  for (int k = 0; k < N / 16; k++) {
    uint32_t w[4];
    load_block(w, block_address(s, c0 + 16 * k));
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 x = unpack<T>(w[j]);
      d.d[8 * k + 2 * j] = x.x;
      d.d[8 * k + 2 * j + 1] = x.y;
    }
  }
}
// Where a tile has several panels, the addresses of a panel's blocks are an exclusive or away from its first block's.
// Written like this, the compiler does not compute or keep each of them: 3 % of the backward at D=64. With one panel it
// is slower.
template<typename T, int C, int N> TILE void store(st<T, 64, C> &d, const rt<T, N> &s, int c0) {
#pragma unroll
  for (int k = 0; k < N / 16; k++) {
    int col = c0 + 16 * k;
    uint32_t to = C == 64 ? block_address(d, col) : block_address(d, col / 64 * 64) ^ col % 64 / 8 << 4;
    store_block(to, s.d[k][0], s.d[k][1], s.d[k][2], s.d[k][3]);
  }
}
template<typename T, int C, int N> TILE void store(st<T, 64, C> &d, const rt<float, N> &s, int c0) {
#pragma unroll
  for (int k = 0; k < N / 16; k++) {
    const float *x = s.d + 8 * k;
    store_block(block_address(d, c0 + 16 * k), pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]),
                pack<T>(x[6], x[7]));
  }
}
// Address of 16-byte chunk c of row r.
template<int R, int C> TILE uint32_t chunk_address(const st<e4m3, R, C> &t, int r, int c) {
  constexpr int BYTES = panel_bytes<e4m3, C>, CHUNKS = BYTES / 16;
  int swizzle = BYTES == 128 ? r & 7 : r >> 1 & 3;
  return shared_address(&t) + c / CHUNKS * R * BYTES + r * BYTES + ((c % CHUNKS ^ swizzle) << 4);
}
TILE void store_half(uint32_t a, uint32_t x, uint32_t y) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(a), "r"(x), "r"(y) : "memory");
}
// It takes 16 columns at a time, and 32 rows of these. ldmatrix.trans moves pairs of columns: a thread gets rows 2t,
// 2t + 1 of columns 2g, 2g + 1 (g: lane / 4) of each of four blocks of 8 rows. Two of these blocks together are the
// bytes of one word in rows 2g and 2g + 1 of the transpose. stmatrix then writes two matrices of rows, 0 2 4 6 9 11 13
// 15 and 1 3 5 7 8 10 12 14. Each has even and odd rows, so that they lie in different banks.
template<int K, int N>
TILE void transpose_part(tt<e4m3, K, N> &d, int k0, const st<e4m3, 64, N> &s, int index, int count) {
  // row r ^ 1, same chunk
  constexpr uint32_t FROM = panel_bytes<e4m3, N>, TO = panel_bytes<e4m3, K>, NEIGHBOUR = TO == 128 ? 0x90 : 0x40;
  constexpr int BATCH = N > 128 ? 1 : 2;   // loads in flight: beside wide tiles there are 24 registers
  int g = lane() & 7, block = lane() >> 3 & 1;
  uint32_t first = lane() < 16 ? 0x6420 : 0x7531, other = first ^ 0x1111;
  uint32_t from0 = chunk_address(s, lane(), 0),
           to0 = (chunk_address(d.t, 2 * g + (g >> 2), block) ^ k0 % TO) + k0 / TO * N * TO;
#pragma unroll 1
  for (uint32_t c = index; c < N / 16; c += count) {   // the chunk of s
    uint32_t from = (from0 ^ c % (FROM / 16) << 4) + c / (FROM / 16) * 64 * FROM, to = to0 + c * 16 * TO;
#pragma unroll
    for (int r = 0; r < 2; r += BATCH) {   // 64 rows stay in a panel of d
      uint32_t x[BATCH][4];
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
          : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3]) : "r"(from + (r + i) * 32 * FROM) : "memory");
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        uint32_t at = to ^ 2 * (r + i) << 4;
        store_half(at, __byte_perm(x[i][0], x[i][1], first), __byte_perm(x[i][2], x[i][3], first));
        store_half(at ^ NEIGHBOUR, __byte_perm(x[i][0], x[i][1], other), __byte_perm(x[i][2], x[i][3], other));
      }
    }
  }
}
template<typename T, int K> TILE void load_t(rt<T, K> &d, const st<T, K, 64> &s) {
#pragma unroll
  for (int k = 0; k < K / 16; k++)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(d.d[k][0]), "=r"(d.d[k][1]), "=r"(d.d[k][2]), "=r"(d.d[k][3]) : "r"(block_address_t(s, k)) : "memory");
}
template<typename T, int K> TILE void store_t(st<T, K, 64> &d, const rt<float, K> &s) {
#pragma unroll
  for (int k = 0; k < K / 16; k++) {
    const float *x = s.d + 8 * k;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(block_address_t(d, k)),
      "r"(pack<T>(x[0], x[1])), "r"(pack<T>(x[2], x[3])), "r"(pack<T>(x[4], x[5])), "r"(pack<T>(x[6], x[7]))
      : "memory");
  }
}
template<typename T, int N, class F>
TILE void store_rc(st<T, 64, N> &s, const rt<float, N> &t, const rv &u, const sv<N> &v, F f) {
  const float2 *g = (const float2 *)(v.d + thread_col());
  int r = thread_row(), c = thread_col();
#pragma unroll
  for (int k = 0; k < N / 16; k++) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 x = g[k * 8 + (j >> 1) * 4];
      int i = 8 * k + 2 * j, row = r + 8 * (j & 1), col = c + 16 * k + 8 * (j >> 1);
      w[j] = pack<T>(f(t.d[i], u.d[j & 1], x.x, row, col), f(t.d[i + 1], u.d[j & 1], x.y, row, col + 1));
    }
    store_block(block_address(s, 16 * k), w[0], w[1], w[2], w[3]);
  }
}
// 16 x 16 blocks on the other side of the diagonal cost a store of zeros and no arithmetic.
template<bool UPPER, typename T, int N, class F>
TILE void store_triangle(st<T, 64, N> &s, const rt<float, N> &t, const rv &u, const sv<N> &v, float diag, F f) {
  const float2 *g = (const float2 *)(v.d + thread_col());
  int r = lane() >> 2, c = thread_col();
#pragma unroll
  for (int k = 0; k < N / 16; k++) {
    uint32_t w[4] = {0, 0, 0, 0};
    if (UPPER ? k >= warp_in_group() : k <= warp_in_group()) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float2 x = g[k * 8 + (j >> 1) * 4];
        float lo = f(t.d[8 * k + 2 * j], u.d[j & 1], x.x), hi = f(t.d[8 * k + 2 * j + 1], u.d[j & 1], x.y);
        if (k == warp_in_group()) {
          int row = r + 8 * (j & 1), col = c + 8 * (j >> 1);
          lo = col == row ? lo + diag : (col > row) != UPPER ? 0.f : lo;
          hi = col + 1 == row ? hi + diag : (col + 1 > row) != UPPER ? 0.f : hi;
        }
        w[j] = pack<T>(lo, hi);
      }
    }
    store_block(block_address(s, 16 * k), w[0], w[1], w[2], w[3]);
  }
}
template<typename T, int N, class F>
TILE void store_tril(st<T, 64, N> &s, const rt<float, N> &t, const rv &u, const sv<N> &v, float diag, F f) {
  store_triangle<false>(s, t, u, v, diag, f);
}
template<typename T, int N, class F>
TILE void store_triu(st<T, 64, N> &s, const rt<float, N> &t, const rv &u, const sv<N> &v, float diag, F f) {
  store_triangle<true>(s, t, u, v, diag, f);
}
// Rows are whole in every panel, so that the swizzle does not matter.
template<int W, typename T, int R, int C> TILE void clear_rows(st<T, R, C> &t, int first, int end) {
#pragma unroll 4
  for (int i = W == WARP ? lane() : thread_in_group(); i < R * C / 8; i += W == WARP ? 32 : 128) {
    int r = i / 8 % R;
    if (r < first || r >= end) ((uint4 *)t.d)[i] = make_uint4(0, 0, 0, 0);
  }
}
// Two threads a row, so that a warp writes the 16 rows that its own products read.
template<typename T, int C, class F> TILE void load_rows(st<T, 64, C> &t, F f, int n) {
  int r = thread_in_group() / 2, first = thread_in_group() % 2 * (C / 16);
  const T *g = f(r);
  // columns that are whole vectors
  int whole = g && ((uintptr_t)g & 15) == 0 ? n & ~7 : 0, end = min(n, (first + C / 16) * 8);
#pragma unroll
  for (int i = 0; i < C / 16; i++) {
    int chunk = first + i;
    uint4 x = chunk * 8 < whole ? *(const uint4 *)(g + chunk * 8) : make_uint4(0, 0, 0, 0);
    *(uint4 *)((char *)t.d + chunk / 8 * 64 * 128 + r * 128 + ((chunk ^ r) & 7) * 16) = x;
  }
  if (!g) return;
#pragma unroll 1
  for (int c = max(whole, first * 8); c < end; c++)
    *(T *)((char *)t.d + c / 64 * 64 * 128 + r * 128 + ((c / 8 ^ r) & 7) * 16 + c % 8 * 2) = g[c];
}
// each(): what an argument has in block k of 16 columns, and of that a thread's element j, 0 to 7.
template<typename T> struct block_words { uint32_t w[4]; };
struct block_pairs { float2 c[2]; };
template<class X> TILE X &each_block(X &x, int) { return x; }
template<typename T, int C> TILE block_words<T> each_block(const st<T, 64, C> &s, int k) {
  block_words<T> b;
  load_block(b.w, block_address(s, 16 * k));
  return b;
}
template<typename T, int C> TILE block_words<T> each_block(st<T, 64, C> &s, int k) {
  return each_block((const st<T, 64, C> &)s, k);
}
template<int N> TILE block_pairs each_block(const sv<N> &v, int k) {
  const float2 *g = (const float2 *)(v.d + thread_col());
  return {{g[k * 8], g[k * 8 + 4]}};
}
template<int N> TILE block_pairs each_block(sv<N> &v, int k) { return each_block((const sv<N> &)v, k); }
template<int N> TILE float &each_at(rt<float, N> &t, int k, int j) { return t.d[8 * k + j]; }
template<int N> TILE float each_at(const rt<float, N> &t, int k, int j) { return t.d[8 * k + j]; }
TILE float each_at(const rv &v, int, int j) { return v.d[j >> 1 & 1]; }
TILE float &each_at(rsum &l, int, int j) { return l.d[j >> 1 & 1]; }
template<int N> TILE float &each_at(csum<N> &c, int k, int j) { return c.d[4 * k + (j >> 2) * 2 + (j & 1)]; }
TILE float each_at(const block_pairs &b, int, int j) { return j & 1 ? b.c[j >> 2].y : b.c[j >> 2].x; }
template<typename T> TILE float each_at(const block_words<T> &b, int, int j) {
  float2 x = unpack<T>(b.w[j >> 1]);
  return j & 1 ? x.y : x.x;
}
// A row's sum is whole before the next block is read: the compiler would read all of a shared tile first.
template<class B> TILE void each_pin(B &) {}
TILE void each_pin(rsum &l) { asm volatile("" : "+f"(l.d[0]), "+f"(l.d[1])::"memory"); }
template<class F, class... B> TILE void each_of_block(F f, int k, B &&...b) {
  int r = thread_row(), c = thread_col() + 16 * k;
#pragma unroll
  for (int j = 0; j < 8; j++) f(r + (j >> 1 & 1) * 8, c + (j >> 2) * 8 + (j & 1), each_at(b, k, j)...);
  (each_pin(b), ...);
}
template<int N, class F, class... X> TILE void each(F f, X &...x) {
#pragma unroll
  for (int k = 0; k < N / 16; k++) each_of_block(f, k, each_block(x, k)...);
}
template<int N, class F, class D, class G, class... X>
TILE void each_of_triangles(F right, D diagonal, G left, X &...x) {
#pragma unroll
  for (int k = 0; k < N / 16; k++)
    if (k > warp_in_group()) each_of_block(right, k, each_block(x, k)...);
    else if (k == warp_in_group()) each_of_block(diagonal, k, each_block(x, k)...);
    else each_of_block(left, k, each_block(x, k)...);
}
// A row's place. It is worked out anew each time: kept in a register for the whole kernel it would cost more.
TILE int row_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return (thread >> 5 & 3) * 16 + (thread >> 2 & 7);
}
TILE void load(rv &v, const sv<64> &s) {
  const float *row = s.d + row_here();
  v.d[0] = row[0];
  v.d[1] = row[8];
}
TILE void store(sv<64> &d, const rv &v) {   // four threads hold a row, each with the same value
  float *row = d.d + row_here();
  __syncwarp();                             // until all four have read what was there: lanes may be apart
  row[0] = v.d[0];
  row[8] = v.d[1];
}
// The eight lanes of a column halve their columns three times, each keeping one half and giving the other away.
template<int STEP, int N, int M> TILE void halve(float (&x)[M]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    bool upper = lane() & STEP;
    float mine = upper ? x[i + N] : x[i], other = upper ? x[i] : x[i + N];
    x[i] = mine + __shfl_xor_sync(~0u, other, STEP);
  }
}
template<int N> TILE void store(sv<4 * N> &d, const csum<N> &c) {
  static_assert(N % 64 == 0, "column sums of 64 columns, or a multiple");
  float x[N / 4];
#pragma unroll
  for (int i = 0; i < N / 4; i++) x[i] = c.d[i];
  halve<16, N / 8>(x);
  halve<8, N / 16>(x);
  halve<4, N / 32>(x);
  // Of its groups of eight columns.
  int first = ((lane() >> 4 & 1) * 4 + (lane() >> 3 & 1) * 2 + (lane() >> 2 & 1)) * (N / 64);
#pragma unroll
  for (int i = 0; i < N / 64; i++)
    *(float2 *)(d.d + warp_in_group() * N + (first + i) * 8 + thread_col()) = make_float2(x[2 * i], x[2 * i + 1]);
}
// The address is asked for anew. Kept for the next time, it would take one of the registers that parking frees.
TILE int parking_place() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread & 127;
}
TILE void load(rv &v, const parked &s) {
  float mine = s.d[parking_place()];
  v.d[0] = __shfl_sync(~0u, mine, 0, 2);
  v.d[1] = __shfl_sync(~0u, mine, 1, 2);
}
TILE void store(parked &d, const rv &v) {
  int place = parking_place();
  d.d[place] = place & 1 ? v.d[1] : v.d[0];
}
template<int N> TILE void load(cv<N> &v, const sv<N> &s) {
#pragma unroll
  for (int i = 0; i < N / 8; i++)
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.d[2 * i]), "=f"(v.d[2 * i + 1])
      : "r"(shared_address(&s) + (i * 8 + thread_col()) * 4) : "memory");
}
template<int N> TILE float get(const sv<N> &s, int i) { return s.d[i]; }
template<int N> TILE void clear(sv<N> &s) {
#pragma unroll 1
  for (int i = 0; i < N; i++) s.d[i] = 0.f;
}
TILE void put(int &s, int v) { *(volatile int *)&s = v; }
TILE void put_at(int &s, int v, sem &full, int rank) {
  asm volatile("{\n.reg .b32 to, at;\nmapa.shared::cluster.u32 to, %0, %3;\nmapa.shared::cluster.u32 at, %2, %3;\n"
    "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [at], 4;\n"
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [at];\n}\n"
    ::"r"(shared_address(&s)), "r"(v), "r"(shared_address(&full)), "r"(rank) : "memory");
  trace(TRACE_ARRIVE, &full, 1);
}
TILE int get(const int &s) { return *(const volatile int *)&s; }
TILE void put(int64_t &s, int64_t v) { *(volatile int64_t *)&s = v; }
TILE int64_t get(const int64_t &s) { return *(const volatile int64_t *)&s; }

// ---- global <-> registers
TILE void load(rv &v, const float *g, int n, float pad) {
  int r = thread_row();
  v.d[0] = r < n ? g[r] : pad;
  v.d[1] = r + 8 < n ? g[r + 8] : pad;
}
TILE void store(float *g, const rv &v, int n) {
  int r = thread_row();
  if ((threadIdx.x & 3) == 0) {
    if (r < n) g[r] = v.d[0];
    if (r + 8 < n) g[r + 8] = v.d[1];
  }
}
template<typename T, int N> TILE void load(cv<N> &v, const T *g, int n) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    int c = (i >> 1) * 8 + thread_col() + (i & 1);
    v.d[i] = c < n ? to_float(g[c]) : 0.f;
  }
}
template<int N> TILE void load(rt<float, N> &t, const float *g, int64_t ld, int m, int n) {
  int r = thread_row(), c = thread_col();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float *from = g + (r + 8 * h) * ld + c;
    bool there = r + 8 * h < m, whole = n == N && ((uintptr_t)from & 7) == 0;
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
      float2 x = make_float2(0.f, 0.f);
      if (there && whole) x = *(const float2 *)(from + 8 * i);
      else if (there) {
        if (c + 8 * i < n) x.x = from[8 * i];
        if (c + 8 * i + 1 < n) x.y = from[8 * i + 1];
      }
      t.d[4 * i + 2 * h] = x.x;
      t.d[4 * i + 2 * h + 1] = x.y;
    }
  }
}
template<int N> TILE void store(float *g, int64_t ld, const rt<float, N> &t, int m, int n) {
  int r = thread_row(), c = thread_col();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float *to = g + (r + 8 * h) * ld + c;
    if (r + 8 * h >= m) continue;
    if (n == N && ((uintptr_t)to & 7) == 0) {
#pragma unroll
      for (int i = 0; i < N / 8; i++) *(float2 *)(to + 8 * i) = make_float2(t.d[4 * i + 2 * h], t.d[4 * i + 2 * h + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < N / 8; i++) {
        if (c + 8 * i < n) to[8 * i] = t.d[4 * i + 2 * h];
        if (c + 8 * i + 1 < n) to[8 * i + 1] = t.d[4 * i + 2 * h + 1];
      }
    }
  }
}
template<int N> TILE void load(rt<float, N> &t, const float *g, int row, int col, int m, int n) {
  if (col == 1) return load(t, g, row, m, n);
  int r = thread_row(), c = thread_col();
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    int x = r + (i >> 1 & 1) * 8, y = c + i / 4 * 8 + (i & 1);
    t.d[i] = x < m && y < n ? g[x * row + y * col] : 0.f;
  }
}
template<int N> TILE void store(float *g, int row, int col, const rt<float, N> &t, int m, int n) {
  if (col == 1) return store(g, row, t, m, n);
  int r = thread_row(), c = thread_col();
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    int x = r + (i >> 1 & 1) * 8, y = c + i / 4 * 8 + (i & 1);
    if (x < m && y < n) g[x * row + y * col] = t.d[i];
  }
}
template<typename T, int N, class F> TILE void store_rows(const rt<float, N> &t, F f, int n) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    T *g = f(thread_row() + 8 * h);
    bool pairs = ((uintptr_t)g & 3) == 0;
    if (!g) continue;
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
      int c = thread_col() + 8 * i;
      uint32_t w = pack<T>(t.d[4 * i + 2 * h], t.d[4 * i + 2 * h + 1]);
      if (pairs && c + 1 < n) *(uint32_t *)(g + c) = w;
      else {
        if (c < n) g[c].u = (uint16_t)w;
        if (c + 1 < n) g[c + 1].u = (uint16_t)(w >> 16);
      }
    }
  }
}
// Accumulator order: thread t's four values of column group i are floats 4 (128 i + t) .. + 3, so that a warp touches
// 512 contiguous bytes.
template<int N> TILE void add_acc(float *g, const rt<float, N> &t) {
  float *p = g + 4 * thread_in_group();
#pragma unroll
  for (int i = 0; i < N / 8; i++)
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
      ::"l"(p + 512 * i), "f"(t.d[4 * i]), "f"(t.d[4 * i + 1]), "f"(t.d[4 * i + 2]), "f"(t.d[4 * i + 3]) : "memory");
}
template<int N> TILE void add_acc_cols(float *g, int c0, const rt<float, N> &t) { add_acc(g + 64 * c0, t); }
template<int N> TILE void load_acc(rt<float, N> &t, const float *g) {
  const float4 *p = (const float4 *)g + thread_in_group();
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    float4 x = p[128 * i];
    t.d[4 * i] = x.x;
    t.d[4 * i + 1] = x.y;
    t.d[4 * i + 2] = x.z;
    t.d[4 * i + 3] = x.w;
  }
}
template<int N> TILE void zero_acc(float *g) {
  float4 *p = (float4 *)g + thread_in_group();
#pragma unroll
  for (int i = 0; i < N / 8; i++) p[128 * i] = make_float4(0.f, 0.f, 0.f, 0.f);
}
TILE void zero_words(int *g, int n) {
  for (int i = thread_in_group(); i < n; i += 128) g[i] = 0;
}
