// Gradients of causal_conv1d.cu's y = f(a), a_t = bias + sum over k of tap[k] x_(t - W + 1 + k). With a computed
// once more, and g_t = dy_t f'(a_t):
//   dx_t = sum over j < W of tap[W - 1 - j] g_(t + j)
//   dtap[k] = sum over t of g_t x_(t - W + 1 + k),   dbias = sum over t of g_t
// One pass over x and dy, in the forward's order: a warpgroup walks down the steps of 256 channels with the last W - 1
// steps of x and as many sums of dx in the making. Step t completes dx_(t - W + 1), which takes the place of dy_t in
// its tile. So a tile of x and dy begins W - 1 steps after the tile of dx that comes of it. A segment begins a tile
// earlier, for the sums in the making. Its sums of dtap and dbias go to memory. causal_conv1d_bwd_post adds them up,
// and sees to the ends of sequences: initial states, and gradients of final ones.
#include "causal_conv1d/causal_conv1d_tasks.h"

// W: taps, 2 to 4. GROUPS: warpgroups of a block. STAGES
struct shared {
  tile x[GROUPS][STAGES], dy[GROUPS][STAGES];
  int marks[GROUPS][STAGES];
  ring<STAGES, ASYNC_READS> steps[GROUPS];   // released behind the fence for the store, which covers the reads
};
typedef causal_conv1d_bwd_params params;

TILE void init(shared &s) {
  for (int g = 0; g < GROUPS; g++) ring_init(s.steps[g], arrivals(1, 0, 0), arrivals(0, 0, 1));
}
TILE int first_task(int group) { return group * block_count() + block_index(); }
TILE int task_stride() { return GROUPS * block_count(); }
TILE bool has_marks(const params &p) { return p.problem.starts || p.problem.seq_idx || p.problem.initial; }
TILE int first_row(const task &t) { return t.step - STEPS; }            // of dx, in front of the segment
TILE int first_sequence(const params &p, int step) { return p.problem.starts ? sequence_at(p.problem, step) : 0; }

TILE void loader(const params &p, shared &s, int group) {
  ring<STAGES, ASYNC_READS> &ring = s.steps[group];
  ring_pos at = {};
  for (int i = first_task(group); i < p.cut.tasks; i += task_stride()) {
    task t = task_of(p.cut, i);
    int next = first_sequence(p, first_row(t) + PAST);
    for (int row = first_row(t); row < t.end; row += STEPS) {
      int step = row + PAST;
      sem &full = ring.full[at.stage];
      ring_acquire(ring, at);
      if (has_marks(p)) put(s.marks[group][at.stage], marks_of(p.problem, t.batch, step, next));
      ring_expect(ring, at, 2 * tile_bytes(s.x[0][0]));
      tma_load(s.x[group][at.stage], p.x, full, step, t.col, 0, t.batch);
      tma_load(s.dy[group][at.stage], p.dout, full, step, t.col, 0, t.batch);   // zeros outside, and change nothing
      ring_next(ring, at);
    }
  }
}

// What goes down the rows: steps of x before this one; dx[j], the sum so far of the step j before the last. Sums are
// those over all steps.
struct state { cols past[PAST], dx[PAST]; };
struct sums { cols tap[W], bias; };

// g = dy f'(a): with s = sigmoid(a), f' = s + a s (1 - s)
TILE void activated(cols &g, const cols &a) {
  map(g, g, a, [](float dy, float a) {
    float s = sigmoid(a), as = a * s;
    return dy * fused(as, 1.f - s, s);
  });
}
TILE void add_to_sums(sums &d, const cols &g, const cols *x) {
  CONSTANT_INDEX for (int k = 0; k < W; k++)
    map(d.tap[k], g, x[k], d.tap[k], [](float g, float x, float d) { return fused(g, x, d); });
  map(d.bias, d.bias, g, [](float d, float g) { return d + g; });
}
// dx of the step W - 1 before. `age`: how many steps before this one belong to its sequence; to others goes nothing.
TILE void add_to_dx(cols &out, cols (&dx)[PAST], const cols &g, const weights &w, int age) {
  map(out, g, w.tap[0], dx[PAST - 1], [=](float g, float w, float d) { return age < W - 1 ? d : fused(g, w, d); });
  CONSTANT_INDEX for (int j = PAST - 1; j > 0; j--)
    map(dx[j], g, w.tap[W - 1 - j], dx[j - 1], [=](float g, float w, float d) { return age < j ? d : fused(g, w, d); });
  map(dx[0], g, w.tap[W - 1], [](float g, float w) { return g * w; });
}

