// Filters' gradients of rows of 4096 R elements from what the tasks of fft_conv_bwd_long.cu left: with y_j the inverse
// transform of their sum, block r of a gradient is 1 / R Re sum over j of c_j^-r w_j^-n y_j (fft_conv_long.cu). A task:
// a block of a head. Sums are in the tasks' order.
// Warpgroups do not meet, but for the tables, which a block makes itself.
#include "tile/tile.h"
#include "fft_conv/fft_conv_blocks.h"

// From the row: PIECES, NC warpgroups, REGS
struct shared {
  table left[3][PIECES], right[3][PIECES], twists[2][PIECES];
  table x[NC][2][PIECES];
  sv<64> rows[NC][2], cols[NC][2];
};
typedef fft_sums_params params;

TILE void init(shared &) {}

TILE void compute(const params &p, shared &s, int wg) {
  table(&x)[2][PIECES] = s.x[wg];
  int log = p.log_parts;
  make_tables(s.left, s.right, s.twists, 6, true, true, wg, NC);
  for (int task = block_index() * NC + wg; task < p.tasks; task += block_count() * NC) {
    int head = task >> log, block = task & ((1 << log) - 1);
    acc total;
    fill(total, 0.f);
    ROLLED for (int j = 0; j < 1 << log; j++) {
      const float *part = p.parts + (int64_t)FFT_UNIT_FLOATS * p.chunks * ((head << log) + j);
      int turns = 4 * j + p.quarter;
      float c, d;
      acc re, im;
      rv a, b, up;
      fill(re, 0.f);
      fill(im, 0.f);
      add_parts(re, im, part, p.chunks);
      put_column_weights(s.cols[wg], turns, log);
      scale_both(re, im, up, s.rows[wg], 6, 64.f);             // also: the last task's products have read x
      come_back(x, re, im, s.right, s.twists, [] {});
      products(re, s.left[0], x[0], s.left[1], x[1]);
      products(im, s.left[0], x[1], s.left[2], x[0]);
      mma_commit();
      mma_wait<0>(re, im);
      turn(c, d, turns * block, 2 + log);
      map_rows(a, [=](int r) { float y, z; turn(y, z, 64 * turns * r, 14 + log); return fused(y, c, -(z * d)); });
      map_rows(b, [=](int r) { float y, z; turn(y, z, 64 * turns * r, 14 + log); return fused(y, d, z * c); });
      map(a, a, up, [](float y, float z) { return y * z; });
      map(b, b, up, [](float y, float z) { return y * z; });
      each<64>([](int, int, float &y, float v, float w, float e, float f, float g, float h) {
        y = fused(fused(e, g, -(f * h)), v, fused(fused(e, h, f * g), w, y));
      }, total, re, im, a, b, s.cols[wg][0], s.cols[wg][1]);
      wg_sync();                                               // `rows` and `cols` have been read
    }
    int from = block * FFT_BLOCK;
    float size = 64.f / (float)(1 << log);                     // the root of 4096, and 1 / R
    each<64>([&](int r, int col, float y) {
      int n = from + 64 * r + col;
      put_gradient(p, head, n, y * size);
    }, total);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, NC, REGS>> kernel;
ENTRY(kernel, NC, PIECES)
