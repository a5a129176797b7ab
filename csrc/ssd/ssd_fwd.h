// What a step's dt is, the same in every kernel of the forward.
#pragma once
#include "tile/tile.h"
#include "ssd/ssd.h"

// log(1 + e^x) = max(x, 0) + log(1 + e), e = e^-|x|; the logarithm is 2 artanh(s), s = e / (2 + e) <= 1/3, by its series: its relative error
// stays below 2^-20 where e is small, which that of log2(1 + e) does not.
TILE float softplus(float x) {
  float e = fast_exp2(fabsf(x) * -1.4426950408889634f), s = e * fast_rcp(2.f + e), z = s * s;
  float p = fused(fused(fused(fused(fused(fused(z, 2.f / 13, 2.f / 11), z, 2.f / 9), z, 2.f / 7), z, 2.f / 5), z, 2.f / 3), z, 2.f);
  return fused(s, p, fmaxf(x, 0.f));
}

// -infinity: a step that is not there. It adds nothing and decays nothing, whatever the limits are.
TILE float step_size(const ssd_dt &p, float x, float bias) {
  float y = x + bias;
  y = clamp(p.softplus ? softplus(y) : y, p.low, p.high);
  return x == -infinity() ? 0.f : y;
}
