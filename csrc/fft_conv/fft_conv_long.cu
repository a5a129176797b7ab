// The same convolution as fft_conv.cu of rows of N = 4096 R elements in one pass, R = 2 or 4. With c_j = e^(-2 pi i (j
// + q) / R), z^N - e^(-2 pi i q) is the product of z^4096 - c_j: causal q = 1/4, circular q = 0. So with x_r = block r
// of a row,
//   p_j = w_j^n sum over r of c_j^r x_r,   w_j = c_j^(1 / 4096),   y_j = k * p_j by spectra at frequencies k / 4096
//   out_r = 1 / R Re sum over j of c_j^-r w_j^-n y_j
// c_(j + R / 2) is -c_j, and of R = 4 c_1 is -i c_0: both sums are a transform of R numbers, in registers.
// The p_j are complex, so L is folded, and their rows are, from the loads of a row to the stores of the result.
// The gradient of a first gate is another product of the same convolution: `other`.
// A row is scaled by a power of two first, so that no number is too large or small for fp16.
// Roles: NC = 2 warpgroups, each with a row and tiles of its own, so that they never meet; for each a thread that loads
// what it reads. Blocks walk along the batch of a head, so that K comes from the L2.
#include "tile/tile.h"
#include "fft_conv/fft_conv_blocks.h"
#include "fft_conv/fft_conv_tasks.h"

// From the row: R, FLOATS, NC, COMPUTE_REGS, LOAD_REGS, PIECES = 1
typedef columns<FLOATS>::type strip;            // 32 columns
// GATES: stages. Of floats L does not stay in registers. FOLD: 64 rows are one group
enum { LOG = R == 4 ? 2 : 1, GATES = 3 - FLOATS, FOLD = 6 };
typedef st<elem, 64, 64> tile;
struct weights { sv<64> row_re, row_im, col_re, col_im; };      // w_j^(64 a), w_j^b
struct own_tiles {                              // a warpgroup's
  // p_j, what passes to a product, y_j; then in the second ones the next row's blocks, in the first ones the result
  table x[R][2][PIECES];
  tile gates[GATES];
  sv<64> rows[R];                               // largest numbers
  parked up;
};
struct shared {
  own_tiles group[NC];
  table twists[2][PIECES], halves[2][PIECES], left[1 + FLOATS][PIECES];         // left: of floats
  weights w[R];
  ring<1> inputs[NC];
  ring<GATES> gates[NC];                        // blocks of the first one, then of the second one, as far as given
  sem constants;
};
typedef fft_long_params params;
enum { START = 1 };                             // barrier

TILE void init(shared &s) {
  for (int i = 0; i < NC; i++) {
    ring_init(s.inputs[i], arrivals(1, 0, 0), arrivals(0, 0, 1));
    ring_init(s.gates[i], arrivals(1, 0, 0), arrivals(0, 0, 1));
  }
  sem_init(s.constants, arrivals(NC, 0, 0));
}

