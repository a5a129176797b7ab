// Gradients of fft_conv.cu, of rows of N = 64 m elements, N a power of two from 64 to 4096, in one pass. With x = pre
// u, g = post dout, and X, G and K their spectra (fft_conv_tiles.h),
//   dpost = dout (k * x)    dx = G conj(K) back    du = pre dx    dpre = u dx
//   dk = sum over the batch of G conj(X) back
// Causal: at frequencies (k + 1/4) / N the real part of what comes back is the gradient. Circular: at frequencies
// k / N. Both take one row at a time. A task: some batch entries of a filter's tile of 4096 elements. What they add to
// dk stays in registers, as a spectrum, and goes to memory once; fft_conv_sums adds tasks up and brings it back.
// Roles: NC warpgroups, each with tiles, rings and a loader thread of its own. A row's two halves, x and then g, are
// turns of one loop, so that its code exists once.
#include "tile/tile.h"
#include "fft_conv/fft_conv_tasks.h"

// From the row: NC, COMPUTE_REGS, LOAD_REGS, PIECES = 1
typedef st<elem, 64, 64> tile;
struct own_tiles {                      // a warpgroup's, side by side: their addresses differ by constants
  tile u[2], pre[2], dout, post;
  table x[2][PIECES];                   // what passes from registers to a product, then results
  table spectrum[2];                    // X
};
struct shared {
  own_tiles group[NC];
  table left[3][PIECES], right[3][PIECES], twists[2][PIECES];
  sv<64> rows[NC];
  parked up[NC][2];
  // They are released behind the fence that the products or the store want, so none of their own is needed.
  ring<2, ASYNC_READS> early[NC];       // u, pre
  ring<1, ASYNC_READS> late[NC];        // dout, post
  sem constants;
};
typedef fft_grads_params params;

TILE void init(shared &s) {
  for (int i = 0; i < NC; i++) {
    ring_init(s.early[i], arrivals(1, 0, 0), arrivals(0, 0, 1));
    ring_init(s.late[i], arrivals(1, 0, 0), arrivals(0, 0, 1));
  }
  sem_init(s.constants, arrivals(1, 0, 0));
}

TILE void loader(const params &p, shared &s, int wg) {
  ring_pos at = {}, late = {};
  own_tiles &t = s.group[wg];
  grid_wait();
  if (wg == 0) load_constants(s.left, s.right, s.twists, p.tables, s.constants);
  for (int task = block_index() * NC + wg; task < p.tasks; task += block_count() * NC) {
    int row = 64 * (task / p.chunks);
    range own = batches_of(p, task);
    for (int batch = own.first; batch < own.end; batch++) {
      ring_acquire(s.early[wg], at);
      ring_expect(s.early[wg], at, (1 + p.has_pre) * tile_bytes(t.u[0]));
      tma_load(t.u[at.stage], p.u, s.early[wg].full[at.stage], row, 0, 0, batch);
      if (p.has_pre) tma_load(t.pre[at.stage], p.pre, s.early[wg].full[at.stage], row, 0, 0, batch);
      ring_next(s.early[wg], at);
      ring_acquire(s.late[wg], late);
      ring_expect(s.late[wg], late, (1 + p.has_post) * tile_bytes(t.dout));
      tma_load(t.dout, p.dout, s.late[wg].full[0], row, 0, 0, batch);
      if (p.has_post) tma_load(t.post, p.post, s.late[wg].full[0], row, 0, 0, batch);
      ring_next(s.late[wg], late);
    }
  }
}

TILE void compute(const params &p, shared &s, int wg) {
  own_tiles &t = s.group[wg];
  ring_pos at = {}, late = {};
  table(&x)[2][PIECES] = t.x;
  bool wants_dx = p.has_du || p.has_dpre;
  grid_wait();
  sem_wait(s.constants, 0);
  for (int task = block_index() * NC + wg; task < p.tasks; task += block_count() * NC) {
    int filter = task / p.chunks;
    range own = batches_of(p, task);
    acc dr, di;
    fill(dr, 0.f);
    fill(di, 0.f);
    for (int batch = own.first; batch < own.end; batch++) {
      ring_wait(s.early[wg], at);
      ROLLED for (int half = p.has_sums || p.has_dpost ? 0 : 1; half < 2; half++) {
        acc re, im, k;
        rv factor, down, up;
        if (half) ring_wait(s.late[wg], late);
        load(re, half ? t.dout : t.u[at.stage]);
        if (half ? p.has_post : p.has_pre) multiply(re, half ? t.post : t.pre[at.stage]);
        row_largest(s.rows[wg], re);
        tma_store_wait_read();
        wg_sync();                                             // also: the last stores have read x
        group_largest(factor, s.rows[wg], p.log_rows);
        scales(down, up, factor, 1.f);
        store(s.up[wg][half], up);
        scale_down(re, down);
        put_pieces(x[0], re);
        fence_async();
        if (half) ring_done(s.late[wg], late);
        wg_sync();
        mma_fence();
        product<ZERO>(re, s.left[0], x[0]);
        product<ZERO>(im, s.left[1], x[0]);
        mma_commit();
        mma_wait<0>(re, im);
        twist<0>(re, im, s.twists);
        load_acc(k, p.filter + (int64_t)64 * 64 * filter);     // it comes while the products run
        multiply_right<0>(re, im, s.right);
        if (p.has_sums) {
          if (half) add_correlation(dr, di, re, im, t.spectrum, s.up[wg][0], up);
          else keep_spectrum(t.spectrum, re, im);
        }
        if (half ? wants_dx : p.has_dpost) {
          float sign = half ? -1.f : 1.f;
          each<64>([=](int, int, float &a, float &b, float w) {
            float c = first_half(w), d = sign * second_half(w), z = fused(a, c, -(b * d));
            b = fused(a, d, b * c);
            a = z;
          }, re, im, k);
          come_back(x, re, im, s.right, s.twists, [] { wg_sync(); });      // it waits until all products have read x
          products(re, s.left[0], x[0], s.left[1], x[1]);
          mma_commit();
          load(factor, p.factors + 64 * filter, p.rows - 64 * filter, 0.f);      // under the products
          mma_wait<0>(re);
          scale_up(re, s.up[wg][half], factor);
          wg_sync();                                           // all products have read x
          if (half) {
            if (p.has_dpre) {
              map(im, re, [](float, float a) { return a; });
              multiply(im, t.u[at.stage]);
              store((tile &)x[1][0], im);
            }
            if (p.has_pre) multiply(re, t.pre[at.stage]);
          } else {
            ring_wait(s.late[wg], late);
            multiply(re, t.dout);
          }
          store((tile &)x[0][0], re);
          fence_async();
          wg_sync();
          if (half == 0) tma_store(p.dpost, (tile &)x[0][0], 64 * filter, 0, 0, batch);
          if (half && p.has_du) tma_store(p.du, (tile &)x[0][0], 64 * filter, 0, 0, batch);
          if (half && p.has_dpre) tma_store(p.dpre, (tile &)x[1][0], 64 * filter, 0, 0, batch);
        }
      }
      ring_done(s.early[wg], at);
    }
    if (p.has_sums) store_sums(p, task, dr, di);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>,
              role<loader, THREAD, NC, LOAD_REGS>, DEPENDENT> kernel;
ENTRY(kernel, NC, PIECES)
