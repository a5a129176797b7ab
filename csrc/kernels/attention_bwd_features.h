// What softcap, ALiBi and dropout change in attention_bwd.cu: tiles of 64 keys x N query rows, which begin at (key0, row0) of the step. Without EVERYTHING
// nothing is left of it.
#pragma once

TILE float slope_at(const attention_features &f, const attention_bwd_params &p, const place &at) {
  int bh = get(at.head), batch = f.slopes ? bh / p.q_heads : 0;
  return slope_of(f, batch, bh - batch * p.q_heads);
}
// Scores as the softmax sees them, up to the factor that is returned.
template<int N> TILE float change_scores(rt<float, N> &x, const attention_bwd_params &p, const place &at, int key0, int row0) {
  if (!EVERYTHING || !changes_scores(p.features)) return p.scale;
  if (p.features.softcap != 0.f) cap_usual_scores(x, p.features.softcap, p.scale);
  else map(x, [c = p.scale](float y) { return y * c; });
  bias_scores(x, slope_at(p.features, p, at), key0 - row0 - get(at.distance));
  return 1.f;
}
// Probabilities that are dropped get a sign.
template<int N> TILE void mark_dropped(rt<float, N> &prob, const attention_features &f, const place &at, int key0, int row0) {
  if (!EVERYTHING || !f.drop_below) return;
  uint32_t word = head_key(f, get(at.head)), below = f.drop_below;
  key0 += get(at.key);
  row0 += get(at.row);
  map_col_pairs(prob, [=](float &a, float &a8, int key, int row) {
    uint32_t bits = random_bits(word, row0 + row, key0 + key);
    if (drops(bits, below)) a = -a;
    if (drops_8(bits, below)) a8 = -a8;
  });
}
// ds to that of the scores before the cap, whose slope 1 - tanh^2 follows from the probabilities: a capped score is log2 p + lse2, less its bias. Rounding makes
// it uncertain by some 2^-20. The slope is that much less here, so that it is 0 where the cap is reached, however large what it is multiplied by. Where p is 0,
// or a row has no keys (lse2 is inf), it is of no account, but must not be NaN.
template<int N>
TILE void uncap(rt<float, N> &ds, const rt<float, N> &prob, const attention_bwd_params &p, const place &at, const sv<N> &lse2, int key0, int row0) {
  if (!EVERYTHING || p.features.softcap == 0.f) return;
  float inverse = 1.f / (p.features.softcap * 1.4426950408889634f), slope = slope_at(p.features, p, at);
  int distance = get(at.distance) + row0 - key0;
  map_rc(ds, prob, lse2, [=](float a, float prob, float l, int key, int row) {   // also without ALiBi: both forms together take more registers than there are
    float steps = (float)(distance + row - key);
    float t = (fast_log2(prob < 0.f ? -prob : prob) + l + slope * (steps < 0.f ? -steps : steps)) * inverse;
    float less = fused(-t, t, 0.999998f);
    return a * (less > 0.f ? less : 0.f);
  });
}
