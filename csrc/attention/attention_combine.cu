// The splits of attention_decode.cu to one result:
//   total = log2(sum_i 2^(lse_i) + 2^(sink)),  o = sum_i 2^(lse_i - total) o_i
// A warp for each row and 32 columns. The time of this kernel is latency: of its start, of one round of loads, and of
// fetching its code, which no multiprocessor has at hand. So longer code costs time.
#include "tile/tile.h"
#include "attention/attention_decode.h"

// From the row: MOST (splits that there may be, a multiple of LOADS), LOADS (of them at a time), WARPS (of a block)

struct shared { int nothing; };
TILE void init(shared &) {}

TILE void load_splits(wv<32> (&x)[LOADS], const attention_combine_params &p, const float *part, int first,
                      int columns) {
  int64_t distance = (int64_t)p.rows * p.dim;
  part += first * distance;
  UNROLLED for (int i = 0; i < LOADS; i++, part += distance) load(x[i], part, 1, first + i < p.splits ? columns : 0,
                                                                  0.f);
}
TILE void add_splits(wv<32> &o, const wv<32> (&x)[LOADS], const wv<LOADS> &weights) {
  UNROLLED for (int i = 0; i < LOADS; i++) {
    float f = get(weights, i);
    map(o, o, x[i], [=](float a, float b) { return fused(f, b, a); });
  }
}

TILE void combine(const attention_combine_params &p, shared &, int warp) {
  for (int i = block_index() * WARPS + warp; i < p.tasks; i += block_count() * WARPS) {
    // row: over [batch, key head, r]
    int column0 = i % p.column_blocks * 32, row = i / p.column_blocks, r = row % p.rows;
    int batch = row / p.rows / p.k_heads, query = r % p.queries,
        head = row / p.rows % p.k_heads * (p.q_heads / p.k_heads) + r / p.queries;
    int64_t first = (int64_t)(row / p.rows) * p.splits * p.rows + r;
    const float *part = p.part + first * p.dim + column0;
    wv<MOST> all, powers;
    wv<LOADS> some;
    wv<32> o, x[LOADS];                              // in registers: their indices are constants
    float top = 0.f, total = 1.f, factor = 0.f;
    grid_wait();
    fill(o, 0.f);
    for (int done = 0; done < p.splits; done += LOADS) {
      load(some, p.part_lse + first + (int64_t)done * p.rows, p.rows, p.splits - done, -infinity());
      load_splits(x, p, part, done, p.dim - column0);
      if (done == 0) {                               // behind the loads, which wait together
        load(all, p.part_lse + first, p.rows, p.splits, -infinity());
        float sink = p.sink ? p.sink[head] * 1.4426950408889634f : -infinity();
        top = max_of(all);
        top = sink > top ? sink : top;
        top = top > -infinity() ? top : 0.f;
        map(powers, all, all, [=](float a, float) { return fast_exp2(a - top); });
        total = sum_of(powers) + fast_exp2(sink - top);
        factor = total == 0.f ? 0.f : fast_rcp(total);
      }
      map(some, some, some, [=](float a, float) { return fast_exp2(a - top) * factor; });
      add_splits(o, x, some);
    }
    store((elem *)p.out + batch * p.out_stride[0] + query * p.out_stride[1] + head * p.out_stride[2] + column0, o,
          p.dim - column0);
    if (p.lse && column0 == 0) {
      fill(o, (top + fast_log2(total)) * 0.6931471805599453f);
      store(p.lse + row, o, 1);
    }
  }
}

typedef block<attention_combine_params, shared, init, role<combine, WARP, WARPS, 0>, OCCUPANCY<4>, DEPENDENT, FOLLOWED>
              kernel;
ENTRY(kernel, WARPS, 32)
