// Bodies of tile/l2.h: there is nobody to tell.
#pragma once
template<typename T, int R, int C>
TILE void tma_load(st<T, R, C> &t, const gmap &m, sem &s, int row, int col, int head, int batch, enum l2) {
  tma_load(t, m, s, row, col, head, batch);
}
template<int R, int C>
TILE void tma_load(sm<R, C> &t, const gmap &m, sem &s, int row, int col, int head, int batch, enum l2) {
  tma_load(t, m, s, row, col, head, batch);
}
template<typename T, int R, int C>
TILE void tma_store(const gmap &m, st<T, R, C> &t, int row, int col, int head, int batch, enum l2) {
  tma_store(m, t, row, col, head, batch);
}
