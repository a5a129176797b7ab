// States at cuts, each from what a segment adds: cuts[i] += cuts[i - 1], with cuts[-1] what is given, in front of the
// first segment; or, backwards, cuts[i] += cuts[i + 1], with what is given behind the last. A block has 64 COLS floats
// of a row.
#include "tile/tile.h"
#include "based/based.h"

struct shared { int unused; };
typedef based_join_params params;

TILE void init(shared &) {}

struct task { int64_t row, place; int lines; };
TILE task block_task(const params &p) {
  int64_t tiles = (p.size + 64 * COLS - 1) / (64 * COLS), row = block_index() / tiles;
  int64_t place = (block_index() - row * tiles) * 64 * COLS, lines = (p.size - place) / COLS;
  return {row, place, (int)(lines < 64 ? lines : 64)};
}
// The i-th cut in order; behind the last there are none.
TILE float *cut_of(const params &p, const task &t, int i) {
  return p.cuts + (t.row * p.cut_stride + (p.backwards ? p.cut - 1 - i : i)) * p.size + t.place;
}
TILE void fetch(rt<float, COLS> &cut, const params &p, const task &t, int i) {
  load(cut, cut_of(p, t, i), COLS, i < p.cut ? t.lines : 0, COLS);
}
TILE void add(rt<float, COLS> &state, const rt<float, COLS> &cut, const params &p, const task &t, int i) {
  map(state, cut, [](float x, float y) { return x + y; });
  store(cut_of(p, t, i), COLS, state, i < p.cut ? t.lines : 0, COLS);
}

TILE void compute(const params &p, shared &, int) {
  task t = block_task(p);
  rt<float, COLS> state, cut0, cut1, cut2, cut3;      // four cuts are under way together
  if (p.given) load(state, p.given + t.row * p.size + t.place, COLS, t.lines, COLS);
  else fill(state, 0.f);
  for (int i = 0; i < p.cut; i += 4) {
    fetch(cut0, p, t, i);
    fetch(cut1, p, t, i + 1);
    fetch(cut2, p, t, i + 2);
    fetch(cut3, p, t, i + 3);
    add(state, cut0, p, t, i);
    add(state, cut1, p, t, i + 1);
    add(state, cut2, p, t, i + 2);
    add(state, cut3, p, t, i + 3);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 64, COLS)
