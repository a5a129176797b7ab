// Bodies of tile/triangle.h.
#pragma once
template<typename T> struct alignas(1024) tri { T d[10][2][16 * 16]; };
// Of float, hi is all of x.
template<typename T> TILE void split_row(T *hi, T *lo, const float *x, int n) {
  alignas(64) float rounded[16 * 16];
  narrow_row(hi, x, n);
  if constexpr (sizeof(T) == 4) return;
  widen_row(rounded, hi, n);
  for (int i = 0; i < n; i++) rounded[i] = x[i] - rounded[i];
  narrow_row(lo, rounded, n);
}
// V (I + R) = the block at row r and column b of t, R the strict upper triangle at b, b
TILE void solve_rows(float (&v)[8][8], const rt<float, 64> &t, int r, int b) {
  for (int i = 0; i < 8; i++)
    for (int c = 0; c < 8; c++) v[i][c] = r + i < b + c ? t.d[r + i][b + c] : 0.f;
  for (int i = 0; i < 8; i++)
    for (int k = 0; k < 7; k++)
      for (int c = k + 1; c < 8; c++) v[i][c] = fused(-v[i][k], t.d[b + k][b + c], v[i][c]);
}
// The inverse of the block of 16 x 16 at b, b
template<typename T> TILE void invert_corners(rt<float, 64> &x, const rt<float, 64> &t, int b) {
  float first[8][8], second[8][8], corner[8][8];
  T part[8], rest[8];
  solve_rows(first, t, b, b);
  solve_rows(second, t, b + 8, b + 8);
  solve_rows(corner, t, b, b + 8);
  alignas(64) float hi[2][8][8], lo[2][8][8] = {};
  for (int i = 0; i < 16; i++) {
    split_row(part, rest, i < 8 ? first[i] : corner[i - 8], 8);
    widen_row(hi[i / 8][i % 8], part, 8);
    if (sizeof(T) == 2) widen_row(lo[i / 8][i % 8], rest, 8);
  }
  for (int i = 0; i < 8; i++)
    for (int c = 0; c < 8; c++) {
      float sum = -corner[i][c];
      for (int k = 0; k < 8; k++) {
        sum = fused(hi[0][i][k], hi[1][k][c], sum);
        if (sizeof(T) == 2) sum = fused(hi[0][i][k], lo[1][k][c], fused(lo[0][i][k], hi[1][k][c], sum));
      }
      x.d[b + i][b + 8 + c] = sum;
      x.d[b + i][b + c] -= first[i][c];
      x.d[b + 8 + i][b + 8 + c] -= second[i][c];
    }
}
template<typename T> TILE void put_row(tri<T> &s, int u, int v, int r, const float *x) {
  T(&to)[2][256] = s.d[block_of(u, v)];
  split_row(to[0] + 16 * r, to[1] + 16 * r, x, 16);
}
template<inverse I, typename T> TILE void invert_diagonal(rt<float, 64> &x, tri<T> &s, const rt<float, 64> &t) {
  reads(t);
  writes(x);
  writes_shared(s, whole(s));
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < 64; c++) x.d[r][c] = r == c ? 1.f : I == IN_HALVES && r < 32 && c >= 32 ? -t.d[r][c] : 0.f;
  for (int b = 0; b < 64; b += 16) invert_corners<T>(x, t, b);
  for (int v = 1; v < 4; v++)
    for (int u = 0; u <= v; u++)
      for (int r = 0; r < 16; r++) put_row(s, u, v, r, (u == v ? x : t).d[16 * u + r] + 16 * v);
}
// d (+)= a block; its rows are 64 floats apart.
template<int A, typename T> TILE void add_product(float *d, const float *a, const T (&b)[2][256]) {
  alignas(64) float b_hi[256], b_lo[256] = {}, row[16];
  T part[16], rest[16];
  widen_row(b_hi, b[0], 256);
  if (sizeof(T) == 2) widen_row(b_lo, b[1], 256);
  for (int i = 0; i < 16; i++, d += 64, a += 64) {
    alignas(64) float a_hi[16], a_lo[16] = {};
    split_row(part, rest, a, 16);
    widen_row(a_hi, part, 16);
    if (sizeof(T) == 2) widen_row(a_lo, rest, 16);
    for (int c = 0; c < 16; c++) row[c] = A ? d[c] : 0.f;
    for (int k = 0; k < 16; k++)
#pragma GCC ivdep
      for (int c = 0; c < 16; c++) {
        row[c] = fused(a_hi[k], b_hi[16 * k + c], row[c]);
        if (sizeof(T) == 2) row[c] = fused(a_hi[k], b_lo[16 * k + c], fused(a_lo[k], b_hi[16 * k + c], row[c]));
      }
    memcpy(d, row, sizeof row);
  }
}
// n columns of 16 rows
TILE void negate(float *x, int n) {
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < n; c++) x[64 * r + c] = -x[64 * r + c];
}
template<inverse I, typename T> TILE void invert_pairs(rt<float, 64> &x, tri<T> &s) {
  reads_shared({s.d[1], 1, 0, (int)sizeof s.d - (int)sizeof s.d[0]});
  if (I == IN_ONE) writes_shared(s, {s.d[0], 1, 0, (int)sizeof s.d[0]});
  changes(x);
  for (int w = 0; w < 4; w += 2) {
    alignas(64) float sum[16][64];
    float *to = x.d[16 * w] + 16 * (w + 1);
    add_product<ZERO>(sum[0], x.d[16 * w] + 16 * w, s.d[block_of(w, w + 1)]);
    add_product<ZERO>(to, sum[0], s.d[block_of(w + 1, w + 1)]);
    negate(to, 16);
    for (int r = 0; r < 16 && w == 2 && I == IN_ONE; r++) put_row(s, 0, 0, r, to + 64 * r);
  }
}
template<typename T> TILE void invert_rest(rt<float, 64> &x, const tri<T> &s) {
  reads_shared(whole(s));
  changes(x);
  for (int w = 0; w < 2; w++) {
    alignas(64) float sum[16][64] = {};
    for (int v = 2; v < 4; v++)
      for (int u = w; u < 2; u++) add_product<ACC>(sum[0] + 16 * v, x.d[16 * w] + 16 * u, s.d[block_of(u, v)]);
    float *to = x.d[16 * w];
    add_product<ZERO>(to + 32, sum[0] + 32, s.d[block_of(2, 2)]);
    add_product<ZERO>(to + 48, sum[0] + 32, s.d[block_of(0, 0)]);
    add_product<ACC>(to + 48, sum[0] + 48, s.d[block_of(3, 3)]);
    negate(to + 32, 32);
  }
}
template<inverse I, typename T> TILE void store_carried(st<T, 64, 64> &d, const rt<float, 64> &t) {
  reads(t);
  writes_shared(d, whole(d));
  for (int r = 0; r < 64; r++) {
    float left[4] = {}, y[2];
    for (int c = 0; c < 64; c += 2) {
      T *to = d.d + 64 * r + c;
      float &from = left[c / 2 % 4], x[2] = {carried(t.d[r][c], from), t.d[r][c + 1]};
      narrow_row(to, x, 2);
      widen_row(y, to, 2);
      const bool ends = c >= 56 || (I == IN_HALVES && c >= 24 && c < 32);
      if (ends) {                         // the row's last two of these
        x[1] = carried(x[1], x[0] - y[0]);
        narrow_row(to, x, 2);
      }
      from = ends ? 0.f : x[0] - y[0] + (x[1] - y[1]);
    }
  }
}
