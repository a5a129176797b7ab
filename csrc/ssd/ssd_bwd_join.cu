// db and dc as the sums of their parts, which blocks of ssd_bwd.cu wrote for some of the heads each. A block adds 64
// steps of one group.
#include "tile/tile.h"
#include "ssd/ssd_steps.h"

// W: columns at a time, 64 or 128
struct shared { int unused; };
typedef ssd_bwd_join_params params;

TILE void init(shared &) {}

TILE void add_parts(const params &p, shared &, int) {
  int which = block_index() % 2, at = block_index() / 2, group = at % p.groups, chunk = at / p.groups % p.chunks,
      batch = at / p.groups / p.chunks;
  chunk_steps t = steps_of(p.steps, p.first + chunk);
  int rows = t.stop - t.step, n = p.state_dim;
  int64_t ld = (int64_t)p.groups * 2 * n;
  const int64_t *stride = which ? p.db_stride : p.dc_stride;
  int64_t to = stride[1];
  elem *out = (elem *)(which ? p.db : p.dc) + batch * stride[0] + t.step * to + group * stride[2];
  for (int col = 0; col < n; col += W) {
    const float *from = p.parts + (group * 2 + which) * n + col;
    rt<float, W> sum, part;
    fill(sum, 0.f);
    for (int i = 0; i < p.splits; i++) {
      int64_t row = (((int64_t)i * p.batches + batch) * p.chunks + chunk) * 64;
      load(part, from + row * ld, ld, rows, n - col);
      map(sum, part, [](float x, float y) { return x + y; });
    }
    store_rows<elem>(sum, [=](int i) { return i < rows ? out + col + i * to : (elem *)nullptr; }, n - col);
  }
}

typedef block<params, shared, init, role<add_parts, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 64, W)
