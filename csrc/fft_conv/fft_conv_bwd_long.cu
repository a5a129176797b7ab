// What rows of 4096 R elements, R = 2 or 4, add to their filter's gradient. With x = pre u and g = post dout, and p_j
// of each as in fft_conv_long.cu, it is the sum over the batch of G_j conj(X_j), spectra of the p_j at frequencies
// k / 4096. A task: some batch entries of one j of a head. The sum stays in registers and goes to memory once;
// fft_conv_parts adds tasks up and brings it back.
// Roles: NC warpgroups, each with tiles, a ring and a loader thread of its own. A row's two halves, x and then g, are
// turns of one loop.
#include "tile/tile.h"
#include "fft_conv/fft_conv_blocks.h"
#include "fft_conv/fft_conv_tasks.h"

// From the row: STAGES, NC, COMPUTE_REGS, LOAD_REGS, PIECES = 1
typedef st<elem, 64, 64> tile;
struct own_tiles {                      // a warpgroup's, side by side: their addresses differ by constants
  tile in[STAGES];                      // blocks of a row, each before its gate's, if there is one
  table x[2][PIECES], spectrum[2];      // what a product reads; X_j
};
struct shared {
  own_tiles group[NC];
  table left[3][PIECES], right[3][PIECES], twists[2][PIECES];
  sv<64> rows[NC][2], cols[NC][2];      // largest numbers; w_j^b
  parked up[NC];
  ring<STAGES> inputs[NC];
  sem constants;
};
typedef fft_grads_params params;

TILE void init(shared &s) {
  for (int i = 0; i < NC; i++) ring_init(s.inputs[i], arrivals(1, 0, 0), arrivals(0, 0, 1));
  sem_init(s.constants, arrivals(1, 0, 0));
}

TILE void load_tile(shared &s, const gmap &m, int wg, ring_pos &at, int row, int batch) {
  tile &t = s.group[wg].in[at.stage];
  ring_acquire(s.inputs[wg], at);
  ring_expect(s.inputs[wg], at, tile_bytes(t));
  tma_load(t, m, s.inputs[wg].full[at.stage], row, 0, 0, batch);
  ring_next(s.inputs[wg], at);
}
TILE void loader(const params &p, shared &s, int wg) {
  ring_pos at = {};
  grid_wait();
  if (wg == 0) load_constants(s.left, s.right, s.twists, p.tables, s.constants);
  for (int task = block_index() * NC + wg; task < p.tasks; task += block_count() * NC) {
    int blocks = 1 << p.log_parts, head = task / p.chunks >> p.log_parts;
    range own = batches_of(p, task);
    for (int batch = own.first; batch < own.end; batch++) {
      for (int r = 0; r < blocks; r++) {
        load_tile(s, p.u, wg, at, 64 * (head * blocks + r), batch);
        if (p.has_pre) load_tile(s, p.pre, wg, at, 64 * (head * blocks + r), batch);
      }
      for (int r = 0; r < blocks; r++) {
        load_tile(s, p.dout, wg, at, 64 * (head * blocks + r), batch);
        if (p.has_post) load_tile(s, p.post, wg, at, 64 * (head * blocks + r), batch);
      }
    }
  }
}

TILE void compute(const params &p, shared &s, int wg) {
  own_tiles &t = s.group[wg];
  ring_pos at = {};
  table(&x)[2][PIECES] = t.x;
  int log = p.log_parts;
  grid_wait();
  sem_wait(s.constants, 0);
  for (int task = block_index() * NC + wg; task < p.tasks; task += block_count() * NC) {
    int turns = 4 * (task / p.chunks & ((1 << log) - 1)) + p.quarter;
    range own = batches_of(p, task);
    rv a, b;
    acc dr, di;
    put_column_weights(s.cols[wg], turns, log);                // all have met since they read the last task's
    wg_sync();
    turns_of_rows(a, b, 64 * turns, 14 + log);
    fill(dr, 0.f);
    fill(di, 0.f);
    for (int batch = own.first; batch < own.end; batch++)
      ROLLED for (int half = 0; half < 2; half++) {
        acc re, im;
        rv up;
        fill(re, 0.f);
        fill(im, 0.f);
        ROLLED for (int r = 0; r < 1 << log; r++) {
          acc v;
          ring_wait(s.inputs[wg], at);
          load(v, t.in[at.stage]);
          ring_done(s.inputs[wg], at);
          if (half ? p.has_post : p.has_pre) {
            ring_wait(s.inputs[wg], at);
            multiply(v, t.in[at.stage]);
            ring_done(s.inputs[wg], at);
          }
          add_turned(re, im, v, turns * r, log);
        }
        weigh_block(re, im, a, b, s.cols[wg]);
        scale_both(re, im, up, s.rows[wg], 6, 1.f);            // also: all products have read x
        put_pieces(x[0], re);
        put_pieces(x[1], im);
        fence_async();
        wg_sync();                                             // also: `rows` has been read
        mma_fence();
        product<ZERO>(re, s.left[0], x[0]);
        product<ZERO>(im, s.left[0], x[1]);
        product<ACC>(re, s.left[2], x[1]);
        product<ACC>(im, s.left[1], x[0]);
        mma_commit();
        mma_wait<0>(re, im);
        twist<0>(re, im, s.twists);
        multiply_right<0>(re, im, s.right);
        if (half) add_correlation(dr, di, re, im, t.spectrum, s.up[wg], up);
        else {
          store(s.up[wg], up);
          keep_spectrum(t.spectrum, re, im);
        }
      }
    store_sums(p, task, dr, di);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>,
              role<loader, THREAD, NC, LOAD_REGS>, DEPENDENT> kernel;
ENTRY(kernel, NC, PIECES)
