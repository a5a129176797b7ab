// Tasks of attention_decode.cu: which rows, which keys, and where these lie. Included behind tile.h; BN, the keys of a block, is a constant of the row.
#pragma once
#include "attention/attention_decode.h"

struct task {
  int batch, head, split, row0;
  int length, cache;
  int shift;                // query i is at position i + shift of its sequence
  int low, high;            // keys that some row sees, and that all rows see: [low, high) and [low_all, high_all)
  int low_all, high_all;
  int begin, end;           // key blocks of this split: begin, begin + splits, ..., below end
};

TILE int min_of(int a, int b) { return a < b ? a : b; }
TILE int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

TILE int divide(int n, divider d) { return (int)(((uint32_t)((uint64_t)n * d.multiplier >> 32) + (uint32_t)n) >> d.shift); }

TILE task numbers_of(const attention_decode_params &p, int i) {   // without what is in memory
  task t;
  int heads = divide(i, p.by_row_blocks), splits = divide(heads, p.by_k_heads);
  t.row0 = (i - heads * p.row_blocks) * 64;
  t.head = heads - splits * p.k_heads;
  t.batch = divide(splits, p.by_splits);
  t.split = splits - t.batch * p.splits;
  return t;
}
TILE void read_task(const attention_decode_params &p, task &t) {
  t.length = p.lengths ? p.lengths[t.batch] : p.keys;
  t.cache = p.cache_index ? p.cache_index[t.batch] : t.batch;
}
// The rest of a task: what depends on its sequence's length.
TILE void set_keys(const attention_decode_params &p, task &t) {
  int length = clamp(t.length, 0, p.keys), first = t.row0 % p.queries, last = first + min_of(64, p.rows - t.row0) - 1;   // queries of these rows
  if (last >= p.queries) first = 0, last = p.queries - 1;
  t.shift = length - p.queries;
  t.low = clamp(first + t.shift - p.left, 0, length);
  t.low_all = clamp(last + t.shift - p.left, 0, length);
  t.high = clamp(last + t.shift + p.right + 1, t.low, length);
  t.high_all = clamp(first + t.shift + p.right + 1, 0, length);
  t.begin = t.low / BN + t.split;
  t.end = t.high > t.low ? (t.high + BN - 1) / BN : 0;
}
// Without a window a split begins at the same key block whatever the length is: it is loaded before the length has come, and thrown away where the
// sequence turns out to end in front of it.
TILE bool loads_ahead(const attention_decode_params &p, const task &t) { return p.left == 1 << 30 && t.split * BN < p.keys; }

// Where the parts of a key block lie. Parts that begin behind the last key are read from outside of the tensor: zeros, without a page and without memory
// traffic. So is a page that does not exist.
struct parts { int place[BN / 16], row; };   // page or cache of each part; row of the first

TILE parts parts_of(const attention_decode_params &p, const task &t, int key0) {
  parts x;
  const int *pages = p.page_table ? p.page_table + t.batch * p.page_stride : nullptr;
  int page = pages ? key0 / p.page_size : 0, row = x.row = key0 - page * p.page_size;
  UNROLLED for (int i = 0; i < BN / 16; i++) {
    if (i * p.box < BN) x.place[i] = key0 + i * p.box >= t.high ? p.caches : pages ? pages[page] : t.cache;
    if ((row += p.box) == p.page_size) row = 0, page++;
  }
  return x;
}

TILE void load_block(st<elem, BN, D> &tile, const gmap &map, sem &full, const attention_decode_params &p, const task &t, const parts &x) {
  int row = x.row;
  UNROLLED for (int i = 0; i < BN / 16; i++) {
    if (i * p.box >= BN) break;
    tma_load_rows(tile, i * p.box, p.box, map, full, row, 0, t.head, x.place[i]);
    if ((row += p.box) == p.page_size) row = 0;
  }
}

// Thread, before grid_wait(): to the L2, the first key block of this block's first task. The kernel in front may still write to the cache, and what
// it writes goes to the L2 too; but a page table or an index of caches may not be read yet.
TILE void prefetch_first(const gmap &map, const attention_decode_params &p, const task &t) {
  if (p.page_table || p.cache_index || p.left != 1 << 30) return;
  if (t.split * BN < p.keys) tma_prefetch_rows<D>(map, t.split * BN, 0, t.head, t.batch);
}
