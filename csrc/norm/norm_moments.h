// A line's mean and variance, which norm_fwd.cu describes.
#pragma once
#include "norm/norm_tile.h"

// scale u has the mean `mean` + `rest`, and `squares` is the sum of squares about it.
struct moments { lv scale, mean, rest, squares; };

// Of the n = 1 / inverse columns of a part.
TILE void measure_part(moments &m, tile &x, const norm_problem &p, const place &at, float n, float inverse,
                       sums_room &s, summer &who) {
  lsum first, second;
  lv unused;
  clear(first);
  clear(second);
  if (p.rms) {
    each<ACCESS>(x, lines_of(p), columns_left(p, at), [](float &x, float scale, float &sum) {
      float y = x * scale;
      sum = fused(y, y, sum);
    }, m.scale, first);
    sum_up(m.squares, first, unused, second, p, s, who);
    fill(m.mean, 0.f);
    fill(m.rest, 0.f);
    return;
  }
  each<ACCESS>(x, lines_of(p), columns_left(p, at),
               [](float &x, float scale, float &sum) { sum = fused(x, scale, sum); }, m.scale, first);
  sum_up(m.mean, first, unused, second, p, s, who);
  map(m.mean, m.mean, [=](float sum) { return sum * inverse; });
  clear(first);
  each<ACCESS>(x, lines_of(p), columns_left(p, at), [](float &x, float scale, float mean, float &sum, float &squares) {
    float y = fused(x, scale, -mean);
    sum += y;
    squares = fused(y, y, squares);
  }, m.scale, m.mean, first, second);
  sum_up(m.rest, first, m.squares, second, p, s, who);
  map(m.squares, m.squares, m.rest, [=](float squares, float sum) {
    float left = fused(-sum * inverse, sum, squares);
    return left < 0.f ? 0.f : left;
  });
  map(m.rest, m.rest, [=](float sum) {         // sum / n exactly rounded: of a constant row it is what remains
    float rest = sum * inverse;
    return fused(fused(-rest, n, sum), inverse, rest);
  });
}

// Sums of magnitudes: as they are, and divided by 2^17, so that one of them is in the range of float.
TILE void add_sizes(tile &x, const norm_problem &p, const place &at, lsum &whole, lsum &small) {
  each<ACCESS>(x, lines_of(p), columns_left(p, at), [](float &x, float &whole, float &small) {
    float y = fabsf(x);
    whole += y;
    small = fused(y, 0x1p-17f, small);
  }, whole, small);
}
TILE void set_scale(moments &m, const lv &sum, const lv &small_sum, float most) {
  map(m.scale, sum, small_sum, [=](float sum, float small) {
    float scale = sum < 1e37f ? 1.f / (sum < 1e-37f ? 1e-37f : sum) : 0x1p-17f / small;
    return scale > 0.f ? scale < most ? scale : most : 1.f;         // what is not finite stays so
  });
}
// What is to be multiplied: 1 / sqrt(variance + eps) of scale u.
TILE void factor_of(lv &factor, const moments &m, float inverse, float root_eps) {
  map(factor, m.squares, m.scale, [=](float squares, float scale) {
    float e = root_eps * scale;
    return 1.f / sqrtf(fused(squares, inverse, e * e));
  });
}
TILE bool precise(const moments &m, const norm_problem &p, float least) {
  return !any(m.squares, lines_of(p), [=](float x) { return !(x < 1e37f && x > least); });
}
TILE void normalise(tile &x, const moments &m, const lv &factor, const norm_problem &p, const place &at) {
  each<ACCESS>(x, lines_of(p), columns_left(p, at), [](float &x, float scale, float mean, float rest, float factor) {
    x = (fused(x, scale, -mean) - rest) * factor;
  }, m.scale, m.mean, m.rest, factor);
}
// What a backward reads
TILE void keep_statistics(const moments &m, const lv &factor, const norm_problem &p, const place &at) {
  if (at.col == 0 && p.rstd) {
    lv saved;
    int64_t first = (int64_t)at.row * p.groups + at.group;
    map(saved, factor, m.scale, [](float factor, float scale) { return factor * scale; });
    save(p.rstd + first, p.groups, saved, lines_of(p), SPAN ? 1 : rows_left(p, at));
    map(saved, m.mean, m.rest, m.scale, [](float mean, float rest, float scale) { return (mean + rest) / scale; });
    if (p.mean) save(p.mean + first, p.groups, saved, lines_of(p), SPAN ? 1 : rows_left(p, at));
  }
}
