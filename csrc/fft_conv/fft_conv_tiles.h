// Transforms of 4096 numbers as 64 x 64, with products of tiles. What the family's kernels share.
//
// With x[64 a + b] = X[a][b] and N = 4096, the spectrum at frequencies (k + 1/4) / N, k = k1 + 64 k2, is
//   S[k1][k2] = ((L X) * T) F          and back   x = L^H (((S F^H)) * T^*)
//   L[k1][a] = e^(-2 pi i (4 a k1 + a + k1) / 256) / 8
//   T[k1][b] = e^(-2 pi i (b (4 k1 + 1) / (4 N) - k1 / 256))
//   F[b][k2] = e^(-2 pi i b k2 / 64) / 8
// Both ways are unitary. The factor e^(.. k1 / 256), which the two undo, makes L symmetric: L^H is its conjugate. A
// product of such spectra is the convolution modulo z^N + i. Of real rows its real part is the first half of the
// convolution, and its imaginary part, negated, is the second half: no zeros are appended.
// A row of N = 64 m < 4096 is m rows of a tile: L has blocks of m x m, and 64 / m rows share a tile.
// Circular rows of such a length take frequencies k / N: 4 a k1 in L, 4 k1 in T. Two rows with one filter, which is
// real, are the real and the imaginary part of one.
//
// Numbers are PIECES fp16 tiles: the first eleven bits, and, of two pieces, the next eleven.
//
// Of one piece F may be a step of radix 2 and two products of half the size (pass_spectrum). With b < 32, k < 32
//   even[k] = S[k1][2 k] = sum over b of (x_b + x_(b + 32)) E[b][k]    E[b][k] = e^(-2 pi i 2 b k / 64) / 8
//   odd[k] = e^(-2 pi i k / 64) S[k1][2 k + 1]
//          = sum over b of (x_b - x_(b + 32)) O[b][k]              O[b][k] = e^(-2 pi i (2 b k + b + k) / 64) / 8
// The factor of odd makes O symmetric, and the way back undoes it: conj(x) comes of conj(S) by the same two tables.
// A complex number's parts lie side by side, re in columns 0 to 31, im in the others, so that products have 64 columns:
// (re + i im) E = re [E_re | E_im] + im [-E_im | E_re].
//
// At frequencies k / N, where the operand is complex, so may L be: `folded`. With a < 32, k < 32
//   S[2 k] = sum over a of (x_a + x_(a + 32)) e^(-2 pi i 2 a k / 64) / 8
//   e^(-2 pi i k / 64) S[2 k + 1] = sum over a of (x_a - x_(a + 32)) e^(-2 pi i (2 a k + a + k) / 64) / 8
// Both matrices are symmetric, and the folded T has the factor of the second one, so that the way back takes the same
// two tables: of conj(S T^*) comes conj(x), as sums and differences. Eight rows of re lie above eight of im (folds.h):
// so a product has 64 rows and columns, and both parts of a number are in one thread. A row of m rows of a tile has
// halves of m / 2; one of a single row has none, and the tables are 1 there.
#pragma once
#include "tile/folds.h"
#include "fft_conv/fft_conv.h"

typedef st<fp16, 64, 64> table;
typedef rt<float, 64> acc;
typedef rt<fp16, 64> operands;

// x to eleven bits
TILE float head_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  u = (u + 0x1000u) & 0xffffe000u;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

// e^(-2 pi i j / 2^log), log >= 3: the next quarter turn, and the rest by its series.
TILE void turn(float &re, float &im, int j, int log) {
  j &= (1 << log) - 1;
  int quarter = (j + (1 << (log - 3))) >> (log - 2);
  float x = (float)(j - (quarter << (log - 2))) * (6.28318530718f / (float)(1 << log)), z = x * x;
  float s = x * fused(fused(fused(fused(2.75573192e-6f, z, -1.98412698e-4f), z, 8.33333333e-3f), z, -0.166666667f), z,
                      1.f);
  float c = fused(fused(fused(fused(2.48015873e-5f, z, -1.38888889e-3f), z, 4.16666667e-2f), z, -0.5f), z, 1.f);
  float a = quarter & 1 ? s : c, b = quarter & 1 ? c : s;
  re = (quarter + 1) & 2 ? -a : a;
  im = quarter & 2 ? b : -b;
}

