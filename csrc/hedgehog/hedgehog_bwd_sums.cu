// The gradients of Hedgehog's maps and factors, as the sums of their shares, always in the same order. A block adds 64
// rows of a map, or a head's factor.
#include "tile/tile.h"
// F: most columns of a map
#include "hedgehog/hedgehog_bwd.h"

struct shared { int unused; };
typedef hedgehog_bwd_sums_params params;

TILE void init(shared &) {}
TILE int tiles(const params &p) { return (p.key_dim + 63) / 64; }

TILE void add_maps(const params &p, shared &, int) {
  int kind = block_index() % 2, at = block_index() / 2, head = at / tiles(p), row = at % tiles(p) * 64;
  if (head >= p.heads) return;
  rt<float, F> sum, part;
  int64_t size = (int64_t)p.key_dim * p.count, ld = p.map_stride[kind][1];
  const float *from = p.parts + ((int64_t)kind * p.shares * p.heads + head) * size + row * p.count;
  elem *to = (elem *)p.map[kind] + head * p.map_stride[kind][0] + row * ld;
  int rows = p.key_dim - row;
  fill(sum, 0.f);
  for (int i = 0; i < p.shares; i++) {
    load(part, from + i * p.heads * size, p.count, rows, p.count);
    map(sum, part, [](float x, float y) { return x + y; });
  }
  store_rows<elem>(sum, [=](int i) { return i < rows ? to + i * ld : (elem *)nullptr; }, p.count);
}

// Of the factors w and l only their ratio matters: dl = dr / w, dw = -dr l / w^2.
TILE void add_factors(const params &p, shared &, int) {
  int head = block_index() - 2 * tiles(p) * p.heads;
  if (head < 0) return;
  wv<64> sum, part;
  fill(sum, 0.f);
  for (int row = 0; row < p.rows; row++)
    for (int i = 0; i < p.segments; i++) {
      load(part, p.sums + (((int64_t)row * p.sum_stride + i) * p.heads + head) * 64, 1, 64, 0.f);
      map(sum, sum, part, [](float x, float y) { return x + y; });
    }
  float w = fast_rcp(p.window_factor[head]), dl = sum_of(sum) * w;
  fill(part, dl);
  store(p.dlinear_factor + head, 1, part, 1);
  fill(part, -dl * p.linear_factor[head] * w);
  store(p.dwindow_factor + head, 1, part, 1);
}

typedef block<params, shared, init, role<add_maps, WARPGROUP, 1, 0>, role<add_factors, WARP, 1, 0>> kernel;
ENTRY(kernel, 64, F)
