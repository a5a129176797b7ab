// Where a slot of rotary's kernels stands, and the angles of its step (warpgroup). Params are those of one of the three
// kernels: the fields that say it have the same names in all.
#pragma once
#include "tile/pairs.h"
#include "rotary/rotary.h"

TILE int64_t begin_of(const rotary_rows &x, int batch, int step, int head) {
  return batch * x.stride[0] + step * x.stride[1] + head * x.stride[2];
}

// A slot's step, and its first head of it. It has heads head, head + 2^heads_log2, ... below `heads`, which is 0 where
// there is no step.
struct spot { int batch, step, head, heads; };
template<class Params> TILE spot spot_of(const Params &p, const rotary_side &x, int block, int slot) {
  int token = (block << (p.slots_log2 - x.heads_log2)) + (slot >> x.heads_log2);
  bool exists = token < p.tokens;
  int batch = exists ? token / p.steps : 0;
  return {batch, exists ? token - batch * p.steps : 0, slot & ((1 << x.heads_log2) - 1), exists ? x.heads : 0};
}

// Elements in front of a step's cosines and sines. -1: it has none, and they are 0.
struct angle_row { int64_t cos, sin; };
// past: steps in front of the first one, where steps have no positions of their own
template<class Params> TILE angle_row angle_row_of(const Params &p, const spot &t, int past) {
  int64_t row = p.offset;
  row += p.positions ? p.positions[t.batch * p.positions_stride + t.step] : (int64_t)t.step + past;
  row += p.offsets ? p.offsets[t.batch] : 0;
  if (row < 0 || row >= p.angle_rows) return {-1, -1};
  return {t.batch * p.cos_stride[0] + row * p.cos_stride[1], t.batch * p.sin_stride[0] + row * p.sin_stride[1]};
}

TILE row_of<const float> floats_at(const void *data, int64_t at) { return {(const float *)data + at, at >= 0}; }
TILE row_of<const elem> halves_at(const void *data, int64_t at) { return {(const elem *)data + at, at >= 0}; }
// If `begins`: ptxas spills where that is asked around both. A place has an angle_row `angle`.
template<int A, class Params, class Place>
TILE void load_angles(pa &angles, const Params &p, const per_slot<Place> &places, const paired &columns, bool begins) {
  if (begins && p.angles_are_float)
    load<A>(angles, columns, [&](int slot) { return floats_at(p.cos, of_slot(places, slot).angle.cos); },
            [&](int slot) { return floats_at(p.sin, of_slot(places, slot).angle.sin); });
  else if (begins)
    load<A>(angles, columns, [&](int slot) { return halves_at(p.cos, of_slot(places, slot).angle.cos); },
            [&](int slot) { return halves_at(p.sin, of_slot(places, slot).angle.sin); });
}