// head: x to eleven bits; x becomes the rest.
template<int N> TILE void split(rt<float, N> &head, rt<float, N> &x) {
  fill(head, 0.f);
  each<N>([](int, int, float &y, float &h) { h = head_of(y); y -= h; }, x, head);
}
// 16 columns of a table
TILE void put_columns(table (&t)[PIECES], rt<float, 16> &x, int c0) {
  if (PIECES == 2) {
    rt<float, 16> head;
    split(head, x);
    store(t[0], head, c0);
    store(t[PIECES - 1], x, c0);
  } else store(t[0], x, c0);
}
// Tables: re, im and, where there are three, -im.
TILE void put_complex(table (*t)[PIECES], rt<float, 16> &re, rt<float, 16> &im, bool three, int c0) {
  rt<float, 16> other;
  fill(other, 0.f);
  each<16>([](int, int, float x, float &y) { y = -x; }, im, other);
  put_columns(t[0], re, c0);
  put_columns(t[1], im, c0);
  if (three) put_columns(t[2], other, c0);
}
// What tables FFT_HALVES and the next have: E and O, in rows 0 to 31 [re | im], in the others [-im | re].
TILE void half_table(acc &t, int odd) {
  each<64>([=](int r, int c, float &y) {
    float re, im;
    int b = r & 31, k = c & 31;
    turn(re, im, 2 * b * k + (odd ? b + k : 0), 6);
    y = 0.125f * ((r ^ c) & 32 ? (r & 32 ? -im : im) : re);
  }, t);
}
// What tables FFT_FOLDED_LEFT and the next have: L's halves, re and im of rows and of columns in turn.
TILE void folded_left_table(acc &t, int log_rows, int odd) {
  int half = log_rows ? log_rows - 1 : 0;
  float size = (log_rows & 1 ? 0.707106781f : 1.f) / (float)(1 << log_rows / 2);
  each<64>([=](int r, int c, float &y) {
    float re, im;
    int j = fold_of(r), i = fold_of(c), k = j & ((1 << half) - 1), a = i & ((1 << half) - 1);
    turn(re, im, (2 * k * a + (odd ? k + a : 0)) << (6 - log_rows), 6);
    float part = (r ^ c) & 8 ? (r & 8 ? im : -im) : re;
    y = (j ^ i) >> half ? 0.f : size * part;
  }, t);
}
// What the next two have: re and im of the folded T, whose rows 2 k + h are h = 0 and 1 of row k of L's halves.
TILE void folded_twist_table(acc &t, int log_rows, int im) {
  each<64>([=](int r, int b, float &y) {
    float re, other;
    int odd = log_rows ? r >> 3 & 1 : 0, k = log_rows ? fold_of(r) & ((1 << (log_rows - 1)) - 1) : 0;
    turn(re, other, (2 * k + odd) * b - odd * 64 * k, 6 + log_rows);
    y = im ? other : re;
  }, t);
}
// 16 columns of each. plain: at frequencies k / N. There the product of spectra is the circular convolution.
TILE void left_columns(table (*t)[PIECES], int log_rows, bool plain, bool three, int c0) {
  float size = (log_rows & 1 ? 0.707106781f : 1.f) / (float)(1 << log_rows / 2);
  rt<float, 16> re, im;
  fill(re, 0.f);
  fill(im, 0.f);
  each<16>([=](int r, int c, float &x, float &y) {
    c += c0;
    int i = r & ((1 << log_rows) - 1), a = c & ((1 << log_rows) - 1);
    turn(x, y, (4 * i * a + (plain ? 0 : a + i)) << (6 - log_rows), 8);
    float f = (r ^ c) >> log_rows ? 0.f : size;
    x *= f;
    y *= f;
  }, re, im);
  put_complex(t, re, im, three, c0);
}
TILE void twist_columns(table (*t)[PIECES], int log_rows, bool plain, int c0) {
  rt<float, 16> re, im;
  fill(re, 0.f);
  fill(im, 0.f);
  each<16>([=](int r, int c, float &x, float &y) {
    int i = r & ((1 << log_rows) - 1);
    turn(x, y, plain ? 4 * i * (c + c0) : (4 * i + 1) * (c + c0) - 64 * i, 8 + log_rows);
  }, re, im);
  put_complex(t, re, im, false, c0);
}
TILE void right_columns(table (*t)[PIECES], int c0) {
  rt<float, 16> re, im;
  fill(re, 0.f);
  fill(im, 0.f);
  each<16>([=](int r, int c, float &x, float &y) {
    turn(x, y, r * (c + c0), 6);
    x *= 0.125f;
    y *= 0.125f;
  }, re, im);
  put_complex(t, re, im, true, c0);
}
// Warpgroup `wg` of `count` makes its share of a block's tables. Then they meet.
TILE void make_tables(table (*left)[PIECES], table (*right)[PIECES], table (*twists)[PIECES], int log_rows, bool plain,
                      bool three, int wg, int count) {
  ROLLED for (int i = wg; i < 12; i += count) {
    int c0 = i % 4 * 16;
    if (i < 4) left_columns(left, log_rows, plain, three, c0);
    else if (i < 8) twist_columns(twists, log_rows, plain, c0);
    else right_columns(right, c0);
  }
  fence_async();
  bar_sync(1, 128 * count);
}

