// Inverses of triangular tiles on sm_90a.
#pragma once
// Rows of a block are 32 bytes. Their halves change places in rows 4 to 7 of each eight: so eight rows of a half lie in
// all banks.
template<typename T> struct alignas(1024) tri { T d[9][2][16 * 16]; };
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
// d += (hi + lo) times a block
template<typename T>
TILE void add_product(float (&d)[8], const uint32_t (&hi)[4], const uint32_t (&lo)[4], const tri<T> &s, int block) {
  uint32_t x[4], y[4], from = part_address(s, block);
  load_block_t(x, from);
  load_block_t(y, from + 512);
#pragma unroll
  for (int c = 0; c < 2; c++) {
    warp_mma<T>(d + 4 * c, lo, x[2 * c], x[2 * c + 1]);
    warp_mma<T>(d + 4 * c, hi, y[2 * c], y[2 * c + 1]);
    warp_mma<T>(d + 4 * c, hi, x[2 * c], x[2 * c + 1]);
  }
}
template<int V> TILE void get_block(float (&x)[8], const rt<float, 64> &t) {
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = t.d[8 * V + i];
}

// Warp w has the rows 16 w .. 16 w + 15, of block v its values 8 v .. 8 v + 7. Value 4 ch + 2 rh + e of a thread's
// eight is in row 8 rh + lane / 4, column 8 ch + 2 (lane % 4) + e. From the last row up, row j of the inverse is whole
// when those below it have been taken off; then it is taken off the rows above.
template<typename T> TILE void invert_diagonal(rt<float, 64> &d, tri<T> &s, const rt<float, 64> &t) {
  int w = warp_in_group(), l = lane(), row = l >> 2, col = (l & 3) * 2;
  float a[8], x[8];
#pragma unroll
  for (int e = 0; e < 8; e++) {
    a[e] = w == 0 ? t.d[e] : w == 1 ? t.d[8 + e] : w == 2 ? t.d[16 + e] : t.d[24 + e];
    x[e] = (e >> 1 & 1) * 8 + row == (e >> 2) * 8 + col + (e & 1) ? 1.f : 0.f;
  }
#pragma unroll
  for (int j = 15; j >= 1; j--) {
    int from = (j & 7) * 4 + (l & 3), at = (l & ~3) | (j & 7) >> 1;   // lanes with row j of x, and with column j of a
    const int ch = j >> 3, e = j & 1;
#pragma unroll
    for (int rh = 0; rh <= ch; rh++) {
      float f = __shfl_sync(~0u, a[4 * ch + 2 * rh + e], at);
      f = rh * 8 + row < j ? f : 0.f;
#pragma unroll
      for (int c = ch; c < 2; c++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          float y = __shfl_sync(~0u, x[4 * c + 2 * ch + k], from);
          x[4 * c + 2 * rh + k] = fused(-f, y, x[4 * c + 2 * rh + k]);
        }
    }
  }
#pragma unroll
  for (int v = 1; v < 4; v++) {
    float y[8];
    if (w <= v) {
#pragma unroll
      for (int i = 0; i < 8; i++) y[i] = w == v ? x[i] : t.d[8 * v + i];
      put_block(s, block_of(0, v) + w, y);
    }
  }
#pragma unroll
  for (int i = 0; i < 32; i++) d.d[i] = i / 8 == w ? x[i % 8] : 0.f;
}
// Block V is what its row has of the sum; where the warp's row ends before it, nothing.
template<typename T, int V> TILE void finish_block(rt<float, 64> &d, const tri<T> &s) {
  uint32_t hi[4], lo[4];
  float x[8];
  get_block<V - 1>(x, d);
  split<T>(hi, lo, x);
#pragma unroll
  for (int v = V; v < 4; v++) add_product<T>(*(float (*)[8])(d.d + 8 * v), hi, lo, s, block_of(V - 1, v));
  get_block<V>(x, d);
  split<T>(hi, lo, x);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = 0.f;
  add_product<T>(x, hi, lo, s, block_of(V, V));
#pragma unroll
  for (int i = 0; i < 8; i++) d.d[8 * V + i] = -x[i];
}
template<typename T> TILE void invert_rest(rt<float, 64> &d, const tri<T> &s) {
  int w = warp_in_group();
  if (w < 1) finish_block<T, 1>(d, s);
  if (w < 2) finish_block<T, 2>(d, s);
  if (w < 3) finish_block<T, 3>(d, s);
}
template<typename T> TILE void store_carried(st<T, 64, 64> &d, const rt<float, 64> &t) {
  float left[2] = {0.f, 0.f};
#pragma unroll
  for (int k = 0; k < 4; k++) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float y[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float x = t.d[8 * k + 2 * j + e];
        x += fabsf(left[j & 1]) <= fabsf(x) * 0x1p-10f ? left[j & 1] : 0.f;
        y[e] = unpack<T>(pack<T>(x, x)).x;
        left[j & 1] = x - y[e];
      }
      w[j] = pack<T>(y[0], y[1]);
    }
    store_block(block_address(d, 16 * k), w[0], w[1], w[2], w[3]);
  }
}
