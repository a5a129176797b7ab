// norm_fwd.cu's formulas of lines of 16 bits, of a plain norm or one with what is added: bytes in flight do not take
// registers. A loader copies lines into rings in shared memory, one for each member of a block, which is SPAN
// warpgroups that share a line. A member has its line in registers from there to its results, and meets no other.
#include "norm/norm_fp8.h"
#include "norm/norm_moments.h"
#include "norm/norm_ring.h"

typedef norm_fwd_params params;
struct stage { shared_line x, extra; };
struct shared {
  stage stages[MEMBERS][STAGES];
  rings inputs;
  pl<J> weight[SPAN], bias[SPAN];              // their reads would leave the L1, where results pass
  sums_room sums;
};
TILE void init(shared &s) { rings_init(s.inputs); }

TILE void loader(const params &p, shared &s, int) {
  auto load = [&](int member, int i, const place &at, sem &full) {
    stage &to = s.stages[member][i];
    bring(to.x, p.x, p.problem, at, full);
    if (p.extra.data) bring(to.extra, p.extra, p.problem, at, full);
  };
  load_lines(s.inputs, p.problem, p.tiles, p.extra.data ? 2 : 1, load);
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
  if (warpgroup < SPAN) {
    load_line_weight(vector, q, at);
    store(s.weight[warpgroup], vector);
    load_line_vector(vector, q.bias, q.bias_is_float, q, at);
    store(s.bias[warpgroup], vector);
  }
  bar_sync(ALL, 128 * GROUPS);
}
TILE void finish(tile &x, const moments &m, const lv &factor, const params &p, const place &at, shared &s, int part) {
  const norm_problem &q = p.problem;
  tile vector;                                 // one after the other: registers are short
  normalise(x, m, factor, q, at);
  load(vector, s.weight[part]);
  each<EIGHTS>(x, 1, columns_left(q, at), [](float &y, float w) { y *= w; }, vector);
  if (q.bias) {
    load(vector, s.bias[part]);
    each<EIGHTS>(x, 1, columns_left(q, at), [](float &y, float b) { y += b; }, vector);
  }
}
TILE void write(tile &y, lv &descale, const params &p, const place &at, shared &s, summer &who) {
  if (!QUANT) return keep_line(p.out, y, p.problem, at);
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
    lv factor, descale;
    if (rows_left(q, at) <= 0) return;
    take(x, p, at, s, warpgroup / SPAN, pos);
    ring_next(s.inputs[0], pos);
    keep_line(p.sum, x, q, at);
    if (QUANT) begin_descale(descale, p);
    fill(m.scale, 1.f);
    ROLLED for (int turn = 0; turn < 2; turn++) {
      measure_part(m, x, q, at, (float)q.dim, q.inverse, s.sums, who);
      if (turn == 1 || precise(m, q, p.least_squares)) break;
      choose_scale(m, x, p, at, s, who);
    }
    factor_of(factor, m, q.inverse, p.root_eps);
    keep_statistics(m, factor, q, at);
    finish(x, m, factor, p, at, s, warpgroup % SPAN);
    write(x, descale, p, at, s, who);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, GROUPS, REGS>, role<loader, THREAD, 1, 24>> kernel;
ENTRY(kernel, MEMBERS, COLUMNS)
