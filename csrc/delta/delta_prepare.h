// What the delta rules' kernels share: where chunks of 64 steps lie, what a warp makes of their gates, and the matrices
// of a chunk, which do not depend on the state. With l_i the sum of the log decays up to step i of the chunk,
//   A_ij = beta_j e^(l_i - l_j) k_i . k_j for j < i,  M = (I + A)^-1,  P_ij = scale e^(l_i - l_j) q_i . k_j for j <= i
// Everything is made transposed: the products of the state want it so.
#pragma once
#include "tile/tile.h"
#include "tile/triangle.h"
#include "tile/twins.h"
#include "ssd/ssd_fwd.h"
#include "delta/delta.h"

enum { Q = 64 };                // steps of a chunk
// M, P and what is multiplied with them. bf16 would make the error of the output four times as large, and that of M ten
// times where keys are alike. What might leave fp16's range is scaled.
template<typename T> struct inner_of { typedef fp16 type; };
template<> struct inner_of<float> { typedef float type; };
typedef inner_of<elem>::type inner;
template<typename T> struct exact_of { typedef bf16 type; };   // of two parts, with float32's range
template<> struct exact_of<float> { typedef float type; };
typedef exact_of<elem>::type exact;
typedef st<inner, Q, Q> square;

// ---- rows and chunks

// Steps first .. end - 1 of a row, in `chunks` chunks, the first of which has `place` in scratch.
struct row_task { int row, batch, head, key_head, first, end, place, chunks; };
TILE int row_start(const delta_rows &p, int row) {
  int start = p.starts[row];
  return start < 0 ? 0 : start > p.steps ? p.steps : start;
}
TILE int row_place(const delta_rows &p, int row) { return row_start(p, row) / Q + row; }
TILE row_task task_of(const delta_rows &p, int row, int head) {
  row_task t = {row, row, head, head / p.group_heads, p.from, p.to, 0, 0};
  if (p.starts) {
    t.batch = 0;
    t.first = row_start(p, row);
    t.end = row_start(p, row + 1);
    t.place = row_place(p, row);
  }
  t.chunks = t.end > t.first ? (t.end - t.first + Q - 1) / Q : 0;
  return t;
}
// Steps `step` .. `end` - 1 are those of a row from the beginning of the chunk at a place on; none where that is empty.
struct chunk_steps { int step, end; };
TILE chunk_steps steps_at(const delta_rows &p, int place) {
  if (!p.starts) return {p.from + place * Q, p.to};
  int row = 0, last = p.rows - 1;
  while (row < last) {
    int middle = (row + last + 1) / 2;
    if (row_place(p, middle) <= place) row = middle;
    else last = middle - 1;
  }
  int step = row_start(p, row) + (place - row_place(p, row)) * Q, end = row_start(p, row + 1);
  return {step, end > step ? end : step};
}
// Steps of the next packed row are in this chunk.
TILE bool runs_over(const delta_rows &p, int step, int end) { return p.starts && end - step < Q; }

// Heads of a wave whose first is `first` of `all`: p.wave in kda.h and delta.h, or what is left.
TILE int wave_width(int wave, int first, int all) { return all - first > wave ? wave : all - first; }

// ---- what another kernel has done: `taken` of the parameters

TILE bool is_taken(const int *taken) {
  if (!taken) return false;
  const int takes = taken[0], wrong = taken[1];     // both are asked for at once
  return takes && !wrong;
}
// The same in front of grid_wait(), for UNLESS<>
TILE bool was_taken(const int *taken) {
  if (taken) grid_wait();
  return is_taken(taken);
}
// Whether it is this one (warpgroup). The word is written as a float: 0 is 0.
TILE void tell_taken(int *taken, bool takes) {
  rv x;
  fill(x, takes ? 1.f : 0.f);
  store((float *)taken, x, 1);
}

// ---- gates (warp)

// As which a log decay counts where it is less: 2^-128, and sums stay exact enough.
#define LEAST -88.7228391f

