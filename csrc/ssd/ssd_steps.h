// Where chunks of 64 steps lie, and what a warp makes of their dt. For the kernels of ssd's backward.
#pragma once
#include "ssd/ssd_bwd.h"
#include "ssd/ssd_fwd.h"

TILE int row_start(const ssd_steps &p, int row) {
  int start = p.starts[row];
  return start < 0 ? 0 : start > p.count ? p.count : start;
}
TILE int first_chunk(const ssd_steps &p, int row) { return row_start(p, row) / 64 + row; }   // of a packed row
// Steps `step` .. `end` - 1 are those of a row from a chunk's first on; none where the chunk's place is empty. Gradients
// are written up to `stop`: the last row's places reach to the last step, and those of steps in no row are 0.
struct chunk_steps { int step, end, stop; };
TILE chunk_steps steps_of(const ssd_steps &p, int chunk) {
  if (!p.starts) return {chunk * 64, p.count, p.count};
  int row = 0, last = p.rows - 1;
  while (row < last) {
    int middle = (row + last + 1) / 2;
    if (first_chunk(p, middle) <= chunk) row = middle;
    else last = middle - 1;
  }
  int step = row_start(p, row) + (chunk - first_chunk(p, row)) * 64, end = row_start(p, row + 1);
  if (end < step) end = step;
  return {step, end, row + 1 == p.rows ? p.count : end};
}
// Steps of the next packed row are in this chunk.
TILE bool runs_over(const ssd_steps &p, int step, int end) { return p.starts && end - step < 64; }

TILE void load_steps(wv<64> &raw, const ssd_steps &p, int batch, int step, int end, int head) {
  load_given(raw, p.dt, ((int64_t)batch * p.count + step) * p.heads + head, p.heads, end - step);
}
// d dt / d what the caller gave, of gates that of the log decay: 0 where a limit holds, and where there is no step.
TILE void step_slopes(wv<64> &slope, const wv<64> &raw, const ssd_steps &p, int head) {
  float bias = p.dt.bias ? p.dt.bias[head] : 0.f, low = p.dt.low, high = p.dt.high;
  bool soft = p.dt.softplus;
  if (p.dt.gates) return map(slope, raw, raw, [](float x, float) { return x == infinity() ? 0.f : 1.f; });
  map(slope, raw, raw, [=](float x, float) {
    float y = x + bias, dt = soft ? softplus(y) : y;
    float slope = soft ? fast_rcp(1.f + fast_exp2(y * -1.4426950408889634f)) : 1.f;
    return x == -infinity() || dt < low || dt > high ? 0.f : slope;
  });
}
// How often seq_idx has changed; 0 where there is none.
TILE void count_changes(wv<64> &changes, const ssd_steps &p, int batch, int step, int end) {
  if (p.seq_idx) count_changes(changes, p.seq_idx + batch * p.seq_stride, step, end);
  else fill(changes, 0.f);
}
// e^(l_i), 0 behind a first change of seq_idx; e^(l_e - l_j), 0 in front of the last.
TILE void decays_from_begin(wv<64> &d, const wv<64> &l, const wv<64> &changes) {
  map(d, l, changes, [](float x, float n) { return n > 0.f ? 0.f : fast_exp2(x); });
}
TILE void decays_to_end(wv<64> &d, const wv<64> &l, const wv<64> &changes) {
  float end = last(l), all = last(changes);
  map(d, l, changes, [=](float x, float n) { return n < all ? 0.f : fast_exp2(end - x); });
}
