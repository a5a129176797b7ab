// q and k, each row over its root mean square, times a weight for each column, then turned as in rotary.cu:
//   x = x / sqrt(mean of x^2 + eps) weight,   (x, y) of a pair becomes (x cos - y sin, y cos + x sin)
// in float32, rounded once. k, and v as it is, may go straight into a cache. Bound by memory: every number is read once
// and written once. Blocks are those of rotary.cu, of q, of k or of v.
#include "rotary/qk_norm_rotary.h"
#include "rotary/rotary_rows.h"

// ROWS: rows of a slot in flight. PER_SM: blocks of a multiprocessor. ACCESS: see pairs.h
struct shared { int unused; };
typedef qk_norm_rotary_params params;
TILE void init(shared &) {}

// kept: the cache has a place for the slot's heads.
struct place { const elem *in; elem *out; angle_row angle; int head, heads; bool kept; };
TILE place place_of(const params &p, const qk_side &side, int block, int slot) {
  const rotary_side &x = side.rows;
  spot t = spot_of(p, x, block, slot);
  int length = p.lengths ? p.lengths[t.batch] : p.length, to = t.batch, row = t.step;
  bool kept = true;
  if (side.cached) {
    int64_t key = (int64_t)length + t.step;
    kept = length >= 0 && key < p.keys;
    row = kept ? (int)key : 0;
    to = p.cache_index ? p.cache_index[t.batch] : t.batch;
    if (p.page_table) {
      to = p.page_table[t.batch * p.page_stride + row / p.page_size];
      row %= p.page_size;
    }
    kept = kept && to >= 0 && to < p.caches;
  }
  return {(const elem *)x.in.data + begin_of(x.in, t.batch, t.step, t.head),
          (elem *)x.out.data + begin_of(x.out, to, row, t.head), angle_row_of(p, t, length), t.head, t.heads, kept};
}

TILE void turn(const params &p, shared &, int) {
  int block = block_index(), of = 0;
  if (block >= p.side[0].rows.blocks) {
    block -= p.side[0].rows.blocks;
    of = 1;
    if (block >= p.side[1].rows.blocks) {
      block -= p.side[1].rows.blocks;
      of = 2;
    }
  }
  const qk_side &side = p.side[of];
  int hop_log2 = side.rows.heads_log2;
  int64_t hop = side.rows.in.stride[2] << hop_log2, hop_out = side.rows.out.stride[2] << hop_log2;
  paired columns = paired_of(p.columns);
  per_slot<place> places;
  set(places, columns, [&](int slot) { return place_of(p, side, block, slot); });
  pa angles;
  pc weight;
  ROLLED for (int first = 0; first << hop_log2 < side.rows.heads; first += ROWS) {
    pt<elem> x[ROWS];
    CONSTANT_INDEX for (int r = 0; r < ROWS; r++)
      load<ACCESS>(x[r], columns, [&](int slot) -> row_of<const elem> {
        const place &t = of_slot(places, slot);
        return {t.in + (first + r) * hop, t.head + ((first + r) << hop_log2) < t.heads};
      });
    if (side.turned) {
      load_angles<ACCESS>(angles, p, places, columns, first == 0);
      pr<ROWS> factor;
      if (side.weight) {
        if (first == 0 && side.weight_is_float) load<ACCESS>(weight, columns, floats_at(side.weight, 0));
        else if (first == 0) load<ACCESS>(weight, columns, halves_at(side.weight, 0));
        float per_column = p.per_column, eps = p.eps;
        squares<ACCESS>(factor, x, columns, [=](float sum) { return fast_rsqrt(fused(sum, per_column, eps)); });
      } else {
        fill(weight, 1.f);
        fill(factor, 1.f);
      }
      each_pair<ACCESS>(x, angles, weight, factor, columns,
                        [](float &x, float &y, float c, float s, float x_weight, float y_weight, float factor) {
                          float u = x * factor * x_weight, v = y * factor * y_weight;
                          x = fused(u, c, -(v * s));
                          y = fused(v, c, u * s);
                        }, [](float &x, float weight, float factor) { x = x * factor * weight; });
    }
    CONSTANT_INDEX for (int r = 0; r < ROWS; r++)
      save<ACCESS>([&](int slot) -> row_of<elem> {
        const place &t = of_slot(places, slot);
        return {t.out + (first + r) * hop_out, t.kept && t.head + ((first + r) << hop_log2) < t.heads};
      }, x[r], columns);
  }
}

typedef block<params, shared, init, role<turn, WARPGROUP, 1, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, ROWS, 1)
