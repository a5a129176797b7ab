// out = post (k * (pre u)), the convolution's first N = 64 m elements, N a power of two from 64 to 4096, or the
// circular one. By spectra (fft_conv_tiles.h):
//   out = post L^H ((((((L X) T) F) K) F^H) T^*)
// Causal: of a real row, at frequencies (k + 1/4) / N, the real part. Circular (PAIRS): of two batch entries' rows as
// the real and the imaginary part of one, at frequencies k / N, with the folded L.
// 4096 elements are a tile: a row, or 64 / m heads, each with its own filter. Numbers are fp16 inside. Each row is
// scaled by a power of two first, so that none is too large or small for that.
// Roles: a loader thread; NC warpgroups, each with tiles and rings of its own; a thread that loads the gates. Blocks
// walk along the batch of a filter's tile, so that K comes from the L1 or L2.
#include "tile/tile.h"
#include "fft_conv/fft_conv_tasks.h"

// From the row: TAKES, FLOATS, NC, COMPUTE_REGS, LOAD_REGS, PIECES = 1
enum { ROWS = TAKES, PAIRS = ROWS - 1, GATES = 2 / ROWS };   // tiles of a task; rings of gates, each of as many
typedef st<elem, 64, 64> tile;
typedef columns<FLOATS>::type strip;    // 32 columns
struct own_tiles {                      // a warpgroup's, side by side: their addresses differ by constants
  tile u[ROWS], gates[2];
  table x[2][PIECES];                   // what passes from registers to a product, then the result
  sv<64> rows[ROWS];
  parked up[ROWS];
};
struct shared {
  own_tiles group[NC];
  table left[2][PIECES], twists[2][PIECES], halves[2][PIECES];
  // They are released behind the fence that the products or the store want, so none of their own is needed.
  ring<1, ASYNC_READS> inputs[NC];
  // The first gate and the second one, as far as they are given: in turn, or of causal rows each with a ring.
  ring<1, ASYNC_READS> gates[NC][GATES];
  sem constants;
};
typedef fft_conv_params params;

TILE void init(shared &s) {
  for (int i = 0; i < NC; i++) {
    ring_init(s.inputs[i], arrivals(1, 0, 0), arrivals(0, 0, 1));
    for (int j = 0; j < GATES; j++) ring_init(s.gates[i][j], arrivals(1, 0, 0), arrivals(0, 0, 1));
  }
  sem_init(s.constants, arrivals(1, 0, 0));
}

TILE const float *filter_of(const params &p, int i) { return p.filter + (int64_t)64 * 64 * i; }
// Behind the last head and batch entry are zeros.
TILE void load_task(tile *t, const gmap &m, sem &full, const params &p, int task) {
  for (int i = 0; i < ROWS; i++) tma_load(t[i], m, full, 64 * (task / p.batches), 0, 0, task % p.batches * ROWS + i);
}

TILE void loader(const params &p, shared &s, int) {
  range own = block_tasks(p);
  ring_pos at = {};                     // in the rings of all warpgroups
  int wg = 0;
  grid_wait();
  sem_expect(s.constants, 6 * tile_bytes(s.left[0][0]));
  load_tables(s.left, p.of.tables, s.constants, PAIRS ? FFT_FOLDED_LEFT : FFT_LEFT);
  load_tables(s.twists, p.of.tables, s.constants, PAIRS ? FFT_FOLDED_TWISTS : FFT_TWISTS);
  load_tables(s.halves, p.of.tables, s.constants, FFT_HALVES);
  for (int task = own.first; task < own.end; task++) {
    ring_acquire(s.inputs[wg], at);
    if (task == own.first || task % p.batches == 0) tma_prefetch(filter_of(p, task / p.batches), 64 * 64);
    ring_expect(s.inputs[wg], at, ROWS * tile_bytes(s.group[0].u[0]));
    load_task(s.group[wg].u, p.of.u, s.inputs[wg].full[0], p, task);
    if (++wg == NC) {
      wg = 0;
      ring_next(s.inputs[0], at);
    }
  }
}
TILE void load_gate(const params &p, shared &s, const gmap &m, int wg, int which, ring_pos &at, int task) {
  ring<1, ASYNC_READS> &gates = s.gates[wg][which];
  ring_acquire(gates, at);
  ring_expect(gates, at, ROWS * tile_bytes(s.group[0].gates[0]));
  load_task(s.group[wg].gates + which, m, gates.full[0], p, task);
  ring_next(gates, at);
}
TILE void gate_loader(const params &p, shared &s, int) {
  range own = block_tasks(p);
  ring_pos first = {}, second = {};
  int wg = 0;
  if (!p.has_pre && !p.has_post) return;
  grid_wait();
  for (int task = own.first; task < own.end; task++) {
    ring_pos a = first, b = second;
    if (p.has_pre) load_gate(p, s, p.of.pre, wg, 0, a, task);
    if (p.has_post) load_gate(p, s, p.of.post, wg, GATES - 1, PAIRS ? a : b, task);
    if (++wg == NC) {
      wg = 0;
      first = a;
      second = b;
    }
  }
}

