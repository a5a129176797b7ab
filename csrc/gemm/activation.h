// Activation functions of an epilogue, on floats; mg_activation in margay.h names them.
#pragma once
#include "tile/tile.h"

TILE float relu(float x) { return x < 0.f ? 0.f : x; }   // NaN stays NaN
TILE float sigmoid(float x) { return fast_rcp(1.f + fast_exp2(x * -1.4426950408889634f)); }
TILE float silu(float x) { return x * sigmoid(x); }
// x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
TILE float gelu_tanh(float x) { return x * sigmoid(1.5957691216057308f * x * fused(x * x, 0.044715f, 1.f)); }
// x Phi(x) = x erfc(-x / sqrt(2)) / 2. exp(z^2) erfc(z), z >= 0, is a polynomial of t = 1 / (1 + z / 2), relative error
// below 5e-8: a minimax fit, relative so that the far negative tail keeps its digits.
TILE float gelu(float x) {
  float z = (x < 0.f ? -x : x) * 0.70710678f, t = fast_rcp(fused(z, 0.5f, 1.f)), y = -0.059384349f;
  y = fused(y, t, 0.28611499f);
  y = fused(y, t, -0.49039034f);
  y = fused(y, t, 0.28171762f);
  y = fused(y, t, -0.029139416f);
  y = fused(y, t, 0.20374930f);
  y = fused(y, t, 0.24283578f);
  y = fused(y, t, 0.28241202f);
  y = fused(y, t, 0.28208433f);
  float tail = 0.5f * y * t * fast_exp2(z * z * -1.4426950408889634f);   // Phi(-|x|)
  return x * (x < 0.f ? tail : 1.f - tail);
}
