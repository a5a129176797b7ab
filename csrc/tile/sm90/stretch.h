// Bodies of tile/stretch.h on sm_90a. A thread has two groups of eight numbers, 1024 apart: a warp touches whole lines.
#pragma once
#include "tile/sm90/neighbours.h"
struct stretch { float d[2][8]; };
struct partial { float d; };

TILE int stretch_index(int group) { return 1024 * group + 8 * thread_in_group(); }
template<typename T> TILE void load_begin(stretch &x, const T *g, int n, bool in_eights) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int c = stretch_index(k);
    clear_all(x.d[k]);
    if (in_eights && c + 8 <= n) all_begin(x.d[k], g + c);
    else some_begin(x.d[k], g + c, n - c);
  }
}
template<typename T> TILE void load_end(stretch &x) {
#pragma unroll
  for (int k = 0; k < 2; k++) all_end<T>(x.d[k]);
}
template<typename T> TILE void save(T *g, const stretch &x, int n, bool in_eights) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int c = stretch_index(k);
    if (in_eights && c + 8 <= n) all_store(g + c, x.d[k]);
    else some_store(g + c, x.d[k], n - c);
  }
}
template<typename T> TILE float number_at(const T *g) { return to_float(*g); }
TILE void put_number(float *g, float x) {
  if (thread_in_group() == 0) *g = x;
}

TILE void fill(stretch &x, float y) {
#pragma unroll
  for (int k = 0; k < 2; k++)
#pragma unroll
    for (int e = 0; e < 8; e++) x.d[k][e] = y;
}
TILE void fill(partial &x, float y) { x.d = y; }
template<class F, class... X> TILE void each(stretch &x, int n, F f, X &...parts) {
#pragma unroll
  for (int k = 0; k < 2; k++)
#pragma unroll
    for (int e = 0; e < 8; e++) {
      int i = stretch_index(k) + e;
      if (i < n) f(x.d[k][e], i, parts.d...);
    }
}
template<class F> TILE void map(partial &d, const partial &a, const partial &b, F f) { d.d = f(d.d, a.d, b.d); }
template<class F> TILE float join(const partial &x, sv<32> &room, F f) {
  float y = x.d;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) y = f(y, __shfl_xor_sync(~0u, y, o));
  if (lane() == 0) room.d[warp_in_group()] = y;
  wg_sync();
  return f(f(room.d[0], room.d[1]), f(room.d[2], room.d[3]));
}
