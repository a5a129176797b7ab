// out = post (k * (pre u)), the convolution's first N = 64 m elements, N a power of two from 64 to 4096, or the
// circular one. By spectra at frequencies (k + 1/4) / N of real rows (fft_conv_tiles.h):
//   out = post Re L^H ((((((L X) T) F) K) F^H) T^*)
// Circular is the same with K (1 + i): the second half, minus the imaginary part, is added to the first. The
// convolution with the filter reversed takes conj(K).
// 4096 elements are a tile: a row, or 64 / m heads, each with its own filter. Numbers are fp16 inside. Each row is
// scaled by a power of two first, so that none is too large or small for that.
// Roles: a loader thread; NC warpgroups, each with a tile and a ring of its own; a thread that loads what comes last,
// the second gate. Blocks walk along the batch of a filter's tile.
#include "tile/tile.h"
#include "fft_conv/fft_conv_tiles.h"

// From the row: NC, COMPUTE_REGS, LOAD_REGS, PIECES = 1
typedef st<elem, 64, 64> tile;
struct own_tiles {                      // a warpgroup's, side by side: their addresses differ by constants
  tile u, pre, post;
  table x[2][PIECES];                   // what passes from registers to a product, then the result
  sv<64> rows;
  parked up;
};
struct shared {
  own_tiles group[NC];
  table left[2][PIECES], right[3][PIECES], twists[2][PIECES], k[2][2];
  ring<1> inputs[NC], posts[NC];
  ring<2, ASYNC_READS> filters;         // released behind the fences for x, which cover the reads
  sem constants;
};
typedef fft_conv_params params;

TILE void init(shared &s) {
  for (int i = 0; i < NC; i++) {
    ring_init(s.inputs[i], arrivals(1, 0, 0), arrivals(0, 0, 1));
    ring_init(s.posts[i], arrivals(1, 0, 0), arrivals(0, 0, 1));
  }
  ring_init(s.filters, arrivals(1, 0, 0), arrivals(0, 0, NC));
  sem_init(s.constants, arrivals(1, 0, 0));
}

struct range { int first, end; };
TILE range block_tasks(const params &p) {
  range r;
  r.first = (int)((int64_t)p.tasks * block_index() / block_count());
  r.end = (int)((int64_t)p.tasks * (block_index() + 1) / block_count());
  return r;
}

TILE void loader(const params &p, shared &s, int) {
  range own = block_tasks(p);
  ring_pos at = {}, filter_at = {};     // at: in the rings of all warpgroups
  int wg = 0, last = -1;
  sem_expect(s.constants, FFT_TABLES * tile_bytes(s.left[0][0]));
  for (int i = 0; i < 2; i++) tma_load(s.left[i][0], p.tables, s.constants, 0, 0, i, 0);
  for (int i = 0; i < 3; i++) tma_load(s.right[i][0], p.tables, s.constants, 0, 0, 2 + i, 0);
  for (int i = 0; i < 2; i++) tma_load(s.twists[i][0], p.tables, s.constants, 0, 0, 5 + i, 0);
  for (int task = own.first; task < own.end; task++) {
    int filter = task / p.batches, batch = task % p.batches;
    if (filter != last) {
      ring_acquire(s.filters, filter_at);
      ring_expect(s.filters, filter_at, 2 * tile_bytes(s.k[0][0]));
      for (int i = 0; i < 2; i++)
        tma_load(s.k[filter_at.stage][i], p.filter, s.filters.full[filter_at.stage], 64 * filter, 0, i, 0);
      ring_next(s.filters, filter_at);
      last = filter;
    }
    ring_acquire(s.inputs[wg], at);
    ring_expect(s.inputs[wg], at, (p.has_pre ? 2 : 1) * tile_bytes(s.group[0].u));
    tma_load(s.group[wg].u, p.u, s.inputs[wg].full[0], 64 * filter, 0, 0, batch);      // zeros behind the last head
    if (p.has_pre) tma_load(s.group[wg].pre, p.pre, s.inputs[wg].full[0], 64 * filter, 0, 0, batch);
    if (++wg == NC) {
      wg = 0;
      ring_next(s.inputs[0], at);
    }
  }
}
TILE void post_loader(const params &p, shared &s, int) {
  range own = block_tasks(p);
  ring_pos at = {};
  int wg = 0;
  for (int task = own.first; p.has_post && task < own.end; task++) {
    int filter = task / p.batches, batch = task % p.batches;
    ring_acquire(s.posts[wg], at);
    ring_expect(s.posts[wg], at, tile_bytes(s.group[0].post));
    tma_load(s.group[wg].post, p.post, s.posts[wg].full[0], 64 * filter, 0, 0, batch);
    if (++wg == NC) {
      wg = 0;
      ring_next(s.posts[0], at);
    }
  }
}

