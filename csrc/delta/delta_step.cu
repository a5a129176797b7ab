// Steps of a delta rule for generation, with a head's state S [keys, values] in registers between its one read and its
// one write (Yang, Kautz & Hatamizadeh 2024, section 3; per channel: Kimi Team 2025, section 3):
//   S = e^g S,   u = beta (v - S^T k),   S = S + k u^T,   out = scale S^T q
// S^T q of the new state is S^T q + (k.q) u of the old one. So both sums over the keys are made in one pass over the
// state, and what comes behind them is one more. q and k may be normalised: their lengths are factors of sums.
// g is a head's or, with CHANNELS, one of each key. DOWN: keys are the rows of a tile, values its columns.
#include "delta/delta_step_tile.h"

struct shared {                           // of every other step
  side::room k[2], q[2];
  side::dot_room kk[2], qq[2], kq[2];
  sv<KEYS> decays[CHANNELS ? 2 : 0];
};
typedef delta_step_params params;
TILE void init(shared &) {}

// A decay of the head is applied where the step is added. What is summed before has to be multiplied by it.
struct of_head {
  typedef float made, decays;
  TILE void pass(decays &d, float made, shared &, int) { d = made; }
  TILE void forget(state_tile &, float) {}
  TILE float left(float decay) { return decay; }
  TILE void add(state_tile &state, const keys &k, const values &u, float decay) {
    each(state, [=](float &s, float k, float u) { s = fused(s, decay, k * u); }, k, u);
  }
};
// Decays of keys are applied first. Each is made by one thread.
struct of_keys {
  typedef ml<KEYS> made;
  typedef keys decays;
  TILE void pass(decays &d, const made &m, shared &s, int turn) {
    store(s.decays[turn], m);
    wg_sync();
    load(d, s.decays[turn]);
  }
  TILE void forget(state_tile &state, const keys &decay) {
    each(state, [](float &s, float d) { s *= d; }, decay);
  }
  TILE float left(const keys &) { return 1.f; }
  TILE void add(state_tile &state, const keys &k, const values &u, const keys &) {
    each(state, [](float &s, float k, float u) { s = fused(k, u, s); }, k, u);
  }
};
typedef choose<CHANNELS, of_keys, of_head>::type gate;

// What a step reads.
struct inputs { keys q, k; values v; gate::made g, bias; float beta; };

TILE void begin(inputs &i, const params &p, const step_task &t, int step, int value) {
  int dim = DOWN ? p.states.rows : p.states.cols, dim_v = DOWN ? p.states.cols : p.states.rows;
  int group = quotient_of(t.head, p.group_heads);
  begin_side(i.k, vector_at(p.k, t.sample, step, group), dim);
  begin_side(i.q, vector_at(p.q, t.sample, step, group), dim);
  begin_numbers(i.g, p.g, t.sample, step, t.head, dim);
  begin_numbers(i.bias, p.bias, 0, 0, t.head, dim);
  begin_side(i.v, vector_at(p.v, t.sample, step, t.head) + value, dim_v - value);
  begin_numbers(i.beta, p.beta, t.sample, step, t.head, 1);
}
TILE void end(inputs &i, const params &p) {
  load_end<elem>(i.k);
  load_end<elem>(i.q);
  end_numbers(i.g, p.g);
  end_numbers(i.bias, p.bias);
}

TILE float natural_exp(float x) { return fast_exp2(x * 1.4426950408889634f); }
TILE float sigmoid(float x) { return fast_rcp(1.f + natural_exp(-x)); }
// g becomes the decay of a step. rate: e^a_log, 1 where there is none.
TILE void to_decay(gate::made &g, const gate::made &bias, const params &p, float rate) {
  const float low = p.lower_bound;
  if (low != 0.f) change(g, bias, [=](float g, float bias) { return natural_exp(low * sigmoid(rate * (g + bias))); });
  else if (p.a_log.data) change(g, bias, [=](float g, float bias) { return natural_exp(-rate * softplus(g + bias)); });
  else change(g, bias, [=](float g, float) { return natural_exp(g); });
}

