// Whether segments that began early with a state of 0 may stand: each one's state, where it begins, has to be the one
// behind the segment in front, but for rounding (delta_alike.h). Where they are not alike, p.taken tells it, and all is
// done anew. The same of gradients of states, whose pass goes back. If the first segment is right, so is the second,
// and so on.
// A block has the state between two segments of one head.
// Roles: PARTS warpgroups, each with 64 values of 64 keys; a warp that judges. Registers of a thread: a part of both
// states, 32 each, and sums.
#include "tile/numbers.h"
#include "tile/order.h"
#include "delta/delta_alike.h"

enum { PARTS = 4, KEYS = 128 };           // a part: half of values, then half of keys
struct shared {
  struct alike<PARTS> alike;
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
  if (nobody_began(p)) return;
  if (part % 2 * 64 >= p.keys) return sem_arrive(s.there);
  const int ends = p.segments - 1, matrix = block_index() / ends, segment = block_index() - matrix * ends + 1;
  const int row = matrix / p.heads, head = matrix - row * p.heads;
  const int64_t state = 128 * p.keys, at = ((int64_t)row * p.cut_stride * p.heads + head) * state;
  const float *behind = p.cuts + at + (segment - 1) * p.heads * state + (part / 2 * p.keys + part % 2 * 64) * 64;
  const float *begins = behind + ends * p.heads * state;
  rt<float, 64> x, y;
  rsum row_sizes, row_errors;
  csum<64> sizes, errors;
  load_acc(x, behind);
  load_acc(y, begins);
  fill(row_sizes, 0.f);
  fill(row_errors, 0.f);
  clear(sizes);
  clear(errors);
  add_sizes<64>(x, y, row_sizes, row_errors, sizes, errors);
  put_apart(s.alike.apart[part], row_sizes, row_errors);
  store(s.alike.sizes[part], sizes);
  store(s.alike.errors[part], errors);
  sem_arrive(s.there);
  if (part > 0) return;
  sem_wait(s.judged, 0);
  if (get(s.alike.verdict, 0) > 0.f) order_tell(p.taken + 1);
}
TILE void judge(const params &p, shared &s, int) {
  grid_wait();
  if (nobody_began(p)) return;
  sem_wait(s.there, 0);
  judge_states(s.alike, p.keys);
  sem_arrive<WARP>(s.judged);
}

typedef block<params, shared, init, role<compare, WARPGROUP, PARTS, 0>, role<judge, WARP, 1, 0>, DEPENDENT> kernel;
ENTRY(kernel, 64, KEYS)
