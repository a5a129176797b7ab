// Bodies of tile/mma.h: one micro kernel over packed operands.
//
// A word is what one lane multiplies in one step: a float, or, for bf16 where the CPU has dot products, a pair of
// neighbours along k. The second operand is packed into panels of PW columns, k words deep: word (k, n) at panel n /
// PW, row k, column n % PW. The first operand is read word by word with any strides: as stored, or from panels where
// its tile is the transpose. Packed forms of shared tiles are kept until the tile is written again, so that all
// warpgroups of a block, and all key blocks of a query tile, share them.
#pragma once
enum pack_kind { PACK_ROWS, PACK_COLS, PACK_FLAT };   // k runs along the tile's rows; along its columns; row-major
                                                      // floats

template<typename T> struct word_of { typedef float type; enum { ELEMENTS = 1 }; };
#if defined(__AVX512BF16__)
template<> struct word_of<bf16> { typedef uint32_t type; enum { ELEMENTS = 2 }; };
#endif
enum { PW = 2 * VW };
// Rows of the micro kernel: with 2 vectors a row, one word and a row of b they fill the registers. Panels are a
// multiple of PANEL_ROWS.
enum { FLAT_ROWS = VW == 16 ? 8 : 6, PANEL_ROWS = VW == 16 ? 8 : 4 };

// ---- micro kernel
TILE vf multiply_add(float a, vf b, vf c) { return a * b + c; }
#if defined(__AVX512BF16__)
TILE vf multiply_add(uint32_t a, vf b, vf c) {
  return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
}
#endif
// c[MR][V * VW] (+)= a[MR][k] b[k][V * VW]; AR, AK: strides of a between rows and between k. A panel holds PANEL
// columns. What is added to c is summed first: c, which may be the sum of a long sequence, is rounded once.
template<int A, int MR, int V, int PANEL, int AR, int AK, class Word>
TILE void micro(float *c, int ldc, const Word *a, const Word *b, int k) {
  vf x[MR][V];
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) x[r][v] = vf{};
  for (; k; k--, a += AK, b += PANEL) {
    vf y[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) y[v] = vload(b + v * VW);
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) x[r][v] = multiply_add(a[r * AR], y[v], x[r][v]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) vstore(c + r * ldc + v * VW, A ? vload(c + r * ldc + v * VW) + x[r][v] : x[r][v]);
}
// The first operand: as stored (64 rows of LD words), or 64 columns of panels that are `depth` words deep.
template<class Word, int LD> struct flat_a {
  enum { ROWS = FLAT_ROWS };
  const Word *p;
};
template<class Word> struct panel_a {
  enum { ROWS = PANEL_ROWS };
  const Word *p;
  int depth;
};
template<int A, int MR, int V, int PANEL, class Word, int LD>
TILE void micro_at(float *c, int ldc, flat_a<Word, LD> a, int i, const Word *b, int k) {
  micro<A, MR, V, PANEL, LD, 1>(c, ldc, a.p + i * LD, b, k);
}
template<int A, int MR, int V, int PANEL, class Word>
TILE void micro_at(float *c, int ldc, panel_a<Word> a, int i, const Word *b, int k) {
  micro<A, MR, V, PANEL, 1, PW>(c, ldc, a.p + i / PW * PW * a.depth + i % PW, b, k);
}
// All 64 rows of V vectors of columns
template<int A, int V, int PANEL, class First, class Word>
TILE void product_columns(float *c, int ldc, First a, const Word *b, int k) {
  enum { REST = 64 % First::ROWS };
  for (int i = 0; i + First::ROWS <= 64; i += First::ROWS)
    micro_at<A, First::ROWS, V, PANEL>(c + i * ldc, ldc, a, i, b, k);
  if constexpr (REST > 0) micro_at<A, REST, V, PANEL>(c + (64 - REST) * ldc, ldc, a, 64 - REST, b, k);
}
// d (+)= a b, k words deep; consecutive panels of b are `depth` words deep, LAST is the width of the last one
template<int A, int LAST, int N, class First, class Word>
__attribute__((noinline)) static void product(rt<float, N> &d, First a, const Word *b, int depth, int k) {
  PRODUCT_RULES(N);
  int n = 0;
  for (; n + PW <= N; n += PW, b += depth * PW) product_columns<A, 2, PW>(&d.d[0][n], N, a, b, k);
  if (N % PW) product_columns<A, 1, LAST>(&d.d[0][n], N, a, b, k);
}

