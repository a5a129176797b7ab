// The states of hedgehog_cuts.cu, each with those in front of it: cuts[i] += cuts[i - 1], cuts[-1] the initial one. A
// block has 64 x W numbers of a state, in the order in which they lie.
#include "tile/tile.h"
#include "hedgehog/hedgehog.h"

struct shared { int unused; };
typedef hedgehog_join_params params;

TILE void init(shared &) {}

TILE void compute(const params &p, shared &, int) {
  int64_t tiles = (p.size + 64 * W - 1) / (64 * W), matrix = block_index() / tiles,
          first = (block_index() - matrix * tiles) * 64 * W, left = p.size - first;
  int64_t row = matrix / p.heads, head = matrix - row * p.heads;
  int rows = left < 64 * W ? (int)(left / W) : 64, rest = left < 64 * W ? (int)(left - rows * W) : 0;
  rt<float, W> state, cut;
  rt<float, W> tail, cut_tail;       // the row that the state ends in
  if (p.initial) {
    const float *from = p.initial + matrix * p.size + first;
    load(state, from, W, rows, W);
    load(tail, from + rows * W, W, rest > 0, rest);
  } else {
    fill(state, 0.f);
    fill(tail, 0.f);
  }
  for (int i = 0; i < p.cut; i++) {
    float *at = p.cuts + ((row * p.cut_stride + i) * p.heads + head) * p.size + first;
    load(cut, at, W, rows, W);
    load(cut_tail, at + rows * W, W, rest > 0, rest);
    map(state, cut, [](float x, float y) { return x + y; });
    map(tail, cut_tail, [](float x, float y) { return x + y; });
    store(at, W, state, rows, W);
    store(at + rows * W, W, tail, rest > 0, rest);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 64, W)