TILE void sum_over_keys(side::sums &sums, state_tile &state, const keys &x) {
  clear(sums);
  each(state, [](float &s, float x, float &sum) { sum = fused(s, x, sum); }, x, sums);
}

TILE void put_dots(shared &s, const inputs &now, float &kk, float &qq, float &kq, int turn) {
  side::put(s.kk[turn], kk, now.k, now.k);
  side::put(s.qq[turn], qq, now.q, now.q);
  side::put(s.kq[turn], kq, now.k, now.q);
}

TILE void no_state(const params &p, const step_task &t, int value) {
  values zero;
  int dim_v = DOWN ? p.states.cols : p.states.rows;
  fill(zero, 0.f);
  for (int step = 0; step < (ONCE ? 1 : p.steps); step++)
    save_side(vector_at(p.out, t.sample, step, t.head) + value, zero, dim_v - value);
}

TILE void compute(const params &p, shared &s, int) {
  step_task t = delta_task(p);
  int value = t.part * VALUES, row = DOWN ? 0 : value, col = DOWN ? value : 0;
  int dim_v = DOWN ? p.states.cols : p.states.rows;
  state_tile state;
  inputs now;
  float rate;
  // Vectors are asked for first: they are wanted first, and a place is read meanwhile. But where a thread has numbers
  // of many keys, and blocks are few, the memory has nothing to do for as long as that takes.
  const bool first = STATE_FIRST && (ONCE ? has_state(p.states, t) : !p.places && !p.accepted);
  if (first) begin_state(state, p.states, state_at(p.states, t, row, col), row, col);
  begin(now, p, t, 0, value);
  if (STATE_FIRST && ONCE ? !first : !has_state(p.states, t)) return no_state(p, t, value);
  int64_t at = state_at(p.states, t, row, col);
  if (!STATE_FIRST || (!ONCE && !first)) begin_state(state, p.states, at, row, col);
  begin_numbers(rate, p.a_log, 0, 0, t.head, 1);
  end_numbers(rate, p.a_log);
  rate = natural_exp(rate);
  ROLLED for (int step = 0; step < (ONCE ? 1 : p.steps); step++) {
    if (step > 0) begin(now, p, t, step, value);
    const int turn = step % 2;
    values u, out;
    gate::decays decays;
    side::sums sums;
    float kk, qq, kq;
    end(now, p);
    to_decay(now.g, now.bias, p, rate);
    gate::pass(decays, now.g, s, turn);
    if (DOWN) put_dots(s, now, kk, qq, kq, turn);         // while the state is on its way
    if (step == 0) end_state(state, p.states);
    gate::forget(state, decays);
    sum_over_keys(sums, state, now.k);
    side::put(s.k[turn], u, sums);
    sum_over_keys(sums, state, now.q);
    side::put(s.q[turn], out, sums);
    if (!DOWN) put_dots(s, now, kk, qq, kq, turn);        // registers lack before
    side::meet();
    side::take(u, s.k[turn]);
    side::take(kk, s.kk[turn]);
    side::take(qq, s.qq[turn]);
    side::take(kq, s.kq[turn]);
    load_end<elem>(now.v);
    end_numbers(now.beta, p.beta);
    float beta = p.beta_form ? p.beta_form * sigmoid(now.beta) : now.beta, rest = gate::left(decays);
    float k_length = p.l2norm ? fast_rsqrt(kk + 1e-6f) : 1.f;
    float q_length = p.l2norm ? p.scale * fast_rsqrt(qq + 1e-6f) : p.scale;
    // u: to be multiplied by k as it is
    float weight = beta * k_length, old = rest * k_length;
    map(u, now.v, u, [=](float v, float s) { return weight * (v - old * s); });
    gate::add(state, now.k, u, decays);
    side::take(out, s.q[turn]);
    map(out, out, u, [=](float o, float u) { return q_length * fused(kq, u, rest * o); });
    save_side(vector_at(p.out, t.sample, step, t.head) + value, out, dim_v - value);
    if (!ONCE && p.kept.data) keep_behind(state, p, t, step, row, col);
  }
  if (ONCE || p.update) keep_state(state, p.states, at, row, col);
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, ROWS, COLS)
