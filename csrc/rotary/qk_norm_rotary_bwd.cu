// Gradients of qk_norm_rotary.cu's rows. With g that of a row's result, turned back, and n = x factor of the row x,
// whose factor is 1 / sqrt(mean of x^2 + eps),
//   dx = factor (g weight - n mean(g weight n)),   dweight = sum of g n over the rows
// in float32, dx rounded once. Without a weight dx is g. Bound by memory: every number is read once and written once.
// Blocks take tasks of q and then of k in turn, whose sums of dweight stay in registers. Each leaves one row of sums of
// either, which norm_bwd_post.cu adds up, in the same order each time.
#include "rotary/qk_norm_rotary.h"
#include "rotary/rotary_rows.h"

// ROWS: rows of a slot in flight. PER_SM: blocks of a multiprocessor. ACCESS: see pairs.h
struct shared { ps sums[2]; };
typedef qk_norm_rotary_bwd_params params;
TILE void init(shared &) {}

struct place { const elem *grad, *x; elem *out; angle_row angle; int head, heads; };
TILE place place_of(const params &p, const qk_bwd_side &side, int task, int slot) {
  const rotary_side &x = side.rows;
  spot t = spot_of(p, x, task, slot);
  return {(const elem *)x.in.data + begin_of(x.in, t.batch, t.step, t.head),
          (const elem *)side.x.data + begin_of(side.x, t.batch, t.step, t.head),
          (elem *)x.out.data + begin_of(x.out, t.batch, t.step, t.head), angle_row_of(p, t, 0), t.head, t.heads};
}

TILE void rows_of_task(const params &p, const qk_bwd_side &side, const pc &weight, pc &sums, int task,
                       const paired &columns) {
  int hop_log2 = side.rows.heads_log2;
  int64_t hop = side.rows.in.stride[2] << hop_log2, hop_x = side.x.stride[2] << hop_log2,
          hop_out = side.rows.out.stride[2] << hop_log2;
  float per_column = p.per_column, eps = p.eps;
  per_slot<place> places;
  pa angles;
  set(places, columns, [&](int slot) { return place_of(p, side, task, slot); });
  ROLLED for (int first = 0; first << hop_log2 < side.rows.heads; first += ROWS) {
    pt<elem> grad[ROWS], x[ROWS];
    pr<ROWS> factor, mean;
    CONSTANT_INDEX for (int r = 0; r < ROWS; r++) {
      load<ACCESS>(grad[r], columns, [&](int slot) -> row_of<const elem> {
        const place &t = of_slot(places, slot);
        return {t.grad + (first + r) * hop, t.head + ((first + r) << hop_log2) < t.heads};
      });
      load<ACCESS>(x[r], columns, [&](int slot) -> row_of<const elem> {
        const place &t = of_slot(places, slot);
        return {t.x + (first + r) * hop_x, side.weight && t.head + ((first + r) << hop_log2) < t.heads};
      });
    }
    load_angles<ACCESS>(angles, p, places, columns, first == 0);
    if (side.weight) {
      squares<ACCESS>(factor, x, columns, [=](float sum) {       // of a row that there is not: 0, whatever eps is
        float square = fused(sum, per_column, eps);
        return square > 0.f ? fast_rsqrt(square) : square == 0.f ? 0.f : square;
      });
      dots<ACCESS>(mean, grad, x, angles, weight, factor, columns,
                   [](float x, float y, float u, float v, float c, float s, float x_weight, float y_weight,
                      float factor) {
                     float of_x = fused(x, c, y * s), of_y = fused(y, c, -(x * s));
                     return fused(of_x * x_weight, u * factor, of_y * y_weight * (v * factor));
                   }, [](float x, float u, float weight, float factor) { return x * weight * (u * factor); },
                   [=](float sum) { return sum * per_column; });
    } else {
      fill(factor, 1.f);
      fill(mean, 0.f);
    }
    each_pair<ACCESS>(grad, x, angles, weight, factor, mean, sums, columns,
                      [](float &x, float &y, float u, float v, float c, float s, float x_weight, float y_weight,
                         float factor, float mean, float &x_sum, float &y_sum) {
                        float of_x = fused(x, c, y * s), of_y = fused(y, c, -(x * s));
                        u *= factor;
                        v *= factor;
                        x_sum = fused(of_x, u, x_sum);
                        y_sum = fused(of_y, v, y_sum);
                        x = fused(of_x, x_weight, -(u * mean)) * factor;
                        y = fused(of_y, y_weight, -(v * mean)) * factor;
                      }, [](float &x, float u, float weight, float factor, float mean, float &sum) {
                        u *= factor;
                        sum = fused(x, u, sum);
                        x = fused(x, weight, -(u * mean)) * factor;
                      });
    if (side.rows.out.data)
      CONSTANT_INDEX for (int r = 0; r < ROWS; r++)
        save<ACCESS>([&](int slot) -> row_of<elem> {
          const place &t = of_slot(places, slot);
          return {t.out + (first + r) * hop_out, t.head + ((first + r) << hop_log2) < t.heads};
        }, grad[r], columns);
  }
}

// Block i of n takes every n-th task. k's tasks go on where those of q end.
TILE void compute(const params &p, shared &s, int) {
  paired columns = paired_of(p.columns);
  int task = block_index();
  ROLLED for (int of = 0; of < 2; of++) {
    const qk_bwd_side &side = p.side[of];
    pc weight, sums;
    fill(sums, 0.f);
    if (side.weight && side.weight_is_float) load<ACCESS>(weight, columns, floats_at(side.weight, 0));
    else if (side.weight) load<ACCESS>(weight, columns, halves_at(side.weight, 0));
    else fill(weight, 1.f);
    ROLLED for (; task < side.rows.blocks; task += block_count())
      rows_of_task(p, side, weight, sums, task, columns);
    task -= side.rows.blocks;
    if (!p.partials) continue;
    put(s.sums[of], sums, columns);
    wg_sync();
    save<ACCESS>(p.partials + (2 * (int64_t)block_index() + of) * p.padded, s.sums[of], columns);
  }
}

typedef block<params, shared, init, role<compute, WARPGROUP, 1, 0>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, ROWS, 1)
