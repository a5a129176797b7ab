// The same convolution as fft_conv.cu of rows of N = 4096 R elements in one pass, R = 2 or 4. With c_j = e^(-2 pi i (j
// + q) / R), z^N - e^(-2 pi i q) is the product of z^4096 - c_j: causal q = 1/4, circular q = 0. So with x_r = block r
// of a row,
//   p_j = w_j^n sum over r of c_j^r x_r,   w_j = c_j^(1 / 4096),   y_j = k * p_j by spectra at frequencies k / 4096
//   out_r = 1 / R Re sum over j of c_j^-r w_j^-n y_j
// With c = c_j, c_(j + R / 2) is -c. So a warpgroup that has both shares their sums in registers.
// The gradient of a first gate is another product of the same convolution: `other`.
// A row is scaled by a power of two first, so that no number is too large or small for fp16.
// Roles: a loader thread; NC = 2 warpgroups that share a row: each reads all of its blocks, has j = wg and, of R = 4,
// wg + 2, and R / 2 blocks of the result, for which it gets the other's part through shared memory; a thread that loads
// the gates. The left table's real part stays in registers. Blocks walk along the batch of a head, so that K comes from
// the L2.
#include "tile/tile.h"
#include "fft_conv/fft_conv_tiles.h"

// From the row: R, NC, COMPUTE_REGS, LOAD_REGS, PIECES = 1
enum { MINE = R / NC, LOG = R == 4 ? 2 : 1 };   // MINE: blocks of a warpgroup, 1 or 2
typedef st<elem, 64, 64> tile;
struct weights { sv<64> row_re, row_im, col_re, col_im; };      // w_j^(64 a), w_j^b
struct shared {
  tile u[R], gate[2][R];
  table x[R][2][PIECES];                // p_j, what passes to a product, y_j, what the other one gets, the result
  table left[2][PIECES], right[3][PIECES], twists[2][PIECES];     // left: im and -im
  sv<64> rows[NC][R];                   // largest numbers
  weights w[R];
  parked up[NC];
  // They are released behind the fence that the products or the store want, so none of their own is needed.
  ring<1, ASYNC_READS> inputs;
  ring<2, ASYNC_READS> gates;           // the first one and the second one in turn, as far as they are given
  sem constants;
};
typedef fft_long_params params;
enum { EXCHANGE = 1, READ = 2 };        // barriers; READ + wg: what warpgroup wg gave has been read

TILE void init(shared &s) {
  ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, NC));
  ring_init(s.gates, arrivals(1, 0, 0), arrivals(0, 0, NC));
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
  ring_pos at = {};
  grid_wait();
  sem_expect(s.constants, FFT_TABLES * tile_bytes(s.right[0][0]));
  for (int i = 0; i < 3; i++) tma_load(i ? s.left[i - 1][0] : s.x[0][0][0], p.tables, s.constants, 0, 0, i, 0);
  for (int i = 0; i < 3; i++) tma_load(s.right[i][0], p.tables, s.constants, 0, 0, 3 + i, 0);
  for (int i = 0; i < 2; i++) tma_load(s.twists[i][0], p.tables, s.constants, 0, 0, 6 + i, 0);
  for (int task = own.first; task < own.end; task++) {
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, R * tile_bytes(s.u[0]));
    for (int r = 0; r < R; r++)
      tma_load(s.u[r], p.u, s.inputs.full[0], 64 * (task / p.batches * R + r), 0, 0, task % p.batches);
    ring_next(s.inputs, at);
  }
}
TILE void load_gate(const params &p, shared &s, const gmap &m, ring_pos &at, int task) {
  ring_acquire(s.gates, at);
  ring_expect(s.gates, at, R * tile_bytes(s.u[0]));
  for (int r = 0; r < R; r++)
    tma_load(s.gate[at.stage][r], m, s.gates.full[at.stage], 64 * (task / p.batches * R + r), 0, 0, task % p.batches);
  ring_next(s.gates, at);
}
TILE void gate_loader(const params &p, shared &s, int) {
  range own = block_tasks(p);
  ring_pos at = {};
  if (!p.has_pre && !p.has_post && !p.has_other) return;
  grid_wait();
  for (int task = own.first; task < own.end; task++) {
    if (p.has_pre) load_gate(p, s, p.pre, at, task);
    if (p.has_post) load_gate(p, s, p.post, at, task);
    if (p.has_other) load_gate(p, s, p.factor, at, task);
  }
}

