// Of each row of logits x, with z = x, or z = c tanh(x / c) where there is a softcap c:
//   lse = log sum over i of e^z_i,   loss = (1 - s) (lse - z_target) + s (lse - mean z) + w lse^2
//   dx_i = scale (p_i (1 + 2 w lse) - s / n - (1 - s) [i = target]) dz_i / dx_i,   p_i = e^(z_i - lse)
// s smooths labels, w is the weight of the z loss. Bound by memory: a block, one warpgroup, walks over its row twice,
// first with a running maximum and the sum to it, then to put the gradient in the logits' place.
#include "tile/stretch.h"
#include "cross_entropy/cross_entropy.h"

// DEPTH: stretches of a row in flight. PER_SM: blocks of a multiprocessor
struct shared { sv<32> room[3]; };       // of a join each
typedef cross_entropy_params params;
TILE void init(shared &) {}

TILE constexpr float log2_e() { return 1.4426950408889634f; }
// A finite number below all: minus infinity less itself is none.
TILE constexpr float lowest() { return -3e38f; }
TILE float larger(float a, float b) { return a > b ? a : b; }
TILE float capped(float x, float cap, float slope) { return cap * fast_tanh(x * slope); }   // slope: 1 / cap

// Numbers of a panel, which is what is read at a time. Nearly all panels are whole: n is a constant there, and nothing
// asks for each number whether it exists.
enum { PANEL = DEPTH * STRETCH };

TILE void load_all(stretch (&x)[DEPTH], const params &p, int64_t at, int n) {
  if (p.logits_are_float) {
    CONSTANT_INDEX for (int k = 0; k < DEPTH; k++)
      load_begin(x[k], (const float *)p.logits + at + k * STRETCH, n - k * STRETCH, p.in_eights);
    CONSTANT_INDEX for (int k = 0; k < DEPTH; k++) load_end<float>(x[k]);
  } else {
    CONSTANT_INDEX for (int k = 0; k < DEPTH; k++)
      load_begin(x[k], (const elem *)p.logits + at + k * STRETCH, n - k * STRETCH, p.in_eights);
    CONSTANT_INDEX for (int k = 0; k < DEPTH; k++) load_end<elem>(x[k]);
  }
  if (p.softcap > 0.f) {
    float cap = p.softcap, slope = 1.f / cap;
    CONSTANT_INDEX for (int k = 0; k < DEPTH; k++)
      each(x[k], n - k * STRETCH, [=](float &x, int) { x = capped(x, cap, slope); });
  }
}
TILE void save(const params &p, int64_t at, const stretch &x, int n) {
  if (p.logits_are_float) save((float *)p.logits + at, x, n, p.in_eights);
  else save((elem *)p.logits + at, x, n, p.in_eights);
}

// Largest and sum over i of e^(z_i - largest); sum of z where it is asked for.
struct statistics { float largest, sum, of_logits; };
struct parts { partial largest, sum, of_logits; };
TILE void add_panel(parts &t, const params &p, int64_t at, int n) {
  stretch x[DEPTH];
  partial before;
  load_all(x, p, at, n);
  fill(before, 0.f);
  map(before, t.largest, t.largest, [](float, float m, float) { return m; });
  CONSTANT_INDEX for (int k = 0; k < DEPTH; k++)
    each(x[k], n - k * STRETCH, [](float &z, int, float &m) { m = larger(z, m); }, t.largest);
  map(t.sum, before, t.largest, [](float l, float b, float m) { return l * fast_exp2((b - m) * log2_e()); });
  CONSTANT_INDEX for (int k = 0; k < DEPTH; k++)
    each(x[k], n - k * STRETCH,
         [](float &z, int, float m, float &l) { l += fast_exp2((z - m) * log2_e()); }, t.largest, t.sum);
  if (p.smoothing > 0.f)
    CONSTANT_INDEX for (int k = 0; k < DEPTH; k++)
      each(x[k], n - k * STRETCH, [](float &z, int, float &t) { t += z; }, t.of_logits);
}
TILE statistics statistics_of(const params &p, shared &s, int64_t at) {
  parts t;
  fill(t.largest, lowest());
  fill(t.sum, 0.f);
  fill(t.of_logits, 0.f);
  int first = 0;
  ROLLED for (; first <= p.columns - PANEL; first += PANEL) add_panel(t, p, at + first, PANEL);
  if (first < p.columns) add_panel(t, p, at + first, p.columns - first);
  float all = join(t.largest, s.room[0], [](float a, float b) { return larger(a, b); });
  map(t.sum, t.largest, t.largest, [=](float l, float m, float) { return l * fast_exp2((m - all) * log2_e()); });
  float total = join(t.sum, s.room[1], [](float a, float b) { return a + b; });
  float logits = 0.f;
  if (p.smoothing > 0.f) logits = join(t.of_logits, s.room[2], [](float a, float b) { return a + b; });
  return {all, total, logits};
}