// To base 2. Below 2^-128 a decay is 0, as in float32; sums of a chunk's stay exact enough. NaN stays.
TILE float log_decay(float x) {
  x *= 1.4426950408889634f;
  return x < -128.f ? -128.f : x;
}
TILE float sigmoid(float x) { return fast_rcp(1.f + fast_exp2(x * -1.4426950408889634f)); }
// As PyTorch computes it, to the bit: a beta made here is the one that a caller makes.
TILE float exact_sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// What the caller gave of n steps from `step` on; of others, what decays and writes nothing.
struct given_steps { wv<Q> g, beta, norm_q, norm_k; };
TILE void load_beta(wv<Q> &beta, const delta_rows &r, const delta_gates &p, const row_task &t, int step) {
  load(beta, p.beta + ((int64_t)t.batch * r.steps + step) * r.heads + t.head, r.heads, t.end - step,
       p.sigmoid ? -infinity() : 0.f);
}
TILE void load_given(given_steps &v, const delta_rows &r, const delta_gates &p, const row_task &t, int step) {
  int n = t.end - step;
  int64_t at = ((int64_t)t.batch * r.steps + step) * r.heads + t.head;
  int64_t key = ((int64_t)t.batch * r.key_heads + t.key_head) * r.steps + step;
  if (p.g) load(v.g, p.g + at, r.heads, n, p.a_log ? -infinity() : 0.f);
  else fill(v.g, 0.f);
  load_beta(v.beta, r, p, t, step);
  if (p.norm_q) load(v.norm_q, p.norm_q + key, 1, n, 1.f);
  else fill(v.norm_q, 1.f);
  if (p.norm_k) load(v.norm_k, p.norm_k + key, 1, n, 1.f);
  else fill(v.norm_k, 1.f);
}
TILE void make_beta(wv<Q> &beta, const wv<Q> &given, const delta_gates &p) {
  bool sigmoids = p.sigmoid;
  float most = p.most;
  map(beta, given, given, [=](float x, float) { return sigmoids ? most * exact_sigmoid(x) : x; });
}
TILE void put_beta(sv<Q> &d, const wv<Q> &given, const delta_gates &p) {
  wv<Q> beta;
  make_beta(beta, given, p);
  store(d, beta);
}
// l_i, and with r_i the norms' factors: l_j - log r_j of k; r_i of k, scale r_i of q; r_i e^(l_i) of k, scale r_i
// e^(l_i) of q; r_i e^(l_e - l_i) of k, e the chunk's last step, and the same times beta. Logarithms to base 2
struct chunk_vectors { sv<Q> l, from, beta, norm_k, norm_q, decay, read, weight, write; };
// l of chunk_vectors
TILE void sum_decays(wv<Q> &l, const given_steps &x, const delta_gates &p, int head) {
  if (p.a_log) {
    float a = -fast_exp2(p.a_log[head] * 1.4426950408889634f), bias = p.dt_bias ? p.dt_bias[head] : 0.f;
    map(l, x.g, x.g, [=](float g, float) { return log_decay(a * softplus(g + bias)); });
  } else map(l, x.g, x.g, [](float g, float) { return log_decay(g); });
  cumsum(l);
}
// What the state wants: l, beta, decay, weight, write
TILE void put_state_vectors(chunk_vectors &v, const given_steps &x, const wv<Q> &l, const delta_gates &p) {
  wv<Q> out, beta;
  float end = last(l);
  store(v.l, l);
  make_beta(beta, x.beta, p);
  store(v.beta, beta);
  map(out, l, x.norm_k, [](float l, float r) { return r * fast_exp2(l); });
  store(v.decay, out);
  map(out, l, x.norm_k, [=](float l, float r) { return r * fast_exp2(end - l); });
  store(v.weight, out);
  map(out, out, beta, [](float w, float b) { return w * b; });
  store(v.write, out);
}
TILE void put_read(chunk_vectors &v, const given_steps &x, const wv<Q> &l, float scale) {
  wv<Q> out;
  map(out, x.norm_q, l, [=](float r, float l) { return r * scale * fast_exp2(l); });
  store(v.read, out);
}
TILE void put_vectors(chunk_vectors &v, const given_steps &x, const delta_gates &p, int head, float scale) {
  wv<Q> l, out;
  sum_decays(l, x, p, head);
  map(out, l, x.norm_k, [](float l, float r) { return l - fast_log2(r); });
  store(v.from, out);
  store(v.norm_k, x.norm_k);
  map(out, x.norm_q, l, [=](float r, float) { return r * scale; });
  store(v.norm_q, out);
  put_state_vectors(v, x, l, p);
  put_read(v, x, l, scale);
}