TILE void multiply(acc &x, const tile &gate) {
  each<64>([](int, int, float &v, float g) { v *= g; }, x, gate);
}
// e^(-2 pi i n (j + q) / (4096 R)), n = step row
TILE void make_weights(sv<64> &re, sv<64> &im, int j, int q, int step) {
  rv x, y;
  map_rows(x, [=](int r) { float a, b; turn(a, b, (4 * j + q) * step * r, 14 + LOG); return a; });
  map_rows(y, [=](int r) { float a, b; turn(a, b, (4 * j + q) * step * r, 14 + LOG); return b; });
  store(re, x);
  store(im, y);
}
// (re + i im) w_j^n, or size w_j^-n where BACK
template<int BACK> TILE void weigh(acc &re, acc &im, const weights &w, float size) {
  rv a, b;
  load(a, w.row_re);
  load(b, w.row_im);
  if (BACK) {
    map(a, a, [=](float x) { return x * size; });
    map(b, b, [=](float x) { return x * -size; });
  }
  each<64>([=](int, int, float &x, float &y, float c, float d, float e, float f) {
    if (BACK) f = -f;
    float g = fused(c, e, -(d * f)), h = fused(c, f, d * e), z = fused(x, g, -(y * h));
    y = fused(x, h, y * g);
    x = z;
  }, re, im, a, b, w.col_re, w.col_im);
}

// y_j of p_j in x
TILE void convolve(const params &p, shared &s, acc &re, acc &im, int head, int j, float size,
                   operands (&lr)[PIECES]) {
  table(&x)[2][PIECES] = s.x[j];
  acc k;
  mma_fence();
  product<ZERO>(re, lr, x[0]);
  product<ZERO>(im, s.left[0], x[0]);
  product<ACC>(re, s.left[1], x[1]);
  product<ACC>(im, lr, x[1]);
  mma_commit();
  mma_wait<0>(re, im, lr[0]);
  twist<0>(re, im, s.twists);
  load_acc(k, p.filter + (int64_t)64 * 64 * (head * R + j));   // it comes while the products run
  multiply_right<0>(re, im, s.right);
  float sign = p.conjugate ? -1.f : 1.f;
  each<64>([=](int, int, float &a, float &b, float w) {
    float c = first_half(w), d = sign * second_half(w), z = fused(a, c, -(b * d));
    b = fused(a, d, b * c);
    a = z;
  }, re, im, k);
  multiply_right<1>(re, im, s.right);
  twist<1>(re, im, s.twists);
  wg_sync();                                                   // all products have read x
  put_pieces(x[0], re);
  put_pieces(x[1], im);
  fence_async();
  wg_sync();
  mma_fence();
  product<ZERO>(re, lr, x[0]);
  product<ZERO>(im, lr, x[1]);
  product<ACC>(re, s.left[0], x[1]);
  product<ACC>(im, s.left[1], x[0]);
  mma_commit();
  mma_wait<0>(re, im, lr[0]);
  weigh<1>(re, im, s.w[j], size);
  wg_sync();                                                   // all products have read x
}

