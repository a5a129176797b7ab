// Bodies of tile/quarters.h.
#pragma once
template<int N> TILE void split_halves(rt<float, N> &d, rt<float, N> &e, const rt<float, 2 * N> &s) {
  reads(s);
  writes(d, e);
  for (int r = 0; r < 64; r++) {
    memcpy(d.d[r], s.d[r], sizeof d.d[r]);
    memcpy(e.d[r], s.d[r] + N, sizeof e.d[r]);
  }
}
template<typename T, int N> TILE void join_halves(rt<T, 2 * N> &d, const rt<T, N> &a, const rt<T, N> &b) {
  reads(a, b);
  writes(d);
  for (int r = 0; r < 64; r++) {
    memcpy((void *)d.d[r], a.d[r], sizeof a.d[r]);
    memcpy((void *)(d.d[r] + N), b.d[r], sizeof b.d[r]);
  }
}
template<int A, typename T>
TILE void mma_AB_quarter(rt<float, 32> &d, const rt<T, 32> &a, const st<T, 64, 64> &b, int r0, int c0) {
  enum { E = word_of<T>::ELEMENTS };
  begins_at(b, r0, 32);
  begins_at(b, c0, 32);
  issue_product<A>(d, a, part(b, r0, 32, c0, 32), [=, &d, &a, &b] {
    alignas(64) float scratch[scratch_floats<T, 32>()];
    product<A, PW>(d, operand(a, scratch), packed<PACK_ROWS>(b) + c0 * (64 / E) + r0 / E * PW, 64 / E, 32 / E);
  });
}