// Powers of two that make numbers of any size fit fp16: `down` brings the largest of a group, `bound`, to at most
// `limit`, `up` back. Where it is infinite, the group counts as zero, and `up` is NaN: so other groups in the tile stay
// as they are.
TILE void scales(rv &down, rv &up, const rv &bound, float limit) {
  map(up, bound, [](float x) { return fminf(floorf(fast_log2(fmaxf(x, 1e-30f))) + 1.f, 126.f); });
  map(down, up, bound, [=](float e, float x) { return x < infinity() ? fast_exp2(-e) * limit : 0.f; });
  map(up, up, bound, [=](float e, float x) { return x < infinity() ? fast_exp2(e) / limit : x - x; });
}
TILE void scale_down(acc &x, const rv &down) { scale_or_clear(x, down); }

// The largest becomes 1: rows that share a complex one then have errors of one size.
TILE void scales_alike(rv &down, rv &up, const rv &bound) {
  map(up, bound, [](float x) { return clamp(x, 1e-30f, 8e37f); });
  map(down, up, bound, [](float y, float x) { return x < infinity() ? fast_rcp(y) : 0.f; });
  map(up, up, bound, [](float y, float x) { return x < infinity() ? y : x - x; });
}
// The same of re and im together, which become smaller. The warpgroup meets.
TILE void scale_both(acc &re, acc &im, rv &up, sv<64> (&rows)[2], int log_rows, float limit) {
  rv bound, other, down;
  row_largest(rows[0], re);
  row_largest(rows[1], im);
  wg_sync();
  group_largest(bound, rows[0], log_rows);
  group_largest(other, rows[1], log_rows);
  map(bound, bound, other, [](float x, float y) { return fmaxf(x, y); });
  scales(down, up, bound, limit);
  scale_down(re, down);
  scale_down(im, down);
}

// The pieces of x in shared tiles; x is lost.
TILE void put_pieces(table (&t)[PIECES], acc &x) {
  if (PIECES == 2) {
    acc head;
    split(head, x);
    store(t[0], head);
    store(t[PIECES - 1], x);
  } else store(t[0], x);
}
// The same in registers.
TILE void take_pieces(operands (&t)[PIECES], acc &x) {
  if (PIECES == 2) {
    acc head;
    split(head, x);
    convert(t[0], head);
    convert(t[PIECES - 1], x);
  } else convert(t[0], x);
}

