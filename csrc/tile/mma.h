// Matrix products of a warpgroup, 16-bit operands, fp32 accumulation. Contracts; bodies in sm90/ and cpu/.
// Of e4m3 there are mma_ABt of two shared tiles and mma_AB with a tt; sm_90a keeps some 14 bits of their sums.
// Products are asynchronous: issue, mma_commit(), mma_wait. Until the wait that names them, accumulators and register
// operands must not be touched. mma_fence() comes before the first product after every barrier wait, and after work on
// register tiles; nothing writes a register tile between the fence and the product. An accumulator starts with ZERO
// where its first product is known at compile time, else with fill() before that product's fence.
//   letters: A and B as stored, At / Bt the stored tile is the transpose
#pragma once
// a b^T
template<int A, typename T, int N, int K>
TILE void mma_ABt(rt<float, N> &d, const st<T, 64, K> &a, const st<T, N, K> &b);
template<int A, typename T, int N, int K> TILE void mma_ABt(rt<float, N> &d, const rt<T, K> &a, const st<T, N, K> &b);
// a b
template<int A, typename T, int N, int K>
TILE void mma_AB(rt<float, N> &d, const st<T, 64, K> &a, const st<T, K, N> &b);
template<int A, typename T, int N, int K> TILE void mma_AB(rt<float, N> &d, const rt<T, K> &a, const st<T, K, N> &b);
template<int A, typename T, int N, int K> TILE void mma_AB(rt<float, N> &d, const rt<T, K> &a, const tt<T, K, N> &b);
// N rows of b from r0 (both multiples of 32)
template<int A, typename T, int N, int K, int R>
TILE void mma_ABt_rows(rt<float, N> &d, const st<T, 64, K> &a, const st<T, R, K> &b, int r0);
// N columns of b from cb (a multiple of 64)
template<int A, typename T, int N, int K, int W>
TILE void mma_AB_cols(rt<float, N> &d, const st<T, 64, K> &a, const st<T, K, W> &b, int cb);
template<int A, typename T, int N, int K, int W>
TILE void mma_AB_cols(rt<float, N> &d, const rt<T, K> &a, const st<T, K, W> &b, int cb);
// 64 columns of a from ca (a multiple of 64), N columns of b from cb (a multiple of 64, or of 32 where N is 32)
// a^T b
template<int A, typename T, int N, int K, int WA, int WB>
TILE void mma_AtB(rt<float, N> &d, const st<T, K, WA> &a, int ca, const st<T, K, WB> &b, int cb);
// a^T b^T
template<int A, typename T, int N, int K>
TILE void mma_AtBt(rt<float, N> &d, const st<T, K, 64> &a, const st<T, N, K> &b);
// N rows of b from r0 (both multiples of 16)
template<int A, typename T, int N, int K, int R>
TILE void mma_AtBt_rows(rt<float, N> &d, const st<T, K, 64> &a, const st<T, R, K> &b, int r0);
// K columns of b from column k0 (a multiple of 64): one panel of a longer product
template<int A, typename T, int N, int K, int W>
TILE void mma_ABt_part(rt<float, N> &d, const rt<T, K> &a, const st<T, N, W> &b, int k0);
// K rows of b from row r0 (both multiples of 32)
template<int A, typename T, int N, int K, int R>
TILE void mma_AB_rows(rt<float, N> &d, const rt<T, K> &a, const st<T, R, N> &b, int r0);
TILE void mma_fence();
TILE void mma_commit();
// Waits until at most G later groups are in flight, and names every accumulator and register operand that this frees.
// ptxas moves the wait up, above independent arithmetic, to the last branch before it. A barrier wait between the two
// keeps under the product what shall run there.
template<int G, class... Tile> TILE void mma_wait(Tile &...tiles);
// The product that two constants choose: a is stored transposed where TA, b where TB.
template<int A, int TA, int TB, typename T, int N, int RA, int CA, int RB, int CB>
TILE void mma(rt<float, N> &d, const st<T, RA, CA> &a, const st<T, RB, CB> &b) {
  if constexpr (TA && TB) mma_AtBt<A>(d, a, b);
  else if constexpr (TA) mma_AtB<A>(d, a, 0, b, 0);
  else if constexpr (TB) mma_ABt<A>(d, a, b);
  else mma_AB<A>(d, a, b);
}
