// out = scale x, x being out or sums in float32, which are rounded here. Bound by memory: each block walks over parts of
// rows. A loss that nobody scales, whose scale is 1, leaves out as it is.
#include "tile/stretch.h"
#include "cross_entropy/cross_entropy.h"

// DEPTH: stretches in flight. PER_SM: blocks of a multiprocessor
enum { PART = DEPTH * STRETCH };
struct shared {};
typedef cross_entropy_scaled_params params;
TILE void init(shared &) {}

TILE void compute(const params &p, shared &, int) {
  float scale = number_at(p.scale);
  if (scale == 1.f && !p.sums) return;
  for (int task = block_index(); task < p.tasks; task += block_count()) {
    int row = task / p.parts;
    int64_t first = (int64_t)(task - row * p.parts) * PART, left = p.columns - first, at = row * p.stride + first;
    int n = left < PART ? (int)left : PART;
    elem *out = (elem *)p.out + at;
    stretch x[DEPTH];
    CONSTANT_INDEX for (int k = 0; k < DEPTH; k++)
      if (p.sums) load_begin(x[k], p.sums + row * p.columns + first + k * STRETCH, n - k * STRETCH, p.in_eights);
      else load_begin(x[k], (const elem *)out + k * STRETCH, n - k * STRETCH, p.in_eights);
    CONSTANT_INDEX for (int k = 0; k < DEPTH; k++) {
      if (p.sums) load_end<float>(x[k]);
      else load_end<elem>(x[k]);
      each(x[k], n - k * STRETCH, [=](float &x, int) { x *= scale; });
      save(out + k * STRETCH, x[k], n - k * STRETCH, p.in_eights);
    }
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, 1, PART)
