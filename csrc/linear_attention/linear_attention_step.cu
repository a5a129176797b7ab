// A step of linear attention for generation, or a few of them, with the state in registers between its one read and its
// one write:
//   S = e^g S + k v^T,   out = scale S^T q
// A warpgroup has all rows of a head's state and COLS of its columns: out is a sum down each column.
#include "ssd/step_tile.h"

struct shared { sv<4 * COLS> sums[2]; };      // of every other step
typedef linear_attention_step_params params;
TILE void init(shared &) {}

typedef mr<ROWS> rows;
typedef mc<COLS> cols;
// What a step reads.
struct inputs { rows q, k; cols v; float g; };

TILE void begin(inputs &i, const params &p, const step_task &t, int step, int col) {
  load_begin(i.q, vector_at(p.q, t.sample, step, t.head), p.states.rows);
  load_begin(i.k, vector_at(p.k, t.sample, step, t.head), p.states.rows);
  load_begin<ACCESS>(i.v, vector_at(p.v, t.sample, step, t.head) + col, p.states.cols - col);
  begin_number(i.g, p.g, t.sample, step, t.head);
}
TILE void end(inputs &i, const params &p) {
  load_end<elem>(i.q);
  load_end<elem>(i.k);
  load_end<elem>(i.v);
  end_number(i.g, p.g);
}

TILE void no_state(const params &p, const step_task &t, int col) {
  cols zero;
  fill(zero, 0.f);
  for (int step = 0; step < p.steps; step++)
    save<ACCESS>(vector_at(p.out, t.sample, step, t.head) + col, zero, p.states.cols - col);
}

TILE void compute(const params &p, shared &s, int) {
  step_task t = block_task(p.states, p.heads, p.parts);
  int col = t.part * COLS;
  state_tile state;
  inputs now;
  float g_head, scale = p.scale;
  begin(now, p, t, 0, col);         // while the sample's place is read
  if (!has_state(p.states, t)) return no_state(p, t, col);
  int64_t at = state_at(p.states, t, 0, col);
  begin_state(state, p.states, at, 0, col);
  begin_number(g_head, p.g_head, 0, 0, t.head);
  end_number(g_head, p.g_head);
  end_state(state, p.states);
  ROLLED for (int step = 0; step < p.steps; step++) {
    if (step > 0) begin(now, p, t, step, col);
    cols out;
    mcsum<COLS> sums;
    end(now, p);
    float decay = fast_exp2(log_gate(now.g + g_head));
    clear(sums);
    each(state, [=](float &s, float k, float q, float v, float &o) {
      s = fused(s, decay, k * v);
      o = fused(s, q, o);
    }, now.k, now.q, now.v, sums);
    store(s.sums[step % 2], sums);
    wg_sync();
    load_sum(out, s.sums[step % 2]);
    map(out, out, [=](float o) { return o * scale; });
    save<ACCESS>(vector_at(p.out, t.sample, step, t.head) + col, out, p.states.cols - col);
  }
  keep_state(state, p.states, at, 0, col);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, ROWS, COLS)
