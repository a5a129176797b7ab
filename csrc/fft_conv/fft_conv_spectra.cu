// Spectra of blocks of 4096 numbers (fft_conv_tiles.h), of filters and of rows, for rows that are no power of two,
// longer than 4096, or wanted more precisely. Warpgroups do not meet, but for the tables, which a block makes itself.
// Blocks of a long row: with p_n = block n, and its product with block m of a filter as the two halves of a
// convolution, block s of the result is Re sum over n of (P_(s-n) + i P_(s-n-1)) K_n. So `pairs` transforms p_n + i
// p_(n-1) at once.
#include "tile/tile.h"
#include "fft_conv/fft_conv_tiles.h"

// From the row: PIECES, NC warpgroups, REGS
struct shared {
  table left[3][PIECES], right[3][PIECES], twists[2][PIECES];
  table x[NC][2][PIECES];
  sv<64> rows[NC][2];
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
TILE void compute(const params &p, shared &s, int wg) {
  table(&x)[2][PIECES] = s.x[wg];
  make_tables(s.left, s.right, s.twists, 6, false, true, wg, NC);
  for (int task = block_index() * NC + wg; task < p.tasks; task += block_count() * NC) {
    acc re, im;
    rv up;
    fill(re, 0.f);
    fill(im, 0.f);
    load_block_of(re, im, p, task);
    scale_both(re, im, up, s.rows[wg], 6, 64.f);               // also: the last task's products have read x
    put_pieces(x[0], re);
    put_pieces(x[1], im);
    fence_async();
    wg_sync();
    to_spectrum(re, im, x, s.left, s.right, s.twists);
    fft_complex *out = p.out + (int64_t)FFT_BLOCK * task;
    each<64>([=](int r, int c, float y, float z, float f) {
      fft_complex v;
      v.re = y * f;
      v.im = z * f;
      out[64 * r + c] = v;
    }, re, im, up);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, NC, REGS>> kernel;
ENTRY(kernel, NC, PIECES)
