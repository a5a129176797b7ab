// Parameters of the kernels for generation. Plain C: filled by attention/attention_decode.c, read by
// attention_decode.cu, attention_combine.cu and append_kv.cu.
#pragma once
#include "tile/gmap.h"

// n / d = (n * multiplier / 2^32 + n) / 2^shift for n < 2^30. A block's first load waits until a task's number is taken
// apart, and divisions would make that wait long.
typedef struct divider { uint32_t multiplier, shift; } divider;

// The group * queries rows that share a key head are numbered r = (head in the group) * queries + query, so that
// lse[batch][head][query] is contiguous in r. A task is (batch, split of the keys, key head, block of 64 rows).
typedef struct attention_decode_params {
  gmap k, v;                  // [cache or page, key head, row, column]; boxes of `box` rows
  const void *q;
  void *out;                  // used where splits == 1
  int64_t q_stride[3], out_stride[3];   // batch, query, head; elements
  float *lse;                 // [batch][head][query], natural log; NULL where not wanted; used where splits == 1
  float *part, *part_lse;     // [batch][key head][split][row]([dim]): each split's result; zeros and -inf where the
                              // split is empty; lse in base 2
  const int *lengths;         // [batch], or NULL: all `keys`
  const int *page_table;      // [batch][...], page_stride ints apart, or NULL: the cache is not paged
  const int *cache_index;     // [batch], or NULL: cache i belongs to sequence i
  const float *sink;          // [head], natural log, or NULL
  const float *slopes;        // [batch][head], slope_stride apart (0: the same for all), or NULL
  int *counter;               // dynamic task counter that starts at 0, or NULL: static order
  int64_t page_stride, slope_stride;
  int tasks, splits, row_blocks, rows;      // rows: group * queries
  divider by_row_blocks, by_k_heads, by_splits;
  int q_heads, k_heads, queries, dim;
  int keys;                   // no sequence is longer
  int caches, page_size, box; // caches or pages that there are; page_size: 2^30 where not paged; box divides both it
                              // and the kernel's key block
  int left, right;            // query i of a sequence of n keys is at e = n - queries + i and sees keys e - left to e +
                              // right; 2^30: no limit
  float scale_log2;           // softmax scale * log2(e)
  float cap_log2;             // softcap * log2(e); 0: none
} attention_decode_params;

// out = sum over splits of 2^(part_lse - total) part. A task is (batch, head, query, 32 columns).
typedef struct attention_combine_params {
  const float *part, *part_lse, *sink;
  void *out;
  int64_t out_stride[3];
  float *lse;
  int tasks, splits, rows, q_heads, k_heads, queries, dim, column_blocks;
} attention_combine_params;

// Writes rows k, v [batch, new, head] into the caches, behind the `lengths` rows that are there. What would land
// outside of a cache is dropped. A task is one row of both.
typedef struct append_kv_params {
  const void *k, *v;
  void *k_cache, *v_cache;
  // of k, v: batch, new, head; of the caches: cache or page, row, head
  int64_t k_stride[3], v_stride[3], k_cache_stride[3], v_cache_stride[3];
  const int *lengths, *page_table, *cache_index;   // lengths NULL: all `length`
  int64_t page_stride;
  int tasks, new_rows, heads, length, dim, keys, caches, page_size;
} append_kv_params;
