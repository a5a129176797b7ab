// Spectra of the filters of fft_conv.cu (fft_conv_tiles.h), and its tables. 4096 numbers are a tile: a filter, or 64 /
// m filters of 64 m. The filter enters in two pieces. Spectra are fp16, with a factor for each row of the tile: factors
// and numbers are such that what comes of rows of at most 1 stays below 2^15.
// Warpgroups do not meet, but for the tables, which every block makes itself.
#include "tile/tile.h"
#include "fft_conv/fft_conv_blocks.h"

// From the row: NC warpgroups, PIECES of tables, REGS
struct shared {
  table left[3][PIECES], right[3][PIECES], twists[2][PIECES];
  table x[NC][2][PIECES];
  sv<64> rows[NC][2], cols[NC][2];
};
typedef fft_filters_params params;

TILE void init(shared &) {}

TILE void load_filters(acc &re, const params &p, int task) {
  int log = p.log_rows, taps = p.taps, heads = p.heads;
  int64_t at = (int64_t)64 * 64 * task;
  if (p.k_type == FFT_FP32 && taps == 64 << log)
    load(re, (const float *)p.k + at, 64, (heads << log) - 64 * task, 64);
  else
    each<64>([&](int r, int c, float &y) {
      int row = 64 * task + r, head = row >> log, n = 64 * (row & ((1 << log) - 1)) + c;
      y = head < heads && n < taps ? number_at(p.k, (int64_t)head * taps + n, p.k_type) : 0.f;
    }, re);
  if (p.skip)
    each<64>([&](int r, int c, float &y) {
      int row = 64 * task + r, head = row >> log;
      if (c == 0 && head << log == row && head < heads) y += number_at(p.skip, head, p.skip_type);
    }, re);
}

// p_j of fft_conv_long.cu. The warpgroup meets.
TILE void load_part(acc &re, acc &im, const params &p, int task, sv<64> (&cols)[2]) {
  int log = p.log_parts, taps = p.taps, head = task >> log, turns = 4 * (task & ((1 << log) - 1)) + p.quarter;
  rv a, b;
  put_column_weights(cols, turns, log);
  turns_of_rows(a, b, 64 * turns, 14 + log);
  fill(re, 0.f);
  fill(im, 0.f);
  ROLLED for (int from = 0; from < taps; from += FFT_BLOCK) {
    acc x;
    int64_t at = (int64_t)head * taps + from;
    fill(x, 0.f);
    if (p.k_type == FFT_FP32 && taps % 64 == 0)
      load(x, (const float *)p.k + at, 64, smaller(64, (taps - from) / 64), 64);
    else
      each<64>([&](int r, int col, float &y) {
        int n = 64 * r + col;
        y = from + n < taps ? number_at(p.k, at + n, p.k_type) : 0.f;
      }, x);
    if (p.skip && from == 0)
      each<64>([&](int r, int col, float &y) {
        if (r == 0 && col == 0) y += number_at(p.skip, head, p.skip_type);
      }, x);
    add_turned(re, im, x, turns * (from / FFT_BLOCK), log);
  }
  wg_sync();
  weigh_block(re, im, a, b, cols);
}

TILE void compute(const params &p, shared &s, int wg) {
  table(&x)[2][PIECES] = s.x[wg];
  make_tables(s.left, s.right, s.twists, p.log_rows, p.plain, true, wg, NC);
  for (int i = block_index() * NC + wg; i < FFT_TABLES; i += block_count() * NC) {
    acc t;
    if (i >= FFT_HALVES) {
      fill(t, 0.f);
      if (i < FFT_FOLDED_LEFT) half_table(t, i - FFT_HALVES);
      else if (i < FFT_FOLDED_TWISTS) folded_left_table(t, p.log_rows, i - FFT_FOLDED_LEFT);
      else folded_twist_table(t, p.log_rows, i - FFT_FOLDED_TWISTS);
    } else
      load(t, i < FFT_RIGHT ? s.left[i][0] : i < FFT_TWISTS ? s.right[i - FFT_RIGHT][0] : s.twists[i - FFT_TWISTS][0]);
    store_rows<fp16>(t, [=](int r) { return (fp16 *)p.tables + 4096 * i + 64 * r; }, 64);
  }
  float root = root_of_length(p.log_rows);
  for (int task = block_index() * NC + wg; task < p.tasks; task += block_count() * NC) {
    acc re, im;
    rv up, factor;
    fill(re, 0.f);
    fill(im, 0.f);
    if (PIECES == 2 && p.log_parts) load_part(re, im, p, task, s.cols[wg]);
    else load_filters(re, p, task);
    scale_both(re, im, up, s.rows[wg], p.log_rows, 64.f);      // also: the last task's products have read x
    if (PIECES == 1) {
      split(im, re);
      store(x[0][0], im);
      store(x[1][0], re);
    } else {
      put_pieces(x[0], re);
      put_pieces(x[1], im);
    }
    fence_async();
    wg_sync();
    if (PIECES == 1) {
      mma_fence();
      products(re, s.left[0], x[0], s.left[0], x[1]);
      products(im, s.left[1], x[0], s.left[1], x[1]);
      mma_commit();
      mma_wait<0>(re, im);
      twist<0>(re, im, s.twists);
      multiply_right<0>(re, im, s.right);
    } else to_spectrum(re, im, x, s.left, s.right, s.twists);
    scale_both(re, im, factor, s.rows[wg], p.log_rows, 64.f);
    each<64>([](int, int, float &y, float z) { y = halves(y, z); }, re, im);
    if (p.accumulators) store_acc(p.out + (int64_t)64 * 64 * task, re);
    else store_columns(p.out + (int64_t)64 * 64 * task, re, p.plain);
    map(factor, factor, up, [=](float y, float z) { return y * z * root; });
    store(p.factors + 64 * task, factor, smaller(64, (p.heads << p.log_rows) - 64 * task));
    wg_sync();                                                 // `rows` has been read
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, NC, REGS>> kernel;
ENTRY(kernel, NC, PIECES)
