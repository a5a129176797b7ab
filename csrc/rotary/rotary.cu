// (x, y) of each pair becomes (x cos - y sin, y cos + x sin): the rotary embedding (Su et al., RoFormer, 2021). Bound
// by memory: every number is read once and written once. Threads have several rows in flight, and read the angles of a
// step once for many of its heads. Of what a row costs besides its numbers there is little: a block has rows of q or of
// k, not of both, so that a row begins as far behind the one before as everywhere.
#include "tile/pairs.h"
#include "rotary/rotary.h"

// ROWS: rows of a slot in flight. PER_SM: blocks of a multiprocessor. ACCESS: see pairs.h
struct shared { int unused; };
typedef rotary_params params;
TILE void init(shared &) {}

// A slot's first head of its step, and where the angles are. It has heads head, head + 2^heads_log2, ... below `heads`,
// which is 0 where there is no step.
struct place { const elem *in; elem *out; int64_t cos, sin; int head, heads; };
TILE int64_t begin_of(const rotary_rows &x, int batch, int step, int head) {
  return batch * x.stride[0] + step * x.stride[1] + head * x.stride[2];
}
TILE place place_of(const params &p, const rotary_side &x, int block, int slot) {
  int token = (block << (p.slots_log2 - x.heads_log2)) + (slot >> x.heads_log2);
  bool exists = token < p.tokens;
  int batch = exists ? token / p.steps : 0, step = exists ? token - batch * p.steps : 0,
      head = slot & ((1 << x.heads_log2) - 1);
  int64_t row = p.offset;
  row += p.positions ? p.positions[batch * p.positions_stride + step] : step;
  row += p.offsets ? p.offsets[batch] : 0;
  bool known = row >= 0 && row < p.angle_rows;        // else cosine and sine are 0
  return {(const elem *)x.in.data + begin_of(x.in, batch, step, head),
          (elem *)x.out.data + begin_of(x.out, batch, step, head),
          known ? batch * p.cos_stride[0] + row * p.cos_stride[1] : -1,
          known ? batch * p.sin_stride[0] + row * p.sin_stride[1] : -1, head, exists ? x.heads : 0};
}
TILE row_of<const float> floats_at(const void *data, int64_t at) { return {(const float *)data + at, at >= 0}; }
TILE row_of<const elem> halves_at(const void *data, int64_t at) { return {(const elem *)data + at, at >= 0}; }

TILE void turn(const params &p, shared &, int) {
  bool of_q = block_index() < p.q.blocks;
  const rotary_side &side = of_q ? p.q : p.k;
  int block = block_index() - (of_q ? 0 : p.q.blocks), hop_log2 = side.heads_log2;
  int64_t hop = side.in.stride[2] << hop_log2, hop_out = side.out.stride[2] << hop_log2;
  float sign = p.sign;
  paired columns = paired_of(p.columns);
  per_slot<place> places;
  set(places, columns, [&](int slot) { return place_of(p, side, block, slot); });
  pa angles;
  ROLLED for (int first = 0; first << hop_log2 < side.heads; first += ROWS) {
    pt<elem> x[ROWS];
    CONSTANT_INDEX for (int r = 0; r < ROWS; r++)
      load<ACCESS>(x[r], columns, [&](int slot) -> row_of<const elem> {
        const place &t = of_slot(places, slot);
        return {t.in + (first + r) * hop, t.head + ((first + r) << hop_log2) < t.heads};
      });
    if (first == 0 && p.angles_are_float)
      load<ACCESS>(angles, columns, [&](int slot) { return floats_at(p.cos, of_slot(places, slot).cos); },
                   [&](int slot) { return floats_at(p.sin, of_slot(places, slot).sin); });
    else if (first == 0)
      load<ACCESS>(angles, columns, [&](int slot) { return halves_at(p.cos, of_slot(places, slot).cos); },
                   [&](int slot) { return halves_at(p.sin, of_slot(places, slot).sin); });
    each_pair<ACCESS>(x, angles, columns, [=](float &x, float &y, float c, float s) {
      float u = x, t = s * sign;
      x = fused(u, c, -(y * t));
      y = fused(y, c, u * t);
    });
    CONSTANT_INDEX for (int r = 0; r < ROWS; r++)
      save<ACCESS>([&](int slot) -> row_of<elem> {
        const place &t = of_slot(places, slot);
        return {t.out + (first + r) * hop_out, t.head + ((first + r) << hop_log2) < t.heads};
      }, x[r], columns);
  }
}

typedef block<params, shared, init, role<turn, WARPGROUP, 1, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, ROWS, 1)