// Rows first .. first + 7 of a tile in which no sequence begins.
TILE void eight_rows(const tile &tx, tile &tdy, int first, state &s, sums &d, const weights &w, bool silu) {
  cols x[PAST + 8], g[8];
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) copy(x[k], s.past[k]);
  CONSTANT_INDEX for (int r = 0; r < 8; r++) load_row(x[PAST + r], tx, first + r);
  CONSTANT_INDEX for (int r = 0; r < 8; r++) load_row(g[r], tdy, first + r);
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) copy(s.past[k], x[8 + k]);
  if (silu) {
    CONSTANT_INDEX for (int r = 0; r < 8; r++) {
      cols a;
      convolve(a, x + r, w);
      activated(g[r], a);
    }
  }
  CONSTANT_INDEX for (int r = 0; r < 8; r++) {
    add_to_sums(d, g[r], x + r);
    cols out;
    add_to_dx(out, s.dx, g[r], w, W);
    store_row(tdy, first + r, out);
  }
}

// A tile in which some do, or did so shortly before, row by row. The sequence's age afterwards.
TILE int marked_rows(const tile &tx, tile &tdy, int step, int marks, int age, int &sequence, int col, state &s, sums &d,
                     const weights &w, const causal_conv1d_problem &p) {
  cols x[W];
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) copy(x[k], s.past[k]);
  ROLLED for (int r = 0; r < STEPS; r++) {
    if (marks >> r & 1) {
      begin_sequence(s.past, p, sequence, step + r, col);
      CONSTANT_INDEX for (int k = 0; k < PAST; k++) copy(x[k], s.past[k]);
      age = 0;
    }
    cols g, a, out;
    load_row(x[PAST], tx, r);
    load_row(g, tdy, r);
    convolve(a, x, w);
    if (p.silu) activated(g, a);
    if (marks >> (16 + r) & 1) fill(g, 0.f);
    add_to_sums(d, g, x);
    add_to_dx(out, s.dx, g, w, age);
    store_row(tdy, r, out);
    CONSTANT_INDEX for (int k = 0; k < PAST; k++) copy(x[k], x[k + 1]);
    age++;
  }
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) copy(s.past[k], x[k]);
  return age;
}

TILE void fill_sums(sums &d) {
  CONSTANT_INDEX for (int k = 0; k < W; k++) fill(d.tap[k], 0.f);
  fill(d.bias, 0.f);
}
TILE void store_sums(const params &p, const task &t, const sums &d) {
  int n = p.problem.channels - t.col;
  float *to = p.partials + (int64_t)(t.batch * p.cut.segments + t.segment) * (W + 1) * p.problem.channels + t.col;
  CONSTANT_INDEX for (int k = 0; k < W; k++) store(to + (int64_t)k * p.problem.channels, 1, d.tap[k], n);
  store(to + (int64_t)W * p.problem.channels, 1, d.bias, n);
}

TILE void compute(const params &p, shared &s, int group) {
  ring<STAGES, ASYNC_READS> &ring = s.steps[group];
  ring_pos at = {}, before = {};
  bool leaving = false;               // the tile before, whose stage is the store's until it has read it
  bool silu = p.problem.silu;
  for (int i = first_task(group); i < p.cut.tasks; i += task_stride()) {
    task t = task_of(p.cut, i);
    weights w;
    state c;
    sums d;
    int sequence = p.problem.starts ? 0 : t.batch, age = W;   // what goes to steps before the first is not written
    load_weights(w, p.problem, t.col);
    CONSTANT_INDEX for (int k = 0; k < PAST; k++) fill(c.past[k], 0.f);
    if (p.problem.starts && p.problem.initial) sequence = first_sequence(p, first_row(t) + PAST + 1) - 1;
    CONSTANT_INDEX for (int k = 0; k < PAST; k++) fill(c.dx[k], 0.f);
    fill_sums(d);
    for (int row = first_row(t); row < t.end; row += STEPS) {
      int step = row + PAST;
      tile &x = s.x[group][at.stage], &dy = s.dy[group][at.stage];
      ring_wait(ring, at);
      int marks = has_marks(p) ? get(s.marks[group][at.stage]) : 0;
      if (marks || age < W - 1) age = marked_rows(x, dy, step, marks, age, sequence, t.col, c, d, w, p.problem);
      else {
        ROLLED for (int r = 0; r < STEPS; r += 8) eight_rows(x, dy, r, c, d, w, silu);
      }
      tma_store_wait_read();
      fence_async();
      wg_sync();                      // all have written dx, and the store before has read its tile
      if (leaving) ring_release(ring, before);
      if (row >= t.step && p.writes_dx) tma_store(p.dx, dy, row, t.col, 0, t.batch);
      if (row < t.step && t.step > 0) fill_sums(d);          // these steps count in the segment before
      leaving = true;
      before = at;
      ring_next(ring, at);
    }
    store_sums(p, t, d);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, GROUPS, 0>, role<loader, THREAD, GROUPS, 0>> kernel;
ENTRY(kernel, GROUPS, N)
