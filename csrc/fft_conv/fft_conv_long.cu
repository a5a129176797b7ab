// The same convolution as fft_conv.cu of rows of N = 4096 R elements in one pass, R = 2 or 4. With c_j = e^(-2 pi i (j
// + q) / R), z^N - e^(-2 pi i q) is the product of z^4096 - c_j: causal q = 1/4, circular q = 0. So with x_r = block r
// of a row,
//   p_j = w_j^n sum over r of c_j^r x_r,   w_j = c_j^(1 / 4096),   y_j = k * p_j by spectra at frequencies k / 4096
//   out_r = 1 / R Re sum over j of c_j^-r w_j^-n y_j
// A row is scaled by a power of two first, so that no number is too large or small for fp16.
// Roles: a loader thread; NC = 2 warpgroups that share a row: each has R / NC of its blocks, of the p_j and of the
// results; a thread that loads the gates. Blocks walk along the batch of a head, so that K comes from the L2.
#include "tile/tile.h"
#include "fft_conv/fft_conv_tiles.h"

// From the row: R, NC, COMPUTE_REGS, LOAD_REGS, PIECES = 1
enum { MINE = R / NC, LOG = R == 4 ? 2 : 1 };   // MINE: blocks of a warpgroup, 1 or 2
typedef st<elem, 64, 64> tile;
struct portion {                           // block j
  tile u, gate;                         // u: then x_j
  table x[2][PIECES];                   // what passes from registers to a product, then y_j, then the result
  sv<64> rows, row_re, row_im, col_re, col_im;   // largest numbers; w_j^(64 a), w_j^b
};
struct shared {
  portion parts[R];
  table left[3][PIECES], right[3][PIECES], twists[2][PIECES];
  parked up[NC];
  ring<1> inputs, gates;                // gates: the first one and the second one in turn, as far as they are given
  sem constants;
};
typedef fft_long_params params;

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
  sem_expect(s.constants, FFT_TABLES * tile_bytes(s.left[0][0]));
  for (int i = 0; i < 3; i++) tma_load(s.left[i][0], p.tables, s.constants, 0, 0, i, 0);
  for (int i = 0; i < 3; i++) tma_load(s.right[i][0], p.tables, s.constants, 0, 0, 3 + i, 0);
  for (int i = 0; i < 2; i++) tma_load(s.twists[i][0], p.tables, s.constants, 0, 0, 6 + i, 0);
  for (int task = own.first; task < own.end; task++) {
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, R * tile_bytes(s.parts[0].u));
    for (int r = 0; r < R; r++)
      tma_load(s.parts[r].u, p.u, s.inputs.full[0], 64 * (task / p.batches * R + r), 0, 0, task % p.batches);
    ring_next(s.inputs, at);
  }
}
TILE void load_gate(const params &p, shared &s, const gmap &m, ring_pos &at, int task) {
  ring_acquire(s.gates, at);
  ring_expect(s.gates, at, R * tile_bytes(s.parts[0].gate));
  for (int r = 0; r < R; r++)
    tma_load(s.parts[r].gate, m, s.gates.full[0], 64 * (task / p.batches * R + r), 0, 0, task % p.batches);
  ring_next(s.gates, at);
}
TILE void gate_loader(const params &p, shared &s, int) {
  range own = block_tasks(p);
  ring_pos at = {};
  if (!p.has_pre && !p.has_post) return;
  grid_wait();
  for (int task = own.first; task < own.end; task++) {
    if (p.has_pre) load_gate(p, s, p.pre, at, task);
    if (p.has_post) load_gate(p, s, p.post, at, task);
  }
}

TILE void multiply_gates(shared &s, acc &x, acc &y, int first, ring_pos &at) {
  ring_wait(s.gates, at);
  each<64>([](int, int, float &v, float g) { v *= g; }, x, s.parts[first].gate);
  if (MINE == 2) each<64>([](int, int, float &v, float g) { v *= g; }, y, s.parts[first + MINE - 1].gate);
  ring_done(s.gates, at);
}
// e^(-2 pi i n (j + q) / (4096 R)), n = step row
TILE void make_weights(sv<64> &re, sv<64> &im, int j, int q, int step) {
  rv x, y;
  map_rows(x, [=](int r) { float a, b; turn(a, b, (4 * j + q) * step * r, 14 + LOG); return a; });
  map_rows(y, [=](int r) { float a, b; turn(a, b, (4 * j + q) * step * r, 14 + LOG); return b; });
  store(re, x);
  store(im, y);
}
template<int BACK> TILE void weigh(acc &re, acc &im, const portion &t, float size) {
  rv a, b;
  load(a, t.row_re);
  load(b, t.row_im);
  each<64>([=](int, int, float &x, float &y, float c, float d, float e, float f) {
    float g = fused(c, e, -(d * f)) * size, h = fused(c, f, d * e) * (BACK ? -size : size);
    float z = fused(x, g, -(y * h));
    y = fused(x, h, y * g);
    x = z;
  }, re, im, a, b, t.col_re, t.col_im);
}

