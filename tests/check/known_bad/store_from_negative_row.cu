// A store begins three rows in front of the tensor, as a load may, whose rows outside are zeros. The copy engine takes no
// store like that.
// Known from: the first backward of a causal convolution, which the GPU ended as an illegal instruction.
// Expected: bounds on out
// margay.check: bf16
#include "tile/tile.h"

struct params { gmap out; };
struct shared { st<elem, 64, 64> out; };

TILE void init(shared &) {}

TILE void compute(const params &p, shared &s, int) {
  rt<float, 64> x;
  fill(x, 1.f);
  store(s.out, x);
  fence_async();
  wg_sync();
  tma_store(p.out, s.out, -3, 0, 0, 0);   // BAD: 0
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.out = example_tensor<elem>(1, 1, 128, 128))