// d (+)= a b of one piece
template<int A, class S> TILE void product(acc &d, const S (&a)[PIECES], const table (&b)[PIECES]) {
  mma_AB<A>(d, a[0], b[0]);
}
// d (+)= a's and b's heads with the other's lower piece, without the product of the lower ones
template<int A> TILE void lower(acc &d, const table (&a)[PIECES], const table (&b)[PIECES]) {
  mma_AB<A>(d, a[0], b[PIECES - 1]);
  mma_AB<ACC>(d, a[PIECES - 1], b[0]);
}
template<int A> TILE void lower(acc &d, const operands (&a)[PIECES], const table (&b)[PIECES]) {
  mma_AB<A>(d, a[0], b[PIECES - 1]);
  mma_AB<ACC>(d, a[PIECES - 1], b[0]);
}
// d = a b + x y. Tensor cores cut off what they add to the sum's last bit, each time. The lower products come first,
// while the sum is small: so that happens 8 times to the whole sum, not 24 times.
template<class S> TILE void products(acc &d, const S (&a)[PIECES], const table (&b)[PIECES], const S (&x)[PIECES],
                                     const table (&y)[PIECES]) {
  if (PIECES == 2) {
    lower<ZERO>(d, a, b);
    lower<ACC>(d, x, y);
    mma_AB<ACC>(d, a[0], b[0]);
  } else mma_AB<ZERO>(d, a[0], b[0]);
  mma_AB<ACC>(d, x[0], y[0]);
}

// (re + i im) F, or F^H where BACK. f: re, im, -im
template<int BACK> TILE void multiply_right(acc &re, acc &im, const table (&f)[3][PIECES]) {
  operands a[PIECES], b[PIECES];
  take_pieces(a, re);
  take_pieces(b, im);
  mma_fence();
  products(re, a, f[0], b, f[BACK ? 1 : 2]);
  products(im, b, f[0], a, f[BACK ? 2 : 1]);
  mma_commit();
  if constexpr (PIECES == 2) mma_wait<0>(re, im, a[0], b[0], a[PIECES - 1], b[PIECES - 1]);
  else mma_wait<0>(re, im, a[0], b[0]);
}
// (re + i im) T, or T^* where BACK
template<int BACK> TILE void twist(acc &re, acc &im, const table (&t)[2][PIECES]) {
  if constexpr (PIECES == 2)
    each<64>([](int, int, float &x, float &y, float c, float d, float e, float f) {
      c += e;
      d = BACK ? -(d + f) : d + f;
      float z = fused(x, c, -(y * d));
      y = fused(x, d, y * c);
      x = z;
    }, re, im, t[0][0], t[1][0], t[0][PIECES - 1], t[1][PIECES - 1]);
  else
    each<64>([](int, int, float &x, float &y, float c, float d) {
      d = BACK ? -d : d;
      float z = fused(x, c, -(y * d));
      y = fused(x, d, y * c);
      x = z;
    }, re, im, t[0][0], t[1][0]);
}

// The spectrum of x, whose re and im are in shared tiles.
TILE void to_spectrum(acc &re, acc &im, const table (&x)[2][PIECES], const table (&l)[3][PIECES],
                      const table (&f)[3][PIECES], const table (&t)[2][PIECES]) {
  mma_fence();
  products(re, l[0], x[0], l[2], x[1]);
  products(im, l[0], x[1], l[1], x[0]);
  mma_commit();
  mma_wait<0>(re, im);
  twist<0>(re, im, t);
  multiply_right<0>(re, im, f);
}
// The way back, to what L^H comes in front of, in x. Behind it products may begin. free() comes when nothing but the
// store is left: it waits until all have read x.
template<class F> TILE void come_back(table (&x)[2][PIECES], acc &re, acc &im, const table (&f)[3][PIECES],
                                      const table (&t)[2][PIECES], F free) {
  multiply_right<1>(re, im, f);
  twist<1>(re, im, t);
  free();
  put_pieces(x[0], re);
  put_pieces(x[1], im);
  fence_async();
  wg_sync();
  mma_fence();
}
// x times what scaled it down, and a factor of its row
TILE void scale_up(acc &x, const parked &scaled, const rv &factor) {
  rv up;
  load(up, scaled);
  map(up, up, factor, [](float a, float b) { return a * b; });
  map_row(x, up, [](float a, float f) { return a * f; });
}

