// What the convolution's kernels share: tasks, where sequences begin, weights.
#pragma once
#include "tile/tile.h"
#include "causal_conv1d/causal_conv1d.h"

enum { W = TAPS, STEPS = 16, PAST = W - 1 };   // steps of a tile of N channels; steps before one that it sees
typedef gv<N> cols;
typedef st<elem, STEPS, N> tile;

// ---- tasks. Neighbouring ones are neighbouring channels of the same steps
struct task { int batch, segment, col, step, end; };
TILE task task_of(const causal_conv1d_cut &c, int i) {
  int rest = i / c.col_blocks, segment = rest % c.segments, first = segment * c.segment_steps;
  int end = first + c.segment_steps;
  return {rest / c.segments, segment, i % c.col_blocks * N, first, end < c.steps ? end : c.steps};
}
// ---- where sequences begin
TILE int sequence_at(const causal_conv1d_problem &p, int step) {   // the first one that begins at `step` or later
  int low = 0, high = p.sequences;
  while (low < high) {
    int middle = (low + high) / 2;
    if (p.starts[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}
// Bit r: a sequence begins at row r of the tile at `step`; bit 16 + r: the row belongs to none. next: the first packed
// sequence that begins in it or later. A tile may begin in front of the first step, which initial states then mark.
TILE int marks_of(const causal_conv1d_problem &p, int batch, int step, int &next) {
  int marks = 0;
  if (p.starts) {
    for (; next < p.sequences && p.starts[next] < step + STEPS; next++) marks |= 1 << ((p.starts[next] - step) & 15);
    int behind = p.starts[p.sequences] - step;
    if (behind < STEPS) marks |= ((0xffff << (behind > 0 ? behind : 0)) & 0xffff) << 16;
    return marks;
  }
  if (p.seq_idx) {
    const int *idx = p.seq_idx + batch * p.seq_idx_batch;
    int before = idx[step > p.steps ? p.steps - 1 : step > 0 ? step - 1 : 0];   // the backward's may begin behind all
    CONSTANT_INDEX for (int r = 0; r < STEPS; r++) {
      int now = step + r < 0 || step + r >= p.steps ? before : idx[step + r];
      marks |= (now != before) << r | (now < 0) << (16 + r);
      before = now;
    }
  }
  return p.initial && step < 0 ? marks | 1 << -step : marks;
}

// No sequence begins behind step `from`, up to `to`. Steps in front of a batch entry belong to its first sequence.
TILE bool joined(const causal_conv1d_problem &p, int batch, int from, int to) {
  if (p.seq_idx) {
    const int *idx = p.seq_idx + batch * p.seq_idx_batch;
    for (int t = from < 0 ? 1 : from + 1; t <= to && t < p.steps; t++)
      if (idx[t] != idx[t - 1]) return false;
  }
  return true;
}
TILE bool is_padding(const causal_conv1d_problem &p, int batch, int step) {
  return p.seq_idx && p.seq_idx[batch * p.seq_idx_batch + step] < 0;
}

// ---- weights and states
struct weights { cols tap[W], bias; };
TILE void load_weights(weights &w, const causal_conv1d_problem &p, int col) {
  int64_t first = (int64_t)col * W;
  int n = p.channels - col;
  if (p.weight_is_float) {
    CONSTANT_INDEX for (int k = 0; k < W; k++) load(w.tap[k], (const float *)p.weight + first + k, W, n);
  } else {
    CONSTANT_INDEX for (int k = 0; k < W; k++) load(w.tap[k], (const elem *)p.weight + first + k, W, n);
  }
  if (p.bias_is_float) load(w.bias, (const float *)p.bias + col, 1, n);
  else load(w.bias, (const elem *)p.bias + col, 1, p.bias ? n : 0);
}
// The steps in front of a sequence.
TILE void load_initial(cols (&past)[PAST], const causal_conv1d_problem &p, int sequence, int col) {
  const elem *g = (const elem *)p.initial + sequence * p.initial_sequence + col;
  int n = p.initial && sequence >= 0 ? p.channels - col : 0;
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) load(past[k], g + k * p.initial_step, 1, n);
}
// A mark says that a sequence begins at `step`: of packed ones, the one that has steps, of several. Without packed ones
// only the first has initial states.
TILE void begin_sequence(cols (&past)[PAST], const causal_conv1d_problem &p, int &sequence, int step, int col) {
  if (p.starts && p.initial)
    while (sequence + 1 < p.sequences && p.starts[sequence + 1] <= step) sequence++;
  load_initial(past, p, p.starts || step == 0 ? sequence : -1, col);
}

// a = bias + sum over k of tap[k] x[k]
TILE void convolve(cols &a, const cols *x, const weights &w) {
  map(a, x[0], w.tap[0], w.bias, [](float x, float w, float b) { return fused(x, w, b); });
  CONSTANT_INDEX for (int k = 1; k < W; k++)
    map(a, x[k], w.tap[k], a, [](float x, float w, float a) { return fused(x, w, a); });
}
TILE float sigmoid(float a) { return fast_rcp(1.f + fast_exp2(a * -1.4426950408889634f)); }
