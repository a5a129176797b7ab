// Inverses of triangular tiles on sm_90a.
#pragma once
#include "tile/sm90/anew.h"
// Rows of a block are 32 bytes. Their halves change places in rows 4 to 7 of each eight: so eight rows of a half lie in
// all banks.
template<typename T> struct alignas(1024) tri { T d[10][2][16 * 16]; };
template<typename T> TILE uint32_t part_address(const tri<T> &s, int block) {
  int r = lane() & 15, half = (lane() >> 4) ^ (r >> 2 & 1);
  return shared_address(&s) + block * 1024 + r * 32 + half * 16;
}
// A thread's eight values of a block, as operands of four words.
template<typename T> TILE void split(uint32_t (&hi)[4], uint32_t (&lo)[4], const float (&x)[8]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    hi[j] = pack<T>(x[2 * j], x[2 * j + 1]);
    float2 y = unpack<T>(hi[j]);
    lo[j] = pack<T>(x[2 * j] - y.x, x[2 * j + 1] - y.y);
  }
}
template<typename T> TILE void put_block(tri<T> &s, int block, const float (&x)[8]) {
  uint32_t hi[4], lo[4], to = part_address(s, block);
  split<T>(hi, lo, x);
  store_block(to, hi[0], hi[1], hi[2], hi[3]);
  store_block(to + 512, lo[0], lo[1], lo[2], lo[3]);
}
// b: rows 2t, 2t + 1 and 2t + 8, 2t + 9 of a column; a, d: as in register tiles.
template<typename T> TILE void warp_mma(float *d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (is_bf16<T>)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
TILE void load_block_t(uint32_t (&d)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(a) : "memory");
}
// d += (hi + lo) times a block. rest: what has a lo, summed apart so that fewer products wait for others
template<typename T>
TILE void add_product(float (&d)[8], float (&rest)[8], const uint32_t (&hi)[4], const uint32_t (&lo)[4],
                      const tri<T> &s, int block) {
  uint32_t x[4], y[4], from = part_address(s, block);
  load_block_t(x, from);
  load_block_t(y, from + 512);
#pragma unroll
  for (int c = 0; c < 2; c++) {
    warp_mma<T>(rest + 4 * c, lo, x[2 * c], x[2 * c + 1]);
    warp_mma<T>(d + 4 * c, hi, x[2 * c], x[2 * c + 1]);
    warp_mma<T>(rest + 4 * c, hi, y[2 * c], y[2 * c + 1]);
  }
}
// An operand that is the sum of d and rest
template<typename T> TILE void split_sum(uint32_t (&hi)[4], uint32_t (&lo)[4], const float *d, const float (&rest)[8]) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = d[i] + rest[i];
  split<T>(hi, lo, x);
}
template<int V> TILE float (&block_at(rt<float, 64> &d))[8] { return *(float (*)[8])(d.d + 8 * V); }

// Warp w has the rows 16 w .. 16 w + 15, of block v its values 8 v .. 8 v + 7. Value 4 ch + 2 rh + e of a thread's
// eight is in row 8 rh + lane / 4, column 8 ch + 2 (lane % 4) + e.
// The warp's block on the diagonal goes to where the parts of its inverse will be, as blocks of 8 x 8 of fp32, 00, 11
// and 01.
TILE void put_corners(float *own, const float (&x)[8]) {
  int l = lane(), row = l >> 2, col = (l & 3) * 2;
  float2 *to = (float2 *)own + l;
  to[0] = make_float2(col > row ? x[0] : 0.f, col + 1 > row ? x[1] : 0.f);
  to[32] = make_float2(col > row ? x[6] : 0.f, col + 1 > row ? x[7] : 0.f);
  to[64] = make_float2(x[4], x[5]);
}
template<typename T> TILE void split(uint32_t &hi, uint32_t &lo, float x, float y) {
  hi = pack<T>(x, y);
  float2 z = unpack<T>(hi);
  lo = pack<T>(x - z.x, y - z.y);
}
// V (I + R) = the block, R the block on the diagonal below it or itself. A lane has a row of V, from the left to the
// right. Of (I + R)^-1 the corners on the diagonal are I - V, and 01 is -V_01 + V_00 V_01.
template<typename T> TILE void invert_corners(float (&x)[8], float *own) {
  int l = (int)anew_word((uint32_t)lane()), row = l >> 2, col = (l & 3) * 2, block = l < 24 ? l >> 3 : 2;
  float4 *mine = (float4 *)own + 16 * block + 2 * (l & 7);
  const float4 *r = (const float4 *)own + (l < 8 ? 0 : 16);
  __syncwarp();
  float4 begin = mine[0], end = mine[1];
  float v[8] = {begin.x, begin.y, begin.z, begin.w, end.x, end.y, end.z, end.w};
#pragma unroll
  for (int k = 0; k < 7; k++) {
    float4 f = r[2 * k], g = r[2 * k + 1];
    float of[8] = {f.x, f.y, f.z, f.w, g.x, g.y, g.z, g.w};
#pragma unroll
    for (int c = k + 1; c < 8; c++) v[c] = fused(-v[k], of[c], v[c]);
  }
  __syncwarp();
  mine[0] = make_float4(v[0], v[1], v[2], v[3]);
  mine[1] = make_float4(v[4], v[5], v[6], v[7]);
  __syncwarp();
  const float2 *from = (const float2 *)own + l;
  float2 first = from[0], second = from[32], corner = from[64];
  const float *down = own + 128 + 8 * col + row;
  uint32_t hi[4] = {}, lo[4] = {}, y, z;
  float sum[4] = {-corner.x, -corner.y, 0.f, 0.f}, rest[4] = {};
  split<T>(y, z, down[0], down[8]);
  split<T>(hi[0], lo[0], first.x, first.y);
  warp_mma<T>(rest, lo, y, 0u);
  warp_mma<T>(rest, hi, z, 0u);
  warp_mma<T>(sum, hi, y, 0u);
  x[0] = (col == row ? 1.f : 0.f) - first.x;
  x[1] = (col + 1 == row ? 1.f : 0.f) - first.y;
  x[2] = x[3] = 0.f;
  x[4] = sum[0] + rest[0];
  x[5] = sum[1] + rest[1];
  x[6] = (col == row ? 1.f : 0.f) - second.x;
  x[7] = (col + 1 == row ? 1.f : 0.f) - second.y;
  __syncwarp();
}
template<inverse I, typename T> TILE void invert_diagonal(rt<float, 64> &d, tri<T> &s, const rt<float, 64> &t) {
  int w = __shfl_sync(~0u, warp_in_group(), 0);   // else ptxas asks for the thread again and again, and waits
  float x[8], *own = (float *)s.d[block_of(w, w)][0];
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = w < 2 ? w ? t.d[8 + i] : t.d[i] : w < 3 ? t.d[16 + i] : t.d[24 + i];
  put_corners(own, x);
#pragma unroll
  for (int v = 1; v < 4; v++) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = t.d[8 * v + i];
    if (I == IN_ONE ? w < v : v % 2 && w == v - 1) put_block(s, block_of(0, v) + w, y);
  }
  invert_corners<T>(x, own);
  if (w > 0) put_block(s, block_of(w, w), x);