TILE void compute(const params &p, shared &s, int wg) {
  range own = block_tasks(p);
  ring_pos at = {};                     // of inputs and posts, which go round together
  int first = own.first / p.batches, held = 0;     // filters: the first one, and how many were released
  table(&x)[2][PIECES] = s.group[wg].x;
  tile &y = (tile &)x[0][0];
  sem_wait(s.constants, 0);
  ring_wait(s.filters, ring_at<2>(0));
  for (int task = own.first + wg; task < own.end; task += NC) {
    int filter = task / p.batches, batch = task % p.batches;
    acc re, im;
    rv largest, down, up, factor;
    for (; first + held < filter; held++) {
      ring_release(s.filters, ring_at<2>(held));
      ring_wait(s.filters, ring_at<2>(held + 1));
    }
    ring_wait(s.inputs[wg], at);
    load(re, s.group[wg].u);
    if (p.has_pre) {
      load(im, s.group[wg].pre);
      map(re, im, [](float a, float b) { return a * b; });
    }
    ring_release(s.inputs[wg], at);
    fill(largest, 0.f);
    add_largest(largest, re);
    tma_store_wait_read();
    scales(down, up, s.group[wg].rows, largest, p.log_rows, 1.f);    // its syncs: the last store has read x
    store(s.group[wg].up, up);
    scale_down(re, down);
    put_pieces(x[0], re);
    fence_async();
    wg_sync();
    mma_fence();
    product<ZERO>(re, s.left[0], x[0]);
    product<ZERO>(im, s.left[1], x[0]);
    mma_commit();
    mma_wait<0>(re, im);
    twist<0>(re, im, s.twists);
    multiply_right<0>(re, im, s.right);
    const table(&k)[2] = s.k[held % 2];
    float sign = p.conjugate ? -1.f : 1.f;
    each<64>([=](int, int, float &a, float &b, float c, float d) {
      d *= sign;
      float z = fused(a, c, -(b * d));
      b = fused(a, d, b * c);
      a = z;
    }, re, im, k[0], k[1]);
    multiply_right<1>(re, im, s.right);
    twist<1>(re, im, s.twists);
    wg_sync();                                                 // all products have read x
    store(x[0][0], re);
    store(x[1][0], im);
    fence_async();
    wg_sync();
    mma_fence();
    product<ZERO>(re, s.left[0], x[0]);                        // the real part of L^H x
    product<ACC>(re, s.left[1], x[1]);
    mma_commit();
    mma_wait<0>(re);
    load(factor, p.factors + 64 * filter, p.rows - 64 * filter, 0.f);
    load(up, s.group[wg].up);
    map(up, up, factor, [](float a, float b) { return a * b; });
    map_row(re, up, [](float a, float f) { return a * f; });
    if (p.has_post) {
      ring_wait(s.posts[wg], at);
      load(im, s.group[wg].post);
      ring_release(s.posts[wg], at);
      map(re, im, [](float a, float b) { return a * b; });
    }
    wg_sync();                                                 // all products have read x
    store(y, re);
    fence_async();
    wg_sync();
    tma_store(p.out, y, 64 * filter, 0, 0, batch);
    ring_next(s.inputs[wg], at);
  }
  // Others have up to NC - 1 tasks more, each with a filter of its own at most.
  for (; first + held + 1 < (own.end - 1) / p.batches; held++) ring_release(s.filters, ring_at<2>(held));
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<post_loader, THREAD, 1, LOAD_REGS>> kernel;
ENTRY(kernel, 64, NC)
