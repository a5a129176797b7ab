// y = f(u) weight + bias, with u the rows of drop(x) + residual, or of x, and over each row
//   f(u) = (u - mean) / sqrt(variance + eps)     layer norm
//   f(u) = u / sqrt(mean of u^2 + eps)           root mean square norm (rms)
// and, of a gated norm, u = x silu(z), or y = f(x) weight silu(z). The sum drop(x) + residual is a result too, and
// u is that result, rounded as it is: what is differentiated is what was computed.
// Bound by memory. A line's numbers stay in registers between its one read and its one write; the next line is read
// meanwhile. LONG lines are read twice.
// The variance is that about a first mean, less the square of what remains of it: a constant row has none, whatever its
// value. Rows whose squares would leave the range of float are measured once more, scaled.
#include "norm/norm_fp8.h"
#include "norm/norm_moments.h"

struct shared { sums_room sums; };
typedef norm_fwd_params params;
TILE void init(shared &) {}

// x, dropped; what is read beside it.
struct inputs { tile x, extra; };
TILE void begin(inputs &in, const params &p, const place &at) {
  begin(in.x, p.x, p.problem, at);
  begin(in.extra, p.extra, p.problem, at);
}
TILE float silu(float z) { return z * sigmoid(z); }
TILE void end(inputs &in, const params &p, const place &at) {
  const norm_problem &q = p.problem;
  end(in.x, p.x);
  end(in.extra, p.extra);
  if (q.seed) drop(in.x, q, at);
  if (q.extra == NORM_ADD)
    each<ACCESS>(in.x, q.lines, columns_left(q, at), [](float &x, float r) { x += r; }, in.extra);
  if (p.rounds) round_lines<elem>(in.x);
  if (!QUANT && q.extra == NORM_GATE_FIRST)
    each<ACCESS>(in.x, q.lines, columns_left(q, at), [](float &x, float z) { x *= silu(z); }, in.extra);
}

// Two parts' moments are joined as Chan, Golub & LeVeque (1979) do.
TILE void join(moments &m, const moments &part, float n, float n_part) {
  float share = n_part / (n + n_part), weight = n * share;
  lv step;
  map(step, part.mean, part.rest, [](float mean, float rest) { return mean + rest; });
  map(step, step, m.mean, [](float theirs, float ours) { return theirs - ours; });
  map(m.mean, m.mean, step, [=](float mean, float step) { return fused(step, share, mean); });
  map(m.squares, m.squares, part.squares, [](float a, float b) { return a + b; });
  map(m.squares, m.squares, step, [=](float squares, float step) { return fused(step * weight, step, squares); });
}
// of a LONG line, whose parts are read here
TILE void measure_long(moments &m, const params &p, const place &at, shared &s, summer &who) {
  moments part;
  map(part.scale, m.scale, [](float x) { return x; });
  fill(m.rest, 0.f);
  ROLLED for (int col = 0; col < p.problem.dim; col += WIDTH) {
    int left = p.problem.dim - col, n = left < WIDTH ? left : WIDTH;
    inputs in;
    place here = moved(at, col);
    begin(in, p, here);
    end(in, p, here);
    measure_part(part, in.x, p.problem, here, (float)n, 1.f / (float)n, s.sums, who);
    if (col == 0) {
      map(m.mean, part.mean, part.rest, [](float mean, float rest) { return mean + rest; });
      map(m.squares, part.squares, [](float x) { return x; });
    } else join(m, part, (float)col, (float)n);
  }
}
TILE void choose_scale(moments &m, tile &x, const params &p, const place &at, shared &s, summer &who) {
  lsum whole, small;
  lv sum, small_sum;
  float most = p.most_scale;
  clear(whole);
  clear(small);
  if (LONG) {
    ROLLED for (int col = 0; col < p.problem.dim; col += WIDTH) {
      inputs in;
      place here = moved(at, col);
      begin(in, p, here);
      end(in, p, here);
      add_sizes(in.x, p.problem, here, whole, small);
    }
  } else add_sizes(x, p.problem, at, whole, small);
  sum_up(sum, whole, small_sum, small, p.problem, s.sums, who);
  set_scale(m, sum, small_sum, most);
}
TILE void measure(moments &m, tile &x, const params &p, const place &at, shared &s, summer &who) {
  if (LONG) measure_long(m, p, at, s, who);
  else measure_part(m, x, p.problem, at, (float)p.problem.dim, p.problem.inverse, s.sums, who);
}

