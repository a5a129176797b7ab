// What loaders of fft_conv's kernels of one pass share, and the tasks of its gradients.
#pragma once
#include "fft_conv/fft_conv_tiles.h"

struct range { int first, end; };
// A block's share, in a row: so it walks along the batch of a filter.
template<class P> TILE range block_tasks(const P &p) {
  range r;
  r.first = (int)((int64_t)p.tasks * block_index() / block_count());
  r.end = (int)((int64_t)p.tasks * (block_index() + 1) / block_count());
  return r;
}
// Tables from number `first` on
template<int N> TILE void load_tables(table (&t)[N][PIECES], const gmap &tables, sem &full, int first) {
  for (int i = 0; i < N; i++) tma_load(t[i][0], tables, full, 0, 0, first + i, 0);
}
TILE void multiply(acc &x, const st<elem, 64, 64> &gate) {
  each<64>([](int, int, float &a, float g) { a *= g; }, x, gate);
}
TILE void multiply_folded(acc &x, const st<elem, 64, 64> &gate, int log) {
  acc g;
  load_folded(g, gate, 0, log);
  map(x, g, [](float a, float b) { return a * b; });
}

// ---- gradients: sums over the batch of G conj(X), of which a task makes some batch entries'
TILE range batches_of(const fft_grads_params &p, int task) {
  range r;
  r.first = task % p.chunks * p.step;
  r.end = smaller(r.first + p.step, p.batches);
  return r;
}
TILE void load_constants(table (&left)[3][PIECES], table (&right)[3][PIECES], table (&twists)[2][PIECES],
                         const gmap &tables, sem &full) {
  sem_expect(full, 8 * tile_bytes(left[0][0]));
  load_tables(left, tables, full, FFT_LEFT);
  load_tables(right, tables, full, FFT_RIGHT);
  load_tables(twists, tables, full, FFT_TWISTS);
}
TILE void keep_spectrum(table (&to)[2], acc &re, acc &im) {
  store(to[0], re);
  store(to[1], im);
}
// dr + i di += G conj(X) of G = re + i im, which were scaled by what x_up and up undo
TILE void add_correlation(acc &dr, acc &di, acc &re, acc &im, const table (&x)[2], const parked &x_up, const rv &up) {
  rv factor;
  load(factor, x_up);
  map(factor, factor, up, [](float a, float b) { return a * b; });
  each<64>([](int, int, float &a, float &b, float c, float d, float e, float f, float size) {
    e *= size;
    f *= size;
    a = fused(c, e, fused(d, f, a));
    b = fused(d, e, fused(-c, f, b));
  }, dr, di, re, im, x[0], x[1], factor);
}
TILE void store_sums(const fft_grads_params &p, int task, const acc &dr, const acc &di) {
  store_acc(p.sums + (int64_t)FFT_UNIT_FLOATS * task, dr);
  store_acc(p.sums + (int64_t)FFT_UNIT_FLOATS * task + FFT_BLOCK, di);
}
