// norm_bwd.cu's formulas of lines of 16 bits, of a plain norm or one with what is added. A loader copies lines into
// rings in shared memory, one for each member of a block, which is SPAN warpgroups that share a line. A line is read
// from there twice, for its means and for its results, so that registers hold little but the sums of dweight and dbias.
// Those of all members of a block become one in the end, in the order of the members.
#include "norm/norm_tile.h"

enum { MEMBERS = GROUPS / SPAN, COLUMNS = 1024 * J * SPAN, ALL = 7 };
typedef norm_bwd_params params;
struct stage { sl<elem, COLUMNS> u, dy, extra; };
struct shared {
  stage stages[MEMBERS][STAGES];
  ring<STAGES> inputs[MEMBERS];
  pl<1> weight[J * SPAN];                      // its reads would leave the L1, where results pass
  sums_room sums;
};
TILE void init(shared &s) {
  for (int i = 0; i < MEMBERS; i++) ring_init(s.inputs[i], arrivals(1, 0, 0), arrivals(0, 0, SPAN));
}
typedef lt<1> piece;                           // J of them, one after the other: registers are short
struct sums { piece weight[J], bias[J]; };

// Rows are missing in a block's last tiles only, so that all members are in the same stage.
TILE void loader(const params &p, shared &s, int) {
  const norm_problem &q = p.problem;
  uint32_t bytes = line_bytes<elem>(q.dim) * (p.extra.data ? 3 : 2);
  ring_pos pos = {};
  for (int i = block_index(); i < p.tiles; i += block_count()) {
    for (int member = 0; member < MEMBERS; member++) {
      place at = place_of(q, i, member * SPAN);
      if (rows_left(q, at) <= 0) break;
      stage &to = s.stages[member][pos.stage];
      sem &full = s.inputs[member].full[pos.stage];
      ring_acquire(s.inputs[member], pos);
      ring_expect(s.inputs[member], pos, bytes);
      bulk_load(to.u, (const elem *)p.x.data + offset_of(p.x, at), q.dim, full);
      bulk_load(to.dy, (const elem *)p.dout.data + offset_of(p.dout, at), q.dim, full);
      if (p.extra.data) bulk_load(to.extra, (const elem *)p.extra.data + offset_of(p.extra, at), q.dim, full);
    }
    ring_next(s.inputs[0], pos);
  }
}

TILE void take(piece &t, const sl<elem, COLUMNS> &from, const norm_problem &q, const place &at) {
  load_begin(t, from, at.col, q.dim);
  load_end<elem>(t);
}
TILE void load_weight(piece &w, const norm_problem &q, const place &at) {
  const float offset = q.weight_offset;
  int64_t first = (int64_t)at.group * q.dim + at.col;
  int n = q.weight ? columns_left(q, at) : 0;
  if (q.weight_is_float) {
    load_begin<EIGHTS>(w, (const float *)q.weight + first, 0, 1, 1, n);
    load_end<float>(w);
  } else {
    load_begin<EIGHTS>(w, (const elem *)q.weight + first, 0, 1, 1, n);
    load_end<elem>(w);
  }
  each<EIGHTS>(w, 1, columns_left(q, at), [=](float &w) { w += offset; });
}
TILE void keep_part(const norm_stream &g, const piece &t, const norm_problem &q, const place &at) {
  if (g.data) save<EIGHTS>((elem *)g.data + offset_of(g, at), 0, t, 1, 1, columns_left(q, at));
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
    keep_part(p.dextra, u, q, at);
    if (q.seed) drop(u, q, at);
    keep_part(p.dx, u, q, at);
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
      load_weight(w, q, at);
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
