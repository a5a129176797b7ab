// da, dd and ddt_bias as the sums of what the chunks have of them. A block adds 64 heads of one of the three: WG
// warpgroups tiles of 64 chunks in turn, always in the same order, then a warp what they have.
#include "tile/tile.h"
#include "ssd/ssd_bwd.h"

struct shared {
  sv<256> v[WG];
  sem full;
};
typedef ssd_bwd_sums_params params;

TILE void init(shared &s) { sem_init(s.full, arrivals(0, 0, WG)); }

TILE int kind() { return block_index() % 3; }
TILE int head0() { return block_index() / 3 * 64; }

TILE void add_chunks(const params &p, shared &s, int wg) {
  rt<float, 64> sum, part;
  csum<64> columns;
  fill(sum, 0.f);
  int tiles = (p.chunks + 63) / 64;
  for (int i = wg; i < p.batches * tiles; i += WG) {
    int chunk = i % tiles * 64;
    int64_t row = (int64_t)(i / tiles * 3 + kind()) * p.chunks + chunk;
    load(part, p.sums + row * p.heads + head0(), p.heads, p.chunks - chunk, p.heads - head0());
    map(sum, part, [](float x, float y) { return x + y; });
  }
  clear(columns);
  each<64>([](int, int, float x, float &c) { c += x; }, sum, columns);
  store(s.v[wg], columns);
  sem_arrive(s.full);
}

TILE void add_warpgroups(const params &p, shared &s, int) {
  wv<64> sum, part;
  fill(sum, 0.f);
  sem_wait(s.full, 0);
  UNROLLED for (int i = 0; i < 4 * WG; i++) {
    load(part, slice<64>(s.v[i / 4], i % 4 * 64));
    map(sum, sum, part, [](float x, float y) { return x + y; });
  }
  float *out = kind() == 0 ? p.out[0] : kind() == 1 ? p.out[1] : p.out[2];
  if (out) store(out + head0(), sum, p.heads - head0());
}

typedef block<params, shared, init, role<add_chunks, WARPGROUP, WG, 0>, role<add_warpgroups, WARP, 1, 0>> kernel;
ENTRY(kernel, 64, 1)
