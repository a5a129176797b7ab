// The states of ssd_cuts.cu, each from the one before its segment: cuts[i] += decays[i] cuts[i - 1], cuts[-1] the
// initial one. A block has 64 rows and COLS columns of a head.
#include "tile/tile.h"
#include "ssd/ssd.h"

struct shared { int unused; };
typedef ssd_join_params params;

TILE void init(shared &) {}

struct task { int batch, head, row, col; };
TILE task block_task(const params &p) {
  int down = (p.head_dim + 63) / 64, across = (p.state_dim + COLS - 1) / COLS, matrix = block_index() / (down * across);
  int tile = block_index() % (down * across);
  return {matrix / p.heads, matrix % p.heads, tile / across * 64, tile % across * COLS};
}
// The i-th cut, its matrix and rows; behind the last there are none.
TILE int64_t cut_of(const params &p, const task &t, int i) {
  return ((int64_t)t.batch * p.cut_stride + i) * p.heads + t.head;
}
TILE int64_t place(const params &p, const task &t, int64_t matrix) {
  return (matrix * p.head_dim + t.row) * p.state_dim + t.col;
}
TILE int rows_of(const params &p, const task &t, int i) { return i < p.cut ? p.head_dim - t.row : 0; }

TILE void fetch(rt<float, COLS> &cut, const params &p, const task &t, int i) {
  load(cut, p.cuts + place(p, t, cut_of(p, t, i)), p.state_dim, rows_of(p, t, i), p.state_dim - t.col);
}
TILE void add(rt<float, COLS> &state, const rt<float, COLS> &cut, const params &p, const task &t, int i) {
  float decay = i < p.cut ? p.decays[cut_of(p, t, i)] : 0.f;
  map(state, cut, [=](float x, float y) { return fused(decay, x, y); });
  store(p.cuts + place(p, t, cut_of(p, t, i)), p.state_dim, state, rows_of(p, t, i), p.state_dim - t.col);
}

TILE void compute(const params &p, shared &, int) {
  task t = block_task(p);
  rt<float, COLS> state, cut0, cut1, cut2, cut3;      // four cuts are under way together
  int64_t matrix = ((int64_t)t.batch * p.heads + t.head) * p.head_dim * p.state_dim;
  const float *from = p.initial + matrix + t.row * p.order.row + t.col * p.order.col;
  if (p.initial) load(state, from, p.order.row, p.order.col, p.head_dim - t.row, p.state_dim - t.col);
  else fill(state, 0.f);
  float factor = p.factor;
  map(state, [=](float x) { return x * factor; });
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
