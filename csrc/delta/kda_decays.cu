// What acts of raw gates and betas, for Kimi delta attention's other kernels: log decays as floats, -rate softplus(x +
// b) or lower_bound sigmoid(rate (x + b)), and beta, its sigmoid or what was given, as floats (kda.h).
// Bound by memory. It stands apart: the warpgroups that sum a chunk's gates are those that the others wait for, and
// they would go through twice the instructions. A task has STEPS steps of LINES heads; warpgroups have their channels,
// of which dt_bias and the rate stay in registers, a warp their betas.
#include "tile/lines.h"
#include "delta/kda_gates.h"

// D: columns of a head in lines
enum { LINES = 1024 / D, GROUPS = 2, AT_ONCE = 4, STEPS = 2 * GROUPS * AT_ONCE };   // AT_ONCE: loads under way together
static_assert(STEPS <= 32, "a warp's betas");
enum { FLAT = 512 };                                       // betas that a warp has under way where they lie densely
typedef lt<1> tile;
struct shared { int unused; };
typedef kda_decays_params params;
TILE void init(shared &) {}

// step: the first of `steps`; head0: the first of `heads`, or of more than a task has
struct place { int batch, head0, heads, step, steps; };
TILE place place_of(const params &p, int index) {
  int groups = (p.rows.heads + LINES - 1) / LINES, parts = (p.rows.to - p.rows.from + STEPS - 1) / STEPS;
  int at = index / groups, head0 = (index - at * groups) * LINES, batch = at / parts;
  int step = p.rows.from + (at - batch * parts) * STEPS, left = p.rows.to - step;
  return {batch, head0, p.rows.heads - head0, step, left < STEPS ? left : STEPS};
}

