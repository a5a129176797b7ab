// A line's mean and variance, which norm_fwd.cu describes.
#pragma once
#include "norm/norm_tile.h"

struct moments { lv mean, squares; };          // squares: the sum of those about the mean

// Of the n = 1 / inverse columns of a part.
TILE void measure_part(moments &m, tile &x, const norm_problem &p, const place &at, float n, float inverse,
                       sums_room &s, summer &who) {
  lsum first, second;
  lv rest;
  clear(first);
  if (p.rms) {
    each<WHOLE>(x, lines_of(p), columns_left(p, at), [](float &x, float &sum) { sum = fused(x, x, sum); }, first);
    sum_up(m.squares, first, p, s, who);
    fill(m.mean, 0.f);
    return;
  }
  each<WHOLE>(x, lines_of(p), columns_left(p, at), [](float &x, float &sum) { sum += x; }, first);
  sum_up(m.mean, first, p, s, who);
  map(m.mean, m.mean, [=](float sum) { return sum * inverse; });
  clear(first);
  clear(second);
  each<ACCESS>(x, lines_of(p), columns_left(p, at), [](float &x, float mean, float &sum, float &squares) {
    float y = x - mean;
    sum += y;
    squares = fused(y, y, squares);
  }, m.mean, first, second);
  sum_up(rest, first, m.squares, second, p, s, who);
  map(m.squares, m.squares, rest, [=](float squares, float sum) {
    float left = fused(-sum * inverse, sum, squares);
    return left < 0.f ? 0.f : left;
  });
  map(m.mean, m.mean, rest, [=](float mean, float sum) {       // exactly rounded: a constant row's mean is exact
    float rest = sum * inverse;
    return mean + fused(fused(-rest, n, sum), inverse, rest);
  });
}
TILE bool precise(const lv &squares, const norm_problem &p, float least) {
  return !any(squares, lines_of(p), [=](float x) { return !(x < 1e37f && x > least); });
}
TILE bool precise(const moments &m, const norm_problem &p, float least) { return precise(m.squares, p, least); }

// What is not precise is measured once more, times a power of two, which rounds nothing.
// Sums of magnitudes: as they are, and divided by 2^17, so that one of them is in the range of float.
TILE void add_sizes(tile &x, const norm_problem &p, const place &at, lsum &whole, lsum &small) {
  each<WHOLE>(x, lines_of(p), columns_left(p, at), [](float &x, float &whole, float &small) {
    float y = fabsf(x);
    whole += y;
    small = fused(y, 0x1p-17f, small);
  }, whole, small);
}
TILE void choose_scale(lv &scale, const lsum &whole, const lsum &small, const norm_problem &p, float most,
                       sums_room &s, summer &who) {
  lv sum, small_sum;
  sum_up(sum, whole, small_sum, small, p, s, who);
  map(scale, sum, small_sum, [=](float sum, float small) {
    float scale = sum < 1e37f ? 1.f / (sum < 1e-37f ? 1e-37f : sum) : 0x1p-17f / small;
    return scale > 0.f ? ldexpf(1.f, ilogbf(scale < most ? scale : most)) : 1.f;    // what is not finite stays so
  });
}
TILE void multiply(tile &x, const lv &scale, const norm_problem &p, const place &at) {
  each<WHOLE>(x, lines_of(p), columns_left(p, at), [](float &x, float scale) { x *= scale; }, scale);
}

// What is to be multiplied: 1 / sqrt(variance + eps), of what was multiplied with scale.
TILE void factor_of(lv &factor, const lv &squares, const lv &scale, float inverse, float root_eps) {
  map(factor, squares, scale, [=](float squares, float scale) {
    float e = root_eps * scale;
    return fast_rsqrt(fused(squares, inverse, e * e));
  });
}
TILE void factor_of(lv &factor, const moments &m, const lv &scale, float inverse, float root_eps) {
  factor_of(factor, m.squares, scale, inverse, root_eps);
}
TILE void normalise(tile &x, const moments &m, const lv &factor, const norm_problem &p, const place &at) {
  if (p.rms) each<WHOLE>(x, lines_of(p), columns_left(p, at), [](float &x, float factor) { x *= factor; }, factor);
  else each<WHOLE>(x, lines_of(p), columns_left(p, at),
                   [](float &x, float mean, float factor) { x = (x - mean) * factor; }, m.mean, factor);
}
// What a backward reads
TILE void keep_statistics(const moments &m, const lv &factor, const lv &scale, const norm_problem &p,
                          const place &at) {
  if (at.col != 0 || !p.rstd) return;
  lv saved;
  int64_t first = (int64_t)at.row * p.groups + at.group;
  map(saved, factor, scale, [](float factor, float scale) { return factor * scale; });
  save(p.rstd + first, p.groups, saved, lines_of(p), rows_left(p, at));
  map(saved, m.mean, scale, [](float mean, float scale) { return mean / scale; });
  if (p.mean) save(p.mean + first, p.groups, saved, lines_of(p), rows_left(p, at));
}
