// How many chunks in front of a segment of a row, or behind one of a pass that goes back, make what was beyond them
// fade: the least number over which the decays of each head multiply to 2^-FADED or less, those of a head's channels in
// the mean, of the slowest to 2^-SLOWEST, if all are as the one next to the segment. That alone is read: each more
// takes 2 us. The slowest of many channels in one chunk is not that in the next, so of several 2^-GUESSED will do. 0
// where the number is more than p.most. It is a guess, as gates vary and keys take what a slow column holds to others
// and back: what comes of it is proved by delta_meets.cu, of ranges by kda_whole.cu, which allow what rounding makes,
// 2^-10. A block has the chunk at one end of a segment of one matrix of decays [steps, columns]: columns are the
// channels of a head, or all heads. Or the chunk in front of a range.
// Roles: two warpgroups, one for each panel of 64 columns; the first one has the sums of both. The kernel takes little
// longer than its code and the chunk take to come: what few calls want lies elsewhere.
#include "tile/cold.h"
#include "tile/numbers.h"
#include "tile/channels.h"
#include "delta/delta_early.h"

enum { COLUMNS = 128, PANELS = 2, FADED = 13, SLOWEST = 11, GUESSED = 10 };
struct shared { sv<COLUMNS> parts[4]; };      // sums of 16 steps each
typedef delta_fades_params params;
TILE void init(shared &) {}

// Of a panel's 64 steps from g on. What is not there is 0.
template<typename T> TILE void put_sums(sv<COLUMNS> (&to)[4], const params &p, const T *g, int h) {
  hm x;
  load(x, g + 64 * h, p.step, Q, p.columns - 64 * h);
  at_least(x, LEAST);
  store_sums(to, 64 * h, x);
}
// ... of raw ones. Their rate is the head's, or that of each column.
template<typename T> TILE void put_raw_sums(sv<COLUMNS> (&to)[4], const params &p, const T *g, int head, int h) {
  const int n = p.columns - 64 * h;
  const float bound = p.lower_bound;
  hv rate, bias;
  hm x;
  load(x, g + 64 * h, p.step, Q, n);
  if (p.columns_are_heads) load(rate, p.a_log + 64 * h, n);
  else fill(rate, p.a_log[head]);
  map(rate, rate, [](float a) { return fast_exp2(a * 1.4426950408889634f); });
  fill(bias, 0.f);
  if (p.dt_bias) load(bias, p.dt_bias + head * p.columns + 64 * h, n);
  map(x, bias, Q, [](float x, float bias) { return x + bias; });
  if (bound == 0.f) map(x, rate, Q, [](float x, float rate) { return -rate * softplus(x); });
  else map(x, rate, Q, [=](float x, float rate) { return bound * sigmoid(rate * x); });
  at_least(x, LEAST);
  store_sums(to, 64 * h, x);
}
COLD void put_others(shared &s, const params &p, int64_t from, int head, int h) {
  const float *floats = (const float *)p.g + from;
  const elem *shorts = (const elem *)p.g + from;
  if (!p.a_log) put_sums(s.parts, p, shorts, h);
  else if (p.is_float) put_raw_sums(s.parts, p, floats, head, h);
  else put_raw_sums(s.parts, p, shorts, head, h);
}

// A panel's sums of the chunk, to base 2. Where there is no column they are 0.
TILE void take_sums(hv &sum, const shared &s, int h) {
  hv some;
  fill(sum, 0.f);
  CONSTANT_INDEX for (const sv<COLUMNS> &part : s.parts) {
    load(some, part, 64 * h);
    map(sum, sum, some, [](float x, float y) { return fused(y, 1.4426950408889634f, x); });
  }
}
TILE float slowest_of(const hv &sum, int columns) {
  hv x;
  map_index(x, [=](int i) { return i < columns ? 0.f : -infinity(); });
  map(x, x, sum, [](float x, float y) { return x + y; });
  return max_of(x);
}
// Chunks like this one that make all fade; or p.most + 1
TILE int chunks_of(const params &p, const shared &s) {
  hv sums[PANELS], all;
  CONSTANT_INDEX for (int h = 0; h < PANELS; h++) take_sums(sums[h], s, h);
  map(all, sums[0], sums[1], [](float x, float y) { return x + y; });
  const float slowest = fmaxf(slowest_of(sums[0], p.columns), slowest_of(sums[1], p.columns - 64));
  const float total = p.columns_are_heads ? slowest : sum_of(all), most = p.columns_are_heads ? 1.f : (float)p.columns;
  int n = 1, bits = p.columns_are_heads ? FADED : SLOWEST;
  for (; n <= p.most; n++) {
    if ((float)n * slowest <= -(float)bits && (float)n * total <= -(float)FADED * most) break;
    if (!p.columns_are_heads) bits = GUESSED;
  }
  return n;
}
TILE void fades(const params &p, shared &s, int h) {
  grid_wait();
  const bool ranges = p.line.ranges.by > 0;
  const int at = ranges ? range_begin(block_index() + 1, p.line) : block_index();
  const int matrix = quotient(at, p.line.places), batch = quotient(matrix, p.line.heads);
  const int place = at - matrix * p.line.places.by, head = matrix - batch * p.line.heads.by;
  const int end = p.from + (ranges ? place * Q : (place + 1) * p.segment);
  const int64_t from = batch * p.batch + head * p.head + (end - (p.back ? 0 : Q)) * p.step;
  if (!ranges || place > 0) {               // else a head begins here: what is found of no sums is not used
    if (p.is_float && !p.a_log) put_sums(s.parts, p, (const float *)p.g + from, h);
    else put_others(s, p, from, head, h);
  }
  if (h > 0) return bar_arrive(1, 128 * PANELS);
  bar_sync(1, 128 * PANELS);
  int early = chunks_of(p, s);
  if (ranges && place <= p.most) early = place < 1 ? 1 : place < early ? place : early;    // its head begins there
  else if (early > p.most) early = 0;
  rv word;
  fill(word, 0.f);
  if (block_index() == 0) store((float *)p.wrong, word, 1);
  if (ranges) store((float *)p.told + block_index(), word, 1);
  fill(word, (float)early);
  store(p.early + block_index(), word, 1);
}

typedef block<params, shared, init, role<fades, WARPGROUP, PANELS, 0>, DEPENDENT> kernel;
ENTRY(kernel, Q, COLUMNS)
