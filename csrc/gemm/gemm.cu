// GEMM:  c = act(a b + bias),  fp32 accumulation
// a is stored [m, k] or, with TA, [k, m]; b is stored [k, n] or, with TB, [n, k]. The maps read zeros outside, so that
// no size has a tail.
// Blocks are persistent. One loader thread fills a ring of stages BK deep, NC warpgroups multiply 64 rows each. The
// blocks of a cluster compute tiles that lie one below the other. Each loads its own rows of a, and an equal part of
// their common columns of b for all of them. c leaves through 64 x 64 tiles whose stores run under the next tile's
// products.
#include "tile/tile.h"
#include "gemm/activation.h"
#include "gemm/gemm.h"
#include "margay_types.h"

// From the row: NC (compute warpgroups), BN (columns of a tile), STAGES, CLUSTER_SIZE, PER_SM, TA, TB, *_REGS.
// PART: columns of b that each block of a cluster loads, rows of b as stored where TB.
enum { BM = 64 * NC, BK = 64, PART = BN / CLUSTER_SIZE, B_ROWS = TB ? (int)BN : (int)BK,
    B_COLS = TB ? (int)BK : (int)BN };
static_assert(BN % 128 == 0, "the two tiles that c leaves through alternate, across tasks too");

struct shared {
  st<elem, 64, BK> a[STAGES][NC];   // square: 64 rows by BK, or with TA the transpose
  st<elem, B_ROWS, B_COLS> b[STAGES];
  st<elem, 64, 64> c[NC][2];
  ring<STAGES, ASYNC_READS> steps;
};

TILE void init(shared &s) { cluster_ring_init<CLUSTER_SIZE>(s.steps, arrivals(1, 0, 0), arrivals(0, 0, NC)); }

struct tile_origin { int row, col; };

// Tasks sweep the columns in groups of rows: at any time the blocks work on about as many rows of a as columns of b.
TILE tile_origin origin_of(const gemm_params &p, int task) {
  int first = task / (p.sweep_rows * p.n_blocks) * p.sweep_rows, i = task - first * p.n_blocks;
  int rows = p.m_blocks - first < p.sweep_rows ? p.m_blocks - first : p.sweep_rows;
  tile_origin t;
  t.row = ((first + i % rows) * CLUSTER_SIZE + cluster_rank()) * BM;
  t.col = i / rows * BN;
  return t;
}

TILE void load_a(const gemm_params &p, shared &s, int stage, int row, int k) {
  for (int w = 0; w < NC; w++) {
    int r = row + 64 * w;
    tma_load(s.a[stage][w], p.a, s.steps.full[stage], TA ? k : r, TA ? r : k, 0, 0);
  }
}
TILE void load_b(const gemm_params &p, shared &s, int stage, int col, int k) {
  int c0 = cluster_rank() * PART, everyone = (1 << CLUSTER_SIZE) - 1;
  sem &full = s.steps.full[stage];
  if constexpr (CLUSTER_SIZE == 1) tma_load(s.b[stage], p.b, full, TB ? col : k, TB ? k : col, 0, 0);
  else if constexpr (TB) tma_load_rows_multicast<PART>(s.b[stage], c0, p.b, full, col + c0, k, 0, 0, everyone);
  else tma_load_cols_multicast<PART>(s.b[stage], c0, p.b, full, k, col + c0, 0, 0, everyone);
}

TILE void loader(const gemm_params &p, shared &s, int) {
  ring_pos at = {};
  for (int task = cluster_index<CLUSTER_SIZE>(); task < p.tasks; task += cluster_count<CLUSTER_SIZE>()) {
    tile_origin t = origin_of(p, task);
    for (int k = p.k > 0 ? 0 : -BK; k < p.k; k += BK) {   // k = 0: one step of the zeros outside
      ring_acquire(s.steps, at);
      ring_expect(s.steps, at, NC * tile_bytes(s.a[0][0]) + tile_bytes(s.b[0]));   // b: the other blocks' parts too
      load_a(p, s, at.stage, t.row, k);
      load_b(p, s, at.stage, t.col, k);
      ring_next(s.steps, at);
    }
  }
}

// c = a b. Loads the tile's bias while the last product runs.
TILE void multiply(const gemm_params &p, shared &s, ring_pos &at, rt<float, BN> &c, cv<BN> &bias, int col, int wg) {
  ring_wait(s.steps, at);
  mma_fence();
  mma<ZERO, TA, TB>(c, s.a[at.stage][wg], s.b[at.stage]);
  mma_commit();
  for (int k = BK; k < p.k; k += BK) {
    ring_pos last = at;
    ring_next(s.steps, at);
    ring_wait(s.steps, at);
    mma_fence();
    mma<ACC, TA, TB>(c, s.a[at.stage][wg], s.b[at.stage]);
    mma_commit();
    mma_wait<1>();   // frees the stage before; c stays in flight
    cluster_ring_release<CLUSTER_SIZE>(s.steps, last);
  }
  if (p.bias) load(bias, (const elem *)p.bias + col, p.n - col);
  mma_wait<0>(c);
  cluster_ring_release<CLUSTER_SIZE>(s.steps, at);
  ring_next(s.steps, at);
}

TILE void activate(rt<float, BN> &c, int activation) {
  if (activation == MG_RELU) map(c, [](float x) { return relu(x); });
  if (activation == MG_GELU) map(c, [](float x) { return gelu(x); });
  if (activation == MG_GELU_TANH) map(c, [](float x) { return gelu_tanh(x); });
  if (activation == MG_SILU) map(c, [](float x) { return silu(x); });
}

// 64 columns at a time through two tiles in turn: one may be written when at most the other's store still reads.
TILE void store_tile(const gemm_params &p, shared &s, const rt<float, BN> &c, int row, int col, int wg) {
  UNROLLED for (int j = 0; j < BN / 64; j++) {
    rt<elem, 64> part;
    convert_part(part, c, 64 * j);
    tma_store_wait_read<1>();
    wg_sync();
    store(s.c[wg][j % 2], part);
    fence_async();
    wg_sync();
    tma_store(p.c, s.c[wg][j % 2], row, col + 64 * j, 0, 0);
  }
}

TILE void compute(const gemm_params &p, shared &s, int wg) {
  ring_pos at = {};
  for (int task = cluster_index<CLUSTER_SIZE>(); task < p.tasks; task += cluster_count<CLUSTER_SIZE>()) {
    rt<float, BN> c;
    cv<BN> bias;
    tile_origin t = origin_of(p, task);
    multiply(p, s, at, c, bias, t.col, wg);
    if (p.bias) map_col(c, bias, [](float x, float y) { return x + y; });
    activate(c, p.activation);
    store_tile(p, s, c, t.row + 64 * wg, t.col, wg);
  }
  tma_store_wait_read();
}

typedef block<gemm_params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              CLUSTER<CLUSTER_SIZE>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, BM, BN)
