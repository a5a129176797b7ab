// New keys and values into a cache, behind what it holds. A warp for each row of k and v.
#include "tile/tile.h"
#include "attention/attention_decode.h"

struct shared { int nothing; };
TILE void init(shared &) {}

TILE void append(const append_kv_params &p, shared &, int warp) {
  grid_wait();
  for (int i = block_index() * WARPS + warp; i < p.tasks; i += block_count() * WARPS) {
    int head = i % p.heads, row = i / p.heads % p.new_rows, batch = i / p.heads / p.new_rows;
    int length = p.lengths ? p.lengths[batch] : p.length, place = p.cache_index ? p.cache_index[batch] : batch,
        key = length + row;
    if (length < 0 || length >= p.keys || key >= p.keys) continue;
    if (p.page_table) place = p.page_table[batch * p.page_stride + key / p.page_size];
    if (place < 0 || place >= p.caches) continue;
    copy_row((elem *)p.k_cache + place * p.k_cache_stride[0] + key % p.page_size * p.k_cache_stride[1] +
                 head * p.k_cache_stride[2],
             (const elem *)p.k + batch * p.k_stride[0] + row * p.k_stride[1] + head * p.k_stride[2], p.dim);
    copy_row((elem *)p.v_cache + place * p.v_cache_stride[0] + key % p.page_size * p.v_cache_stride[1] +
                 head * p.v_cache_stride[2],
             (const elem *)p.v + batch * p.v_stride[0] + row * p.v_stride[1] + head * p.v_stride[2], p.dim);
  }
}

typedef block<append_kv_params, shared, init, role<append, WARP, WARPS, 0>, OCCUPANCY<8>, DEPENDENT> kernel;
ENTRY(kernel, WARPS, 1)
