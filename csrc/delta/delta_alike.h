// Whether two states of 128 values, of 64 or 128 keys, are alike, but for what the rounding of one chunk's operands
// makes. That is, in the mean of a key's row of values, 2^-10 of them and 2^-10 of all, as what is left of greater ones
// may be small; and of each value's column of keys, which share the rounding of one u, two steps of that, 2^-6. Where
// NaN stands, they are not.
#pragma once
#include "delta/delta_prepare.h"

// Parts of the states, the odd ones of keys from 64 on: sums of what is there, and of how far that is from the other's
template<int PARTS> struct alike {
  sv<4 * 64> sizes[PARTS], errors[PARTS];   // of keys
  sv<64> apart[PARTS];                      // of values: not 0 where they are
  sv<32> verdict;                           // not 0: they are apart
};
// Warpgroup
template<int N>
TILE void add_sizes(rt<float, N> &x, rt<float, N> &y, rsum &row_sizes, rsum &row_errors, csum<N> &sizes,
                    csum<N> &errors) {
  each<N>([](int, int, float x, float y, float &row_size, float &row_error, float &size, float &error) {
    float d = fabsf(x - y);
    x = fabsf(x);
    row_size += x;
    row_error += d;
    size += x;
    error += d;
  }, x, y, row_sizes, row_errors, sizes, errors);
}
TILE void put_apart(sv<64> &apart, const rsum &row_sizes, const rsum &row_errors) {
  rv size, error;
  reduce(size, row_sizes);
  reduce(error, row_errors);
  map(error, error, size, [](float d, float x) { return d <= 0x1p-6f * x ? 0.f : 1.f; });
  store(apart, error);
}
// Warp
template<int PARTS> TILE float sum_of_key(const sv<4 * 64> (&parts)[PARTS], int key) {
  float sum = 0.f;
  CONSTANT_INDEX for (int half = 0; half < PARTS; half += 2)
    CONSTANT_INDEX for (int i = 0; i < 4; i++) sum += get(parts[half + key / 64], 64 * i + key % 64);
  return sum;
}
template<int PARTS> TILE void judge_states(struct alike<PARTS> &s, int keys) {
  wv<128> of_keys, others;
  map_index(of_keys, [&](int i) { return i < keys ? sum_of_key(s.sizes, i) : 0.f; });
  const float mean = sum_of(of_keys) / (float)keys;
  map_index(others, [&](int i) { return i < keys ? sum_of_key(s.errors, i) : 0.f; });
  map(of_keys, of_keys, others, [=](float x, float d) { return d <= 0x1p-10f * (x + mean) ? 0.f : 1.f; });
  map_index(others, [&](int i) {
    float sum = 0.f;
    CONSTANT_INDEX for (int half = 0; half < PARTS; half += 2)
      if (i < keys) sum += get(s.apart[half + i / 64], i % 64);
    return sum;
  });
  map(of_keys, of_keys, others, [](float x, float y) { return x + y; });
  wv<32> verdict;
  fill(verdict, max_of(of_keys));
  store(s.verdict, verdict);
}