// ---- F by radix 2. 32 columns are an rt<fp16, 32>, whose arithmetic rounds each time, or an rt<float, 32>.
template<int FLOATS> struct columns { typedef rt<fp16, 32> type; };
template<> struct columns<1> { typedef rt<float, 32> type; };
// f(number, ...) for every place of 64 x 32, the numbers as arithmetic wants them
template<class F, class... X> TILE void every(F f, rt<fp16, 32> &x, X &...rest) { each_half<32>(f, x, rest...); }
template<int N, class F, class... X> TILE void every(F f, rt<float, N> &x, X &...rest) {
  each<N>([=](int, int, auto &&...v) { f(v...); }, x, rest...);
}
TILE half like(half, float x) { return half_of(x); }
TILE float like(float, float x) { return x; }

// (x + i y) (c + i d), or its conjugate
template<int CONJ, class X> TILE void complex_product(X &x, X &y, X c, X d) {
  X z = fused(x, c, -(y * d));
  y = CONJ ? fused(-x, d, -(y * c)) : fused(x, d, y * c);
  x = z;
}
template<int CONJ, class P> TILE void times(P &re, P &im, const P &c, const P &d) {
  every([](auto &x, auto &y, auto f, auto g) { complex_product<CONJ>(x, y, f, g); }, re, im, c, d);
}
// (a, b) = (a + b, a - b)
template<class P> TILE void cross(P &a, P &b) {
  every([](auto &x, auto &y) { auto z = x + y; y = x - y; x = z; }, a, b);
}
TILE void unpack(rt<fp16, 32> &c, rt<fp16, 32> &d, const rt<float, 32> &k, bool conjugate) {
  unpack_halves(c, d, k, conjugate);
}
TILE void unpack(rt<float, 32> &c, rt<float, 32> &d, const rt<float, 32> &k, bool conjugate) {
  float sign = conjugate ? -1.f : 1.f;
  fill(c, 0.f);
  fill(d, 0.f);
  each<32>([=](int, int, float &x, float &y, float w) { x = first_half(w); y = sign * second_half(w); }, c, d, k);
}
// Columns from c0 of re and im, times those of T, or the conjugate of that.
template<int CONJ, class P> TILE void twist_part(P &re, P &im, const table (&t)[2][PIECES], int c0) {
  P c, d;
  load(c, t[0][0], c0);
  load(d, t[1][0], c0);
  times<CONJ>(re, im, c, d);
}
// even = (a + i b) E, odd = (c + i d) O. f: E, O
TILE void half_products(acc &even, acc &odd, rt<fp16, 32> &a, rt<fp16, 32> &b, rt<fp16, 32> &c, rt<fp16, 32> &d,
                        const table (&f)[2][PIECES]) {
  mma_fence();
  mma_AB_rows<ZERO>(even, a, f[0][0], 0);
  mma_AB_rows<ZERO>(odd, c, f[1][0], 0);
  mma_AB_rows<ACC>(even, b, f[0][0], 32);
  mma_AB_rows<ACC>(odd, d, f[1][0], 32);
  mma_commit();
  mma_wait<0>(even, odd, a, b, c, d);
}
TILE void half_products(acc &even, acc &odd, const rt<float, 32> &a, const rt<float, 32> &b, const rt<float, 32> &c,
                        const rt<float, 32> &d, const table (&f)[2][PIECES]) {
  rt<fp16, 32> x, y, z, t;
  convert(x, a);
  convert(y, b);
  convert(z, c);
  convert(t, d);
  half_products(even, odd, x, y, z, t, f);
}
// (a, b, c, d) = re and im of even, of odd
template<class P> TILE void take_parts(P &a, P &b, P &c, P &d, const acc &even, const acc &odd) {
  convert_part(a, even, 0);
  convert_part(b, even, 32);
  convert_part(c, odd, 0);
  convert_part(d, odd, 32);
}
// re and im of columns from c0 of two accumulators, which these are. FOLDED: L's even half and its odd one.
template<int FOLDED, class P> TILE void take_columns(P &re, P &im, const acc &a, const acc &b, int c0) {
  convert_part(re, a, c0);
  convert_part(im, b, c0);
  if (FOLDED) trade_rows(re, im);
}
// From L X, re and im, through K back to what L^H comes in front of: x = ((((L X) T) F) K F^H) T^*. FOLDED: from L's
// even half and its odd one, to conj(x). wait() waits for the products that make them, EARLY: behind the loads of a
// half of T. ask() loads K's even and odd columns. P says which arithmetic. free() comes when nothing but the store is
// left: it waits until all have read x.
template<int FOLDED, int EARLY, class P, class W, class A, class F>
TILE void pass_spectrum(table (&x)[2][PIECES], acc &re, acc &im, const table (&t)[2][PIECES],
                        const table (&f)[2][PIECES], bool conjugate, W wait, A ask, F free) {
  acc &even = re, &odd = im;
  P a, b, c, d, kr, ki, tr, ti;
  rt<float, 32> k_even, k_odd;
  if (EARLY) {
    load(tr, t[0][0], 0);
    load(ti, t[1][0], 0);
  }
  wait();
  take_columns<FOLDED>(a, b, re, im, 0);
  if (EARLY) times<0>(a, b, tr, ti);
  else twist_part<0>(a, b, t, 0);
  take_columns<FOLDED>(c, d, re, im, 32);
  twist_part<0>(c, d, t, 32);
  cross(a, c);
  cross(b, d);
  half_products(even, odd, a, b, c, d, f);
  take_parts(a, b, c, d, even, odd);
  ask(k_even, k_odd);
  unpack(kr, ki, k_even, conjugate);
  times<1>(a, b, kr, ki);
  unpack(kr, ki, k_odd, conjugate);
  times<1>(c, d, kr, ki);
  half_products(even, odd, a, b, c, d, f);
  take_parts(a, b, c, d, even, odd);
  cross(a, c);
  cross(b, d);
  twist_part<!FOLDED>(a, b, t, 0);
  twist_part<!FOLDED>(c, d, t, 32);
  if (FOLDED) {
    trade_rows(a, b);
    trade_rows(c, d);
  }
  free();
  store(x[0][0], a, 0);
  store(x[1][0], b, 0);
  store(x[0][0], c, 32);
  store(x[1][0], d, 32);
}

