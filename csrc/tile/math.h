// Arithmetic on register tiles (warpgroup). f is a lambda on floats; row and col are absolute inside the tile.
// Contracts; bodies in sm90/, cpu/.
#pragma once
// scalars; the fast_ ones are approximate: relative error below 2^-22, exact at 0 and infinities, NaN stays NaN,
// subnormals may become 0
TILE float fast_exp2(float x);
TILE float fast_log2(float x);
TILE float fast_rcp(float x);
TILE float fast_rsqrt(float x);                         // 1 / sqrt(x): infinity at 0, NaN below
TILE float fused(float a, float b, float c);            // a * b + c, one rounding
TILE float clamp(float x, float low, float high);       // NaN stays NaN
TILE float infinity();
// Beside these a lambda may use the C library's functions of floats, with the precision that each side's has: sqrtf,
// expf, logf, tanhf, erff, sinf, cosf, powf, fabsf, fminf, fmaxf, floorf, rintf. On the CPU most of them keep a loop
// from being vectorised. CUDA's own (rsqrtf, __expf) do not compile there.

// tanh x = x P(x^2) / Q(x^2), fitted for |x| <= 9, from where on it is 1 in float32. The relative error is below 2^-21
// however small x is, which 1 - 2 / (1 + exp 2x) and the hardware's tanh.approx, of 11 bits, are not.
TILE float fast_tanh(float x) {
  float y = clamp(x, -9.f, 9.f), z = y * y;
  float q = fused(fused(fused(fused(7.77655714e-07f, z, 0.000328563445f), z, 0.0258769821f), z, 0.467143416f), z, 1.f);
  y *= fast_rcp(q);
  return y *
         fused(fused(fused(fused(1.33546587e-08f, z, 2.06090808e-05f), z, 0.00349558797f), z, 0.133810252f), z, 1.f);
}

