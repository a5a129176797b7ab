// The splits of attention_decode.cu to one result:  total = log2(sum_i 2^(lse_i) + 2^(sink)),  o = sum_i 2^(lse_i - total) o_i
// A warp for each row and 128 columns.
#include "tile/tile.h"
#include "kernels/attention_decode.h"

// MOST: splits that there may be

struct shared { int nothing; };
TILE void init(shared &) {}

TILE void combine(const attention_combine_params &p, shared &, int warp) {
  for (int i = block_index() * 4 + warp; i < p.tasks; i += block_count() * 4) {
    int column0 = i % p.column_blocks * 128, row = i / p.column_blocks, r = row % p.rows, columns = p.dim - column0;   // row: over [batch, key head, r]
    int batch = row / p.rows / p.k_heads, query = r % p.queries, head = row / p.rows % p.k_heads * (p.q_heads / p.k_heads) + r / p.queries;
    int64_t first = (int64_t)(row / p.rows) * p.splits * p.rows + r;
    const float *lse = p.part_lse + first;
    wv<MOST> each, weights;
    load(each, lse, p.rows, p.splits, -infinity());
    float top = max_of(each), sink = p.sink ? p.sink[head] * 1.4426950408889634f : -infinity();
    top = sink > top ? sink : top;
    top = top > -infinity() ? top : 0.f;
    map(weights, each, each, [=](float a, float) { return fast_exp2(a - top); });
    float total = sum_of(weights) + fast_exp2(sink - top), factor = total == 0.f ? 0.f : fast_rcp(total);
    wv<128> o, part;
    fill(o, 0.f);
    BY_EIGHT for (int split = 0; split < p.splits; split++) {
      float weight = fast_exp2(lse[(int64_t)split * p.rows] - top) * factor;
      load(part, p.part + (first + (int64_t)split * p.rows) * p.dim + column0, 1, weight > 0.f ? columns : 0, 0.f);   // an empty split has written nothing
      map(o, o, part, [=](float a, float b) { return fused(weight, b, a); });
    }
    store((elem *)p.out + batch * p.out_stride[0] + query * p.out_stride[1] + head * p.out_stride[2] + column0, o, columns);
    if (!p.lse || column0) continue;
    wv<32> result;
    fill(result, (top + fast_log2(total)) * 0.6931471805599453f);
    store(p.lse + row, result, 1);
  }
}

typedef block<attention_combine_params, shared, init, role<combine, WARP, 4, 0>, OCCUPANCY<8>> kernel;
ENTRY(kernel, 1, 128)