// Blocks first to end - 1 of a gate
TILE void load_gate(const params &p, shared &s, const gmap &m, int wg, ring_pos &at, int task, int first, int end) {
  for (int r = first; r < end; r++) {
    ring_acquire(s.gates[wg], at);
    ring_expect(s.gates[wg], at, tile_bytes(s.group[0].gates[0]));
    tma_load(s.group[wg].gates[at.stage], m, s.gates[wg].full[at.stage], 64 * (task / p.batches * R + r), 0, 0,
             task % p.batches);
    ring_next(s.gates[wg], at);
  }
}
TILE void load_inputs(const params &p, shared &s, int wg, ring_pos &at, int task) {
  own_tiles &t = s.group[wg];
  ring_acquire(s.inputs[wg], at);
  ring_expect(s.inputs[wg], at, R * tile_bytes(t.gates[0]));
  for (int r = 0; r < R; r++)
    tma_load((tile &)t.x[r][1][0], p.of.u, s.inputs[wg].full[0], 64 * (task / p.batches * R + r), 0, 0,
             task % p.batches);
  ring_next(s.inputs[wg], at);
}
// The next row comes as soon as there is room for it. The second gate's last block waits for that: its others are on
// the way by then.
TILE void loader(const params &p, shared &s, int wg) {
  range own = block_tasks(p);
  own_tiles &t = s.group[wg];
  ring_pos at = {}, gate_at = {};
  grid_wait();
  sem_expect(s.constants, ((wg ? 0 : 4) + (FLOATS && wg ? 0 : 2)) * tile_bytes(s.halves[0][0]));
  for (int i = 0; i < 2 && !FLOATS; i++) tma_load(t.x[i][0][0], p.of.tables, s.constants, 0, 0, FFT_FOLDED_LEFT + i, 0);
  if (FLOATS && wg == 0) load_tables(s.left, p.of.tables, s.constants, FFT_FOLDED_LEFT);
  for (int i = 0; i < 2 && wg == 0; i++) {
    tma_load(s.twists[i][0], p.of.tables, s.constants, 0, 0, FFT_FOLDED_TWISTS + i, 0);
    tma_load(s.halves[i][0], p.of.tables, s.constants, 0, 0, FFT_HALVES + i, 0);
  }
  int task = own.first + wg;
  if (task < own.end) load_inputs(p, s, wg, at, task);
  for (; task < own.end; task += NC) {
    if (p.has_pre) load_gate(p, s, p.of.pre, wg, gate_at, task, 0, R);
    if (p.has_post) load_gate(p, s, p.of.post, wg, gate_at, task, 0, R - 1);
    if (task + NC < own.end) load_inputs(p, s, wg, at, task + NC);
    if (p.has_post) load_gate(p, s, p.of.post, wg, gate_at, task, R - 1, R);
    if (p.has_other) load_gate(p, s, p.factor, wg, gate_at, task, 0, R);
  }
}

// e^(-2 pi i n (j + q) / (4096 R)): n = 64 row of folded rows, n = column
TILE void make_weights(weights &w, int j, int q) {
  int turns = 4 * j + q;
  rv x, y;
  map_rows(x, [=](int r) { float a, b; turn(a, b, 64 * turns * folded_row(r, FOLD), 14 + LOG); return a; });
  map_rows(y, [=](int r) { float a, b; turn(a, b, 64 * turns * folded_row(r, FOLD), 14 + LOG); return b; });
  store(w.row_re, x);
  store(w.row_im, y);
  turns_of_rows(x, y, turns, 14 + LOG);
  store(w.col_re, x);
  store(w.col_im, y);
}
// Columns from c0 of (re + i im) w_j^n, or where BACK, of size (re - i im) w_j^-n
template<int BACK> TILE void weigh(strip &re, strip &im, const weights &w, float size, int c0) {
  rv a, b;
  load(a, w.row_re);
  load(b, w.row_im);
  if (BACK) {
    map(a, a, [=](float x) { return x * size; });
    map(b, b, [=](float x) { return x * size; });
  }
  every([](auto &x, auto &y, auto c, auto d, auto e, auto f) {
    complex_product<0>(x, y, c, d);
    complex_product<BACK>(x, y, e, f);
  }, re, im, a, b, slice<32>(w.col_re, c0), slice<32>(w.col_im, c0));
}
// p_j, from its columns c0, as what L's halves want: sums and differences of its folded rows
TILE void put_part(table (&x)[2][PIECES], strip &re, strip &im, const weights &w, int c0) {
  weigh<0>(re, im, w, 1.f, c0);
  trade_rows(re, im);
  cross(re, im);
  store(x[0][0], re, c0);
  store(x[1][0], im, c0);
}

