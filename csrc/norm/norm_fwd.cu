// y = f(u) weight + bias, with u the rows of drop(x) + residual, or of x, and over each row
//   f(u) = (u - mean) / sqrt(variance + eps)     layer norm
//   f(u) = u / sqrt(mean of u^2 + eps)           root mean square norm (rms)
// and, of a gated norm, u = x silu(z), or y = f(x) weight silu(z). The sum drop(x) + residual is a result too, and
// u is that result, rounded as it is: what is differentiated is what was computed.
// Bound by memory. These are lines of any length and at any address, read in parts and twice; norm_fwd_whole.cu has
// those that stay in registers.
// The variance is that about a first mean, less the square of what remains of it: a constant row has none, whatever its
// value. Rows whose squares would leave the range of float are measured once more, scaled.
#include "norm/norm_fp8.h"
#include "norm/norm_moments.h"

struct shared { sums_room sums; };
typedef norm_fwd_params params;
TILE void init(shared &) {}

struct inputs { tile x, extra; };
TILE void read(inputs &in, const params &p, const place &at) {
  const norm_problem &q = p.problem;
  begin(in.x, p.x, q, at);
  begin(in.extra, p.extra, q, at);
  end(in.x, p.x);
  end(in.extra, p.extra);
  if (q.seed) drop(in.x, q, at);
  if (q.extra == NORM_ADD)
    each<WHOLE>(in.x, q.lines, columns_left(q, at), [](float &x, float r) { x += r; }, in.extra);
  if (p.rounds) round_lines<elem>(in.x);
  if (!QUANT && q.extra == NORM_GATE_FIRST)
    each<WHOLE>(in.x, q.lines, columns_left(q, at), [](float &x, float z) { x *= silu(z); }, in.extra);
}

// Two parts' moments are joined as Chan, Golub & LeVeque (1979) do.
TILE void join(moments &m, const moments &part, float n, float n_part) {
  float share = n_part / (n + n_part), weight = n * share;
  lv step;
  map(step, part.mean, m.mean, [](float theirs, float ours) { return theirs - ours; });
  map(m.mean, m.mean, step, [=](float mean, float step) { return fused(step, share, mean); });
  map(m.squares, m.squares, part.squares, [](float a, float b) { return a + b; });
  map(m.squares, m.squares, step, [=](float squares, float step) { return fused(step * weight, step, squares); });
}
TILE void measure(moments &m, const lv &scale, const params &p, const place &at, shared &s, summer &who) {
  moments part;
  ROLLED for (int col = 0; col < p.problem.dim; col += WIDTH) {
    int left = p.problem.dim - col, n = left < WIDTH ? left : WIDTH;
    inputs in;
    place here = moved(at, col);
    read(in, p, here);
    multiply(in.x, scale, p.problem, here);
    measure_part(part, in.x, p.problem, here, (float)n, 1.f / (float)n, s.sums, who);
    if (col == 0) {
      map(m.mean, part.mean, [](float x) { return x; });
      map(m.squares, part.squares, [](float x) { return x; });
    } else join(m, part, (float)col, (float)n);
  }
}
TILE void choose_scale(lv &scale, const params &p, const place &at, shared &s, summer &who) {
  lsum whole, small;
  clear(whole);
  clear(small);
  ROLLED for (int col = 0; col < p.problem.dim; col += WIDTH) {
    inputs in;
    place here = moved(at, col);
    read(in, p, here);
    add_sizes(in.x, p.problem, here, whole, small);
  }
  choose_scale(scale, whole, small, p.problem, p.most_scale, s.sums, who);
}

struct statistics { moments m; lv scale, factor; };
TILE void finish(inputs &in, const statistics &of, const params &p, const place &at) {
  const norm_problem &q = p.problem;
  tile vector;                                 // one after the other: registers are short
  float offset = q.weight_offset;
  multiply(in.x, of.scale, q, at);
  normalise(in.x, of.m, of.factor, q, at);
  if (!QUANT && q.extra == NORM_GATE_LAST)
    each<WHOLE>(in.x, q.lines, columns_left(q, at), [](float &y, float z) { y *= silu(z); }, in.extra);
  load_vector(vector, q.weight, q.weight_is_float, q, at);
  each<WHOLE>(in.x, q.lines, columns_left(q, at), [=](float &y, float w) { y *= w + offset; }, vector);
  if (q.bias) {
    load_vector(vector, q.bias, q.bias_is_float, q, at);
    each<WHOLE>(in.x, q.lines, columns_left(q, at), [](float &y, float b) { y += b; }, vector);
  }
}
// What a line in e4m3 is divided by. The largest number is found in a read more.
TILE void choose_descale(lv &descale, const statistics &of, const params &p, const place &at, shared &s, summer &who) {
  lsum most;
  clear(most);
  ROLLED for (int col = 0; col < p.problem.dim; col += WIDTH) {
    inputs in;
    place here = moved(at, col);
    read(in, p, here);
    finish(in, of, p, here);
    add_most(in.x, p.problem, here, most);
  }
  descale_of(descale, most, p.problem, s.sums, who);
}
TILE void write(const statistics &of, const lv &descale, const params &p, const place &at) {
  ROLLED for (int col = 0; col < p.problem.dim; col += WIDTH) {
    inputs in;
    place here = moved(at, col);
    read(in, p, here);
    keep(p.sum, in.x, p.problem, here);
    finish(in, of, p, here);
    if (QUANT) keep_e4m3(in.x, descale, p, here);
    else keep(p.out, in.x, p.problem, here);
  }
}

TILE void compute(const params &p, shared &s, int warpgroup) {
  const norm_problem &q = p.problem;
  place at = place_of(q, block_index(), warpgroup);
  summer who = {warpgroup, 0};
  statistics of;
  lv descale;
  float least = p.least_squares;
  fill(of.scale, 1.f);
  ROLLED for (int turn = 0; turn < 2; turn++) {
    measure(of.m, of.scale, p, at, s, who);
    if (turn == 1 || precise(of.m, q, least)) break;
    choose_scale(of.scale, p, at, s, who);
  }
  factor_of(of.factor, of.m, of.scale, q.inverse, p.root_eps);
  keep_statistics(of.m, of.factor, of.scale, q, at);
  if (QUANT) {
    begin_descale(descale, p);
    if (!p.out_scale) choose_descale(descale, of, p, at, s, who);
    keep_descale(descale, p, at);
  }
  write(of, descale, p, at);
}

typedef block<params, shared, init, role<compute, WARPGROUP, GROUPS, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, GROUPS, 1024 * J)
