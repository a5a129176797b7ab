// 1 / sqrt(x.x + 1e-6) of rows x of q and k, by which the delta rules' kernels multiply where they would multiply with
// a normalised copy. A block has a tile of 64 steps of a head of one of them for each of GROUPS warpgroups.
#include "tile/tile.h"
#include "delta/delta.h"

// D: most columns. GROUPS
struct shared {
  st<elem, 64, D> x[GROUPS];
  sem full[GROUPS];
};
typedef delta_norms_params params;

TILE void init(shared &s) {
  for (int i = 0; i < GROUPS; i++) sem_init(s.full[i], arrivals(1, 0, 0));
}

// Tiles of q, then those of k: behind the last one, none.
struct task { bool there, of_k; int batch, head, step; };
TILE task task_of(const params &p, int group) {
  int chunks = (p.steps + 63) / 64, tiles = p.batches * p.heads * chunks, i = block_index() * GROUPS + group;
  bool of_k = i >= tiles;
  int tile = of_k ? i - tiles : i, matrix = tile / chunks, batch = matrix / p.heads;
  return {i < 2 * tiles, of_k, batch, matrix - batch * p.heads, (tile - matrix * chunks) * 64};
}

TILE void loader(const params &p, shared &s, int) {
  for (int i = 0; i < GROUPS; i++) {
    task t = task_of(p, i);
    if (!t.there) return;
    sem_expect(s.full[i], tile_bytes(s.x[0]));
    tma_load(s.x[i], t.of_k ? p.k : p.q, s.full[i], t.step, 0, t.head, t.batch);
  }
}

TILE void norms(const params &p, shared &s, int group) {
  task t = task_of(p, group);
  if (!t.there) return;
  rsum sum;
  rv norm;
  fill(sum, 0.f);
  sem_wait(s.full[group], 0);
  UNROLLED for (int c = 0; c < D; c += 32) {
    rt<float, 32> x;
    load(x, s.x[group], c);
    row_dot_add(sum, x, x);
  }
  reduce(norm, sum);
  map(norm, norm, [](float x) { return 1.f / sqrtf(x + 1e-6f); });
  float *to = (t.of_k ? p.norm_k : p.norm_q) + ((int64_t)t.batch * p.heads + t.head) * p.steps + t.step;
  store(to, norm, p.steps - t.step);
}

typedef block<params, shared, init, role<norms, WARPGROUP, GROUPS, 0>, role<loader, THREAD, 1, 0>> kernel;
ENTRY(kernel, 64, GROUPS)
