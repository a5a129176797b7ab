// Products of a warp's own rows on sm_90a: mma.sync, m16n8k16, whose first operand and accumulator lie as wgmma's do.
#pragma once
// Word 2 n + k: rows 8 k + 2t, 8 k + 2t + 1 of column 8 n + g (t: lane % 4, g: lane / 4).
template<typename T> struct qt { uint32_t d[4]; };

struct alignas(128) pt { float4 d[2][128]; };
TILE void load(rt<float, 16> &t, const pt &s) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float4 x = s.d[i][thread_in_group()];
    t.d[4 * i] = x.x;
    t.d[4 * i + 1] = x.y;
    t.d[4 * i + 2] = x.z;
    t.d[4 * i + 3] = x.w;
  }
}
TILE void store(pt &d, const rt<float, 16> &t) {
#pragma unroll
  for (int i = 0; i < 2; i++)
    d.d[i][thread_in_group()] = make_float4(t.d[4 * i], t.d[4 * i + 1], t.d[4 * i + 2], t.d[4 * i + 3]);
}

// Lane 8 j + i has the address of row i of block j, 8 x 8. Where that is in a tile's first 16 x 16 values, the
// exclusive or with 2 c0 is where it is in those from column c0 on. It is made anew for each load: in a loop the
// compiler would keep it for each block.
TILE uint32_t own_address(uint32_t tile, int row, int chunk, int r0, int c0) {
  uint32_t at = row * 128 + ((chunk ^ row & 7) << 4);
  asm volatile("xor.b32 %0, %0, %1;" : "+r"(at) : "r"(c0 % 64 * 2));
  return at + tile + r0 * 128;
}
template<typename T, int R, int C> TILE uint32_t own_panel(const st<T, R, C> &s, int c0) {
  return shared_address(&s) + c0 / 64 * R * 128;
}
template<typename T, int R, int C> TILE void load(qt<T> &d, const st<T, R, C> &s, int r0, int c0) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(d.d[0]), "=r"(d.d[1]), "=r"(d.d[2]), "=r"(d.d[3])
    : "r"(own_address(own_panel(s, c0), lane() & 15, lane() >> 4, r0, c0)) : "memory");
}
template<typename T, int R, int C> TILE void load_t(qt<T> &d, const st<T, R, C> &s, int r0, int c0) {
  load_block(d.d, own_address(own_panel(s, c0), 8 * (lane() >> 4) + (lane() & 7), lane() >> 3 & 1, r0, c0));
}
template<typename T> TILE void mma_16_8_16(float *d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(sizeof(T) == 2, "operands of 16 bits");
  if constexpr (is_bf16<T>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template<typename T, int N, int K>
TILE void mma_own(rt<float, N> &d, int d0, const rt<T, K> &a, int a0, const qt<T> &b) {
  OWN_RULES(N, K);
#pragma unroll
  for (int n = 0; n < 2; n++) mma_16_8_16<T>(d.d + d0 / 2 + 4 * n, a.d[a0 / 16], b.d[2 * n], b.d[2 * n + 1]);
}
template<typename T> struct own_words { const uint32_t *w; };
template<typename T, int N> TILE own_words<T> each_words(const rt<T, N> &t, int k) { return {t.d[N == 16 ? 0 : k]}; }
template<typename T> TILE float each_at(const own_words<T> &b, int, int j) {
  float2 x = unpack<T>(b.w[j >> 1]);
  return j & 1 ? x.y : x.x;
}
TILE float &each_at(rt<float, 16> &t, int, int j) { return t.d[j]; }
TILE float each_at(const rt<float, 16> &t, int, int j) { return t.d[j]; }
TILE float &each_at(csum<16> &c, int, int j) { return c.d[(j >> 2) * 2 + (j & 1)]; }
template<int N> TILE own_words<bf16> each_block(const rt<bf16, N> &t, int k) { return each_words(t, k); }
template<int N> TILE own_words<bf16> each_block(rt<bf16, N> &t, int k) { return each_words(t, k); }
template<int N> TILE own_words<fp16> each_block(const rt<fp16, N> &t, int k) { return each_words(t, k); }
template<int N> TILE own_words<fp16> each_block(rt<fp16, N> &t, int k) { return each_words(t, k); }
// ptxas moves no load over the barrier. Otherwise it would begin with the loads of many blocks, and spill.
template<class F, class... X> TILE void each_part(int c0, F f, X &...x) {
  __syncwarp();
  each_of_block(f, c0 / 16, each_block(x, c0 / 16)...);
}
TILE float each_at(const float2 &b, int, int j) { return j & 4 ? b.y : b.x; }
template<typename T> TILE float below_at(const st<T, 64, 64> &s, int c) {
  int r = c + 1;
  return to_float(*(const T *)((const char *)&s + r * 128 + ((c / 8 ^ r & 7) << 4) + c % 8 * 2));
}
template<typename T> TILE float2 each_block(const next_below<T> &t, int k) {
  int c = 16 * k + thread_col();
  return make_float2(below_at(t.s, c), below_at(t.s, c + 8));
}
template<class B> TILE auto couple_at(B &b, int k, int j) -> couple<decltype(each_at(b, k, j))> {
  return {each_at(b, k, j), each_at(b, k, j + 1)};
}
template<class F, class... B> TILE void couples_of_block(F f, int k, B &&...b) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) f(couple_at(b, k, j)...);
}
template<class F, class... X> TILE void each_couple(int c0, F f, X &...x) {
  __syncwarp();
  couples_of_block(f, c0 / 16, each_block(x, c0 / 16)...);
}
TILE void store(sv<4 * 64> &d, int c0, const csum<16> &c) {
  float x[4] = {c.d[0], c.d[1], c.d[2], c.d[3]};
  halve<16, 2>(x);
#pragma unroll
  for (int o = 4; o < 16; o *= 2) {
    x[0] += __shfl_xor_sync(~0u, x[0], o);
    x[1] += __shfl_xor_sync(~0u, x[1], o);
  }
  if ((lane() & 12) == 0)
    *(float2 *)(d.d + 64 * warp_in_group() + c0 + 8 * (lane() >> 4) + thread_col()) = make_float2(x[0], x[1]);
}
template<int P, class F>
TILE void map_parts(sv<64> &d, int c0, const sv<4 * 64> (&parts)[P], const sv<64> &v, F f) {
  if (thread_in_group() >= 16) return;
  int c = c0 + thread_in_group();
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4 * P; i++) sum += parts[i / 4].d[64 * (i % 4) + c];
  d.d[c] = f(sum, v.d[c]);
}
