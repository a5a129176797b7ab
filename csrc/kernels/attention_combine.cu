// The splits of attention_decode.cu to one result:  total = log2(sum_i 2^(lse_i) + 2^(sink)),  o = sum_i 2^(lse_i - total) o_i
// A block for each row and 128 columns, in which every warp adds up every WARPS-th split: the time of this kernel is its loads' latency.
#include "tile/tile.h"
#include "kernels/attention_decode.h"

// MOST: splits that there may be, a multiple of 8 WARPS

struct shared {
  sv<128> part[2][WARPS];
  ring<2, ASYNC_READS> parts;      // refilled by plain stores only, which need no fence; the first warp reads
};
TILE void init(shared &s) { ring_init(s.parts, arrivals(0, WARPS, 0), arrivals(0, 1, 0)); }

// Weighted sum over the splits `first`, first + WARPS, ... An empty split has written nothing.
TILE void add_splits(wv<128> &o, const attention_combine_params &p, const wv<MOST> &weights, const float *part, int first, int columns) {
  fill(o, 0.f);
  for (; first < p.splits; first += 8 * WARPS) {
    wv<128> x[8];                                    // in registers: the loops' indices are constants
    float weight[8];
    UNROLLED for (int i = 0; i < 8; i++) weight[i] = get(weights, first + i * WARPS);   // 0 behind the last split
    UNROLLED for (int i = 0; i < 8; i++) load(x[i], part + (int64_t)(first + i * WARPS) * p.rows * p.dim, 1, weight[i] > 0.f ? columns : 0, 0.f);
    UNROLLED for (int i = 0; i < 8; i++) {
      float f = weight[i];
      map(o, o, x[i], [=](float a, float b) { return fused(f, b, a); });
    }
  }
}

TILE void combine(const attention_combine_params &p, shared &s, int warp) {
  ring_pos at = {};
  for (int i = block_index(); i < p.tasks; i += block_count()) {
    int column0 = i % p.column_blocks * 128, row = i / p.column_blocks, r = row % p.rows;   // row: over [batch, key head, r]
    int batch = row / p.rows / p.k_heads, query = r % p.queries, head = row / p.rows % p.k_heads * (p.q_heads / p.k_heads) + r / p.queries;
    int64_t first = (int64_t)(row / p.rows) * p.splits * p.rows + r;
    wv<MOST> each, weights;
    wv<128> o, x;
    load(each, p.part_lse + first, p.rows, p.splits, -infinity());
    float top = max_of(each), sink = p.sink ? p.sink[head] * 1.4426950408889634f : -infinity();
    top = sink > top ? sink : top;
    top = top > -infinity() ? top : 0.f;
    map(weights, each, each, [=](float a, float) { return fast_exp2(a - top); });
    float total = sum_of(weights) + fast_exp2(sink - top), factor = total == 0.f ? 0.f : fast_rcp(total);
    map(weights, weights, each, [=](float a, float) { return a * factor; });
    add_splits(o, p, weights, p.part + first * p.dim + column0, warp, p.dim - column0);
    ring_acquire(s.parts, at);
    store(s.part[at.stage][warp], o);
    sem_arrive<WARP>(s.parts.full[at.stage]);
    if (warp == 0) {
      ring_wait(s.parts, at);
      ROLLED for (int w = 1; w < WARPS; w++) {
        load(x, s.part[at.stage][w]);
        map(o, o, x, [](float a, float b) { return a + b; });
      }
      ring_release<WARP>(s.parts, at);
      store((elem *)p.out + batch * p.out_stride[0] + query * p.out_stride[1] + head * p.out_stride[2] + column0, o, p.dim - column0);
      if (p.lse && column0 == 0) {
        wv<32> result;
        fill(result, (top + fast_log2(total)) * 0.6931471805599453f);
        store(p.lse + row, result, 1);
      }
    }
    ring_next(s.parts, at);
  }
}

typedef block<attention_combine_params, shared, init, role<combine, WARP, WARPS, 0>, OCCUPANCY<4>> kernel;
ENTRY(kernel, 1, 128)