TILE void zeros(const params &p, int64_t at) {
  stretch x;
  fill(x, 0.f);
  ROLLED for (int first = 0; first < p.columns; first += STRETCH) save(p, at + first, x, p.columns - first);
}

// Factors of a row's gradient: of e^(z - largest), of every number, of the target's.
struct factors { float of_p, each_less, target_less, largest; };
// here: the target's place in the panel, which may be another one's
TILE void put_panel(const params &p, int64_t at, int n, int here, factors f) {
  stretch x[DEPTH];
  load_all(x, p, at, n);
  if (p.softcap > 0.f) {
    float slope = 1.f / p.softcap;
    CONSTANT_INDEX for (int k = 0; k < DEPTH; k++)
      each(x[k], n - k * STRETCH, [=](float &z, int i) {
        float g = fused(fast_exp2((z - f.largest) * log2_e()), f.of_p, -f.each_less), y = z * slope;
        z = (i == here - k * STRETCH ? g - f.target_less : g) * fused(-y, y, 1.f);
      });
  } else {
    CONSTANT_INDEX for (int k = 0; k < DEPTH; k++)
      each(x[k], n - k * STRETCH, [=](float &z, int) {
        z = fused(fast_exp2((z - f.largest) * log2_e()), f.of_p, -f.each_less);
      });
    if (here >= 0 && here < n)
      CONSTANT_INDEX for (int k = 0; k < DEPTH; k++)
        each(x[k], n - k * STRETCH, [=](float &z, int i) { z = i == here - k * STRETCH ? z - f.target_less : z; });
  }
  CONSTANT_INDEX for (int k = 0; k < DEPTH; k++) save(p, at + k * STRETCH, x[k], n - k * STRETCH);
}
TILE void gradients(const params &p, int64_t at, int target, float scale, float lse, statistics t) {
  factors f = {scale * fused(2.f * p.z_loss, lse, 1.f) / t.sum, scale * p.smoothing / p.columns,
               scale * (1.f - p.smoothing), t.largest};
  // The last come first: they are in the L2 still.
  int first = p.columns / PANEL * PANEL;
  if (first < p.columns) put_panel(p, at + first, p.columns - first, target - first, f);
  ROLLED for (first -= PANEL; first >= 0; first -= PANEL) put_panel(p, at + first, PANEL, target - first, f);
}

TILE void compute(const params &p, shared &s, int) {
  int row = block_index(), target = p.targets[row];
  int64_t at = row * p.stride;
  bool counts = target != p.ignored, known = target >= 0 && target < p.columns;
  if (!counts || !known) {            // a target that does not exist: NaN
    put_number(p.loss + row, counts ? infinity() - infinity() : 0.f);
    put_number(p.lse + row, 0.f);
    if (p.scale) zeros(p, at);
    return;
  }
  float z = p.logits_are_float ? number_at((const float *)p.logits + at + target)
                               : number_at((const elem *)p.logits + at + target);
  z = p.softcap > 0.f ? capped(z, p.softcap, 1.f / p.softcap) : z;
  statistics t = statistics_of(p, s, at);         // meets: all have read z
  float log_sum = logf(t.sum), lse = t.largest + log_sum;
  float own = t.largest - z + log_sum, mean = t.largest - t.of_logits / p.columns + log_sum;
  float loss = p.smoothing > 0.f ? fused(p.smoothing, mean - own, own) : own;
  put_number(p.loss + row, fused(p.z_loss * lse, lse, loss));
  put_number(p.lse + row, lse);
  if (p.scale) gradients(p, at, target, p.scale[p.scale_of_rows ? row : 0], lse, t);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, 1, STRETCH)
