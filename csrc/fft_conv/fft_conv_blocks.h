// p_j of rows of 2^log blocks of 4096 (fft_conv_long.cu). With turns = 4 j + 4 q, c_j^r is e^(-2 pi i turns r / 2^(2 +
// log)), and w_j^n is e^(-2 pi i turns n / 2^(14 + log)).
#pragma once
#include "fft_conv/fft_conv_tiles.h"

// e^(-2 pi i turns r / 2^log) of row r
TILE void turns_of_rows(rv &re, rv &im, int turns, int log) {
  map_rows(re, [=](int r) { float x, y; turn(x, y, turns * r, log); return x; });
  map_rows(im, [=](int r) { float x, y; turn(x, y, turns * r, log); return y; });
}
// w_j^b of column b
TILE void put_column_weights(sv<64> (&cols)[2], int turns, int log) {
  rv re, im;
  turns_of_rows(re, im, turns, 14 + log);
  store(cols[0], re);
  store(cols[1], im);
}
// re + i im += e^(-2 pi i turns / 2^(2 + log)) x
TILE void add_turned(acc &re, acc &im, acc &x, int turns, int log) {
  float c, d;
  turn(c, d, turns, 2 + log);
  each<64>([=](int, int, float &y, float &z, float v) {
    y = fused(v, c, y);
    z = fused(v, d, z);
  }, re, im, x);
}
// Times w_j^n, of which a + i b is w_j^(64 r) of row r.
TILE void weigh_block(acc &re, acc &im, const rv &a, const rv &b, const sv<64> (&cols)[2]) {
  each<64>([](int, int, float &y, float &z, float c, float d, float e, float f) {
    float g = fused(c, e, -(d * f)), h = fused(c, f, d * e), v = fused(y, g, -(z * h));
    z = fused(y, h, z * g);
    y = v;
  }, re, im, a, b, cols[0], cols[1]);
}
