// Results in e4m3 (QUANT): y / descale, of a descale that is given, or of each line its largest |y| / 448. That is at
// least 2^-126 and finite, so that 1 / descale is finite and not 0, of a line of zeros too. What lies beyond 448
// becomes 448, infinities too; NaN stays.
#pragma once
#include "norm/norm_tile.h"

// Before anything waits: the number is there when it is wanted.
TILE void begin_descale(lv &descale, const norm_fwd_params &p) {
  if (p.out_scale) load(descale, p.out_scale, 0, lines_of(p.problem), lines_of(p.problem));
}
TILE void add_most(tile &y, const norm_problem &p, const place &at, lsum &most) {
  each<ACCESS>(y, lines_of(p), columns_left(p, at), [](float &y, float &most) {
    float size = fabsf(y);
    most = size > most ? size : most;
  }, most);
}
TILE void descale_of(lv &descale, const lsum &part, const norm_problem &p, sums_room &s, summer &who) {
  most_up(descale, part, p, s, who);
  map(descale, descale, [](float most) {
    float x = (most < 0x1.fffffep127f ? most : 0x1.fffffep127f) / 448.f;
    return x > 0x1p-126f ? x : 0x1p-126f;
  });
}
TILE void keep_descale(const lv &descale, const norm_fwd_params &p, const place &at) {
  if (at.col == 0 && p.descale) save(p.descale + at.row, 1, descale, lines_of(p.problem), rows_left(p.problem, at));
}
TILE void keep_e4m3(tile &y, const lv &descale, const norm_fwd_params &p, const place &at) {
  const norm_problem &q = p.problem;
  lv inverse;
  map(inverse, descale, [](float x) { return 1.f / x; });
  each<ACCESS>(y, lines_of(q), columns_left(q, at), [](float &y, float inverse) { y *= inverse; }, inverse);
  e4m3 *to = (e4m3 *)p.out.data + offset_of(p.out, at);
  if (LONG && !q.eights) save<SINGLES>(to, p.out.row, y, lines_of(q), rows_left(q, at), columns_left(q, at));
  else save<EIGHTS>(to, p.out.row, y, lines_of(q), rows_left(q, at), columns_left(q, at));
}
