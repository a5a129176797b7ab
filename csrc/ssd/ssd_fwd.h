// What the steps of a chunk are to the kernels of the forward.
#pragma once
#include "tile/tile.h"
#include "ssd/ssd.h"

// log(1 + e^x) = max(x, 0) + log(1 + e), e = e^-|x|; the logarithm is 2 artanh(s), s = e / (2 + e) <= 1/3, by its
// series: its relative error stays below 2^-20 where e is small, which that of log2(1 + e) does not.
TILE float softplus(float x) {
  float e = fast_exp2(fabsf(x) * -1.4426950408889634f), s = e * fast_rcp(2.f + e), z = s * s;
  float p = fused(fused(fused(z, 2.f / 13, 2.f / 11), z, 2.f / 9), z, 2.f / 7);
  p = fused(fused(fused(p, z, 2.f / 5), z, 2.f / 3), z, 2.f);
  return fused(s, p, fmaxf(x, 0.f));
}

// What stands for a step that is not there, in place of what the caller gave. It adds nothing and decays nothing,
// whatever the limits are.
TILE float no_step(const ssd_dt &p) { return p.gates ? infinity() : -infinity(); }

TILE float step_size(const ssd_dt &p, float x, float bias) {
  float y = x + bias;
  y = clamp(p.softplus ? softplus(y) : y, p.low, p.high);
  return x == -infinity() ? 0.f : y;
}
// In base 2. Below e^-64 a decay leaves nothing that float32 would show; sums of such logarithms stay exact enough, and
// -infinity, which would make NaN of their differences, may be given. NaN stays.
TILE float log_gate(float x) { return x == infinity() ? 0.f : (x < -64.f ? -64.f : x) * 1.4426950408889634f; }

// What the caller gave of n steps of a head, from `first` on in a tensor of all steps and heads.
TILE void load_given(wv<64> &v, const ssd_dt &p, int64_t first, int heads, int n) {
  float pad = no_step(p);
  if (p.dt) load(v, p.dt + first, heads, n, pad);
  else map_index(v, [=](int i) { return i < n ? 0.f : pad; });
}

// Weights of a head's steps, and l_i, the sum of the log decays up to step i, in base 2. given: by load_given().
TILE void log_decays(wv<64> &dt, wv<64> &l, const wv<64> &given, const ssd_dt &p, int head) {
  float a = p.a ? p.a[head] : 0.f;
  if (p.gates) {
    map(l, given, given, [=](float x, float) { return log_gate(x + a); });
    map(dt, given, given, [](float x, float) { return x == infinity() ? 0.f : 1.f; });
  } else {
    float bias = p.bias ? p.bias[head] : 0.f;
    a *= 1.4426950408889634f;
    map(dt, given, given, [&](float x, float) { return step_size(p, x, bias); });
    map(l, dt, dt, [=](float d, float) { return d * a; });
  }
  cumsum(l);
}

// changes_i: how often seq_idx has changed from the step before the chunk to step i. seq: of the batch.
TILE void count_changes(wv<64> &changes, const int *seq, int step, int end) {
  map_index(changes, [=](int i) {
    int at = step + i;
    return at < end && seq[at] != (at > 0 ? seq[at - 1] : 0) ? 1.f : 0.f;
  });
  cumsum(changes);
}
