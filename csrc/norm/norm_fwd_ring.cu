// norm_fwd.cu's formulas of lines of 16 bits, of a plain norm or one with what is added: bytes in flight do not take
// registers. A loader copies lines into rings in shared memory, one for each member of a block, which is SPAN
// warpgroups that share a line. A member has its line in registers from there to its results, and meets no other.
#include "norm/norm_fp8.h"
#include "norm/norm_moments.h"

enum { MEMBERS = GROUPS / SPAN, COLUMNS = 1024 * J * SPAN, ALL = 7 };
typedef norm_fwd_params params;
struct stage { sl<elem, COLUMNS> x, extra; };
struct shared {
  stage stages[MEMBERS][STAGES];
  ring<STAGES> inputs[MEMBERS];
  pl<J> weight[SPAN], bias[SPAN];              // their reads would leave the L1, where results pass
  sums_room sums;
};
TILE void init(shared &s) {
  for (int i = 0; i < MEMBERS; i++) ring_init(s.inputs[i], arrivals(1, 0, 0), arrivals(0, 0, SPAN));
}

// Rows are missing in a block's last tiles only, so that all members are in the same stage.
TILE void loader(const params &p, shared &s, int) {
  const norm_problem &q = p.problem;
  uint32_t bytes = line_bytes<elem>(q.dim) * (p.extra.data ? 2 : 1);
  ring_pos pos = {};
  for (int i = block_index(); i < p.tiles; i += block_count()) {
    for (int member = 0; member < MEMBERS; member++) {
      place at = place_of(q, i, member * SPAN);
      if (rows_left(q, at) <= 0) break;
      stage &to = s.stages[member][pos.stage];
      sem &full = s.inputs[member].full[pos.stage];
      ring_acquire(s.inputs[member], pos);
      ring_expect(s.inputs[member], pos, bytes);
      bulk_load(to.x, (const elem *)p.x.data + offset_of(p.x, at), q.dim, full);
      if (p.extra.data) bulk_load(to.extra, (const elem *)p.extra.data + offset_of(p.extra, at), q.dim, full);
    }
    ring_next(s.inputs[0], pos);
  }
}

TILE void take(tile &x, const params &p, const place &at, shared &s, int member, ring_pos pos) {
  const norm_problem &q = p.problem;
  tile extra;
  ring_wait(s.inputs[member], pos);
  load_begin(x, s.stages[member][pos.stage].x, at.col, q.dim);
  if (p.extra.data) load_begin(extra, s.stages[member][pos.stage].extra, at.col, q.dim);
  ring_release(s.inputs[member], pos);
  load_end<elem>(x);
  if (q.seed) drop(x, q, at);
  if (p.extra.data) {
    load_end<elem>(extra);
    each<EIGHTS>(x, 1, columns_left(q, at), [](float &x, float r) { x += r; }, extra);
  }
  if (p.rounds) round_lines<elem>(x);
}
TILE void keep_line(const norm_stream &g, const tile &t, const params &p, const place &at) {
  if (g.data) save<EIGHTS>((elem *)g.data + offset_of(g, at), 0, t, 1, 1, columns_left(p.problem, at));
}
TILE void choose_scale(moments &m, tile &x, const params &p, const place &at, shared &s, summer &who) {
  lsum whole, small;
  lv sum, small_sum;
  clear(whole);
  clear(small);
  add_sizes(x, p.problem, at, whole, small);
  sum_up(sum, whole, small_sum, small, p.problem, s.sums, who);
  set_scale(m, sum, small_sum, p.most_scale);
}
TILE void keep_vectors(const norm_problem &q, shared &s, int warpgroup) {
  place at = place_of(q, 0, warpgroup);
  tile vector;
  float offset = q.weight_offset;
  if (warpgroup < SPAN) {
    load_vector(vector, q.weight, q.weight_is_float, q, at);
    each<EIGHTS>(vector, 1, columns_left(q, at), [=](float &w) { w += offset; });
    store(s.weight[warpgroup], vector);
    load_vector(vector, q.bias, q.bias_is_float, q, at);
    store(s.bias[warpgroup], vector);
  }
  bar_sync(ALL, 128 * GROUPS);
}
TILE void finish(tile &x, const moments &m, const lv &factor, const params &p, const place &at, shared &s, int part) {
  const norm_problem &q = p.problem;
  tile vector;                                 // one after the other: registers are short
  each<EIGHTS>(x, 1, columns_left(q, at), [](float &x, float scale, float mean, float rest, float factor) {
    x = (fused(x, scale, -mean) - rest) * factor;
  }, m.scale, m.mean, m.rest, factor);
  load(vector, s.weight[part]);
  each<EIGHTS>(x, 1, columns_left(q, at), [](float &y, float w) { y *= w; }, vector);
  if (q.bias) {
    load(vector, s.bias[part]);
    each<EIGHTS>(x, 1, columns_left(q, at), [](float &y, float b) { y += b; }, vector);
  }
}
TILE void write(tile &y, lv &descale, const params &p, const place &at, shared &s, summer &who) {
  if (!QUANT) return keep_line(p.out, y, p, at);
  if (!p.out_scale) {
    lsum most;
    clear(most);
    add_most(y, p.problem, at, most);
    descale_of(descale, most, p.problem, s.sums, who);
  }
  keep_descale(descale, p, at);
  keep_e4m3(y, descale, p, at);
}
TILE void compute(const params &p, shared &s, int warpgroup) {
  const norm_problem &q = p.problem;
  summer who = {warpgroup, 0};
  keep_vectors(q, s, warpgroup);
  ring_pos pos = {};
  ROLLED for (int i = block_index(); i < p.tiles; i += block_count()) {
    place at = place_of(q, i, warpgroup);
    tile x;
    moments m;
    lv factor, saved, descale;
    if (rows_left(q, at) <= 0) return;
    take(x, p, at, s, warpgroup / SPAN, pos);
    ring_next(s.inputs[0], pos);
    keep_line(p.sum, x, p, at);
    if (QUANT) begin_descale(descale, p);
    fill(m.scale, 1.f);
    ROLLED for (int turn = 0; turn < 2; turn++) {
      measure_part(m, x, q, at, (float)q.dim, q.inverse, s.sums, who);
      if (turn == 1 || precise(m, q, p.least_squares)) break;
      choose_scale(m, x, p, at, s, who);
    }
    factor_of(factor, m, q.inverse, p.root_eps);
    if (at.col == 0 && q.rstd) {
      int64_t first = (int64_t)at.row * q.groups + at.group;
      map(saved, factor, m.scale, [](float factor, float scale) { return factor * scale; });
      save(q.rstd + first, 0, saved, 1, 1);
      map(saved, m.mean, m.rest, m.scale, [](float mean, float rest, float scale) { return (mean + rest) / scale; });
      if (q.mean) save(q.mean + first, 0, saved, 1, 1);
    }
    finish(x, m, factor, p, at, s, warpgroup % SPAN);
    write(x, descale, p, at, s, who);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, GROUPS, REGS>, role<loader, THREAD, 1, 24>> kernel;
ENTRY(kernel, MEMBERS, COLUMNS)
