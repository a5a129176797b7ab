// How many chunks in front of a segment of a row, or behind one of a pass that goes back, make what was beyond them
// fade: the least number over which the decays of each head multiply to 2^-FADED or less, those of a head's channels in
// the mean, of the slowest to 2^-SLOWEST; 0 where p.most chunks do not, or where the first has not its share of that. It
// is a guess, as keys take what a slow column holds to others and back: what comes of it is proved by delta_meets.cu,
// which allows what rounding makes, 2^-10. A block has the chunks at one end of a segment of one matrix of decays
// [steps, columns]: columns are the channels of a head, or all heads. Or those in front of a range.
// Roles: WARPS warps, of each chunk's 64 steps STEPS each. Registers of a thread: 4 columns of HALF of these.
#include "tile/numbers.h"
#include "delta/delta_early.h"

enum { COLUMNS = 128, WARPS = 4, STEPS = Q / WARPS, HALF = STEPS / 2, FADED = 13, SLOWEST = 11 };
typedef wv<COLUMNS> columns;
struct shared {
  sv<COLUMNS> parts[2][WARPS];              // of chunks in turn
  sem there[2];
};
typedef delta_fades_params params;
TILE void init(shared &s) {
  for (int i = 0; i < 2; i++) sem_init(s.there[i], arrivals(0, WARPS, 0));
}

// The rate of each column, and what is added to what was given.
struct gate { columns rate, bias; };
TILE void load_gate(gate &d, const params &p, int head) {
  fill(d.rate, 0.f);
  fill(d.bias, 0.f);
  if (!p.a_log) return;
  if (p.columns_are_heads) load(d.rate, p.a_log, 1, p.columns, 0.f);
  else fill(d.rate, p.a_log[head]);
  map(d.rate, d.rate, d.rate, [](float a, float) { return fast_exp2(a * 1.4426950408889634f); });
  if (p.dt_bias) load(d.bias, p.dt_bias + head * p.columns, 1, p.columns, 0.f);
}
// Where there is no column, it fades at once.
template<typename T> TILE void load_steps(columns (&steps)[HALF], const params &p, const T *g) {
  const int n = p.columns;
  const float none = p.a_log ? 128.f : -128.f;
  CONSTANT_INDEX for (int k = 0; k < HALF; k++) {
    const T *step = g + k * p.step;
    map_index(steps[k], [=](int i) { return i < n ? number(step[i]) : none; });
  }
}
TILE void add_steps(columns &sum, columns (&steps)[HALF], const gate &by, const params &p) {
  const float bound = p.lower_bound;
  CONSTANT_INDEX for (columns &x : steps) {
    if (p.a_log) {
      map(x, x, by.bias, [](float x, float bias) { return x + bias; });
      if (bound == 0.f) map(x, x, by.rate, [](float x, float rate) { return -rate * softplus(x); });
      else map(x, x, by.rate, [=](float x, float rate) { return bound * sigmoid(rate * x); });
    }
    map(sum, sum, x, [](float sum, float x) { return sum + log_decay(x); });
  }
}
// This warp's steps of the chunk in front of g, or behind.
template<typename T>
TILE void put_part(shared &s, int i, const gate &by, const params &p, const T *g, int warp) {
  columns sum;
  fill(sum, 0.f);
  ROLLED for (int first = warp * STEPS; first < (warp + 1) * STEPS; first += HALF) {
    columns x[HALF];
    load_steps(x, p, g + (first - (p.back ? 0 : Q)) * p.step);
    add_steps(sum, x, by, p);
  }
  store(s.parts[i][warp], sum);
}

TILE bool have_faded(const columns &all, const params &p) {
  const int n = p.columns;
  columns there;
  if (p.columns_are_heads) return max_of(all) <= -(float)FADED;
  map_index(there, [=](int i) { return i < n ? 1.f / (float)n : 0.f; });
  map(there, there, all, [](float share, float x) { return share * x; });
  return max_of(all) <= -(float)SLOWEST && sum_of(there) <= -(float)FADED;
}
TILE void fades(const params &p, shared &s, int warp) {
  grid_wait();
  const int at = p.ranges ? range_begin(block_index() + 1, p.ranges, p.chunks) : block_index();
  const int ends = p.ranges ? p.places : p.segments - 1, matrix = at / ends, batch = matrix / p.heads;
  const int place = at - matrix * ends, end = p.from + (p.ranges ? place * Q : (place + 1) * p.segment);
  const int most = p.ranges && place < p.most ? place : p.most;
  const int64_t first = batch * p.batch + (matrix - batch * p.heads) * p.head;
  columns all, some;
  gate by;
  load_gate(by, p, matrix - batch * p.heads);
  fill(all, 0.f);
  int faded = 0;
  bool slow = false;
  for (int chunks = 0; !faded && !slow && chunks < most; chunks++) {
    const int i = chunks % 2;
    const int64_t from = first + (end + (p.back ? chunks : -chunks) * Q) * p.step;
    if (p.is_float) put_part(s, i, by, p, (const float *)p.g + from, warp);
    else put_part(s, i, by, p, (const elem *)p.g + from, warp);
    sem_arrive<WARP>(s.there[i]);
    sem_wait(s.there[i], chunks / 2 & 1);
    CONSTANT_INDEX for (const sv<COLUMNS> &part : s.parts[i]) {
      load(some, part);
      map(all, all, some, [](float x, float y) { return x + y; });
    }
    if (have_faded(all, p)) faded = chunks + 1;
    slow = max_of(all) > -(float)SLOWEST / (float)p.most;
  }
  if (!faded && most < p.most) faded = most > 0 ? most : 1;
  if (warp > 0) return;
  fill(some, 0.f);
  if (block_index() == 0) store((float *)p.wrong, 1, some, 1);
  if (p.ranges) store((float *)p.told + block_index(), 1, some, 1);
  fill(all, (float)faded);
  store(p.early + block_index(), 1, all, 1);
}

typedef block<params, shared, init, role<fades, WARP, WARPS, 0>, DEPENDENT> kernel;
ENTRY(kernel, Q, COLUMNS)
