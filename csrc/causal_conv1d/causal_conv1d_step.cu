// A few steps of causal_conv1d.cu's convolution for generation: a sequence's last steps are in its state, [length,
// channels] in either memory order, which is updated in place. Without `used` the state is the last `length` steps,
// oldest first; with it a ring, where step i of the sequence is at i % length. A warpgroup computes 256 channels of a
// sequence.
#include "causal_conv1d/causal_conv1d_tasks.h"

struct shared { int unused; };
typedef causal_conv1d_step_params params;
TILE void init(shared &) {}

enum { BATCH = 2 };                   // steps whose loads are in flight together: more cost registers, and so blocks

// The state's steps move up by p.steps; what moves out is lost. `last`: its last W - 1 steps, which are read already.
TILE void move_up(const params &p, elem *state, const cols *last, int n) {
  int held = p.length - PAST;
  for (int from = p.steps; from < held; from += BATCH) {
    cols v[BATCH];
    CONSTANT_INDEX for (int k = 0; k < BATCH; k++)
      load(v[k], state + (from + k) * p.state_step, p.state_channel, from + k < held ? n : 0);
    CONSTANT_INDEX for (int k = 0; k < BATCH; k++)
      store(state + (from + k - p.steps) * p.state_step, p.state_channel, v[k], from + k < held ? n : 0);
  }
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) {
    int to = held + k - p.steps;
    store(state + to * p.state_step, p.state_channel, last[k], to < 0 ? 0 : n);
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
    if (t == 0 && !p.used) move_up(p, state, x, n);
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

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, OCCUPANCY<6>> kernel;
ENTRY(kernel, 1, N)