template<int N> TILE void fill(rt<float, N> &t, float x);
TILE void fill(rv &v, float x);
TILE void fill(rsum &v, float x);
template<int N> TILE void clear(csum<N> &v);
template<int N, class F> TILE void map(rt<float, N> &t, F f);                                              // t = f(t)
// t = f(t, u)
template<int N, class F> TILE void map(rt<float, N> &t, const rt<float, N> &u, F f);
// t = f(t, v[row])
template<int N, class F> TILE void map_row(rt<float, N> &t, const rv &v, F f);
// d = f(t, v[row])
template<int N, class F> TILE void map_row(rt<float, N> &d, const rt<float, N> &t, const rv &v, F f);
// t *= f[row]; costs little where f is all ones
template<int N> TILE void scale_rows(rt<float, N> &t, const rv &f);
// t *= f[row]; where f is 0 the row becomes 0, whatever it holds. That costs little where no f is
template<int N> TILE void scale_or_clear(rt<float, N> &t, const rv &f);
// t = f(t, v[col])
template<int N, class F> TILE void map_col(rt<float, N> &t, const cv<N> &v, F f);
// the vector read in place
template<int N, class F> TILE void map_col(rt<float, N> &t, const sv<N> &v, F f);
// t = f(t, u, v[col])
template<int N, class F> TILE void map_col(rt<float, N> &t, const rt<float, N> &u, const cv<N> &v, F f);
template<int N, class F> TILE void map_col(rt<float, N> &t, const rt<float, N> &u, const sv<N> &v, F f);
// u: 16-bit
template<typename T, int N, class F> TILE void map_col(rt<float, N> &t, const rt<T, N> &u, const sv<N> &v, F f);
// 16-bit tile
template<typename T, int N, class F> TILE void map_col(rt<T, N> &t, const sv<N> &v, F f);
// t = f(t, row, col)
template<int N, class F> TILE void map_rc(rt<float, N> &t, F f);
// t = f(t, v[row], row, col)
template<int N, class F> TILE void map_rc(rt<float, N> &t, const rv &v, F f);
// t = f(t, u, v[col], row, col)
template<int N, class F> TILE void map_rc(rt<float, N> &t, const rt<float, N> &u, const sv<N> &v, F f);
// t = f(t, u[row], v[col], row, col)
template<int N, class F> TILE void map_rc(rt<float, N> &t, const rv &u, const sv<N> &v, F f);
// f(row, col, ...) for every place of 64 x N, N a multiple of 16, with what each further argument has there. A register
// tile, an rsum's row and a csum's column may be changed. Of an rv comes the row's value, of an sv<N> the column's, of
// a shared tile, 64 rows of 16 bits (fp32 on the CPU), the element.
template<int N, class F, class... X> TILE void each(F f, X &...x);
// The same with a function each for blocks of 16 x 16 right of the diagonal, on it and left of it.
template<int N, class F, class D, class G, class... X>
TILE void each_of_triangles(F right, D diagonal, G left, X &...x);
// map_row_pairs calls f(a, b, row, col) once for each row % 16 < 8; f may change a = t[row][col] and b = t[row +
// 8][col]. map_col_pairs does so for each col % 16 < 8, with b = t[row][col + 8].
template<int N, class F> TILE void map_row_pairs(rt<float, N> &t, F f);
template<int N, class F> TILE void map_col_pairs(rt<float, N> &t, F f);
// t = x where col > row + diagonal
template<int N> TILE void tril(rt<float, N> &t, int diagonal, float x);
// t = x where col < row + diagonal
template<int N> TILE void triu(rt<float, N> &t, int diagonal, float x);
template<class F> TILE void map_rows(rv &d, F f);                                                          // d = f(row)
template<class F> TILE void map(rv &d, const rv &a, F f);                                                  // d = f(a)
// d = f(a, b)
template<class F> TILE void map(rv &d, const rv &a, const rv &b, F f);
// m = max(m, row maxima). NaN may be lost here; exp2 keeps it
template<int N> TILE void row_max(rv &m, const rt<float, N> &t);
template<int N> TILE void row_sum_add(rsum &l, const rt<float, N> &t);     // l += row sums
template<int N> TILE void row_sum(rsum &l, const rt<float, N> &t);         // l = row sums
template<int N> TILE void row_dot_add(rsum &l, const rt<float, N> &x, const rt<float, N> &y);
TILE void scale(rsum &l, const rv &f);
TILE void add(rsum &l, const rsum &m);
// warp: some row's sum, or one thread's part of it, is above x or NaN
TILE bool exceeds(const rsum &l, float x);
// With a barrier of the warpgroup: of every row, of each thread's part of it, the largest value is from `least` to
// `most`, or 0. NaN may be lost
template<int N> TILE bool rows_within(const rt<float, N> &t, float least, float most);
// warp: some element is 448 or NaN; none is negative
template<int N> TILE bool saturated(const rt<e4m3, N> &t);
TILE void reduce(rv &v, const rsum &l);
// rounds to nearest even; e4m3: at most +-448
template<typename T, int N> TILE void convert(rt<T, N> &d, const rt<float, N> &s);
// K columns from c0; T may be float
template<typename T, int K, int N> TILE void convert_part(rt<T, K> &d, const rt<float, N> &s, int c0);
// s = f(t, u[row], v[col], row, col), rounded, in one pass (no second register tile)
template<typename T, int N, class F>
TILE void store_rc(st<T, 64, N> &s, const rt<float, N> &t, const rv &u, const sv<N> &v, F f);
// lower triangle: f(t, u[row], v[col]) where col < row, the same plus diag where col == row, 0 above
template<typename T, int N, class F>
TILE void store_tril(st<T, 64, N> &s, const rt<float, N> &t, const rv &u, const sv<N> &v, float diag, F f);
// upper triangle: where col > row, and 0 below
template<typename T, int N, class F>
TILE void store_triu(st<T, 64, N> &s, const rt<float, N> &t, const rv &u, const sv<N> &v, float diag, F f);
