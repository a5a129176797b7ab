// Gradients of norm_fwd.cu's y = n weight + bias. With n = (u - mean) rstd of a row u, which is computed once more, and
// g = dy weight:
//   du = rstd (g - n mean(g n) - mean(g)) + dsum     without mean(g) for the root mean square norm; dsum: what comes
//                                                    through the sum, where that is a result
//   dweight = sum over rows of dy n,   dbias = sum over rows of dy
//   dx = drop(du), with the forward's draws;  what was added to x has the gradient du
// Gates: y = n weight silu(z) has dz = dy n weight silu'(z), and dy silu(z) takes the place of dy. u = x silu(z) has
// dz = du x silu'(z), dx = du silu(z).
// A block goes through lines of one group and keeps their sums of dweight and dbias in registers; norm_bwd_post adds up
// those of all blocks, always in the same order. Of LONG lines the sums are in memory, where nobody else touches them.
#include "norm/norm_tile.h"

// norm.c takes the sums of a block with more warpgroups than lines for one part.
static_assert(!LINES || (GROUPS == SPAN && LINES == 1), "a block of known lines has one");
struct shared { sums_room sums; };
typedef norm_bwd_params params;
TILE void init(shared &) {}

struct inputs { tile u, dy, extra; };
struct sums { tile weight, bias; };
struct statistics { lv mean, rstd; };

TILE void begin(inputs &in, const params &p, const place &at) {
  begin_given(in.u, p.x, p.problem, at);
  begin_given(in.dy, p.dout, p.problem, at);
  begin(in.extra, p.extra, p.problem, at);
}
TILE void load_statistics(statistics &of, const norm_problem &p, const place &at) {
  int64_t first = (int64_t)at.row * p.groups + at.group;
  load(of.rstd, p.rstd + first, p.groups, lines_of(p), rows_left(p, at));
  if (p.mean) load(of.mean, p.mean + first, p.groups, lines_of(p), rows_left(p, at));
  else fill(of.mean, 0.f);
}
TILE void load_weight(tile &w, const norm_problem &p, const place &at) {
  load_vector(w, p.weight, p.weight_is_float, p, at);
}
TILE float silu_slope(float z, float s) { return s * fused(z, 1.f - s, 1.f); }     // s: sigmoid(z)

// What was read becomes u, dy of n weight + bias, and of a gate behind the norm dz.
TILE void end(inputs &in, const tile &w, const statistics &of, const params &p, const place &at) {
  const norm_problem &q = p.problem;
  float offset = q.weight_offset;
  end_given(in.u, p.x);
  end_given(in.dy, p.dout);
  end(in.extra, p.extra);
  if (q.extra == NORM_GATE_FIRST)
    each<ACCESS>(in.u, lines_of(q), columns_left(q, at), [](float &x, float z) { x *= z * sigmoid(z); }, in.extra);
  if (q.extra == NORM_GATE_LAST)
    each<WHOLE>(in.u, lines_of(q), columns_left(q, at),
                 [=](float u, float &dy, float &z, float mean, float rstd, float w) {
      float s = sigmoid(z), slope = silu_slope(z, s), gate = z * s;
      z = dy * ((u - mean) * rstd * (w + offset)) * slope;
      dy *= gate;
    }, in.dy, in.extra, of.mean, of.rstd, w);
}
TILE void add_to_means(lsum &of_gn, lsum &of_g, inputs &in, const tile &w, const statistics &of, const params &p,
                       const place &at) {
  float offset = p.problem.weight_offset;
  each<ACCESS>(in.u, lines_of(p.problem), columns_left(p.problem, at),
               [=](float u, float dy, float w, float mean, float rstd, float &gn, float &g) {
    float n = (u - mean) * rstd, d = dy * (w + offset);
    gn = fused(d, n, gn);
    g += d;
  }, in.dy, w, of.mean, of.rstd, of_gn, of_g);
}
TILE void add_to_sums(sums &d, inputs &in, const statistics &of, const params &p, const place &at) {
  each<ACCESS>(in.u, lines_of(p.problem), columns_left(p.problem, at),
               [](float u, float dy, float mean, float rstd, float &dweight, float &dbias) {
    dweight = fused(dy, (u - mean) * rstd, dweight);
    dbias += dy;
  }, in.dy, of.mean, of.rstd, d.weight, d.bias);
}
// u becomes du, and is stored.
TILE void write(inputs &in, const tile &w, const statistics &of, const lv &gn, const lv &g, const params &p,
                const place &at) {
  const norm_problem &q = p.problem;
  float offset = q.weight_offset;
  each<ACCESS>(in.u, lines_of(q), columns_left(q, at),
               [=](float &u, float dy, float w, float mean, float rstd, float gn, float g) {
    float n = (u - mean) * rstd;
    u = rstd * (fused(-n, gn, dy * (w + offset)) - g);
  }, in.dy, w, of.mean, of.rstd, gn, g);
  if (q.extra == NORM_ADD && p.extra.data)
    each<ACCESS>(in.u, lines_of(q), columns_left(q, at), [](float &u, float d) { u += d; }, in.extra);
  if (q.extra == NORM_GATE_FIRST) {
    tile x;                                    // read again: it would be long in registers
    begin_given(x, p.x, q, at);
    end_given(x, p.x);
    each<ACCESS>(in.u, lines_of(q), columns_left(q, at), [](float &u, float x, float &z) {
      float s = sigmoid(z), slope = silu_slope(z, s), gate = z * s;
      z = u * x * slope;
      u *= gate;
    }, x, in.extra);
  }
  if (q.extra == NORM_ADD) keep(p.dextra, in.u, q, at);
  else keep(p.dextra, in.extra, q, at);
  if (q.seed) drop(in.u, q, at);
  keep(p.dx, in.u, q, at);
}