// Log of a folded group's rows. Rows of 64 elements (log_rows 0) are folded as two heads, whose sums are not made.
TILE int fold_log(const params &p) { return p.log_rows ? p.log_rows : 1; }
TILE void multiply_gate(const params &p, shared &s, acc &re, acc &im, int wg, int which, ring_pos at) {
  const tile *gate = s.group[wg].gates + which;
  ring_wait(s.gates[wg][which], at);
  if (PAIRS) {
    multiply_folded(re, gate[0], fold_log(p));
    multiply_folded(im, gate[ROWS - 1], fold_log(p));
  } else multiply(re, gate[0]);
}
// x, scaled, as an operand
TILE void enter(own_tiles &own, acc &x, int log_rows) {
  rv bound, down, up;
  group_largest(bound, own.rows[0], log_rows);
  scales(down, up, bound, 1.f);
  store(own.up[0], up);
  scale_down(x, down);
  put_pieces(own.x[0], x);
}
TILE void enter_pair(own_tiles &own, acc &re, acc &im, int log_rows) {
  rv a, b, up_a, up_b, down_a, down_b;
  group_largest_folded(a, own.rows[0], log_rows);
  group_largest_folded(b, own.rows[ROWS - 1], log_rows);
  scales_alike(down_a, up_a, a);
  scales_alike(down_b, up_b, b);
  store(own.up[0], up_a);
  store(own.up[ROWS - 1], up_b);
  scale_down(re, down_a);
  scale_down(im, down_b);
  UNROLLED for (int i = 0; i < 2; i++) {
    strip y, z;
    convert_part(y, re, 32 * i);
    convert_part(z, im, 32 * i);
    trade_rows(y, z);
    if (log_rows) cross(y, z);
    store(own.x[0][0], y, 32 * i);
    store(own.x[1][0], z, 32 * i);
  }
}
// What comes of L's halves, conjugated, becomes both rows of the result. a, b: what scales them up
TILE void leave_pair(acc &re, acc &im, rv a, rv b, const rv &factor, int log_rows) {
  map(a, a, factor, [](float x, float y) { return x * y; });
  map(b, b, factor, [](float x, float y) { return x * -y; });
  trade_rows(a, b);
  if (log_rows)
    each<64>([](int, int, float &x, float &y, float f, float g) {
      float z = x * f;
      x = fused(y, g, z);
      y = fused(-y, g, z);
    }, re, im, a, b);
  else {
    map_row(re, a, [](float x, float f) { return x * f; });
    map_row(im, b, [](float x, float f) { return x * f; });
  }
  trade_rows(re, im);
}

TILE void load_factors(rv &factor, const params &p, int filter) {
  int log = fold_log(p), rows = p.rows - 64 * filter;
  const float *f = p.factors + 64 * filter;
  map_rows(factor, [=](int r) { int i = folded_row(r, log); return i < rows ? f[i] : 0.f; });
}

