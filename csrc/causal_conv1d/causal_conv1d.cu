// y_t = f(bias + sum over k < W of tap[k] x_(t - W + 1 + k)), each channel by itself; f: a, or a sigmoid(a) (SiLU).
// Bound by memory: x is read once, y written once. A warpgroup walks down the steps of 256 channels, two a thread, and
// keeps the last W - 1 steps in registers. y takes the place of x in its tile, from where it goes home. Warpgroups do
// not meet; each has a loader thread and a ring.
#include "causal_conv1d/causal_conv1d_tasks.h"

// W: taps, 2 to 4. GROUPS: warpgroups of a block. STAGES
struct shared {
  tile x[GROUPS][STAGES];
  int marks[GROUPS][STAGES];
  ring<STAGES, ASYNC_READS> steps[GROUPS];   // released behind the fence for the store, which covers the reads
};
typedef causal_conv1d_params params;

TILE void init(shared &s) {
  for (int g = 0; g < GROUPS; g++) ring_init(s.steps[g], arrivals(1, 0, 0), arrivals(0, 0, 1));
}
TILE int first_task(int group) { return group * block_count() + block_index(); }   // spread over all multiprocessors
TILE int task_stride() { return GROUPS * block_count(); }
// A segment that is not its sequence's first begins a tile earlier, for what its first steps need of the steps before.
TILE int first_step(const task &t) { return t.step ? t.step - STEPS : 0; }
TILE bool has_marks(const params &p) { return p.problem.starts || p.problem.seq_idx; }

TILE void loader(const params &p, shared &s, int group) {
  ring<STAGES, ASYNC_READS> &ring = s.steps[group];
  ring_pos at = {};
  for (int i = first_task(group); i < p.cut.tasks; i += task_stride()) {
    task t = task_of(p.cut, i);
    int next = p.problem.starts ? sequence_at(p.problem, first_step(t)) : 0;
    for (int step = first_step(t); step < t.end; step += STEPS) {
      ring_acquire(ring, at);
      if (has_marks(p)) put(s.marks[group][at.stage], marks_of(p.problem, t.batch, step, next));
      ring_expect(ring, at, tile_bytes(s.x[0][0]));
      tma_load(s.x[group][at.stage], p.x, ring.full[at.stage], step, t.col, 0, t.batch);   // zeros past the end
      ring_next(ring, at);
    }
  }
}

TILE void activate(cols &y) {
  map(y, y, [](float a) { return a * sigmoid(a); });
}

// Rows first .. first + 7 of a tile in which no sequence begins.
TILE void eight_rows(tile &t, int first, cols (&past)[PAST], const weights &w, bool silu) {
  cols x[PAST + 8];
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) copy(x[k], past[k]);
  CONSTANT_INDEX for (int r = 0; r < 8; r++) load_row(x[PAST + r], t, first + r);
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) copy(past[k], x[8 + k]);
  CONSTANT_INDEX for (int r = 0; r < 8; r++) convolve(x[r], x + r, w);     // the rows below do not need x[r]
  if (silu) {
    CONSTANT_INDEX for (int r = 0; r < 8; r++) activate(x[r]);
  }
  CONSTANT_INDEX for (int r = 0; r < 8; r++) store_row(t, first + r, x[r]);
}

// A tile in which some do, row by row.
TILE void marked_rows(tile &t, int step, int marks, int &sequence, int col, cols (&past)[PAST], const weights &w,
                      const causal_conv1d_problem &p) {
  cols x[W];
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) copy(x[k], past[k]);
  ROLLED for (int r = 0; r < STEPS; r++) {
    if (marks >> r & 1) {
      begin_sequence(past, p, sequence, step + r, col);
      CONSTANT_INDEX for (int k = 0; k < PAST; k++) copy(x[k], past[k]);
    }
    load_row(x[PAST], t, r);
    cols y;
    convolve(y, x, w);
    if (p.silu) activate(y);
    if (marks >> (16 + r) & 1) fill(y, 0.f);
    store_row(t, r, y);
    CONSTANT_INDEX for (int k = 0; k < PAST; k++) copy(x[k], x[k + 1]);
  }
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) copy(past[k], x[k]);
}

// The last W - 1 steps of a sequence, of which some may be initial states. Where seq_idx has several, that is the last
// one, after zeros.
TILE void keep_final(const params &p, int i) {
  int sequence = i / p.cut.col_blocks, col = i % p.cut.col_blocks * N, n = p.problem.channels - col;
  int batch = p.problem.starts ? 0 : sequence;
  int first = p.problem.starts ? p.problem.starts[sequence] : 0;
  int end = p.problem.starts ? p.problem.starts[sequence + 1] : p.problem.steps;
  const elem *x = (const elem *)p.first + batch * p.x_batch + col;
  const elem *initial = (const elem *)p.problem.initial + sequence * p.problem.initial_sequence + col;
  elem *final = (elem *)p.final.data + sequence * p.final.sequence + col;
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) {
    int step = end - PAST + k, there = joined(p.problem, batch, step, end - 1) ? n : 0;
    cols v;
    if (step >= first) load(v, x + step * p.x_step, 1, there);
    else load(v, initial + (step - first + PAST) * p.problem.initial_step, 1, p.problem.initial ? there : 0);
    store(final + k * p.final.step, 1, v, n);
  }
}

TILE void compute(const params &p, shared &s, int group) {
  ring<STAGES, ASYNC_READS> &ring = s.steps[group];
  ring_pos at = {}, before = {};
  bool leaving = false;               // the tile before, whose stage is the store's until it has read it
  bool silu = p.problem.silu;
  for (int i = first_task(group); i < p.cut.tasks; i += task_stride()) {
    task t = task_of(p.cut, i);
    weights w;
    cols past[PAST];
    int sequence = p.problem.starts ? 0 : t.batch;
    load_weights(w, p.problem, t.col);
    load_initial(past, p.problem, sequence, t.col);   // others come before it counts, in later segments and packed
    if (p.problem.starts && p.problem.initial) sequence = sequence_at(p.problem, first_step(t) + 1) - 1;
    for (int step = first_step(t); step < t.end; step += STEPS) {
      tile &x = s.x[group][at.stage];
      ring_wait(ring, at);
      int marks = has_marks(p) ? get(s.marks[group][at.stage]) : 0;
      if (marks) marked_rows(x, step, marks, sequence, t.col, past, w, p.problem);
      else {
        ROLLED for (int r = 0; r < STEPS; r += 8) eight_rows(x, r, past, w, silu && step >= t.step);
      }
      tma_store_wait_read();
      fence_async();
      wg_sync();                      // all have written y, and the store before has read its tile
      if (leaving) ring_release(ring, before);
      if (step >= t.step) tma_store(p.out, x, step, t.col, 0, t.batch);
      leaving = true;
      before = at;
      ring_next(ring, at);
    }
  }
  for (int i = first_task(group); i < p.states; i += task_stride()) keep_final(p, i);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, GROUPS, 0>, role<loader, THREAD, GROUPS, 0>> kernel;
ENTRY(kernel, GROUPS, N)
