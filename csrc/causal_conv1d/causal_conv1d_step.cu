// A few steps of causal_conv1d.cu's convolution for generation: a sequence's last steps are in its state, [length,
// channels] in either memory order, which is updated in place. Without `used` the state is the last `length` steps,
// oldest first; with it a ring, where step i of the sequence is at i % length. A warpgroup computes 256 channels of a
// sequence. All loads are issued before anything waits for one.
#include "causal_conv1d/causal_conv1d_tasks.h"

struct shared { int unused; };
typedef causal_conv1d_step_params params;
TILE void init(shared &) {}

enum { BATCH = 8 };                   // steps whose loads are in flight together

// The state's steps move up by p.steps; what moves out is lost.
TILE void move_up(const params &p, elem *state, int n) {
  for (int i = 0; i < p.length - p.steps; i += BATCH) {
    cols v[BATCH];
    CONSTANT_INDEX for (int k = 0; k < BATCH; k++) {
      int from = i + k + p.steps;
      load(v[k], state + from * p.state_step, p.state_channel, from < p.length ? n : 0);
    }
    CONSTANT_INDEX for (int k = 0; k < BATCH; k++)
      store(state + (i + k) * p.state_step, p.state_channel, v[k], i + k + p.steps < p.length ? n : 0);
  }
}

TILE void compute(const params &p, shared &, int) {
  int sequence = block_index() / p.col_blocks, col = block_index() % p.col_blocks * N, n = p.problem.channels - col;
  int slot = p.slots ? p.slots[sequence] : sequence;
  const elem *from = (const elem *)p.x + sequence * p.x_batch + col;
  elem *to = (elem *)p.out + sequence * p.out_batch + col;
  if (slot < 0 || slot >= p.states) {            // padding
    cols zero;
    fill(zero, 0.f);
    for (int t = 0; t < p.steps; t++) store(to + t * p.out_step, 1, zero, n);
    return;
  }
  elem *state = (elem *)p.state + slot * p.state_slot + col * p.state_channel;
  int used = p.used ? p.used[sequence] % p.length : 0;
  used = used < 0 ? used + p.length : used;
  weights w;
  cols x[PAST + BATCH];
  load_weights(w, p.problem, col);
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) {
    int i = p.used ? used - PAST + k : p.length - PAST + k;
    load(x[k], state + (i < 0 ? i + p.length : i) * p.state_step, p.state_channel, n);
  }
  for (int t = 0; t < p.steps; t += BATCH) {
    CONSTANT_INDEX for (int r = 0; r < BATCH; r++)
      load(x[PAST + r], from + (t + r) * p.x_step, 1, t + r < p.steps ? n : 0);
    if (t == 0 && !p.used) move_up(p, state, n);
    CONSTANT_INDEX for (int r = 0; r < BATCH; r++) {
      int i = p.used ? (used + t + r) % p.length : p.length - p.steps + t + r;
      cols y;
      convolve(y, x + r, w);
      if (p.problem.silu) map(y, y, [](float a) { return a * sigmoid(a); });
      int there = t + r < p.steps ? n : 0;
      store(to + (t + r) * p.out_step, 1, y, there);
      store(state + i * p.state_step, p.state_channel, x[PAST + r], i < 0 ? 0 : there);
    }
    CONSTANT_INDEX for (int k = 0; k < PAST; k++) copy(x[k], x[BATCH + k]);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 1, N)
