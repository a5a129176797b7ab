// Bodies of tile/twins.h.
#pragma once
template<int A, int H, class First, class Word>
TILE void product_of_halves(rt<float, H> &d, rt<float, H> &e, First a, const Word *b, int depth, int k) {
  rt<float, 2 * H> both;
  for (int r = 0; r < 64 && A == ACC; r++) {
    memcpy(both.d[r], d.d[r], sizeof d.d[r]);
    memcpy(both.d[r] + H, e.d[r], sizeof e.d[r]);
  }
  product<A, VW>(both, a, b, depth, k);
  for (int r = 0; r < 64; r++) {
    memcpy(d.d[r], both.d[r], sizeof d.d[r]);
    memcpy(e.d[r], both.d[r] + H, sizeof e.d[r]);
  }
}
template<int A, typename T, int H, int W>
TILE void mma_ABt_halves(rt<float, H> &d, rt<float, H> &e, const rt<T, 64> &a, const st<T, 2 * H, W> &b, int k0) {
  enum { E = word_of<T>::ELEMENTS };
  begins_at(b, k0, 64);
  issue_product<A>(d, a, part(b, 0, H, k0, 64), [=, &d, &e, &a, &b] {
    alignas(64) float scratch[scratch_floats<T, 64>()];
    product_of_halves<A>(d, e, operand(a, scratch), packed<PACK_COLS>(b) + k0 / E * PW, W / E, 64 / E);
  });
  issue_product<A>(e, a, part(b, H, H, k0, 64), [] {});
}
template<int A, typename T, int K>
TILE void mma_ABt_halves(rt<float, 64> &d, rt<float, 64> &e, const st<T, 128, K> &b) {
  enum { DEPTH = K / word_of<T>::ELEMENTS };
  issue_product<A>(d, part(b, 0, 64, 0, K), part(b, 0, 64, 0, K), [=, &d, &e, &b] {
    product_of_halves<A>(d, e, operand(*(const st<T, 64, K> *)&b), packed<PACK_COLS>(b), DEPTH, DEPTH);
  });
  issue_product<A>(e, part(b, 0, 64, 0, K), part(b, 64, 64, 0, K), [] {});
}
template<int W, typename T, int R, int C> TILE void clear_halves(st<T, R, C> &t, int end) {
  called_by<W>();
  end = end < 0 ? 0 : end < R / 2 ? end : R / 2;
  for (int r = 0; r < R && end < R / 2; r += R / 2) {
    writes_shared(t, part(t, r + end, R / 2 - end, 0, C));
    memset((void *)(t.d + (r + end) * C), 0, (R / 2 - end) * C * sizeof(T));
  }
}
