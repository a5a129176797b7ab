// A step of Mamba-2's recurrence for generation (Dao & Gu 2024, section 6), or a few of them, with the state in
// registers between its one read and its one write:
//   S = e^(dt a) S + dt x b^T,   y = (S c + d x) silu(z)
// A warpgroup has ROWS rows of a head's state, all of its columns: y is a sum along each row.
#include "ssd/step_tile.h"

struct shared { int unused; };
typedef ssd_step_params params;
TILE void init(shared &) {}

typedef mr<ROWS> rows;
typedef mc<COLS> cols;
// What a step reads.
struct inputs { rows x, z; cols b, c; float dt; };

TILE void begin(inputs &i, const params &p, const step_task &t, int step, int row) {
  int group = quotient(t.head, p.group_heads), m = p.states.rows - row, n = p.states.cols;
  load_begin<ACCESS>(i.b, vector_at(p.b, t.sample, step, group), n);
  load_begin<ACCESS>(i.c, vector_at(p.c, t.sample, step, group), n);
  load_begin(i.x, vector_at(p.x, t.sample, step, t.head) + row, m);
  load_begin(i.z, vector_at(p.z, t.sample, step, t.head) + row, p.z.data ? m : 0);
  begin_number(i.dt, p.dt, t.sample, step, t.head);
}
TILE void end(inputs &i, const params &p) {
  load_end<elem>(i.b);
  load_end<elem>(i.c);
  load_end<elem>(i.x);
  load_end<elem>(i.z);
  end_number(i.dt, p.dt);
}

// d x: d of the head, or of each of its columns.
TILE void begin_skip(rows &d, const params &p, int head, int row) {
  int64_t at = (int64_t)head * p.states.rows + row;
  int m = p.d_wide ? p.states.rows - row : 0;
  if (p.d_wide_is_float) load_begin(d, (const float *)p.d_wide + at, m);
  else load_begin(d, (const elem *)p.d_wide + at, m);
}
TILE void end_skip(rows &d, const params &p) {
  if (p.d_wide_is_float) load_end<float>(d);
  else load_end<elem>(d);
}

TILE float step_size(const params &p, float x, float bias) {
  float y = x + bias;
  return clamp(p.softplus ? softplus(y) : y, p.low, p.high);
}

TILE float silu(float z) { return z * fast_rcp(1.f + fast_exp2(z * -1.4426950408889634f)); }

TILE void no_state(const params &p, const step_task &t, int row) {
  rows zero;
  fill(zero, 0.f);
  for (int step = 0; step < p.steps; step++)
    save(vector_at(p.y, t.sample, step, t.head) + row, zero, p.states.rows - row);
}

TILE void compute(const params &p, shared &, int) {
  step_task t = block_task(p.states, p.heads, p.parts);
  int row = t.part * ROWS;
  state_tile state;
  inputs now;
  rows d;
  float a, bias, head_d;
  begin(now, p, t, 0, row);         // while the sample's place is read
  if (!has_state(p.states, t)) return no_state(p, t, row);
  int64_t at = state_at(p.states, t, row, 0);
  begin_state(state, p.states, at, row, 0);
  begin_number(a, p.a, 0, 0, t.head);
  begin_number(bias, p.bias, 0, 0, t.head);
  begin_number(head_d, p.d, 0, 0, t.head);
  begin_skip(d, p, t.head, row);
  end_number(a, p.a);
  end_number(bias, p.bias);
  end_number(head_d, p.d);
  end_skip(d, p);
  end_state(state, p.states);
  ROLLED for (int step = 0; step < p.steps; step++) {
    if (step > 0) begin(now, p, t, step, row);
    rows u, y;
    mrsum<ROWS> sums;
    end(now, p);
    float dt = step_size(p, now.dt, bias), decay = fast_exp2(dt * a * 1.4426950408889634f);
    map(u, now.x, [=](float x) { return dt * x; });
    clear(sums);
    each(state, [=](float &s, float u, float b, float c, float &y) {
      s = fused(s, decay, u * b);
      y = fused(s, c, y);
    }, u, now.b, now.c, sums);
    reduce(y, sums);
    map(u, d, now.x, [=](float d, float x) { return (d + head_d) * x; });
    map(y, y, u, [](float y, float u) { return y + u; });
    if (p.z.data) map(y, y, now.z, [](float y, float z) { return y * silu(z); });
    save(vector_at(p.y, t.sample, step, t.head) + row, y, p.states.rows - row);
  }
  keep_state(state, p.states, at, row, 0);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, ROWS, COLS)
