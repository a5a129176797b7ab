// What a warp knows of a chunk's steps of one head. Included by kernels, behind tile/tile.h.
#pragma once
// As it is given; -infinity where the sequence has no step.
TILE void load_steps(wv<64> &raw, const ssd_steps &p, int batch, int chunk, int head) {
  load(raw, p.dt + ((int64_t)batch * p.count + chunk * 64) * p.heads + head, p.heads, p.count - chunk * 64, -infinity());
}
TILE float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }
TILE void make_steps(wv<64> &dt, const wv<64> &raw, const ssd_steps &p, int head) {
  float bias = p.dt_bias ? p.dt_bias[head] : 0.f, low = p.dt_min, high = p.dt_max;
  if (p.softplus) map(dt, raw, raw, [=](float x, float) { return x == -infinity() ? 0.f : clamp(softplus(x + bias), low, high); });
  else map(dt, raw, raw, [=](float x, float) { return x == -infinity() ? 0.f : clamp(x + bias, low, high); });
}
// l_i = sum of dt_k a for k <= i, in base 2.
TILE void log_decays(wv<64> &l, const wv<64> &dt, const ssd_steps &p, int head) {
  float a = p.a[head] * 1.4426950408889634f;
  map(l, dt, dt, [=](float d, float) { return d * a; });
  cumsum(l);
}
// d dt / d what the caller gave: 0 where a limit holds, and where there is no step.
TILE void step_slopes(wv<64> &slope, const wv<64> &raw, const ssd_steps &p, int head) {
  float bias = p.dt_bias ? p.dt_bias[head] : 0.f, low = p.dt_min, high = p.dt_max;
  if (p.softplus) map(slope, raw, raw, [=](float x, float) {
    float y = x + bias, dt = softplus(y);
    return x == -infinity() || dt < low || dt > high ? 0.f : y > 20.f ? 1.f : 1.f / (1.f + expf(-y));
  });
  else map(slope, raw, raw, [=](float x, float) { return x == -infinity() || x + bias < low || x + bias > high ? 0.f : 1.f; });
}
