// norm_fwd.cu's formulas of lines that stay in registers between their one read and their one write. A block has a few
// lines and ends. Many small blocks hide each other's reads, and slow multiprocessors get fewer of them. So the numbers
// of instructions, registers and barriers matter.
#include "norm/norm_fp8.h"
#include "norm/norm_moments.h"

struct shared { sums_room sums; };
typedef norm_fwd_params params;
TILE void init(shared &) {}

TILE void choose_scale(lv &scale, tile &x, const params &p, const place &at, shared &s, summer &who) {
  lsum whole, small;
  clear(whole);
  clear(small);
  add_sizes(x, p.problem, at, whole, small);
  choose_scale(scale, whole, small, p.problem, p.most_scale, s.sums, who);
  multiply(x, scale, p.problem, at);
}

struct inputs { tile x, extra; };              // extra: as it was read, until it is wanted
TILE void begin(inputs &in, const params &p, const place &at) {
  begin_given(in.x, p.x, p.problem, at);
  begin(in.extra, p.extra, p.problem, at);
}
// f(element, other's) of what has been begun to be read. Types have code of their own, so that 16 bits stay 16.
template<class F> TILE void with(tile &x, tile &other, bool is_float, const norm_problem &q, const place &at, F f) {
  if (is_float) {
    begun<float, J> y = {other};
    each<WHOLE>(x, lines_of(q), columns_left(q, at), f, y);
  } else {
    begun<elem, J> y = {other};
    each<WHOLE>(x, lines_of(q), columns_left(q, at), f, y);
  }
}
template<class F> TILE void with_extra(inputs &in, const params &p, const place &at, F f) {
  with(in.x, in.extra, !HALVES && p.extra.is_float, p.problem, at, f);
}
// f(element, its weight or bias)
template<class F> TILE void with_vector(tile &x, const void *v, int is_float, const norm_problem &q, const place &at,
                                        F f) {
  int64_t first = (int64_t)at.group * q.dim + at.col;
  int lines = lines_of(q), n = columns_left(q, at);
  tile vector;
  if (is_float) load_begin<EIGHTS>(vector, (const float *)v + first, 0, lines, lines, n);
  else load_begin<EIGHTS>(vector, (const elem *)v + first, 0, lines, lines, n);
  with(x, vector, is_float, q, at, f);
}
TILE void add(inputs &in, const params &p, const place &at) {
  const norm_problem &q = p.problem;
  end_given(in.x, p.x);
  if (q.seed) drop(in.x, q, at);
  if (q.extra == NORM_ADD) with_extra(in, p, at, [](float &x, float r) { x += r; });
  if (p.rounds) round_lines<elem>(in.x);
  if (!QUANT && q.extra == NORM_GATE_FIRST) with_extra(in, p, at, [](float &x, float z) { x *= silu(z); });
}
TILE void finish(inputs &in, const moments &m, const lv &factor, const params &p, const place &at) {
  const norm_problem &q = p.problem;
  normalise(in.x, m, factor, q, at);
  if (!QUANT && q.extra == NORM_GATE_LAST) with_extra(in, p, at, [](float &y, float z) { y *= silu(z); });
  if (q.weight && q.weight_offset != 0.f)
    with_vector(in.x, q.weight, q.weight_is_float, q, at, [](float &y, float w) { y = fused(y, w, y); });
  else if (q.weight) with_vector(in.x, q.weight, q.weight_is_float, q, at, [](float &y, float w) { y *= w; });
  if (q.bias) with_vector(in.x, q.bias, q.bias_is_float, q, at, [](float &y, float b) { y += b; });
}
TILE void write(inputs &in, lv &descale, const params &p, const place &at, shared &s, summer &who) {
  const norm_problem &q = p.problem;
  if (!QUANT) return keep(p.out, in.x, q, at);
  if (!p.out_scale) {
    lsum most;
    clear(most);
    add_most(in.x, q, at, most);
    descale_of(descale, most, q, s.sums, who);
  }
  keep_descale(descale, p, at);
  keep_e4m3(in.x, descale, p, at);
}
TILE void compute(const params &p, shared &s, int warpgroup) {
  const norm_problem &q = p.problem;
  place at = place_of(q, block_index(), warpgroup);
  summer who = {warpgroup, 0};
  inputs in;
  moments m;
  lv scale, factor, descale;
  begin(in, p, at);
  if (QUANT) begin_descale(descale, p);
  add(in, p, at);
  keep(p.sum, in.x, q, at);
  fill(scale, 1.f);
  measure_part(m, in.x, q, at, (float)q.dim, q.inverse, s.sums, who);
  if (!precise(m, q, p.least_squares)) {
    choose_scale(scale, in.x, p, at, s, who);
    measure_part(m, in.x, q, at, (float)q.dim, q.inverse, s.sums, who);
  }
  factor_of(factor, m, scale, q.inverse, p.root_eps);
  keep_statistics(m, factor, scale, q, at);
  finish(in, m, factor, p, at);
  write(in, descale, p, at, s, who);
}

typedef block<params, shared, init, role<compute, WARPGROUP, GROUPS, 0>, OCCUPANCY<PER_SM>> kernel;
// With LINES: the lines of a block, and their most columns. Else as in norm_fwd.cu.
ENTRY(kernel, LINES ? GROUPS / SPAN * LINES : GROUPS, LINES ? 1024 * J * SPAN / LINES : 1024 * J)