// y_j of p_j, both in t.x
TILE void convolve(const params &p, shared &s, portion &t, int head, int j) {
  table(&x)[2][PIECES] = t.x;
  acc re, im, k;
  // Spectra of one filter have factors of their own.
  float mine = 0.f, most = 0.f;
  ROLLED for (int r = 0; r < R; r++) {
    float f = p.factors[64 * (head * R + r)];
    mine = r == j ? f : mine;
    most = fmaxf(most, f);
  }
  mma_fence();
  product<ZERO>(re, s.left[0], x[0]);
  product<ZERO>(im, s.left[1], x[0]);
  product<ACC>(re, s.left[2], x[1]);
  product<ACC>(im, s.left[0], x[1]);
  mma_commit();
  mma_wait<0>(re, im);
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
  product<ZERO>(re, s.left[0], x[0]);
  product<ZERO>(im, s.left[0], x[1]);
  product<ACC>(re, s.left[1], x[1]);
  product<ACC>(im, s.left[2], x[0]);
  mma_commit();
  mma_wait<0>(re, im);
  weigh<1>(re, im, t, most > 0.f ? mine / most : 0.f);
  wg_sync();                                                   // all products have read x
  put_pieces(x[0], re);
  put_pieces(x[1], im);
}
// Re sum over j of c_j^-r w_j^-n y_j
TILE void join(acc &x, const shared &s, int r, int q) {
  fill(x, 0.f);
  ROLLED for (int j = 0; j < R; j++) {
    float c, d;
    turn(c, d, (4 * j + q) * r, 2 + LOG);
    each<64>([=](int, int, float &y, float v, float w) { y = fused(c, v, fused(d, w, y)); }, x, s.parts[j].x[0][0],
             s.parts[j].x[1][0]);
  }
}

TILE void compute(const params &p, shared &s, int wg) {
  range own = block_tasks(p);
  int first = wg * MINE, last = first + MINE - 1, q = p.quarter;
  ring_pos at = {}, gate_at = {};
  for (int j = first; j <= last; j++) {
    make_weights(s.parts[j].row_re, s.parts[j].row_im, j, q, 64);
    make_weights(s.parts[j].col_re, s.parts[j].col_im, j, q, 1);
  }
  grid_wait();
  sem_wait(s.constants, 0);
  for (int task = own.first; task < own.end; task++) {
    int head = task / p.batches, batch = task % p.batches;
    acc re, im;
    rv bound, other, down, up;
    ring_wait(s.inputs, at);
    load(re, s.parts[first].u);
    if (MINE == 2) load(im, s.parts[last].u);
    if (p.has_pre) multiply_gates(s, re, im, first, gate_at);
    row_largest(s.parts[first].rows, re);
    if (MINE == 2) row_largest(s.parts[last].rows, im);
    tma_store_wait_read();
    bar_sync(1, 128 * NC);                                     // also: the last stores have read x
    fill(bound, 0.f);
    UNROLLED for (int r = 0; r < R; r++) {
      group_largest(other, s.parts[r].rows, 6);
      map(bound, bound, other, [](float a, float b) { return fmaxf(a, b); });
    }
    scales(down, up, bound, 1.f);
    store(s.up[wg], up);
    scale_down(re, down);
    store((table &)s.parts[first].u, re);
    if (MINE == 2) {
      scale_down(im, down);
      store((table &)s.parts[last].u, im);
    }
    bar_sync(1, 128 * NC);
    ROLLED for (int j = first; j <= last; j++) {
      portion &t = s.parts[j];
      fill(im, 0.f);
      load(re, (table &)s.parts[0].u);
      ROLLED for (int r = 1; r < R; r++) {
        float c, d;
        turn(c, d, (4 * j + q) * r, 2 + LOG);
        each<64>([=](int, int, float &y, float &z, float v) {
          y = fused(v, c, y);
          z = fused(v, d, z);
        }, re, im, (table &)s.parts[r].u);
      }
      weigh<0>(re, im, t, 1.f);
      put_pieces(t.x[0], re);
      put_pieces(t.x[1], im);
    }
    ring_done(s.inputs, at);                                   // it fences, for the products too
    wg_sync();
    ROLLED for (int j = first; j <= last; j++) convolve(p, s, s.parts[j], head, j);
    bar_sync(1, 128 * NC);
    join(re, s, first, q);
    if (MINE == 2) join(im, s, last, q);
    float most = 0.f, poison = 0.f;
    ROLLED for (int r = 0; r < R; r++) {
      float f = p.factors[64 * (head * R + r)];
      most = fmaxf(most, f);
      poison += f - f;                                         // NaN stays
    }
    load(up, s.up[wg]);
    map(up, up, [=](float x) { return x * ((most + poison) / (float)R); });
    map_row(re, up, [](float y, float f) { return y * f; });
    if (MINE == 2) map_row(im, up, [](float y, float f) { return y * f; });
    if (p.has_post) multiply_gates(s, re, im, first, gate_at);
    bar_sync(1, 128 * NC);                                     // all have read x
    store((tile &)s.parts[first].x[0][0], re);
    if (MINE == 2) store((tile &)s.parts[last].x[0][0], im);
    fence_async();
    wg_sync();
    for (int j = first; j <= last; j++) tma_store(p.out, (tile &)s.parts[j].x[0][0], 64 * (head * R + j), 0, 0, batch);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<gate_loader, THREAD, 1, LOAD_REGS>, DEPENDENT> kernel;
ENTRY(kernel, 1, R)
