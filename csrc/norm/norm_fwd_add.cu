// norm_fwd_whole.cu of FIT 5: what is read is added, rounded, and normalised by its root mean square, times a weight of
// 16 bits. What cannot be is not asked for, and numbers stay in the 16 bits in which they are read, added and stored.
// A thread of 32 columns then runs 380 instructions, one of 8 columns 150, all in a row and early in the kernel. A call
// of 20 us feels them: its first blocks wait for the cache of instructions too.
#include "norm/norm_moments.h"

struct shared { sums_room sums; };
typedef norm_fwd_params params;
TILE void init(shared &) {}
typedef begun<elem, J> begun_tile;

TILE place line_place(const norm_problem &q, int warpgroup) {          // of one group
  int member = member_of(q, warpgroup);
  return {block_index() * slots_of(q) + member * LINES, 0, (warpgroup - member * SPAN) * (1024 * J)};
}
TILE void begin_weight(tile &t, const norm_problem &q, const place &at) {
  load_begin<EIGHTS>(t, (const elem *)q.weight + at.col, 0, LINES, LINES, columns_left(q, at));
}
TILE void keep_begun(const norm_stream &g, const tile &t, const norm_problem &q, const place &at) {
  save_begun((elem *)g.data + offset_of(g, at), stride_of(g.row), t, LINES, rows_left(q, at), columns_left(q, at));
}
TILE void keep_rstd(const lv &rstd, const norm_problem &q, const place &at) {
  if (at.col == 0 && q.rstd) save(q.rstd + at.row, 1, rstd, LINES, rows_left(q, at));
}
TILE void write(tile &y, const params &p, const place &at) {
  unend<elem>(y);
  keep_begun(p.out, y, p.problem, at);
}

// What is not precise, again times a power of two (norm_moments.h). Few lines want it.
TILE void finish_scaled(begun_tile &x, begun_tile &weight, const params &p, const place &at, shared &s, summer &who) {
  const norm_problem &q = p.problem;
  int n = columns_left(q, at);
  tile y;
  lsum whole, small, part;
  lv scale, squares, factor, rstd;
  clear(whole);
  clear(small);
  clear(part);
  fill(y, 0.f);
  each<WHOLE>(y, LINES, n, [](float &, float x, float &whole, float &small) {
    whole += fabsf(x);
    small = fused(fabsf(x), 0x1p-17f, small);
  }, x, whole, small);
  choose_scale(scale, whole, small, q, p.most_scale, s.sums, who);
  each<WHOLE>(y, LINES, n, [](float &, float x, float scale, float &sum) {
    float scaled = x * scale;
    sum = fused(scaled, scaled, sum);
  }, x, scale, part);
  sum_up(squares, part, q, s.sums, who);
  factor_of(factor, squares, scale, q.inverse, p.root_eps);
  map(rstd, factor, scale, [](float factor, float scale) { return factor * scale; });
  keep_rstd(rstd, q, at);
  each<WHOLE>(y, LINES, n, [](float &y, float x, float scale, float factor, float w) { y = x * scale * factor * w; },
              x, scale, factor, weight);
  write(y, p, at);
}
TILE void compute(const params &p, shared &s, int warpgroup) {
  const norm_problem &q = p.problem;
  place at = line_place(q, warpgroup);
  int n = columns_left(q, at);
  summer who = {warpgroup, 0};
  tile x, extra, w, y;
  begun_tile sum = {x}, weight = {w};
  lsum part;
  lv squares, factor, scale;
  begin_given(x, p.x, q, at);
  begin_given(extra, p.extra, q, at);
  if (EARLY) begin_weight(w, q, at);
  add_begun<elem>(x, extra);
  if (p.sum.data) keep_begun(p.sum, x, q, at);
  fill(y, 0.f);
  clear(part);
  each<WHOLE>(y, LINES, n, [](float &, float x, float &sum) { sum = fused(x, x, sum); }, sum, part);
  sum_up(squares, part, q, s.sums, who);
  if (!EARLY) begin_weight(w, q, at);
  if (!precise(squares, q, p.least_squares)) return finish_scaled(sum, weight, p, at, s, who);
  fill(scale, 1.f);
  factor_of(factor, squares, scale, q.inverse, p.root_eps);
  keep_rstd(factor, q, at);
  each<WHOLE>(y, LINES, n, [](float &y, float x, float factor, float w) { y = x * factor * w; }, sum, factor, weight);
  write(y, p, at);
}

typedef block<params, shared, init, role<compute, WARPGROUP, GROUPS, 0>, OCCUPANCY<PER_SM>> kernel;
// The lines of a block, and their most columns
ENTRY(kernel, GROUPS / SPAN * LINES, 1024 * J * SPAN / LINES)
