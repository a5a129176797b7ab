// What attention's rows with FEATURES share between forward and backward: lengths of packed sequences, scores, dropout.
// Scores are turned into units of log 2 here (factor 1 instead of scale log2 e from there on).
#pragma once

// A row's FEATURES: 0 none; 1 windows; 2 packed sequences and, in the forward, sinks too; 3 softcap, ALiBi and dropout too.
enum { UNMASKED = 1 << 30 };
struct sequence { int q0, k0, rows, keys, diagonal, lower; };   // where it begins in q and in k; query row i sees keys i + lower .. i + diagonal

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

// The first m rows of a tile, n columns each, where the next sequence's rows follow: rows of ld elements.
template<int N> TILE void store_first(elem *g, int64_t ld, const rt<float, N> &t, int m, int n) {
  store_rows<elem>(t, [=](int row) { return row < m ? g + row * ld : (elem *)nullptr; }, n);
}

// Warpgroup, number i of n that share the work. lse (NULL: none) is -inf for these rows.
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

TILE bool changes_scores(const attention_features &f) { return f.softcap != 0.f || f.slopes; }
TILE float slope_of(const attention_features &f, int batch, int head) { return f.slopes ? f.slopes[batch * f.slope_batch + head] * 1.4426950408889634f : 0.f; }
// a - 2 a / (1 + 2^(2 x log2 e / a)) takes two special functions and three more instructions instead of 16 and one, which are a fifth to a third slower. It is wrong by
// a 2^-22: nothing to 16-bit results where a is what models have. As CAP_LEAST, CAP_MOST of attention_problem.c.
TILE bool is_usual(float softcap) { return sizeof(elem) == 2 && softcap >= 4.f && softcap <= 256.f; }
template<int N> TILE void cap_usual_scores(rt<float, N> &x, float softcap, float scale_log2) {
  float a = softcap * 1.4426950408889634f, b = 2.f * 1.4426950408889634f * scale_log2 / a;
  map(x, [=](float y) { return a - 2.f * a * fast_rcp(1.f + fast_exp2(y * b)); });
}
// x: scores of 64 rows and N keys. distance: row - key + keys - rows of the tile's first element.
template<int N> TILE void cap_scores(rt<float, N> &x, const attention_features &f, float scale_log2) {
  float a = f.softcap * 1.4426950408889634f, inverse = fast_rcp(a);   // two products: scale / softcap may be out of range
  if (is_usual(f.softcap)) cap_usual_scores(x, f.softcap, scale_log2);
  else if (f.softcap != 0.f) map(x, [=](float y) { return a * fast_tanh(y * scale_log2 * inverse); });
  else map(x, [=](float y) { return y * scale_log2; });
}
template<int N> TILE void bias_scores(rt<float, N> &x, float slope, int distance) {
  if (slope != 0.f) map_rc(x, [=](float y, int row, int key) {
    float steps = (float)(distance + row - key);
    return y - slope * (steps < 0.f ? -steps : steps);
  });
}

// Dropout: 32 random bits of (seed, batch, head, row, key), by two rounds of a mixing function (Wellons, lowbias32): 16 for the row, row % 16 < 8, and 16 for row + 8,
// which is the same thread's, as a row of the forward's tiles and as a column of the backward's.
TILE uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}
TILE uint32_t head_key(const attention_features &f, int batch_head) { return mix(f.seed[0] ^ mix(f.seed[1] + (uint32_t)batch_head * 0x9e3779b9u)); }
TILE uint32_t random_bits(uint32_t key, int row, int col) { return mix(mix(key + (uint32_t)row * 0x85ebca6bu) ^ (uint32_t)col * 0xc2b2ae35u); }
TILE bool drops(uint32_t bits, uint32_t below) { return (bits & 0xffff) < below; }     // at row
TILE bool drops_8(uint32_t bits, uint32_t below) { return bits >> 16 < below; }         // at row + 8
template<int N> TILE void drop(rt<float, N> &x, const attention_features &f, int batch_head, int row0, int col0) {
  uint32_t key = head_key(f, batch_head), below = f.drop_below;
  map_row_pairs(x, [=](float &p, float &p8, int row, int col) {
    uint32_t bits = random_bits(key, row0 + row, col0 + col);
    if (drops(bits, below)) p = 0.f;
    if (drops_8(bits, below)) p8 = 0.f;
  });
}

