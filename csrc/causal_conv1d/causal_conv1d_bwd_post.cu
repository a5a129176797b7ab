// Behind causal_conv1d_bwd.cu: dweight and dbias, the sums of all segments' sums, always in the same order; and what
// crosses the ends of a sequence of steps first .. end - 1. Its initial states are steps first - W + 1 .. first - 1,
// its final ones steps end - W + 1 .. end - 1 of both.
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
    CONSTANT_INDEX for (int j = 0; j < 8; j++)
      load(v[j], from + (int64_t)(part + j) * (W + 1) * channels, 1, part + j < p.parts ? n : 0);
    CONSTANT_INDEX for (int j = 0; j < 8; j++) map(sum, sum, v[j], [](float s, float x) { return s + x; });
  }
  if (k == W) store_column(p.dbias, p.dbias_is_float, col, 1, sum, n);
  else store_column(p.dweight, p.dweight_is_float, (int64_t)col * W + k, W, sum, n);
}

// ---- the ends of a sequence
struct place { int first, end, col, n, batch, sequence; const elem *x, *dy, *initial; };

TILE bool is_step(const place &s, int step) { return step >= s.first && step < s.end; }
TILE void load_step(cols &v, const params &p, const place &s, int step) {   // of the initial states too; else zeros
  bool ahead = p.problem.initial && step < s.first && step >= s.first - PAST;
  if (ahead) load(v, s.initial + (step - s.first + PAST) * p.problem.initial_step, 1, s.n);
  else load(v, s.x + step * p.x_step, 1, is_step(s, step) ? s.n : 0);
}
// The gradient that comes through the final states, where `step` is one of them.
TILE void load_final(cols &v, const params &p, const place &s, int step) {
  int k = step - (s.end - PAST);
  bool final = p.dfinal.data && k >= 0 && k < PAST && joined(p.problem, s.batch, step, s.end - 1);
  load(v, (const elem *)p.dfinal.data + s.sequence * p.dfinal.sequence + k * p.dfinal.step + s.col, 1, final ? s.n : 0);
}
// Of steps from .. from + PAST - 1.
TILE void gradients(cols (&d)[PAST], const params &p, const place &s, int from, const weights &w) {
  cols x[3 * PAST], g[2 * PAST];             // steps from - PAST .. from + 2 PAST - 1; from .. from + 2 PAST - 1
  int part[3 * PAST];                        // of steps of one sequence the same
  bool silu = p.problem.silu;
  CONSTANT_INDEX for (int k = 0; k < 3 * PAST; k++) {
    load_step(x[k], p, s, from - PAST + k);
    part[k] = k ? part[k - 1] + !joined(p.problem, s.batch, from - PAST + k - 1, from - PAST + k) : 0;
  }
  CONSTANT_INDEX for (int k = 0; k < 2 * PAST; k++) {
    int step = from + k;
    bool inside = is_step(s, step) && !is_padding(p.problem, s.batch, step);
    cols a;
    load(g[k], s.dy + step * p.dout_step, 1, inside ? s.n : 0);
    copy(a, w.bias);
    CONSTANT_INDEX for (int j = 0; j < W; j++) {
      bool seen = part[k + j] == part[k + PAST];
      map(a, x[k + j], w.tap[j], a, [=](float x, float w, float a) { return seen ? fused(x, w, a) : a; });
    }
    map(g[k], g[k], a, [=](float dy, float a) {
      float sg = sigmoid(a), as = a * sg;
      return !inside ? 0.f : silu ? dy * fused(as, 1.f - sg, sg) : dy;
    });
  }
  CONSTANT_INDEX for (int k = 0; k < PAST; k++) {
    load_final(d[k], p, s, from + k);
    CONSTANT_INDEX for (int j = 0; j < W; j++) {
      bool seen = part[k + j + PAST] == part[k + PAST];
      map(d[k], g[k + j], w.tap[W - 1 - j], d[k], [=](float g, float w, float d) { return seen ? fused(g, w, d) : d; });
    }
  }
}

TILE void see_to_ends(const params &p, int i) {
  int sequence = i / p.col_blocks, col = i % p.col_blocks * N, n = p.problem.channels - col;
  const int *starts = p.problem.starts;
  int batch = starts ? 0 : sequence;
  place s = {starts ? starts[sequence] : 0, starts ? starts[sequence + 1] : p.problem.steps, col, n, batch, sequence,
             (const elem *)p.x + batch * p.x_batch + col, (const elem *)p.dout + batch * p.dout_batch + col,
             (const elem *)p.problem.initial + sequence * p.problem.initial_sequence + col};
  weights w;
  cols d[PAST];
  load_weights(w, p.problem, col);
  bool initial = p.dinitial.data, final = p.dfinal.data && p.dx;
  elem *ahead = (elem *)p.dinitial.data + sequence * p.dinitial.sequence + col;
  elem *dx = (elem *)p.dx + batch * p.dx_batch + col;
  ROLLED for (int end = !initial; end < 1 + final; end++) {      // 0: the initial states; 1: the last steps
    int from = (end ? s.end : s.first) - PAST;
    gradients(d, p, s, from, w);
    CONSTANT_INDEX for (int k = 0; k < PAST; k++) {
      if (end) store(dx + (from + k) * p.dx_step, 1, d[k], from + k >= s.first ? n : 0);
      else store(ahead + k * p.dinitial.step, 1, d[k], n);
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
