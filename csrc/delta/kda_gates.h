// Gates, beta and norms of Kimi delta attention, as its kernels take them of what the caller gave (warpgroup).
#pragma once
#include "delta/delta_prepare.h"
#include "tile/channels.h"
#include "delta/kda.h"

// Of a product between steps, what has a decay in it: its range is not fp16's.
template<typename T> struct factor_of { typedef bf16 type; };
template<> struct factor_of<float> { typedef float type; };
typedef factor_of<elem>::type factor;

// `steps` steps of a head, from `step` on.
struct head_steps { int batch, head, step, steps; };
template<typename T> TILE const T *first_of(const kda_given &g, const head_steps &t) {
  return (const T *)g.data + t.batch * g.batch + t.step * g.step + t.head * g.head;
}
// What was given of the channels from c0 on, as many as a tile has, and dt_bias.
template<class Tile> TILE void take_given(Tile &x, const kda_gates &p, const head_steps &t, int key_dim, int c0) {
  int n = key_dim - c0;
  if (p.g.is_float) load(x, first_of<float>(p.g, t) + c0, p.g.step, t.steps, n);
  else load(x, first_of<elem>(p.g, t) + c0, p.g.step, t.steps, n);
}
template<class Vector> TILE void take_bias(Vector &bias, const kda_gates &p, int head, int key_dim, int c0) {
  if (p.dt_bias) load(bias, p.dt_bias + head * key_dim + c0, key_dim - c0);
  else fill(bias, 0.f);
}
template<class Tile, class Vector> TILE void take_given(Tile &x, Vector &bias, const kda_gates &p, const head_steps &t,
                                                        int key_dim, int c0) {
  take_given(x, p, t, key_dim, c0);
  take_bias(bias, p, t.head, key_dim, c0);
}
TILE float rate_of(const kda_gates &p, int head) {
  return p.gate == KDA_LOG ? 0.f : fast_exp2(p.a_log[head] * 1.4426950408889634f);
}
// f of the log decays that what was given makes.
template<class Tile, class Vector, class F>
TILE void make_gates(Tile &x, const Vector &bias, const kda_gates &p, const head_steps &t, F f) {
  if (p.gate == KDA_LOG) return map(x, bias, t.steps, [=](float y, float) { return f(y); });
  float rate = rate_of(p, t.head), bound = p.lower_bound;
  if (p.gate == KDA_SOFTPLUS) map(x, bias, t.steps, [=](float y, float b) { return f(-rate * softplus(y + b)); });
  else map(x, bias, t.steps, [=](float y, float b) { return f(bound * sigmoid(rate * (y + b))); });
}
template<class Vector, class Tile, class F>
TILE void take_gates_of(Tile &x, const kda_gates &p, const head_steps &t, int key_dim, int c0, F f) {
  Vector bias;
  take_given(x, bias, p, t, key_dim, c0);
  make_gates(x, bias, p, t, f);
}
TILE void take_beta_as_given(rv &beta, const kda_gates &p, const head_steps &t) {
  load_steps(beta, first_of<float>(p.beta, t), p.beta.step, t.steps);
}
TILE void take_beta(rv &beta, const kda_gates &p, const head_steps &t) {
  float most = p.most;
  int steps = t.steps;
  if (p.beta.is_float) take_beta_as_given(beta, p, t);
  else load_steps(beta, first_of<elem>(p.beta, t), p.beta.step, steps);
  if (most == 0.f) return;
  rv inside;
  map_rows(inside, [=](int i) { return i < steps ? most : 0.f; });
  map(beta, beta, inside, [](float x, float m) { return m * exact_sigmoid(x); });
}
// Factors that make rows of length 1 of those of which x has the panels.
template<int PANELS> TILE void take_norms(rv &norm, const st<elem, Q, 64> (&x)[PANELS]) {
  rsum sum;
  fill(sum, 0.f);
  UNROLLED for (int h = 0; h < PANELS; h++)
    each<64>([](int, int, float y, float &z) { z = fused(y, y, z); }, x[h], sum);
  reduce(norm, sum);
  map(norm, norm, [](float x) { return fast_rsqrt(x + 1e-6f); });
}