// Step i of the place; none behind its end.
TILE void begin(tile &t, const params &p, const place &at, int i) {
  const kda_given &g = p.gates.g;
  int64_t first = at.batch * g.batch + (at.step + i) * g.step + at.head0 * g.head;
  int lines = i < at.steps ? at.heads : 0;
  if (g.is_float && p.eights) load_begin<EIGHTS>(t, (const float *)g.data + first, g.head, LINES, lines, p.key_dim);
  else if (g.is_float) load_begin<SINGLES>(t, (const float *)g.data + first, g.head, LINES, lines, p.key_dim);
  else if (p.eights) load_begin<EIGHTS>(t, (const elem *)g.data + first, g.head, LINES, lines, p.key_dim);
  else load_begin<SINGLES>(t, (const elem *)g.data + first, g.head, LINES, lines, p.key_dim);
}
TILE void end(tile &t, const params &p) {
  if (p.gates.g.is_float) load_end<float>(t);
  else load_end<elem>(t);
}
TILE void make(tile &t, const params &p, tile &bias, const lv &rates) {
  float bound = p.gates.lower_bound;
  if (p.gates.gate == KDA_SOFTPLUS)
    each<WHOLE>(t, LINES, p.key_dim, [](float &x, float b, float rate) { x = -rate * softplus(x + b); }, bias, rates);
  else
    each<WHOLE>(t, LINES, p.key_dim, [=](float &x, float b, float rate) { x = bound * sigmoid(rate * (x + b)); }, bias,
                rates);
}
TILE void make_decays(const params &p, const place &at, int group) {
  tile bias;
  lv rates;
  fill(bias, 0.f);
  if (p.gates.dt_bias) {
    load_begin<SINGLES>(bias, p.gates.dt_bias + at.head0 * p.key_dim, p.key_dim, LINES, at.heads, p.key_dim);
    load_end<float>(bias);
  }
  load(rates, p.gates.a_log + at.head0, 1, LINES, at.heads);
  map(rates, rates, [](float x) { return fast_exp2(x * 1.4426950408889634f); });
  float *to = p.decays + ((int64_t)at.batch * p.batch + (int64_t)(at.step - p.rows.from) * p.rows.heads + at.head0) * D;
  for (int i = group * AT_ONCE; i < at.steps; i += GROUPS * AT_ONCE) {
    tile t[AT_ONCE];
    CONSTANT_INDEX for (int k = 0; k < AT_ONCE; k++) begin(t[k], p, at, i + k);
    CONSTANT_INDEX for (int k = 0; k < AT_ONCE; k++) {
      end(t[k], p);
      make(t[k], p, bias, rates);
      save<EIGHTS>(to + (int64_t)(i + k) * p.rows.heads * D, D, t[k], LINES, i + k < at.steps ? at.heads : 0,
                   (p.key_dim + 7) / 8 * 8);
    }
  }
}
// ---- betas (warp): n of a vector, `stride` apart
TILE void take(const params &p, wv<32> &beta, int64_t from, int64_t stride, int n) {
  const kda_given &g = p.gates.beta;
  if (g.is_float) load_steps(beta, (const float *)g.data + from, stride, n);
  else load_steps(beta, (const elem *)g.data + from, stride, n);
}
TILE void put(const params &p, float *to, int64_t stride, wv<32> &beta, int n) {
  float most = p.gates.most;
  if (most != 0.f) map(beta, beta, beta, [=](float x, float) { return most * exact_sigmoid(x); });
  store(to, stride, beta, n);
}
// Of a place, a vector for each head.
TILE void make_betas(const params &p, const place &at) {
  const kda_given &g = p.gates.beta;
  int64_t first = at.batch * g.batch + at.step * g.step + at.head0 * g.head;
  float *to = p.betas + ((int64_t)at.batch * p.rows.steps + at.step) * p.rows.heads + at.head0;
  wv<32> beta[LINES];
  CONSTANT_INDEX for (int i = 0; i < LINES; i++)
    take(p, beta[i], first + i * g.head, g.step, i < at.heads ? at.steps : 0);
  CONSTANT_INDEX for (int i = 0; i < LINES; i++) put(p, to + i, p.rows.heads, beta[i], i < at.heads ? at.steps : 0);
}
// Of a batch whose heads and steps lie one behind the other, the part of that number.
TILE void make_dense_betas(const params &p, int batch, int part) {
  int64_t first = (int64_t)p.rows.from * p.rows.heads + (int64_t)part * FLAT, end = (int64_t)p.rows.to * p.rows.heads;
  int n = end - first < FLAT ? (int)(end - first) : FLAT;
  float *to = p.betas + (int64_t)batch * p.rows.steps * p.rows.heads + first;
  wv<32> beta[FLAT / 32];
  CONSTANT_INDEX for (int i = 0; i < FLAT / 32; i++)
    take(p, beta[i], batch * p.gates.beta.batch + first + 32 * i, 1, n - 32 * i);
  CONSTANT_INDEX for (int i = 0; i < FLAT / 32; i++) put(p, to + 32 * i, 1, beta[i], n - 32 * i);
}

TILE void decays(const params &p, shared &, int group) {
  if (!p.decays) return;
  for (int i = block_index(); i < p.tasks; i += block_count()) make_decays(p, place_of(p, i), group);
}
TILE void betas(const params &p, shared &, int) {
  if (!p.betas) return;
  int parts = (int)(((int64_t)(p.rows.to - p.rows.from) * p.rows.heads + FLAT - 1) / FLAT);
  const kda_given &g = p.gates.beta;
  if (g.head == 1 && g.step == p.rows.heads)
    for (int i = block_index(); i < p.batches * parts; i += block_count()) make_dense_betas(p, i / parts, i % parts);
  else
    for (int i = block_index(); i < p.tasks; i += block_count()) make_betas(p, place_of(p, i));
}

typedef block<params, shared, init, role<decays, WARPGROUP, GROUPS, 0>, role<betas, WARP, 1, 0>,
              OCCUPANCY<2>> kernel;
ENTRY(kernel, STEPS, LINES)