TILE void compute(const params &p, shared &s, int wg) {
  range own = block_tasks(p);
  int q = p.quarter, last = wg + R - NC, other = 1 - wg;       // j = wg and, where it is another one, last
  ring_pos at = {}, gate_at = {};
  operands lr[PIECES];
  for (int j = wg; j < R; j += NC) {
    make_weights(s.w[j].row_re, s.w[j].row_im, j, q, 64);
    make_weights(s.w[j].col_re, s.w[j].col_im, j, q, 1);
  }
  int turns = 4 * wg + q;
  grid_wait();
  sem_wait(s.constants, 0);
  load(lr[0], s.x[0][0][0]);
  bar_arrive(READ + other, 128 * NC);                          // every block has a task
  float size = 0.f, size_of_last = 0.f, most = 0.f;            // of a head: spectra have factors of their own
  for (int task = own.first; task < own.end; task++) {
    int head = task / p.batches, batch = task % p.batches;
    if (task == own.first || batch == 0) {
      const float *f = p.factors + 64 * R * head;
      float a = f[0], b = f[64], c = R == 4 ? f[64 * (R - 2)] : a, d = R == 4 ? f[64 * (R - 1)] : b;
      float largest = fmaxf(fmaxf(a, b), fmaxf(c, d)), scale = largest > 0.f ? 1.f / largest : 0.f;
      size = scale * (wg ? b : a);
      size_of_last = scale * (wg ? d : c);
      most = (largest + (a - a) + (b - b) + (c - c) + (d - d)) / (float)R;        // NaN stays
    }
    acc re, im;
    rv bound, more, down, up;
    {
      acc a, b;
      ring_wait(s.inputs, at);
      load(re, s.u[0]);
      load(im, s.u[1]);
      if (R == 4) {
        load(a, s.u[R - 2]);
        load(b, s.u[R - 1]);
      }
      if (p.has_pre) {
        const tile *gate = s.gate[gate_at.stage];
        ring_wait(s.gates, gate_at);
        multiply(re, gate[0]);
        multiply(im, gate[1]);
        if (R == 4) {
          multiply(a, gate[R - 2]);
          multiply(b, gate[R - 1]);
        }
      }
      row_largest(s.rows[wg][0], re);
      row_largest(s.rows[wg][1], im);
      if (R == 4) {
        row_largest(s.rows[wg][R - 2], a);
        row_largest(s.rows[wg][R - 1], b);
      }
      tma_store_wait_read();
      bar_sync(READ + wg, 128 * NC);                           // also: the last stores have read x
      fill(bound, 0.f);
      UNROLLED for (int r = 0; r < R; r++) {
        group_largest(more, s.rows[wg][r], 6);
        map(bound, bound, more, [](float x, float y) { return fmaxf(x, y); });
      }
      scales(down, up, bound, 1.f);
      store(s.up[wg], up);
      float cr, ci, c2r, c2i, c3r, c3i;                        // powers of c_j
      turn(cr, ci, turns, 2 + LOG);
      turn(c2r, c2i, 2 * turns, 2 + LOG);
      turn(c3r, c3i, 3 * turns, 2 + LOG);
      scale_down(re, down);
      scale_down(im, down);
      if (R == 4) {
        scale_down(a, down);
        scale_down(b, down);
        each<64>([=](int, int, float &x, float &y, float &z, float &t) {
          float er = fused(c2r, z, x), ei = c2i * z, fr = fused(cr, y, c3r * t), fi = fused(ci, y, c3i * t);
          x = er + fr;
          y = ei + fi;
          z = er - fr;
          t = ei - fi;
        }, re, im, a, b);
        weigh<0>(a, b, s.w[last], 1.f);
        put_pieces(s.x[last][0], a);
        put_pieces(s.x[last][1], b);
      } else
        each<64>([=](int, int, float &x, float &y) {
          x = fused(cr, y, x);
          y *= ci;
        }, re, im);
      weigh<0>(re, im, s.w[wg], 1.f);
      put_pieces(s.x[wg][0], re);
      put_pieces(s.x[wg][1], im);
      fence_async();
      ring_done(s.inputs, at);
      if (p.has_pre) ring_done(s.gates, gate_at);
      wg_sync();
    }
    ROLLED for (int j = wg; j < R; j += NC) {
      convolve(p, s, re, im, head, j, j == wg ? size : size_of_last, lr);
      if (j != last) {
        put_pieces(s.x[wg][0], re);
        put_pieces(s.x[wg][1], im);
      }
    }
    acc a, b;
    float kr, ki, lkr, lki, gr, gi, lgr, lgi;                  // of this warpgroup's results, of the other's
    turn(kr, ki, wg * MINE * turns, 2 + LOG);
    turn(lkr, lki, (wg * MINE + 1) * turns, 2 + LOG);
    turn(gr, gi, other * MINE * turns, 2 + LOG);
    turn(lgr, lgi, (other * MINE + 1) * turns, 2 + LOG);
    if (R == 4) {
      load(a, s.x[wg][0][0]);
      load(b, s.x[wg][1][0]);
      each<64>([=](int, int, float &x, float &y, float &z, float &t) {
        float er = x + z, ei = y + t, fr = x - z, fi = y - t;
        x = fused(kr, er, ki * ei);
        y = fused(lkr, fr, lki * fi);
        z = fused(gr, er, gi * ei);
        t = fused(lgr, fr, lgi * fi);
      }, a, b, re, im);
      put_pieces(s.x[last][0], re);
      put_pieces(s.x[last][1], im);
    } else {
      fill(a, 0.f);
      fill(b, 0.f);
      each<64>([=](int, int, float &x, float &y, float z, float t) {
        x = fused(kr, z, ki * t);
        y = fused(gr, z, gi * t);
      }, a, b, re, im);
      put_pieces(s.x[wg][1], b);
    }
    bar_sync(EXCHANGE, 128 * NC);
    if (R == 4)
      each<64>([](int, int, float &x, float &y, float z, float t) { x += z; y += t; }, a, b, s.x[other + R - NC][0][0],
               s.x[other + R - NC][1][0]);
    else
      each<64>([](int, int, float &x, float z) { x += z; }, a, s.x[other][1][0]);
    if (task + 1 < own.end) bar_arrive(READ + other, 128 * NC);
    load(up, s.up[wg]);
    map(up, up, [=](float x) { return x * most; });
    map_row(a, up, [](float y, float f) { return y * f; });
    if (R == 4) map_row(b, up, [](float y, float f) { return y * f; });
    if (p.has_other) {
      map(re, a, [](float, float x) { return x; });
      if (R == 4) map(im, b, [](float, float x) { return x; });
    }
    if (p.has_post) {
      const tile *gate = s.gate[gate_at.stage] + wg * MINE;
      ring_wait(s.gates, gate_at);
      multiply(a, gate[0]);
      if (R == 4) multiply(b, gate[MINE - 1]);
    }
    store((tile &)s.x[wg][0][0], a);
    if (R == 4) store((tile &)s.x[wg][1][0], b);
    fence_async();
    if (p.has_post) ring_done(s.gates, gate_at);
    wg_sync();
    for (int i = 0; i < MINE; i++)
      tma_store(p.out, (tile &)s.x[wg][i][0], 64 * (head * R + wg * MINE + i), 0, 0, batch);
    if (p.has_other) {
      const tile *gate = s.gate[gate_at.stage] + wg * MINE;
      ring_wait(s.gates, gate_at);
      multiply(re, gate[0]);
      if (R == 4) multiply(im, gate[MINE - 1]);
      tma_store_wait_read();
      wg_sync();
      store((tile &)s.x[wg][0][0], re);
      if (R == 4) store((tile &)s.x[wg][1][0], im);
      fence_async();
      ring_done(s.gates, gate_at);
      wg_sync();
      for (int i = 0; i < MINE; i++)
        tma_store(p.other, (tile &)s.x[wg][i][0], 64 * (head * R + wg * MINE + i), 0, 0, batch);
    }
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<gate_loader, THREAD, 1, LOAD_REGS>, DEPENDENT> kernel;
ENTRY(kernel, 1, R)
