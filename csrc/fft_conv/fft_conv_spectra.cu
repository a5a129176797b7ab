// Spectra of blocks of 4096 numbers (fft_conv_tiles.h): of filters, and of rows that are no power of two, longer than
// 4096, or wanted more precisely. Warpgroups do not meet, but for the tables, which a block makes itself.
// Blocks of a long row: with p_n = block n, and its product with block m of a filter as the two halves of a
// convolution, block s of the result is Re sum over n of (P_(s-n) + i P_(s-n-1)) K_n. So `pairs` transforms p_n + i
// p_(n-1) at once.
#include "tile/tile.h"
#include "fft_conv/fft_conv_tiles.h"

// From the row: PIECES, NC warpgroups, REGS
struct shared {
  table left[3][PIECES], right[3][PIECES], twists[2][PIECES];
  table x[NC][2][PIECES];
  sv<64> rows[NC];
};
typedef fft_spectra_params params;

TILE void init(shared &) {}

// Element n of a row, which may be in front of it or behind it
TILE float element(const fft_rows &x, int64_t at, int64_t gate_at, int n) {
  if (n < 0 && x.circular) n = x.length - 1 - (-1 - n) % x.length;
  if (n < 0 || n >= x.length) return 0.f;
  if (x.reversed) n = x.length - 1 - n;
  float y = number_at(x.data, at + n, x.type);
  return x.gate ? y * number_at(x.gate, gate_at + n, x.gate_type) : y;
}

// A block of a row
TILE void load_block_of(acc &re, acc &im, const params &p, int task) {
  int row = p.first_row + task / p.blocks, block = task % p.blocks - p.past;
  int head = row / p.batches, batch = row % p.batches;
  const fft_rows &x = p.x;
  int64_t at = batch * x.batch + head * x.head, gate_at = batch * x.gate_batch + head * x.gate_head;
  float first = p.skip && block == 0 ? number_at(p.skip, head, p.skip_type) : 0.f;
  int from = block * FFT_BLOCK, before = from - FFT_BLOCK;
  bool pairs = p.pairs;
  each<64>([&](int r, int c, float &y, float &z) {
    int n = 64 * r + c;
    y = element(x, at, gate_at, from + n) + (n ? 0.f : first);
    if (pairs) z = element(x, at, gate_at, before + n);
  }, re, im);
}
// Whole rows of heads, as many as fit
TILE void load_filters(acc &re, const params &p, int task) {
  const fft_rows &x = p.x;
  each<64>([&](int r, int c, float &y) {
    int row = 64 * task + r, head = row >> p.log_rows, n = 64 * (row & ((1 << p.log_rows) - 1)) + c;
    y = 0.f;
    if (head < p.heads) {
      y = element(x, head * x.head, 0, n);
      if (p.skip && n == 0) y += number_at(p.skip, head, p.skip_type);
    }
  }, re);
}

// fp16, with a factor for each row of the tile. Factors and numbers are such that what comes of rows of at most 1 stays
// below 2^15.
TILE void store_filters(const params &p, acc &re, acc &im, const rv &up, sv<64> &rows, int task) {
  int there = smaller(64, (p.heads << p.log_rows) - 64 * task);
  int64_t at = (int64_t)64 * 64 * task;
  rv largest, down, factor;
  if (p.turned) each<64>([](int, int, float &x, float &y) { float z = x - y; y += x; x = z; }, re, im);
  fill(largest, 0.f);
  add_largest(largest, re);
  add_largest(largest, im);
  scales(down, factor, rows, largest, p.log_rows, 64.f);
  scale_down(re, down);
  scale_down(im, down);
  store_rows<fp16>(re, [=](int r) { return r < there ? (fp16 *)p.re + at + 64 * r : nullptr; }, 64);
  store_rows<fp16>(im, [=](int r) { return r < there ? (fp16 *)p.im + at + 64 * r : nullptr; }, 64);
  float root = (p.log_rows & 1 ? 11.3137085f : 8.f) * (float)(1 << p.log_rows / 2);   // of the row's length
  map(factor, factor, up, [=](float x, float y) { return x * y * root; });
  store(p.factors + 64 * task, factor, there);
  wg_sync();                                                 // `rows` has been read
}

TILE void export_tables(const params &p, const shared &s) {
  ROLLED for (int i = 0; i < FFT_TABLES; i++) {
    acc t;
    load(t, i < 2 ? s.left[i][0] : i < 5 ? s.right[i - 2][0] : s.twists[i - 5][0]);
    store_rows<fp16>(t, [=](int r) { return (fp16 *)p.tables + 4096 * i + 64 * r; }, 64);
  }
}

TILE void compute(const params &p, shared &s, int wg) {
  table(&x)[2][PIECES] = s.x[wg];
  if (wg == 0) {
    make_left(s.left, p.log_rows, true);
    make_twist(s.twists, p.log_rows);
  } else if (wg == 1) make_right(s.right);
  fence_async();
  bar_sync(1, 128 * NC);
  if (p.tables && block_index() == 0 && wg == 0) export_tables(p, s);
  for (int task = block_index() * NC + wg; task < p.tasks; task += block_count() * NC) {
    acc re, im;
    rv largest, down, up;
    fill(re, 0.f);
    fill(im, 0.f);
    if (p.out) load_block_of(re, im, p, task);
    else load_filters(re, p, task);
    fill(largest, 0.f);
    add_largest(largest, re);
    add_largest(largest, im);
    scales(down, up, s.rows[wg], largest, p.log_rows, 64.f);   // also: the last task's products have read x
    scale_down(re, down);
    put_pieces(x[0], re);
    scale_down(im, down);
    put_pieces(x[1], im);
    fence_async();
    wg_sync();
    mma_fence();
    product<ZERO>(re, s.left[0], x[0]);
    product<ZERO>(im, s.left[1], x[0]);
    product<ACC>(re, s.left[2], x[1]);
    product<ACC>(im, s.left[0], x[1]);
    mma_commit();
    mma_wait<0>(re, im);
    twist<0>(re, im, s.twists);
    multiply_right<0>(re, im, s.right);
    if (p.out) {
      fft_complex *out = p.out + (int64_t)FFT_BLOCK * task;
      each<64>([=](int r, int c, float y, float z, float f) {
        fft_complex v;
        v.re = y * f;
        v.im = z * f;
        out[64 * r + c] = v;
      }, re, im, up);
    } else store_filters(p, re, im, up, s.rows[wg], task);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, NC, REGS>> kernel;
ENTRY(kernel, NC, PIECES)