TILE void widened(rt<float, 32> &d, const rt<fp16, 32> &s) { convert(d, s); }
TILE void widened(rt<fp16, 32> &d, const rt<fp16, 32> &s) { d = s; }
TILE void rounded(rt<fp16, 32> &d, const rt<float, 32> &s) { convert(d, s); }
TILE void rounded(rt<fp16, 32> &d, const rt<fp16, 32> &s) { d = s; }

// Columns from 32 i of all p_j of the blocks a. C: c_0, G: its square.
TILE void transform(own_tiles &t, const rt<fp16, 32> (&a)[R][2], const weights (&w)[R], fft_complex C, fft_complex G,
                    int i) {
  int c0 = 32 * i;
  float cr = C.re, ci = C.im, gr = G.re, gi = G.im;
  if constexpr (R == 2) {
    strip x, y, z, v;
    widened(x, a[0][i]);
    widened(y, a[1][i]);
    widened(z, a[0][i]);
    widened(v, a[1][i]);
    every([=](auto &p, auto &q, auto &f, auto &g) {            // x + c y, x - c y
      auto u = like(p, cr), h = like(p, ci) * q;
      f = fused(-u, q, p);
      p = fused(u, q, p);
      q = h;
      g = -h;
    }, x, y, z, v);
    put_part(t.x[0], x, y, w[0], c0);
    put_part(t.x[R - 1], z, v, w[R - 1], c0);
  } else UNROLLED for (int j = 0; j < 2; j++) {                // of x_0 + s G x_2 and x_1 + s G x_3, s = 1 or -1
    strip p, q, f, g;
    float s = j ? -1.f : 1.f;
    widened(p, a[0][i]);
    widened(q, a[1][i]);
    widened(f, a[R - 2][i]);
    widened(g, a[R - 1][i]);
    every([=](auto &p, auto &q, auto &f, auto &g) {
      auto k = like(p, s * gr), l = like(p, s * gi), m = like(p, j ? ci : cr), n = like(p, j ? -cr : ci);
      auto er = fused(k, f, p), ei = l * f, fr = fused(k, g, q), fi = l * g;
      complex_product<0>(fr, fi, m, n);
      p = er + fr;
      q = ei + fi;
      f = er - fr;
      g = ei - fi;
    }, p, q, f, g);
    put_part(t.x[j], p, q, w[j], c0);
    put_part(t.x[j + R / 2], f, g, w[j + R / 2], c0);
  }
}
// Columns from 32 i of the R blocks of the result, of y_j in t.x
TILE void transform_back(rt<fp16, 32> (&out)[R][2], const own_tiles &t, fft_complex C, fft_complex G, int i) {
  int c0 = 32 * i;
  strip a, b, c, d;
  float cr = C.re, ci = C.im, gr = G.re, gi = G.im;
  load(a, t.x[0][0][0], c0);
  load(c, t.x[R / 2][0][0], c0);
  cross(a, c);                                                 // sums and differences of y_0 and y_(R / 2): re, then im
  if constexpr (R == 2) {
    rounded(out[0][i], a);
    load(b, t.x[0][1][0], c0);
    load(d, t.x[R / 2][1][0], c0);
    every([=](auto &x, auto &y, auto &z) { x = fused(like(x, cr), x, like(x, ci) * (y - z)); }, c, b, d);
    rounded(out[R - 1][i], c);
  } else {
    strip e, f, g, h;                                          // of y_1 and y_3
    load(e, t.x[1][0][0], c0);
    load(g, t.x[R - 1][0][0], c0);
    cross(e, g);
    cross(a, e);
    rounded(out[0][i], a);
    if (FLOATS) wg_sync();                                     // else ptxas does all at once, and spills
    load(b, t.x[0][1][0], c0);
    load(d, t.x[R / 2][1][0], c0);
    cross(b, d);
    load(f, t.x[1][1][0], c0);
    load(h, t.x[R - 1][1][0], c0);
    cross(f, h);
    every([=](auto &x, auto &y, auto &z) { x = fused(like(x, gr), x, like(x, gi) * (y - z)); }, e, b, f);
    rounded(out[R - 2][i], e);
    float hr = cr * gr - ci * gi, hi = cr * gi + ci * gr;      // c_0^3
    every([=](auto &x, auto &y, auto &z, auto &v) {
      auto k = like(x, cr), l = like(x, ci), m = like(x, hr), n = like(x, hi);
      auto p = fused(k, x, fused(l, y, fused(l, z, -(k * v))));
      y = fused(m, x, fused(n, y, fused(m, v, -(n * z))));
      x = p;
    }, c, d, g, h);
    rounded(out[1][i], c);
    rounded(out[R - 1][i], d);
  }
}