TILE void compute(const params &p, shared &s, int wg) {
  range own = block_tasks(p);
  own_tiles &t = s.group[wg];
  ring_pos at = {}, first = {}, other = {}, &second = PAIRS ? first : other;     // of the inputs, of the gates
  table(&x)[2][PIECES] = t.x;
  grid_wait();
  sem_wait(s.constants, 0);
  operands lr[PIECES], li[PIECES];
  load(lr[0], s.left[0][0]);                                   // of pairs L's even half and its odd one
  load(li[0], s.left[1][0]);
  int filter = (own.first + wg) / p.batches, batch = (own.first + wg) % p.batches;
  for (int task = own.first + wg; task < own.end; task += NC) {
    acc re, im;
    rv factor, up, other_up;
    ring_wait(s.inputs[wg], at);
    if (PAIRS) {
      load_folded(re, t.u[0], 0, fold_log(p));
      load_folded(im, t.u[ROWS - 1], 0, fold_log(p));
    } else load(re, t.u[0]);
    if (p.has_pre) multiply_gate(p, s, re, im, wg, 0, first);
    row_largest(t.rows[0], re);
    if (PAIRS) row_largest(t.rows[ROWS - 1], im);
    tma_store_wait_read();
    wg_sync();                                                 // also: the last store has read x
    if (PAIRS) enter_pair(t, re, im, p.log_rows);
    else enter(t, re, p.log_rows);
    fence_async();
    ring_done(s.inputs[wg], at);
    if (p.has_pre) ring_done(s.gates[wg][0], first);
    wg_sync();
    mma_fence();
    product<ZERO>(re, lr, x[0]);
    product<ZERO>(im, li, x[PAIRS]);
    mma_commit();
    if (PAIRS) {                                               // worked out anew they take no registers
      filter = task / p.batches;
      batch = task % p.batches;
    }
    const float *k = filter_of(p, filter);
    pass_spectrum<PAIRS, !FLOATS, strip>(x, re, im, s.twists, s.halves, false,
                                         [&] { mma_wait<0>(re, im, lr[0], li[0]); },
                                         [=](auto &even, auto &odd) {
                                           load_columns(even, k, 0);
                                           load_columns(odd, k, 1);
                                         }, [] { wg_sync(); });
    fence_async();
    wg_sync();
    mma_fence();
    product<ZERO>(re, lr, x[0]);
    if (PAIRS) product<ZERO>(im, li, x[1]);
    else product<ACC>(re, li, x[1]);
    mma_commit();
    if (PAIRS) load_factors(factor, p, filter);                // under the products
    else load(factor, p.factors + 64 * filter, p.rows - 64 * filter, 0.f);
    load(up, t.up[0]);
    if (PAIRS) load(other_up, t.up[ROWS - 1]);
    mma_wait<0>(re, im, lr[0], li[0]);
    if (PAIRS) leave_pair(re, im, up, other_up, factor, p.log_rows);
    else {
      map(up, up, factor, [](float a, float b) { return a * b; });
      map_row(re, up, [](float a, float f) { return a * f; });
    }
    if (p.has_post) multiply_gate(p, s, re, im, wg, GATES - 1, second);
    wg_sync();                                                 // all products have read x
    if (PAIRS) {
      store_folded((tile &)x[0][0], re, 0, fold_log(p));
      store_folded((tile &)x[1][0], im, 0, fold_log(p));
    } else store((tile &)x[0][0], re);
    fence_async();
    if (p.has_post) ring_done(s.gates[wg][GATES - 1], second);
    wg_sync();
    tma_store(p.of.out, (tile &)x[0][0], 64 * filter, 0, 0, batch * ROWS);
    if (PAIRS) tma_store(p.of.out, (tile &)x[1][0], 64 * filter, 0, 0, batch * ROWS + 1);
    if (!PAIRS)
      for (batch += NC; batch >= p.batches; batch -= p.batches) filter++;
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<gate_loader, THREAD, 1, LOAD_REGS>, DEPENDENT> kernel;
ENTRY(kernel, 64, NC)
