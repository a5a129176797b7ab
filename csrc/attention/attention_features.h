// What a row's FEATURES change in scores and probabilities, for forward and backward. FEATURES comes from the row.
// Scores are turned into units of log 2 here (factor 1 instead of scale log2 e from there on).
#pragma once
#include "attention/attention_rows.h"

// Which sets of features (attention.h) this row's kernel has.
enum { WINDOWS = FEATURES >= FEATURES_WINDOWS, PACKED = FEATURES >= FEATURES_PACKED,
    EVERYTHING = FEATURES >= FEATURES_ALL };

TILE bool changes_scores(const attention_features &f) { return f.softcap != 0.f || f.slopes; }
TILE float slope_of(const attention_features &f, int batch, int head) {
  return f.slopes ? f.slopes[batch * f.slope_batch + head] * 1.4426950408889634f : 0.f;
}
// a - 2 a / (1 + 2^(2 x log2 e / a)) takes two special functions and three more instructions, fast_tanh one and 16.
// With fast_tanh kernels are a fifth to a third slower. The formula's error is a 2^-22. That does not show in 16-bit
// results where a is a cap that models have. The limits are CAP_LEAST and CAP_MOST of attention_problem.c.
TILE bool is_usual(float softcap) { return sizeof(elem) == 2 && softcap >= 4.f && softcap <= 256.f; }
template<int N> TILE void cap_usual_scores(rt<float, N> &x, float softcap, float scale_log2) {
  float a = softcap * 1.4426950408889634f, b = 2.f * 1.4426950408889634f * scale_log2 / a;
  map(x, [=](float y) { return a - 2.f * a * fast_rcp(1.f + fast_exp2(y * b)); });
}
// x: scores of 64 rows and N keys. distance: row - key + keys - rows of the tile's first element.
template<int N> TILE void cap_scores(rt<float, N> &x, const attention_features &f, float scale_log2) {
  // two products, because scale / softcap may be out of range
  float a = f.softcap * 1.4426950408889634f, inverse = fast_rcp(a);
  if (is_usual(f.softcap)) cap_usual_scores(x, f.softcap, scale_log2);
  else if (f.softcap != 0.f) map(x, [=](float y) { return a * fast_tanh(y * scale_log2 * inverse); });
  else map(x, [=](float y) { return y * scale_log2; });
}
template<int N> TILE void bias_scores(rt<float, N> &x, float slope, int distance) {
  if (slope != 0.f) map_rc(x, [=](float y, int row, int key) {
    float steps = (float)(distance + row - key);
    return y - slope * (steps < 0.f ? -steps : steps);
  });
}

// Dropout: 32 random bits of (seed, batch, head, row, key), by two rounds of a mixing function (Wellons, lowbias32). Of
// these 16 are for the row, where row % 16 < 8, and 16 for row + 8. Both belong to the same thread, as rows of the
// forward's tiles and as columns of the backward's.
TILE uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}
TILE uint32_t head_key(const attention_features &f, int batch_head) {
  return mix(f.seed[0] ^ mix(f.seed[1] + (uint32_t)batch_head * 0x9e3779b9u));
}
TILE uint32_t random_bits(uint32_t key, int row, int col) {
  return mix(mix(key + (uint32_t)row * 0x85ebca6bu) ^ (uint32_t)col * 0xc2b2ae35u);
}
TILE bool drops(uint32_t bits, uint32_t below) { return (bits & 0xffff) < below; }     // at row
TILE bool drops_8(uint32_t bits, uint32_t below) { return bits >> 16 < below; }         // at row + 8
template<int N> TILE void drop(rt<float, N> &x, const attention_features &f, int batch_head, int row0, int col0) {
  uint32_t key = head_key(f, batch_head), below = f.drop_below;
  map_row_pairs(x, [=](float &p, float &p8, int row, int col) {
    uint32_t bits = random_bits(key, row0 + row, col0 + col);
    if (drops(bits, below)) p = 0.f;
    if (drops_8(bits, below)) p8 = 0.f;
  });
}
