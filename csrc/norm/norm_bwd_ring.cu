// norm_bwd.cu's formulas of lines of 16 bits, of a plain norm or one with what is added. A loader copies lines into
// rings in shared memory, one for each member of a block, which is SPAN warpgroups that share a line. A line is read
// from there twice, for its means and for its results, so that registers hold little but the sums of dweight and dbias.
// Those of all members of a block become one in the end, in the order of the members.
#include "norm/norm_ring.h"

typedef norm_bwd_params params;
struct stage { shared_line u, dy, extra; };
struct shared {
  stage stages[MEMBERS][STAGES];
  rings inputs;
  pl<1> weight[J * SPAN];                      // its reads would leave the L1, where results pass
  sums_room sums;
};
TILE void init(shared &s) { rings_init(s.inputs); }
typedef lt<1> piece;                           // J of them, one after the other: registers are short
struct sums { piece weight[J], bias[J]; };

TILE void loader(const params &p, shared &s, int) {
  auto load = [&](int member, int i, const place &at, sem &full) {
    stage &to = s.stages[member][i];
    bring(to.u, p.x, p.problem, at, full);
    bring(to.dy, p.dout, p.problem, at, full);
    if (p.extra.data) bring(to.extra, p.extra, p.problem, at, full);
  };
  load_lines(s.inputs, p.problem, p.tiles, p.extra.data ? 3 : 2, load);
}

TILE void take(piece &t, const shared_line &from, const norm_problem &q, const place &at) {
  load_begin(t, from, at.col, q.dim);
  load_end<elem>(t);
}
TILE void differentiate(sums &d, const params &p, const place &line, shared &s, summer &who, ring_pos pos) {
  const norm_problem &q = p.problem;
  const int member = who.warpgroup / SPAN;
  const stage &from = s.stages[member][pos.stage];
  const float inverse = q.inverse, inverse_g = q.rms ? 0.f : q.inverse;
  int64_t first = (int64_t)line.row * q.groups + line.group;
  lv mean, rstd, gn, g;
  lsum part_gn, part_g;
  piece u, dy, w;
  load(rstd, q.rstd + first, 0, 1, 1);
  fill(mean, 0.f);
  if (q.mean) load(mean, q.mean + first, 0, 1, 1);
  clear(part_gn);
  clear(part_g);
  ring_wait(s.inputs[member], pos);
  CONSTANT_INDEX for (int j = 0; j < J; j++) {
    place at = moved(line, 1024 * j);
    load(w, s.weight[at.col / 1024]);
    take(u, from.u, q, at);
    take(dy, from.dy, q, at);
    each<EIGHTS>(u, 1, columns_left(q, at),
                 [=](float u, float dy, float w, float mean, float rstd, float &gn, float &g) {
      float x = (u - mean) * rstd, d = dy * w;
      gn = fused(d, x, gn);
      g += d;
    }, dy, w, mean, rstd, part_gn, part_g);
  }
  sum_up(gn, part_gn, g, part_g, q, s.sums, who);
  map(gn, gn, [=](float sum) { return sum * inverse; });
  map(g, g, [=](float sum) { return sum * inverse_g; });
  CONSTANT_INDEX for (int j = 0; j < J; j++) {
    place at = moved(line, 1024 * j);
    load(w, s.weight[at.col / 1024]);
    take(u, from.u, q, at);
    take(dy, from.dy, q, at);
    each<EIGHTS>(u, 1, columns_left(q, at),
                 [=](float &u, float dy, float w, float mean, float rstd, float gn, float g, float &dweight,
                     float &dbias) {
      float x = (u - mean) * rstd;
      dweight = fused(dy, x, dweight);
      dbias += dy;
      u = rstd * (fused(-x, gn, dy * w) - g);
    }, dy, w, mean, rstd, gn, g, d.weight[j], d.bias[j]);
    if (p.extra.data) {
      take(dy, from.extra, q, at);
      each<EIGHTS>(u, 1, columns_left(q, at), [](float &u, float d) { u += d; }, dy);
    }
    if (j == J - 1) ring_release(s.inputs[member], pos);
    keep_line(p.dextra, u, q, at);
    if (q.seed) drop(u, q, at);
    keep_line(p.dx, u, q, at);
  }
}

// A block's sums: of each member in turn, and its own are added to what is there.
TILE void add_up(sums &d, const params &p, const place &line, int member) {
  const norm_problem &q = p.problem;
  int64_t other = q.groups * p.columns, block = block_index() / q.groups;
  ROLLED for (int i = 0; i < MEMBERS; i++) {
    if (i == member)
      CONSTANT_INDEX for (int j = 0; j < J; j++) {
        place at = moved(line, 1024 * j);
        float *weight = p.partials + (block * 2 * q.groups + at.group) * p.columns + at.col;
        int n = (int)p.columns - at.col;
        piece more;
        if (i > 0) {
          load_begin<EIGHTS>(more, weight, 0, 1, 1, n);
          load_end<float>(more);
          each<EIGHTS>(d.weight[j], 1, n, [](float &sum, float x) { sum += x; }, more);
          load_begin<EIGHTS>(more, weight + other, 0, 1, 1, n);
          load_end<float>(more);
          each<EIGHTS>(d.bias[j], 1, n, [](float &sum, float x) { sum += x; }, more);
        }
        save<EIGHTS>(weight, 0, d.weight[j], 1, 1, n);
        save<EIGHTS>(weight + other, 0, d.bias[j], 1, 1, n);
      }
    bar_sync(ALL, 128 * GROUPS);
  }
}
TILE void compute(const params &p, shared &s, int warpgroup) {
  const norm_problem &q = p.problem;
  summer who = {warpgroup, 0};
  ring_pos pos = {};
  sums d;
  if (warpgroup < SPAN)
    CONSTANT_INDEX for (int j = 0; j < J; j++) {
      piece w;
      place at = moved(place_of(q, 0, warpgroup), 1024 * j);
      load_line_weight(w, q, at);
      store(s.weight[at.col / 1024], w);
    }
  bar_sync(ALL, 128 * GROUPS);
  CONSTANT_INDEX for (int j = 0; j < J; j++) {
    fill(d.weight[j], 0.f);
    fill(d.bias[j], 0.f);
  }
  ROLLED for (int i = block_index(); i < p.tiles; i += block_count()) {
    place at = place_of(q, i, warpgroup);
    if (rows_left(q, at) <= 0) break;
    differentiate(d, p, at, s, who, pos);
    ring_next(s.inputs[0], pos);
  }
  add_up(d, p, place_of(q, block_index(), warpgroup), warpgroup / SPAN);
}

typedef block<params, shared, init, role<compute, WARPGROUP, GROUPS, REGS>, role<loader, THREAD, 1, 24>> kernel;
ENTRY(kernel, MEMBERS, COLUMNS)