#pragma unroll
  for (int i = 0; i < 32; i++) d.d[i] = i / 8 == w ? x[i % 8] : I == IN_HALVES && i >= 16 && w < 2 ? -t.d[i] : 0.f;
}
// One code for warps 0 and 2: of two, both have to be fetched.
template<inverse I, typename T> TILE void invert_pairs(rt<float, 64> &d, tri<T> &s) {
  const int w = warp_in_group();
  if (w % 2) return;
  uint32_t hi[4], lo[4];
  float x[8], sum[8] = {}, rest[8] = {}, next[8] = {}, last[8] = {};
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = w ? d.d[16 + i] : d.d[i];
  split<T>(hi, lo, x);
  const int right = (int)anew_word(w ? block_of(2, 3) : block_of(0, 1));   // of R, beside the block on the diagonal
  add_product<T>(sum, rest, hi, lo, s, right);
  if (I == IN_ONE && w == 0) {             // and what block 0 adds to the sums of the others
    add_product<T>(block_at<2>(d), next, hi, lo, s, block_of(0, 2));
    add_product<T>(block_at<3>(d), last, hi, lo, s, block_of(0, 3));
  }
  split_sum<T>(hi, lo, sum, rest);
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = rest[i] = 0.f;
  add_product<T>(sum, rest, hi, lo, s, right + 1);          // the inverse below it
#pragma unroll
  for (int i = 0; i < 8; i++) {
    x[i] = -sum[i] - rest[i];
    d.d[8 + i] = w ? d.d[8 + i] : x[i];
    if (I == IN_ONE) d.d[16 + i] += next[i];
    d.d[24 + i] = w ? x[i] : I == IN_ONE ? d.d[24 + i] + last[i] : d.d[24 + i];
  }
  if (I == IN_ONE && w) put_block(s, block_of(0, 0), x);
}
template<typename T> TILE void invert_rest(rt<float, 64> &d, const tri<T> &s) {
  if (warp_in_group() > 1) return;
  uint32_t hi[4], lo[4];
  float x[8], rest[8] = {}, last[8] = {}, less[8] = {};
  split<T>(hi, lo, block_at<1>(d));
  add_product<T>(block_at<2>(d), rest, hi, lo, s, block_of(1, 2));
  add_product<T>(block_at<3>(d), last, hi, lo, s, block_of(1, 3));
#pragma unroll
  for (int i = 0; i < 8; i++) {
    x[i] = d.d[24 + i];
    d.d[24 + i] = 0.f;
  }
  split_sum<T>(hi, lo, block_at<2>(d), rest);
#pragma unroll
  for (int i = 0; i < 8; i++) d.d[16 + i] = rest[i] = 0.f;
  add_product<T>(block_at<2>(d), rest, hi, lo, s, block_of(2, 2));
  add_product<T>(block_at<3>(d), less, hi, lo, s, block_of(0, 0));
  split_sum<T>(hi, lo, x, last);
  add_product<T>(block_at<3>(d), less, hi, lo, s, block_of(3, 3));
#pragma unroll
  for (int i = 0; i < 8; i++) {
    d.d[16 + i] = -d.d[16 + i] - rest[i];
    d.d[24 + i] = -d.d[24 + i] - less[i];
  }
}
template<inverse I, typename T> TILE void store_carried(st<T, 64, 64> &d, const rt<float, 64> &t) {
  float left[2] = {0.f, 0.f};
#pragma unroll
  for (int k = 0; k < 4; k++) {
    uint32_t w[4];
    const bool ends = k == 3 || (I == IN_HALVES && k == 1);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float x = carried(t.d[8 * k + 2 * j], left[j & 1]), y = t.d[8 * k + 2 * j + 1];
      if (ends && j > 1) y = carried(y, x - unpack<T>(pack<T>(x, x)).x);       // the row's last two
      w[j] = pack<T>(x, y);
      float2 rounded = unpack<T>(w[j]);
      left[j & 1] = ends && j > 1 ? 0.f : x - rounded.x + (y - rounded.y);
    }
    store_block(block_address_anew(d, 16 * k), w[0], w[1], w[2], w[3]);
  }
}