// ---- packing
// x[i][j] <-> x[j][i]: log2(VW) rounds of exchanges between rows i and i + h
template<int H> TILE void transpose_round(vf (&x)[VW]) {
  vu lo, hi;
#pragma GCC unroll 16
  for (int j = 0; j < VW; j++) {
    lo[j] = (uint32_t)(j & H ? j - H + VW : j);
    hi[j] = (uint32_t)(j & H ? j + VW : j + H);
  }
#pragma GCC unroll 16
  for (int i = 0; i < VW; i++) {
    if (i & H) continue;
    vf a = x[i], b = x[i + H];
    x[i] = __builtin_shuffle(a, b, lo);
    x[i + H] = __builtin_shuffle(a, b, hi);
  }
}
TILE void transpose(vf (&x)[VW]) {
  transpose_round<1>(x);
  transpose_round<2>(x);
  if constexpr (VW > 4) transpose_round<4>(x);
  if constexpr (VW > 8) transpose_round<8>(x);
}
template<typename T> TILE vf load_words(const T *s) {
  alignas(64) float row[VW];
  if constexpr (word_of<T>::ELEMENTS == 2 || sizeof(T) == 4) return vload(s);
  widen_row(row, s, VW);
  return vload(row);
}
// R x C tile, k along C. R is a multiple of VW: the last panel may be half as wide.
template<typename T, int R, int C, class Word> __attribute__((noinline)) static void pack_cols(Word *d, const T *s) {
  enum { K = C / word_of<T>::ELEMENTS };
  for (int n = 0; n < R; n += VW)
    for (int k = 0; k < K; k += VW) {
      vf x[VW];
#pragma GCC unroll 16
      for (int j = 0; j < VW; j++) x[j] = load_words(s + (n + j) * C + k * word_of<T>::ELEMENTS);
      transpose(x);
      const int panel = n / PW * PW, width = R - panel < PW ? (int)VW : (int)PW;
      Word *block = d + panel * K + k * width + n % PW;
#pragma GCC unroll 16
      for (int j = 0; j < VW; j++) vstore(block + j * width, x[j]);
    }
}
// R x C tile, k along R; C is a multiple of PW
template<typename T, int R, int C> __attribute__((noinline)) static void pack_rows(float *d, const T *s) {
  for (int n = 0; n < C; n += PW)
    for (int k = 0; k < R; k++, d += PW) widen_row(d, s + k * C + n, PW);
}
template<typename T, int R, int C> __attribute__((noinline)) static void pack_rows(uint32_t *d, const T *s) {
  for (int n = 0; n < C; n += PW)
    for (int k = 0; k < R; k += 2, d += PW) {
      const T *even = s + k * C + n, *odd = even + C;
#pragma GCC ivdep
      for (int j = 0; j < PW; j++) d[j] = even[j].u | (uint32_t)odd[j].u << 16;
    }
}
template<enum pack_kind KIND, typename T, int R, int C>
TILE const typename word_of<T>::type *packed(const st<T, R, C> &t) {
  typedef typename word_of<T>::type word;
  if constexpr (KIND == PACK_FLAT && (word_of<T>::ELEMENTS == 2 || sizeof(T) == 4)) return (const word *)t.d;
  machine &m = *mg_machine;
  size_t offset = (size_t)((const char *)&t - m.shared), granule = offset / GRANULE;
  word *d = (word *)(m.packed[KIND] + PACK_GROWTH * offset);
  uint64_t tag = (uint64_t)m.written[granule] << 32 | R << 16 | C;
  if (KEEPS_PACKED && m.packed_tag[KIND][granule] == tag) return d;
  m.packed_tag[KIND][granule] = tag;
  if constexpr (KIND == PACK_COLS) pack_cols<T, R, C>(d, t.d);
  else if constexpr (KIND == PACK_ROWS) pack_rows<T, R, C>(d, t.d);
  else widen_row((float *)d, t.d, R * C);
  return d;
}
template<typename T, int K>
TILE flat_a<typename word_of<T>::type, K / word_of<T>::ELEMENTS> operand(const st<T, 64, K> &a) {
  return {packed<PACK_FLAT>(a)};
}
// A register operand that needs conversion is converted to the floats behind it for this product only.
template<typename T, int K>
TILE flat_a<typename word_of<T>::type, K / word_of<T>::ELEMENTS> operand(const rt<T, K> &a, float *scratch) {
  if constexpr (word_of<T>::ELEMENTS == 2 || sizeof(T) == 4) return {(const typename word_of<T>::type *)a.d[0]};
  else {
    widen_row(scratch, a.d[0], 64 * K);
    return {scratch};
  }
}
template<typename T, int K> constexpr int scratch_floats() {
  return word_of<T>::ELEMENTS == 2 || sizeof(T) == 4 ? 1 : 64 * K;
}

