// Behind causal_conv1d_bwd.cu: dweight and dbias, the sums of all segments' sums, always in the same order; and what crosses the ends of a sequence of
// steps first .. end - 1, whose initial states are steps first - W + 1 .. first - 1 and whose final ones are steps end - W + 1 .. end - 1 of both:
//   gradients of initial states, dx_t = sum over j < W of tap[W - 1 - j] g_(t + j) for t < first
//   dx of the last W - 1 steps, computed once more in fp32, with the gradients of final states added
#include "causal_conv1d/causal_conv1d_tasks.h"

struct shared { int unused; };
typedef causal_conv1d_bwd_post_params params;
TILE void init(shared &) {}

TILE void store_column(void *g, int is_float, int64_t first, int stride, const cols &v, int n) {
  if (is_float) store((float *)g + first, stride, v, n);
  else store((elem *)g + first, stride, v, n);
}
TILE void add_up(const params &p, int i) {
  int k = i / p.col_blocks, col = i % p.col_blocks * N, channels = p.problem.channels, n = channels - col;
  const float *from = p.partials + (int64_t)k * channels + col;
  cols sum;
  fill(sum, 0.f);
  for (int part = 0; part < p.parts; part += 8) {
    cols v[8];
    CONSTANT_INDEX for (int j = 0; j < 8; j++) load(v[j], from + (int64_t)(part + j) * (W + 1) * channels, 1, part + j < p.parts ? n : 0);
    CONSTANT_INDEX for (int j = 0; j < 8; j++) map(sum, sum, v[j], [](float s, float x) { return s + x; });
  }
  if (k == W) store_column(p.dbias, p.problem.bias_is_float, col, 1, sum, n);
  else store_column(p.dweight, p.problem.weight_is_float, (int64_t)col * W + k, W, sum, n);
}

// ---- the ends of a sequence
struct place { int first, end, col, n, sequence; const elem *x, *dy, *initial; };

TILE void load_step(cols &v, const params &p, const place &s, int step) {   // of the initial states too; else zeros
  bool inside = step >= s.first && step < s.end, ahead = p.problem.initial && step < s.first && step >= s.first - PAST;
  if (ahead) load(v, s.initial + (step - s.first + PAST) * p.problem.initial_step, 1, s.n);
  else load(v, s.x + step * p.x_step, 1, inside ? s.n : 0);
}
// g of a step, 0 outside of the sequence; x: the W steps up to it
TILE void load_gradient(cols &g, const cols *x, const params &p, const place &s, int step, const weights &w) {
  load(g, s.dy + step * p.dout_step, 1, step >= s.first && step < s.end ? s.n : 0);
  if (p.problem.silu) {
    cols a;
    convolve(a, x, w);
    bool inside = step >= s.first && step < s.end;
    map(g, g, a, [=](float dy, float a) {
      float sg = sigmoid(a), as = a * sg;
      return inside ? dy * fused(as, 1.f - sg, sg) : 0.f;
    });
  }
}
// The gradient that comes through the final states: where `step` is one of them
TILE void load_final(cols &v, const params &p, const place &s, int step) {
  int k = step - (s.end - PAST);
  load(v, (const elem *)p.dfinal.data + s.sequence * p.dfinal.sequence + k * p.dfinal.step + s.col, 1, p.dfinal.data && k >= 0 && k < PAST ? s.n : 0);
}
// Of steps from .. from + PAST - 1
TILE void gradients(cols (&d)[PAST], const params &p, const place &s, int from, const weights &w) {
  cols x[3 * PAST], g[2 * PAST];             // steps from - PAST .. from + 2 PAST - 1; from .. from + 2 PAST - 1
  CONSTANT_INDEX for (int k = 0; k < 3 * PAST; k++) load_step(x[k], p, s, from - PAST + k);
  CONSTANT_INDEX for (int k = 0; k < 2 * PAST; k++) load_gradient(g[k], x + k, p, s, from + k, w);
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) {
    load_final(d[k], p, s, from + k);
    CONSTANT_INDEX for (int j = 0; j < W; j++) map(d[k], g[k + j], w.tap[W - 1 - j], d[k], [](float g, float w, float d) { return fused(g, w, d); });
  }
}

TILE void see_to_ends(const params &p, int i) {
  int sequence = i / p.col_blocks, col = i % p.col_blocks * N, n = p.problem.channels - col;
  const int *starts = p.problem.starts;
  int64_t batch = starts ? 0 : sequence;
  place s = {starts ? starts[sequence] : 0, starts ? starts[sequence + 1] : p.problem.steps, col, n, sequence, (const elem *)p.x + batch * p.x_batch + col,
             (const elem *)p.dout + batch * p.dout_batch + col, (const elem *)p.problem.initial + sequence * p.problem.initial_sequence + col};
  weights w;
  cols d[PAST];
  load_weights(w, p.problem, col);
  if (p.dinitial.data) {
    gradients(d, p, s, s.first - PAST, w);
    elem *to = (elem *)p.dinitial.data + sequence * p.dinitial.sequence + col;
    CONSTANT_INDEX for (int k = 0; k < PAST; k++) store(to + k * p.dinitial.step, 1, d[k], n);
  }
  if (p.dfinal.data && p.dx) {
    gradients(d, p, s, s.end - PAST, w);
    elem *to = (elem *)p.dx + batch * p.dx_batch + col;
    CONSTANT_INDEX for (int k = 0; k < PAST; k++) {
      int step = s.end - PAST + k;
      store(to + step * p.dx_step, 1, d[k], step >= s.first ? n : 0);
    }
  }
}

TILE void compute(const params &p, shared &, int) {
  int i = block_index();
  if (i < p.sums) add_up(p, i);
  else see_to_ends(p, i - p.sums);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>> kernel;
ENTRY(kernel, 1, N)
