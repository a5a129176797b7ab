// Whether segments that began early with a state of 0 may stand: each one's state, where it begins, has to be the one
// behind the segment in front, but for what the rounding of one chunk's operands makes. That is, in the mean of a key's
// row of 128 values, 2^-10 of them and 2^-10 of all, as what is left of greater ones may be small; and of each value's
// column of keys, which share the rounding of one u, two steps of that, 2^-6. Where they are not alike, and where NaN
// stands, p.taken tells it, and all is done anew. The same of gradients of states, whose pass goes back. If the first
// segment is right, so is the second, and so on.
// A block has the state between two segments of one head. The first one clears what kernels behind want clear.
// Roles: PARTS warpgroups, each with 64 values of 64 keys; a warp that judges. Registers of a thread: a part of both
// states, 32 each, and sums.
#include "tile/numbers.h"
#include "tile/order.h"
#include "delta/delta_prepare.h"

enum { PARTS = 4, KEYS = 128 };           // a part: half of values, then half of keys
struct shared {
  sv<4 * 64> sizes[PARTS], errors[PARTS]; // of keys
  sv<64> apart[PARTS];                    // of values: not 0 where they are
  sv<32> verdict;                         // not 0: they are apart
  sem there, judged;
};
typedef delta_meets_params params;
TILE void init(shared &s) {
  sem_init(s.there, arrivals(0, 0, PARTS));
  sem_init(s.judged, arrivals(0, 1, 0));
}

TILE bool nobody_began(const params &p) { return *p.taken == 0; }
TILE void compare(const params &p, shared &s, int part) {
  grid_wait();
  if (block_index() == 0 && part == 0 && p.marks) zero_words(p.marks, p.mark_count);
  if (nobody_began(p)) return;
  if (part % 2 * 64 >= p.keys) return sem_arrive(s.there);
  const int ends = p.segments - 1, matrix = block_index() / ends, segment = block_index() - matrix * ends + 1;
  const int row = matrix / p.heads, head = matrix - row * p.heads;
  const int64_t state = 128 * p.keys, at = ((int64_t)row * p.cut_stride * p.heads + head) * state;
  const float *behind = p.cuts + at + (segment - 1) * p.heads * state + (part / 2 * p.keys + part % 2 * 64) * 64;
  const float *begins = behind + ends * p.heads * state;
  rt<float, 64> x, y;
  rsum row_sizes, row_errors;
  rv row_size, row_error;
  csum<64> sizes, errors;
  load_acc(x, behind);
  load_acc(y, begins);
  fill(row_sizes, 0.f);
  fill(row_errors, 0.f);
  clear(sizes);
  clear(errors);
  each<64>([](int, int, float x, float y, float &row_size, float &row_error, float &size, float &error) {
    float d = fabsf(x - y);
    x = fabsf(x);
    row_size += x;
    row_error += d;
    size += x;
    error += d;
  }, x, y, row_sizes, row_errors, sizes, errors);
  reduce(row_size, row_sizes);
  reduce(row_error, row_errors);
  map(row_error, row_error, row_size, [](float d, float x) { return d <= 0x1p-6f * x ? 0.f : 1.f; });
  store(s.apart[part], row_error);
  store(s.sizes[part], sizes);
  store(s.errors[part], errors);
  sem_arrive(s.there);
  if (part > 0) return;
  sem_wait(s.judged, 0);
  if (get(s.verdict, 0) > 0.f) order_tell(p.taken + 1);
}
TILE float sum_of_key(const sv<4 * 64> (&parts)[PARTS], int key) {
  float sum = 0.f;
  CONSTANT_INDEX for (int half = 0; half < 2; half++)
    CONSTANT_INDEX for (int i = 0; i < 4; i++) sum += get(parts[2 * half + key / 64], 64 * i + key % 64);
  return sum;
}
TILE void judge(const params &p, shared &s, int) {
  grid_wait();
  if (nobody_began(p)) return;
  const int keys = p.keys;
  wv<KEYS> of_keys, of_values;
  sem_wait(s.there, 0);
  map_index(of_keys, [&](int i) { return i < keys ? sum_of_key(s.sizes, i) : 0.f; });
  const float mean = sum_of(of_keys) / (float)keys;
  map_index(of_values, [&](int i) { return i < keys ? sum_of_key(s.errors, i) : 0.f; });
  map(of_keys, of_keys, of_values, [=](float x, float d) { return d <= 0x1p-10f * (x + mean) ? 0.f : 1.f; });
  map_index(of_values, [&](int i) {
    return get(s.apart[i / 64 * 2], i % 64) + (keys > 64 ? get(s.apart[i / 64 * 2 + 1], i % 64) : 0.f);
  });
  map(of_keys, of_keys, of_values, [](float x, float y) { return x + y; });
  wv<32> verdict;
  fill(verdict, max_of(of_keys));
  store(s.verdict, verdict);
  sem_arrive<WARP>(s.judged);
}

typedef block<params, shared, init, role<compare, WARPGROUP, PARTS, 0>, role<judge, WARP, 1, 0>, DEPENDENT> kernel;
ENTRY(kernel, 64, KEYS)
