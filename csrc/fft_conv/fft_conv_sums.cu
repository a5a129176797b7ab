// Sums of products of spectra (fft_conv_spectra.cu), the inverse transform, the gate. Of a convolution: over the blocks
// of the filter. Of a filter's gradient: over the batch and the blocks of a row, in their order, with conjugates; or
// over what the tasks of fft_conv_bwd.cu left, in theirs.
// Warpgroups do not meet, but for the tables, which a block makes itself.
#include "tile/tile.h"
#include "fft_conv/fft_conv_tiles.h"

// From the row: PIECES, NC warpgroups, REGS
struct shared {
  table left[2][PIECES], right[3][PIECES], twists[2][PIECES];
  table x[NC][2][PIECES];
  sv<64> rows[NC][2];
};
typedef fft_sums_params params;

TILE void init(shared &) {}

// re + i im += a b, or a conj(b) where sign is -1
TILE void add_product(acc &re, acc &im, const fft_complex *a, const fft_complex *b, float sign) {
  each<64>([=](int r, int c, float &x, float &y) {
    fft_complex v = a[64 * r + c], w = b[64 * r + c];
    w.im *= sign;
    x = fused(v.re, w.re, fused(-v.im, w.im, x));
    y = fused(v.re, w.im, fused(v.im, w.re, y));
  }, re, im);
}

TILE void compute(const params &p, shared &s, int wg) {
  table(&x)[2][PIECES] = s.x[wg];
  make_tables(s.left, s.right, s.twists, p.log_rows, p.plain, false, wg, NC);
  float root = root_of_length(p.log_rows);
  for (int task = block_index() * NC + wg; task < p.tasks; task += block_count() * NC) {
    int row = task / p.blocks, block = task % p.blocks;         // of_filters: the row is a head
    int head = p.first_row + row, batch = 0;
    acc re, im;
    rv up;
    fill(re, 0.f);
    fill(im, 0.f);
    if (p.of_parts) add_parts(re, im, p.parts + (int64_t)FFT_UNIT_FLOATS * p.chunks * task, p.chunks);
    else if (p.of_filters) {
      int first = larger(0, block - p.past);
      for (int i = 0; i < p.batches; i++) {
        int64_t at = (int64_t)row * p.batches + i;
        for (int n = first; n < p.a_blocks; n++)
          add_product(re, im, p.a + (at * p.a_blocks + n) * FFT_BLOCK,
                      p.b + (at * p.b_blocks + p.past + n - block) * FFT_BLOCK, -1.f);
      }
    } else {
      batch = head % p.batches;
      head /= p.batches;
      int64_t at = (int64_t)row * p.a_blocks + p.past + block, filter = (int64_t)head * p.b_blocks;
      int end = smaller(p.b_blocks, p.past + block + 1);
      for (int n = 0; n < end; n++)
        add_product(re, im, p.a + (at - n) * FFT_BLOCK, p.b + (filter + n) * FFT_BLOCK, 1.f);
    }
    scale_both(re, im, up, s.rows[wg], p.log_rows, 64.f);                // also: the last task's products have read x
    come_back(x, re, im, s.right, s.twists, [] {});
    products(re, s.left[0], x[0], s.left[1], x[1]);             // the real part of L^H x
    mma_commit();
    mma_wait<0>(re);
    int from = block * FFT_BLOCK, there = p.length - from;
    int64_t at = batch * p.out_batch + head * p.out_head, gate_at = batch * p.gate_batch + head * p.gate_head;
    if (p.of_parts) {
      each<64>([&](int r, int c, float y, float f) {
        int tile_row = 64 * task + r, filter = tile_row >> p.log_rows;
        int n = 64 * (tile_row & ((1 << p.log_rows) - 1)) + c;
        if (tile_row < p.rows) put_gradient(p, filter, n, y * (f * root));
      }, re, up);
      continue;
    }
    each<64>([&](int r, int c, float y, float f) {
      int n = 64 * r + c;
      if (n >= there) return;
      int64_t to = p.reversed ? p.length - 1 - from - n : from + n;
      y *= f * root;
      if (p.gate) y *= number_at(p.gate, gate_at + to, p.type);
      if (p.out) set_number_at(p.out, at + to, p.type, y);
      if (p.first && to == 0) set_number_at(p.first, head, p.first_type, y);
    }, re, up);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, NC, REGS>> kernel;
ENTRY(kernel, NC, PIECES)
