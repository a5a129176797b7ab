// Rows of attention's tensors: which of them are a sequence's, where these lie in memory and in the backward's
// workspace, and what is written to others.
#pragma once
#include "tile/tile.h"
#include "attention/attention.h"

enum { UNMASKED = 1 << 30 };
// A sequence: its first row in q and in k, how many rows and keys it has. Query row i sees keys i + lower to i +
// diagonal.
struct sequence { int q0, k0, rows, keys, diagonal, lower; };

TILE sequence sequence_of(const attention_features &f, bool packed, int batch, int q_rows, int k_rows, int diagonal) {
  sequence q = {0, 0, q_rows, k_rows, diagonal, f.lower};
  if (packed && f.q_start) {
    q.q0 = f.q_start[batch];
    q.k0 = f.k_start[batch];
    q.rows = f.q_start[batch + 1] - q.q0;
    q.keys = f.k_start[batch + 1] - q.k0;
    if (diagonal != UNMASKED) q.diagonal += q.keys - q.rows;
    if (f.lower != -UNMASKED) q.lower += q.keys - q.rows;
  }
  return q;
}

// Stores the first m rows of a tile, n columns of each, where the next sequence's rows follow. ld: elements from row to
// row.
template<int N> TILE void store_first(elem *g, int64_t ld, const rt<float, N> &t, int m, int n) {
  store_rows<elem>(t, [=](int row) { return row < m ? g + row * ld : (elem *)nullptr; }, n);
}

// Warpgroup, the i-th of n that share the work. Makes these rows 0, and their lse (NULL: none) -inf.
template<typename T> TILE void clear_behind(const rows_behind &t, float *lse, int i, int n) {
  if (!t.end) return;
  int first = *t.end, blocks = first < t.rows ? (t.rows - first + 63) / 64 : 0;
  rt<float, 64> zeros;
  rv empty;
  fill(zeros, 0.f);
  fill(empty, -infinity());
  for (int unit = i; unit < blocks * t.heads; unit += n) {   // less than 2^31: a unit is 128 bytes of memory or more
    int head = unit / blocks, row = first + (unit - head * blocks) * 64;
    for (int col = 0; col < t.columns; col += 64)
      store_first((T *)t.data + row * t.row + head * t.head + col, t.row, zeros, t.rows - row, t.columns - col);
    if (lse) store(lse + (int64_t)head * t.rows + row, empty, t.rows - row);
  }
}

// Backward: dq or dk times out_scale, which is mostly 1. Where delta was rounded and the scale is large, the product
// could leave fp32's range, and is clamped instead. An infinity from before becomes NaN.
template<int N> TILE void scale_gradient(rt<float, N> &x, float scale) {
  if (scale > 1.f) map(x, [=](float a) { return clamp(a * scale, -3.38e38f, 3.38e38f) + (a - a); });
  else if (scale < 1.f) map(x, [=](float a) { return a * scale; });
}

// Backward, packed sequences: the first of a sequence's blocks of `tile` rows among those that a head has in the
// workspace. Each sequence has room there for its rows, rounded up to blocks, and for a block of padding.
TILE int padded_block(const int *q_start, int batch, int tile) { return q_start[batch] / tile + 2 * batch; }

// The same for blocks of 64 rows, of (batch, head), and how many there are.
struct row_blocks { int first, count; };
TILE row_blocks blocks_of(const packed_rows &p, int batch, int head, int q_heads, int q_padded) {
  if (!p.start) return {(batch * q_heads + head) * q_padded, q_padded};
  int first = padded_block(p.start, batch, 64 * p.tile) * p.tile;
  return {head * p.head_blocks + first, padded_block(p.start, batch + 1, 64 * p.tile) * p.tile - first};
}