TILE void mean_of(lv &v, float inverse) {
  map(v, v, [=](float sum) { return sum * inverse; });
}

// The lines that `in` has begun to read.
TILE void differentiate(inputs &in, sums &d, const params &p, const place &at, shared &s, summer &who) {
  const norm_problem &q = p.problem;
  statistics of;
  tile w;
  lsum part_gn, part_g;
  lv gn, g;
  load_statistics(of, q, at);
  load_weight(w, q, at);
  clear(part_gn);
  clear(part_g);
  end(in, w, of, p, at);
  add_to_means(part_gn, part_g, in, w, of, p, at);
  sum_up(gn, part_gn, g, part_g, q, s.sums, who);
  add_to_sums(d, in, of, p, at);
  mean_of(gn, q.inverse);
  mean_of(g, q.rms ? 0.f : q.inverse);
  if (J > 1) load_weight(w, q, at);            // registers are short
  write(in, w, of, gn, g, p, at);
}

// ---- where a block's sums are
TILE int sums_line(const norm_problem &p, int warpgroup) { return member_of(p, warpgroup) * lines_of(p); }
TILE int64_t sums_at(const params &p, const place &at, int line) {
  int64_t part = (int64_t)(block_index() / p.problem.groups) * p.problem.slots + line;
  return (part * 2 * p.problem.groups + at.group) * p.columns + at.col;
}
TILE int sums_left(const params &p, const place &at) { return (int)p.columns - at.col; }
TILE void store_sums(const sums &d, const params &p, const place &at, int line) {
  const norm_problem &q = p.problem;
  int64_t first = sums_at(p, at, line), part = 2 * q.groups * p.columns, other = q.groups * p.columns;
  save<EIGHTS>(p.partials + first, part, d.weight, lines_of(q), lines_of(q), sums_left(p, at));
  save<EIGHTS>(p.partials + first + other, part, d.bias, lines_of(q), lines_of(q), sums_left(p, at));
}
TILE void load_sums(sums &d, const params &p, const place &at, int line) {
  const norm_problem &q = p.problem;
  int64_t first = sums_at(p, at, line), part = 2 * q.groups * p.columns, other = q.groups * p.columns;
  load_begin<EIGHTS>(d.weight, p.partials + first, part, lines_of(q), lines_of(q), sums_left(p, at));
  load_begin<EIGHTS>(d.bias, p.partials + first + other, part, lines_of(q), lines_of(q), sums_left(p, at));
  load_end<float>(d.weight);
  load_end<float>(d.bias);
}

TILE void differentiate_long(const params &p, const place &at, bool first, shared &s, summer &who) {
  const norm_problem &q = p.problem;
  int line = sums_line(q, who.warpgroup);
  statistics of;
  lsum part_gn, part_g;
  lv gn, g;
  load_statistics(of, q, at);
  clear(part_gn);
  clear(part_g);
  ROLLED for (int turn = 0; turn < 2; turn++) {            // 0: means; 1: results
    ROLLED for (int col = 0; col < q.dim; col += WIDTH) {
      place here = moved(at, col);
      inputs in;
      tile w;
      begin(in, p, here);
      load_weight(w, q, here);
      end(in, w, of, p, here);
      if (turn == 0) add_to_means(part_gn, part_g, in, w, of, p, here);
      else {
        sums d;
        if (first) {
          fill(d.weight, 0.f);
          fill(d.bias, 0.f);
        } else load_sums(d, p, here, line);
        add_to_sums(d, in, of, p, here);
        store_sums(d, p, here, line);
        write(in, w, of, gn, g, p, here);
      }
    }
    if (turn == 0) {
      sum_up(gn, part_gn, g, part_g, q, s.sums, who);
      mean_of(gn, q.inverse);
      mean_of(g, q.rms ? 0.f : q.inverse);
    }
  }
}

TILE void compute(const params &p, shared &s, int warpgroup) {
  summer who = {warpgroup, 0};
  int step = block_count();                    // a multiple of the groups, so that a block has lines of one
  if (LONG) {
    ROLLED for (int i = block_index(); i < p.tiles; i += step)
      differentiate_long(p, place_of(p.problem, i, warpgroup), i == block_index(), s, who);
    return;
  }
  sums d;
  inputs in;
  place first = place_of(p.problem, block_index(), warpgroup);
  fill(d.weight, 0.f);
  fill(d.bias, 0.f);
  ROLLED for (int i = block_index(); i < p.tiles; i += step) {
    begin(in, p, place_of(p.problem, i, warpgroup));
    differentiate(in, d, p, place_of(p.problem, i, warpgroup), s, who);
  }
  store_sums(d, p, first, sums_line(p.problem, warpgroup));
}

typedef block<params, shared, init, role<compute, WARPGROUP, GROUPS, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, LINES ? GROUPS / SPAN * LINES : GROUPS, LINES ? 1024 * J * SPAN / LINES : 1024 * J)