// The result, times the next gate where there is one, to x[r][0] and to global memory.
TILE void leave(own_tiles &t, ring<GATES> &gates, ring_pos &at, bool has_gate, const rt<fp16, 32> (&out)[R][2],
                const rv &up, const gmap &to, int row, int batch) {
  UNROLLED for (int r = 0; r < R; r++) {
    if (has_gate) ring_wait(gates, at);
    UNROLLED for (int i = 0; i < 2; i++) {
      rt<float, 32> y, g;
      widened(y, out[r][i]);
      map_row(y, up, [](float v, float f) { return v * f; });
      if (has_gate) {
        load_folded(g, t.gates[at.stage], 32 * i, FOLD);
        map(y, g, [](float v, float f) { return v * f; });
      }
      store_folded((tile &)t.x[r][0][0], y, 32 * i, FOLD);
    }
    if (has_gate) ring_done(gates, at);
  }
  fence_async();
  wg_sync();
  for (int r = 0; r < R; r++) tma_store(to, (tile &)t.x[r][0][0], row + 64 * r, 0, 0, batch);
}

// K of p_j, tile i of all. It comes from the L2, and is asked for a turn ahead: so it stays where it is written, where
// ptxas would move it behind the product that it should come under.
TILE void ask(rt<float, 32> &even, rt<float, 32> &odd, const params &p, int i) {
  const float *k = p.filter + (int64_t)64 * 64 * i;
  load_columns(even, k, 0);
  load_columns(odd, k, 1);
}
// From registers. Were it a load from memory, K's loads behind it would count on the same scoreboard, and be waited for
// with it.
TILE float one_of(const float (&x)[R], int j) {
  float y = x[0];
  UNROLLED for (int i = 1; i < R; i++) y = j == i ? x[i] : y;
  return y;
}
TILE void compute(const params &p, shared &s, int wg) {
  range own = block_tasks(p);
  own_tiles &t = s.group[wg];
  int q = p.quarter, head = -1;
  ring_pos at = {}, gate_at = {};
  operands even[PIECES], odd[PIECES];                          // L's halves
  fft_complex C, G;
  turn(C.re, C.im, q, 2 + LOG);
  turn(G.re, G.im, 2 * q, 2 + LOG);
  for (int j = wg; j < R; j += NC) make_weights(s.w[j], j, q);
  bar_sync(START, 128 * NC);
  grid_wait();
  sem_wait(s.constants, 0);
  if (!FLOATS) {
    load(even[0], t.x[0][0][0]);
    load(odd[0], t.x[1][0][0]);
  }
  float sizes[R], most = 0.f;                                  // of a head: spectra have factors of their own
  for (float &x : sizes) x = 0.f;
  for (int task = own.first + wg; task < own.end; task += NC) {
    int batch = task % p.batches;
    if (task / p.batches != head) {
      head = task / p.batches;
      const float *f = p.factors + 64 * R * head;
      float largest = 0.f, spoiled = 0.f;
      UNROLLED for (int j = 0; j < R; j++) {
        sizes[j] = f[64 * j];
        largest = fmaxf(largest, sizes[j]);
        spoiled += sizes[j] - sizes[j];                        // NaN stays
      }
      float scale = largest > 0.f ? 1.f / largest : 0.f;
      UNROLLED for (int j = 0; j < R; j++) sizes[j] *= scale;
      most = (largest + spoiled) / (float)R;
    }
    {
      acc a[R];
      rv bound, down, up;
      ring_wait(s.inputs[wg], at);
      UNROLLED for (int r = 0; r < R; r++) {
        load_folded(a[r], (tile &)t.x[r][1][0], 0, FOLD);
        if (p.has_pre) {
          ring_wait(s.gates[wg], gate_at);
          multiply_folded(a[r], t.gates[gate_at.stage], FOLD);
          ring_done(s.gates[wg], gate_at);
        }
        row_largest(t.rows[r], a[r]);
      }
      tma_store_wait_read();
      wg_sync();                                               // also: the last stores have read x
      tile_largest(bound, t.rows);
      if (FLOATS) {                                            // in a uniform register it makes ptxas spill others
        store(t.up, bound);
        load(bound, t.up);
      }
      scales(down, up, bound, 1.f);
      store(t.up, up);
      rt<fp16, 32> b[R][2];
      UNROLLED for (int r = 0; r < R; r++) {
        scale_down(a[r], down);
        UNROLLED for (int i = 0; i < 2; i++) convert_part(b[r][i], a[r], 32 * i);
      }
      UNROLLED for (int i = 0; i < 2; i++) transform(t, b, s.w, C, G, i);
      fence_async();
      wg_sync();
    }
    if (FLOATS) {
      load(even[0], s.left[0][0]);
      load(odd[0], s.left[FLOATS][0]);
    }
    rt<float, 32> k_even, k_odd;
    ask(k_even, k_odd, p, head * R);
    ROLLED for (int j = 0; j < R; j++) {
      table(&x)[2][PIECES] = t.x[j];
      acc re, im;
      float size = one_of(sizes, j);
      mma_fence();
      product<ZERO>(re, even, x[0]);
      product<ZERO>(im, odd, x[1]);
      mma_commit();
      pass_spectrum<1, !FLOATS, strip>(x, re, im, s.twists, s.halves, p.conjugate,
                                       [&] { mma_wait<0>(re, im, even[0], odd[0]); },
                                       [&](auto &a, auto &b) { a = k_even; b = k_odd; }, [] { wg_sync(); });
      fence_async();
      wg_sync();
      mma_fence();
      product<ZERO>(re, even, x[0]);
      product<ZERO>(im, odd, x[1]);
      mma_commit();
      if (j + 1 < R) ask(k_even, k_odd, p, head * R + j + 1);
      mma_wait<0>(re, im, even[0], odd[0]);
      wg_sync();                                               // all products have read x
      UNROLLED for (int i = 0; i < 2; i++) {
        strip y, z;
        convert_part(y, re, 32 * i);
        convert_part(z, im, 32 * i);
        cross(y, z);
        trade_rows(y, z);
        weigh<1>(y, z, s.w[j], size, 32 * i);
        store(x[0][0], y, 32 * i);
        store(x[1][0], z, 32 * i);
      }
    }
    rt<fp16, 32> out[R][2];
    rv up;
    wg_sync();                                                 // y_j have been written
    UNROLLED for (int i = 0; i < 2; i++) {
      if (FLOATS && i) wg_sync();
      transform_back(out, t, C, G, i);
    }
    ring_done(s.inputs[wg], at);
    load(up, t.up);
    map(up, up, [=](float x) { return x * most; });
    if (!FLOATS || R == 2) wg_sync();                          // y_j have been read; else they met since
    leave(t, s.gates[wg], gate_at, p.has_post, out, up, p.of.out, 64 * R * head, batch);
    if (p.has_other) {
      tma_store_wait_read();
      wg_sync();                                               // the stores have read x
      leave(t, s.gates[wg], gate_at, true, out, up, p.other, 64 * R * head, batch);
    }
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, NC, COMPUTE_REGS>, role<loader, THREAD, NC, LOAD_REGS>,
              DEPENDENT> kernel;
ENTRY(kernel, 1, R)