// Forward. p = 2^(c (x - base) - top), where base is t and top is m, or 0 if the row has none; m = c max x - below when it was found, and is raised by more than
// `slack` only, which spares o some of its scaling. A row has m or t; what it does not have is -infinity, both where no key was seen. l and o are to be multiplied
// by alpha. t is in registers, or in shared memory where a kernel has none to spare: hardly any block needs it.
TILE void finite(rv &v) { map(v, v, [](float x) { return x == -infinity() ? 0.f : x; }); }
TILE void load(rv &v, const rv &t) { v = t; }
TILE void store(rv &t, const rv &v) { t = v; }
template<int N, class T> TILE void maximum(const rt<float, N> &x, rv &m, rv &base, rv &top, rv &alpha, T &t, float c, float below, float slack) {
  load(base, t);
  map(alpha, m, base, [=](float m, float t) { return m == -infinity() ? t : 0.f; });
  top = m;
  finite(top);
  row_max(base, x);
  map(m, m, base, [=](float m, float h) {
    float peak = h * c - below, limit = 16384.f;
    return m > -infinity() && !(peak > m + slack) ? m : peak < limit && peak > -limit ? peak : -infinity();
  });
  map(base, m, base, [](float m, float h) { return m == -infinity() ? h : -infinity(); });
  store(t, base);
  finite(base);
  map(alpha, alpha, base, [=](float before, float now) { return (before - now) * c; });
  map(alpha, alpha, top, [](float x, float y) { return x + y; });
  top = m;
  finite(top);
  map(alpha, alpha, top, [](float x, float y) { return fast_exp2(x - y); });
}
// At the end, m of rows that have t.
template<class T> TILE void rows_maxima(rv &m, const T &kept, float c) {
  rv t;
  load(t, kept);
  map(m, m, t, [=](float m, float t) { return m == -infinity() ? t * c : m; });
}

// Forward, at the end: m, the rows' maxima in units of log 2, and the sums of 2^(x - m) with the sink; o is to be multiplied by `factor`, too.
TILE void add_sink(const attention_features &f, int head, rv &m, rv &sum, rv &factor) {
  if (!f.sink) return;
  float sink = f.sink[head] * 1.4426950408889634f;
  rv old = m, grown;
  map(m, m, [=](float a) { return a > sink ? a : sink; });
  map(grown, old, m, [](float a, float b) { return b == -infinity() ? 1.f : fast_exp2(a - b); });
  map(factor, factor, grown, [](float f, float g) { return f * g; });
  map(sum, sum, grown, [](float l, float g) { return l * g; });
  map(old, m, [=](float b) { return b == -infinity() ? 0.f : fast_exp2(sink - b); });
  map(sum, sum, old, [](float l, float g) { return l + g; });
}

// Backward: dq or dk, times what of the softmax scale ds did not have, mostly 1. Rounding of delta times a large scale must not become an infinity; one that is
// there before becomes NaN.
template<int N> TILE void scale_gradient(rt<float, N> &x, float scale) {
  if (scale > 1.f) map(x, [=](float a) { return clamp(a * scale, -3.38e38f, 3.38e38f) + (a - a); });
  else if (scale < 1.f) map(x, [=](float a) { return a * scale; });
}

// Backward, packed sequences: a head's blocks of `tile` rows in the workspace are the sequences', each with room for its rows rounded up to
// blocks and for a block of padding. The first one of a sequence:
TILE int padded_block(const int *q_start, int batch, int tile) { return q_start[batch] / tile + 2 * batch; }

// The same for blocks of 64 rows, of (batch, head), and how many there are.
struct row_blocks { int first, count; };
TILE row_blocks blocks_of(const packed_rows &p, int batch, int head, int q_heads, int q_blocks) {
  if (!p.start) return {(batch * q_heads + head) * q_blocks, q_blocks};
  int first = padded_block(p.start, batch, 64 * p.tile) * p.tile;
  return {head * p.head_blocks + first, padded_block(p.start, batch + 1, 64 * p.tile) * p.tile - first};
}