// ---- contract
// r0 is a multiple of the packed panel's width, see pack_cols.
template<int A, typename T, int N, int K, int R>
TILE void mma_ABt_rows(rt<float, N> &d, const st<T, 64, K> &a, const st<T, R, K> &b, int r0) {
  enum { DEPTH = K / word_of<T>::ELEMENTS };
  static_assert(N == R || N % 32 == 0, "a window consists of whole panels");
  begins_at(b, r0, 32);
  issue_product<A>(d, whole(a), part(b, r0, N, 0, K),
                   [=, &d, &a, &b] { product<A, VW>(d, operand(a), packed<PACK_COLS>(b) + r0 * DEPTH, DEPTH, DEPTH); });
}
template<int A, typename T, int N, int K>
TILE void mma_ABt(rt<float, N> &d, const st<T, 64, K> &a, const st<T, N, K> &b) {
  mma_ABt_rows<A>(d, a, b, 0);
}
template<int A, typename T, int N, int K, int W>
TILE void mma_ABt_part(rt<float, N> &d, const rt<T, K> &a, const st<T, N, W> &b, int k0) {
  enum { E = word_of<T>::ELEMENTS };
  begins_at(b, k0, 64);
  issue_product<A>(d, a, part(b, 0, N, k0, K), [=, &d, &a, &b] {
    alignas(64) float scratch[scratch_floats<T, K>()];
    product<A, VW>(d, operand(a, scratch), packed<PACK_COLS>(b) + k0 / E * PW, W / E, K / E);
  });
}
template<int A, typename T, int N, int K> TILE void mma_ABt(rt<float, N> &d, const rt<T, K> &a, const st<T, N, K> &b) {
  mma_ABt_part<A>(d, a, b, 0);
}
template<int A, typename T, int N, int K, int W>
TILE void mma_AB_cols(rt<float, N> &d, const st<T, 64, K> &a, const st<T, K, W> &b, int cb) {
  enum { DEPTH = K / word_of<T>::ELEMENTS };
  begins_at(b, cb, 64);
  issue_product<A>(d, whole(a), part(b, 0, K, cb, N),
                   [=, &d, &a, &b] { product<A, PW>(d, operand(a), packed<PACK_ROWS>(b) + cb * DEPTH, DEPTH, DEPTH); });
}
template<int A, typename T, int N, int K, int W>
TILE void mma_AB_cols(rt<float, N> &d, const rt<T, K> &a, const st<T, K, W> &b, int cb) {
  enum { DEPTH = K / word_of<T>::ELEMENTS };
  begins_at(b, cb, 64);
  issue_product<A>(d, a, part(b, 0, K, cb, N), [=, &d, &a, &b] {
    alignas(64) float scratch[scratch_floats<T, K>()];
    product<A, PW>(d, operand(a, scratch), packed<PACK_ROWS>(b) + cb * DEPTH, DEPTH, DEPTH);
  });
}
template<int A, typename T, int N, int K>
TILE void mma_AB(rt<float, N> &d, const st<T, 64, K> &a, const st<T, K, N> &b) {
  mma_AB_cols<A>(d, a, b, 0);
}
template<int A, typename T, int N, int K, int R>
TILE void mma_AB_rows(rt<float, N> &d, const rt<T, K> &a, const st<T, R, N> &b, int r0) {
  enum { E = word_of<T>::ELEMENTS };
  begins_at(b, r0, 32);
  issue_product<A>(d, a, part(b, r0, K, 0, N), [=, &d, &a, &b] {
    alignas(64) float scratch[scratch_floats<T, K>()];
    product<A, PW>(d, operand(a, scratch), packed<PACK_ROWS>(b) + r0 / E * PW, R / E, K / E);
  });
}
template<int A, typename T, int N, int K> TILE void mma_AB(rt<float, N> &d, const rt<T, K> &a, const st<T, K, N> &b) {
  mma_AB_rows<A>(d, a, b, 0);
}
template<int A, typename T, int N, int K> TILE void mma_AB(rt<float, N> &d, const rt<T, K> &a, const tt<T, K, N> &b) {
  enum { DEPTH = K / word_of<T>::ELEMENTS };
  issue_product<A>(d, a, whole(b), [&d, &a, &b] {
    alignas(64) float scratch[scratch_floats<T, K>()];
    product<A, VW>(d, operand(a, scratch), packed<PACK_COLS>(b.t), DEPTH, DEPTH);
  });
}
template<int A, typename T, int N, int K, int WA, int WB>
TILE void mma_AtB(rt<float, N> &d, const st<T, K, WA> &a, int ca, const st<T, K, WB> &b, int cb) {
  typedef typename word_of<T>::type word;
  enum { DEPTH = K / word_of<T>::ELEMENTS };
  begins_at(a, ca, 64);
  begins_at(b, cb, N == 32 ? 32 : 64);
  issue_product<A>(d, part(a, 0, K, ca, 64), part(b, 0, K, cb, N), [=, &d, &a, &b] {
    panel_a<word> first = {packed<PACK_ROWS>(a) + ca * DEPTH, DEPTH};
    product<A, PW>(d, first, packed<PACK_ROWS>(b) + cb * DEPTH, DEPTH, DEPTH);
  });
}
// From r0 on may be half of a packed panel.
template<int A, typename T, int N, int K, int R>
TILE void mma_AtBt_rows(rt<float, N> &d, const st<T, K, 64> &a, const st<T, R, K> &b, int r0) {
  typedef typename word_of<T>::type word;
  enum { DEPTH = K / word_of<T>::ELEMENTS };
  static_assert(N == R || R % PW == 0, "a window lies in whole panels");
  begins_at(b, r0, 16);
  issue_product<A>(d, whole(a), part(b, r0, N, 0, K), [=, &d, &a, &b] {
    panel_a<word> first = {packed<PACK_ROWS>(a), DEPTH};
    product<A, N == R ? (int)VW : (int)PW>(d, first, packed<PACK_COLS>(b) + r0 / PW * PW * DEPTH + r0 % PW, DEPTH, DEPTH);
  });
}
template<int A, typename T, int N, int K>
TILE void mma_AtBt(rt<float, N> &d, const st<T, K, 64> &a, const st<T, N, K> &b) {
  mma_AtBt_rows<A>(d, a, b, 0);
}
