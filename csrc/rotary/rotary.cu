// (x, y) of each pair becomes (x cos - y sin, y cos + x sin): the rotary embedding (Su et al., RoFormer, 2021). Bound
// by memory: every number is read once and written once. Threads have several rows in flight, and read the angles of a
// step once for many of its heads. Of what a row costs besides its numbers there is little: a block has rows of q or of
// k, not of both, so that a row begins as far behind the one before as everywhere.
#include "rotary/rotary_rows.h"

// ROWS: rows of a slot in flight. PER_SM: blocks of a multiprocessor. ACCESS: see pairs.h
struct shared { int unused; };
typedef rotary_params params;
TILE void init(shared &) {}

struct place { const elem *in; elem *out; angle_row angle; int head, heads; };
TILE place place_of(const params &p, const rotary_side &x, int block, int slot) {
  spot t = spot_of(p, x, block, slot);
  return {(const elem *)x.in.data + begin_of(x.in, t.batch, t.step, t.head),
          (elem *)x.out.data + begin_of(x.out, t.batch, t.step, t.head), angle_row_of(p, t, 0), t.head, t.heads};
}

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
    load_angles<ACCESS>(angles, p, places, columns, first == 0);
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