TILE void finish(tile &x, const tile &extra, const moments &m, const lv &factor, const params &p, const place &at) {
  const norm_problem &q = p.problem;
  tile vector;                                 // one after the other: registers are short
  float offset = q.weight_offset;
  normalise(x, m, factor, q, at);
  if (!QUANT && q.extra == NORM_GATE_LAST)
    each<ACCESS>(x, q.lines, columns_left(q, at), [](float &y, float z) { y *= silu(z); }, extra);
  load_vector(vector, q.weight, q.weight_is_float, q, at);
  each<ACCESS>(x, q.lines, columns_left(q, at), [=](float &y, float w) { y *= w + offset; }, vector);
  if (q.bias) {
    load_vector(vector, q.bias, q.bias_is_float, q, at);
    each<ACCESS>(x, q.lines, columns_left(q, at), [](float &y, float b) { y += b; }, vector);
  }
}
TILE void write(tile &x, const tile &extra, const moments &m, const lv &factor, const params &p, const place &at) {
  finish(x, extra, m, factor, p, at);
  keep(p.out, x, p.problem, at);
}
// In e4m3. The largest of LONG lines is found in a read more.
TILE void quantise(inputs &in, const moments &m, const lv &factor, lv &descale, const params &p, const place &at,
                   shared &s, summer &who) {
  const norm_problem &q = p.problem;
  lsum most;
  clear(most);
  if (!LONG) finish(in.x, in.extra, m, factor, p, at);
  if (!LONG && !p.out_scale) add_most(in.x, q, at, most);
  ROLLED for (int col = 0; LONG && !p.out_scale && col < q.dim; col += WIDTH) {
    place here = moved(at, col);
    begin(in, p, here);
    end(in, p, here);
    finish(in.x, in.extra, m, factor, p, here);
    add_most(in.x, q, here, most);
  }
  if (!p.out_scale) descale_of(descale, most, q, s.sums, who);
  keep_descale(descale, p, at);
  if (!LONG) return keep_e4m3(in.x, descale, p, at);
  ROLLED for (int col = 0; col < q.dim; col += WIDTH) {
    place here = moved(at, col);
    begin(in, p, here);
    end(in, p, here);
    keep(p.sum, in.x, q, here);
    finish(in.x, in.extra, m, factor, p, here);
    keep_e4m3(in.x, descale, p, here);
  }
}

// The lines that `in` has begun to read.
TILE void normalise(inputs &in, const params &p, const place &at, shared &s, summer &who) {
  const norm_problem &q = p.problem;
  moments m;
  lv factor, descale;
  float inverse = q.inverse, root_eps = p.root_eps, least = p.least_squares;
  if (!LONG) {
    end(in, p, at);
    keep(p.sum, in.x, q, at);
  }
  if (QUANT) begin_descale(descale, p);
  fill(m.scale, 1.f);
  ROLLED for (int turn = 0; turn < 2; turn++) {
    measure(m, in.x, p, at, s, who);
    if (turn == 1 || precise(m, q, least)) break;
    choose_scale(m, in.x, p, at, s, who);
  }
  factor_of(factor, m, inverse, root_eps);
  keep_statistics(m, factor, q, at);
  if (QUANT) return quantise(in, m, factor, descale, p, at, s, who);
  if (!LONG) return write(in.x, in.extra, m, factor, p, at);
  ROLLED for (int col = 0; col < q.dim; col += WIDTH) {
    place here = moved(at, col);
    begin(in, p, here);
    end(in, p, here);
    keep(p.sum, in.x, q, here);
    write(in.x, in.extra, m, factor, p, here);
  }
}

TILE void compute(const params &p, shared &s, int warpgroup) {
  summer who = {warpgroup, 0};
  if (LONG) {
    inputs in;
    ROLLED for (int i = block_index(); i < p.tiles; i += block_count())
      normalise(in, p, place_of(p.problem, i, warpgroup), s, who);
    return;
  }
  inputs now, next;                            // the one is read while the other is normalised
  begin(next, p, place_of(p.problem, block_index(), warpgroup));
  ROLLED for (int i = block_index(); i < p.tiles; i += block_count()) {
    copy(now.x, next.x);
    if (p.extra.data) copy(now.extra, next.extra);
    if (i + block_count() < p.tiles) begin(next, p, place_of(p.problem, i + block_count(), warpgroup));
    normalise(now, p, place_of(p.problem, i, warpgroup), s, who);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, GROUPS, 0>, OCCUPANCY<BLOCKS>> kernel;
ENTRY(kernel, GROUPS, 1024 * J)