// ---- fp16 operands (warpgroup)

// Of each row of x the sum of its four threads' largest values: from the row's largest one to four times that
TILE void row_maxima(rv &d, const rt<float, Q> &x) {
  rsum most;
  fill(most, 0.f);
  each<Q>([](int, int, float x, float &most) { most = fmaxf(most, fabsf(x)); }, x, most);
  reduce(d, most);
}
// Of each row of x, 16 down is at least the largest value, and at most four times that; up = 1 / down. A product of an
// operand x up with M may grow by 4000 before it leaves fp16's range.
TILE void row_factors(rv &up, rv &down, const rt<float, Q> &x) {
  row_maxima(down, x);
  map(down, down, [](float m) { return (m > 1e-30f ? m : 1e-30f) * 0.0625f; });
  map(up, down, [](float m) { return fast_rcp(m); });
}
// The same, but a row of which that is from 2^-10 to 16 stays as it is: what falls below fp16's range is nothing beside
// its largest value.
TILE void few_factors(rv &up, rv &down, const rt<float, Q> &x) {
  row_maxima(down, x);
  map(down, down, [](float m) { return m >= 0x1p-10f && m <= 16.f ? 1.f : (m > 1e-30f ? m : 1e-30f) * 0.0625f; });
  map(up, down, [](float m) { return m == 1.f ? 1.f : fast_rcp(m); });
}

// ---- the matrices of a chunk (warpgroup)

// k q^T and k k^T of a chunk whose tiles are there
template<int K>
TILE void begin_pairs(rt<float, Q> &reads, rt<float, Q> &writes, const st<elem, Q, K> &k, const st<elem, Q, K> &q) {
  mma_fence();
  mma_ABt<ZERO>(reads, k, q);
  mma_ABt<ZERO>(writes, k, k);
  mma_commit();
}
// ... in one tile, q behind k
template<int K> TILE void begin_pairs(rt<float, Q> &reads, rt<float, Q> &writes, const st<elem, 2 * Q, K> &keys) {
  mma_fence();
  mma_ABt_halves<ZERO>(writes, reads, keys);
  mma_commit();
}
// P^T of k q^T, and A^T of k k^T, of which what stands on the diagonal is not looked at: row j, column i >= j times
// e^(l_i - l_j), the norms' factors and, in A^T, beta_j. weighed: in P^T too.
TILE void make_pairs(rt<float, Q> &reads, rt<float, Q> &writes, const chunk_vectors &v, bool weighed) {
  rv from, beta;
  load(from, v.from);
  load(beta, v.beta);
  each<Q>([=](int row, int col, float &read, float &write, float j, float b, float i, float norm_q, float norm_k) {
    float d = col < row ? 0.f : fast_exp2(i - j), e = d * b;
    read *= (weighed ? e : d) * norm_q;
    write *= e * norm_k;
  }, reads, writes, from, beta, v.l, v.norm_q, v.norm_k);
}

// M^T of A^T, which is upper triangular. The warpgroup has scratch to itself from here to the next wg_sync() behind it.
// Doubling over all 64 steps gives errors of 10^7 for equal keys. Products of blocks of 16 do not; but with factors of
// 16 bits their errors were up to 34 times those of substitution in fp32 with one rounding behind it. With factors in
// two parts nothing of that is left. Registers: two tiles of 32, four words of each part of two factors, sums of 16.
TILE void invert(rt<float, Q> &inverse, const rt<float, Q> &a, tri<inner> &scratch) {
  invert_diagonal(inverse, scratch, a);
  wg_sync();
  invert_pairs(inverse, scratch);
  wg_sync();
  invert_rest(inverse, scratch);
}
// The same in halves (tile/triangle.h)
TILE void invert_in_halves(rt<float, Q> &inverse, const rt<float, Q> &a, tri<inner> &scratch) {
  invert_diagonal<IN_HALVES>(inverse, scratch, a);
  wg_sync();
  invert_pairs<IN_HALVES>(inverse, scratch);
}
