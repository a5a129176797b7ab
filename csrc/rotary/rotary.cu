// (x, y) of each pair becomes (x cos - y sin, y cos + x sin): the rotary embedding (Su et al., RoFormer, 2021). Bound by
// memory: every number is read once and written once. Threads have several rows in flight, and read the angles of a
// step once for all its heads.
#include "tile/pairs.h"
#include "rotary/rotary.h"

// ROWS: rows of a slot in flight. PER_SM: blocks of a multiprocessor. ACCESS: see pairs.h
struct shared { int unused; };
typedef rotary_params params;
TILE void init(shared &) {}

struct place { int batch, step, head; };     // head: the first that the slot has; batch: -1 where there is no step
TILE place place_of(const params &p, int slot) {
  int token = (block_index() << (p.slots_log2 - p.heads_log2)) + (slot >> p.heads_log2);
  int batch = token / p.steps;
  return {token < p.tokens ? batch : -1, token - batch * p.steps, slot & ((1 << p.heads_log2) - 1)};
}
// A row of q, or of k.
TILE elem *row_at(const params &p, const rotary_rows &q, const rotary_rows &k, int slot, int head) {
  place t = place_of(p, slot);
  head += t.head;
  if (t.batch < 0 || head >= p.heads) return nullptr;
  const rotary_rows &x = head < p.q_heads ? q : k;
  head -= head < p.q_heads ? 0 : p.q_heads;
  return (elem *)x.data + t.batch * x.stride[0] + t.step * x.stride[1] + head * x.stride[2];
}
// The row of angles of a slot's step, or -1: a place without one.
TILE int64_t angle_row(const params &p, int slot, const int64_t (&stride)[2]) {
  place t = place_of(p, slot);
  if (t.batch < 0) return -1;
  int64_t row = p.offset;
  row += p.positions ? p.positions[t.batch * p.positions_stride + t.step] : t.step;
  row += p.offsets ? p.offsets[t.batch] : 0;
  return row >= 0 && row < p.angle_rows ? t.batch * stride[0] + row * stride[1] : -1;
}
TILE const float *floats_at(const params &p, const void *data, const int64_t (&stride)[2], int slot) {
  int64_t at = angle_row(p, slot, stride);
  return at < 0 ? nullptr : (const float *)data + at;
}
TILE const elem *halves_at(const params &p, const void *data, const int64_t (&stride)[2], int slot) {
  int64_t at = angle_row(p, slot, stride);
  return at < 0 ? nullptr : (const elem *)data + at;
}

TILE void turn(const params &p, shared &, int) {
  int step = ROWS << p.heads_log2;
  pa angles;
  ROLLED for (int first = 0; first < p.heads; first += step) {
    pt<elem> x[ROWS];
    CONSTANT_INDEX for (int r = 0; r < ROWS; r++)
      load<ACCESS>(x[r], p.columns, [&](int slot) -> const elem * {
        return row_at(p, p.q, p.k, slot, first + (r << p.heads_log2));
      });
    if (first == 0 && p.angles_are_float)
      load<ACCESS>(angles, p.columns, [&](int slot) { return floats_at(p, p.cos, p.cos_stride, slot); },
                   [&](int slot) { return floats_at(p, p.sin, p.sin_stride, slot); });
    else if (first == 0)
      load<ACCESS>(angles, p.columns, [&](int slot) { return halves_at(p, p.cos, p.cos_stride, slot); },
                   [&](int slot) { return halves_at(p, p.sin, p.sin_stride, slot); });
    float sign = p.sign;
    CONSTANT_INDEX for (int r = 0; r < ROWS; r++)
      each_pair<ACCESS>(x[r], angles, p.columns, [=](float &x, float &y, float c, float s) {
        float u = x, t = s * sign;
        x = fused(u, c, -(y * t));
        y = fused(y, c, u * t);
      });
    CONSTANT_INDEX for (int r = 0; r < ROWS; r++)
      save<ACCESS>([&](int slot) { return row_at(p, p.q_out, p.k_out, slot, first + (r << p.heads_log2)); }, x[r],
                   p.columns);
  }
}

typedef block<params, shared, init, role<turn, WARPGROUP, 1, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, ROWS, 1)
