// Bodies of tile/folds.h.
#pragma once
template<typename T, int N> TILE void load_folded(rt<float, N> &d, const st<T, 64, 64> &s, int c0, int log) {
  begins_at(s, c0, 16);
  reads_shared(part(s, 0, 64, c0, N));
  writes(d);
  for (int r = 0; r < 64; r++) widen_row(d.d[r], s.d + folded_row(r, log) * 64 + c0, N);
}
template<typename T, int N> TILE void store_folded(st<T, 64, 64> &d, const rt<float, N> &s, int c0, int log) {
  begins_at(d, c0, 16);
  reads(s);
  writes_shared(d, part(d, 0, 64, c0, N));
  for (int r = 0; r < 64; r++) narrow_row(d.d + folded_row(r, log) * 64 + c0, s.d[r], N);
}
template<typename T, int N> TILE void trade_rows(rt<T, N> &a, rt<T, N> &b) {
  changes(a, b);
  for (int r = 0; r < 64; r++)
    if (r & 8) {
      T x[N];
      memcpy(x, a.d[r], sizeof(x));
      memcpy(a.d[r], b.d[r - 8], sizeof(x));
      memcpy(b.d[r - 8], x, sizeof(x));
    }
}
TILE void trade_rows(rv &a, rv &b) {
  changes(a, b);
  for (int r = 0; r < 64; r++)
    if (r & 8) {
      float x = a.d[r];
      a.d[r] = b.d[r - 8];
      b.d[r - 8] = x;
    }
}
TILE void store_columns(float *g, const rt<float, 64> &t, bool folded) {
  called_by<WARPGROUP>();
  touches_global(g, 64 * 64 * sizeof(float), GLOBAL_WRITE);
  reads(t);
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < 64; c++) g[2048 * (c & 1) + 32 * r + c / 2] = t.d[folded ? folded_row(r, 1) : r][c];
}
TILE void load_columns(rt<float, 32> &t, const float *g, int odd) { load_acc(t, g + 2048 * odd); }
TILE void group_largest_folded(rv &d, const sv<64> &rows, int log) {
  group_largest(d, rows, log < 4 ? log - (log > 0) : log);
  if (log > 0 && log < 4)
    for (int r = 0; r < 64; r++)
      if (r & 8) d.d[r] = d.d[r - 8] = d.d[r] > d.d[r - 8] ? d.d[r] : d.d[r - 8];
}
