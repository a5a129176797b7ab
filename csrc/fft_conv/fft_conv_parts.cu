// Filters' gradients of rows of 4096 R elements from what the tasks of fft_conv_bwd_long.cu left: with y_j the inverse
// transform of their sum, block r of a gradient is 1 / R Re sum over j of c_j^-r w_j^-n y_j (fft_conv_long.cu). A task:
// a block of a head. Sums are in the tasks' order.
// Warpgroups do not meet, but for the tables, which a block makes itself.
#include "tile/tile.h"
#include "fft_conv/fft_conv_tiles.h"

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
      ROLLED for (int i = 0; i < p.chunks; i++, part += FFT_UNIT_FLOATS) {
        acc v;
        load_acc(v, part);
        map(re, v, [](float y, float z) { return y + z; });
        load_acc(v, part + FFT_BLOCK);
        map(im, v, [](float y, float z) { return y + z; });
      }
      map_rows(a, [=](int col) { float y, z; turn(y, z, turns * col, 14 + log); return y; });
      map_rows(b, [=](int col) { float y, z; turn(y, z, turns * col, 14 + log); return z; });
      store(s.cols[wg][0], a);
      store(s.cols[wg][1], b);
      scale_both(re, im, up, s.rows[wg], 6, 64.f);             // also: the last task's products have read x
      multiply_right<1>(re, im, s.right);
      twist<1>(re, im, s.twists);
      put_pieces(x[0], re);
      put_pieces(x[1], im);
      fence_async();
      wg_sync();
      mma_fence();
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
      y *= size;
      if (p.out && n < p.length) set_number_at(p.out, (int64_t)head * p.out_head + n, p.type, y);
      if (p.first && n == 0) set_number_at(p.first, head, p.first_type, y);
    }, total);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, NC, REGS>> kernel;
ENTRY(kernel, NC, PIECES)
