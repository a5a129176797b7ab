// Bodies of tile/dots.h on the CPU, and for the checker.
#pragma once
TILE float sum_of_products(const float *a, const float *b, int n) {
  float parts[SUM_PARTS] = {0}, x = 0.f;
  for (int first = 0; first < n; first += SUM_PARTS)
#pragma GCC ivdep
    for (int i = 0; i < SUM_PARTS; i++) parts[i] += a[first + i] * b[first + i];
  for (float part : parts) x += part;
  return x;
}
template<int C> TILE float dot(const mc<C> &a, const mc<C> &b) {
  called_by<WARPGROUP>();
  reads(a, b);
  return sum_of_products(a.d, b.d, C);
}
template<int R> TILE void store_dot(sv<4> &d, const mr<R> &a, const mr<R> &b) {
  called_by<WARPGROUP>();
  reads(a, b);
  writes_shared(d, whole(d));
  for (float &part : d.d) part = 0.f;
  d.d[0] = sum_of_products(a.d, b.d, R);
}
TILE float load_dot(const sv<4> &s) {
  called_by<WARPGROUP>();
  reads_shared(whole(s));
  return s.d[0] + s.d[1] + s.d[2] + s.d[3];
}