// The square root of a row's length
TILE float root_of_length(int log_rows) { return (log_rows & 1 ? 11.3137085f : 8.f) * (float)(1 << log_rows / 2); }

// re, im += the sums of re and im of `count` tasks, in their order
TILE void add_parts(acc &re, acc &im, const float *part, int count) {
  ROLLED for (int i = 0; i < count; i++, part += FFT_UNIT_FLOATS) {
    acc x, y;
    load_acc(x, part);
    load_acc(y, part + FFT_BLOCK);
    each<64>([](int, int, float &a, float &b, float c, float d) { a += c; b += d; }, re, im, x, y);
  }
}

TILE int smaller(int a, int b) { return a < b ? a : b; }
TILE int larger(int a, int b) { return a > b ? a : b; }

// A number of global memory
TILE float number_at(const void *p, int64_t i, int type) {
  if (type == FFT_FP32) return ((const float *)p)[i];
  if (type == FFT_BF16) return number(((const bf16 *)p)[i]);
  return number(((const fp16 *)p)[i]);
}
TILE void set_number_at(void *p, int64_t i, int type, float x) {
  if (type == FFT_FP32) ((float *)p)[i] = x;
  else if (type == FFT_BF16) set_number(((bf16 *)p)[i], x);
  else set_number(((fp16 *)p)[i], x);
}
// Element n of the gradient of a filter, and of what was added to its first element
TILE void put_gradient(const fft_sums_params &p, int head, int n, float x) {
  if (p.out && n < p.length) set_number_at(p.out, (int64_t)head * p.out_head + n, p.type, x);
  if (p.first && n == 0) set_number_at(p.first, head, p.first_type, x);
}
