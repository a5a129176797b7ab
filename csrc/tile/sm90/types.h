// Tile types on sm_90a.
#pragma once
struct bf16 { uint16_t u; };
struct fp16 { uint16_t u; };
struct e4m3 { uint8_t u; };
template<typename T> constexpr bool is_bf16 = false;
template<> constexpr bool is_bf16<bf16> = true;

// Panels of 128 bytes a row, each R rows. 16-byte chunk c of row r sits at chunk c ^ (r & 7): the 128-byte swizzle of
// TMA and wgmma. Where the columns of e4m3 do not fill such panels, panels have 64 bytes a row, and chunk c of row r
// sits at c ^ (r / 2 & 3): the 64-byte swizzle.
template<typename T, int C> constexpr int panel_bytes = sizeof(T) == 1 && C % 128 ? 64 : 128;
template<typename T, int C> constexpr int panel_columns = panel_bytes<T, C> / (int)sizeof(T);
template<typename T, int R, int C> struct alignas(1024) st {
  static_assert(sizeof(T) <= 2, "shared tile: 16-bit or e4m3");
  SHARED_TILE_RULES(R, C);
  T d[R * C];
};
// Its columns, the keys of attention, are in the order of a register operand's, see rt<e4m3, N>.
template<typename T, int K, int N> struct tt { st<T, N, K> t; };
template<int N> struct alignas(128) sv { float d[N]; };
struct alignas(128) parked { float d[128]; };   // of the four threads that hold two rows the even ones keep the first,
                                                // the odd ones the second
template<int R, int C> struct alignas(128) sm { float d[R * C]; };

// wgmma's accumulator: a warp holds 16 rows, a thread d[4i..4i+3] = rows r, r, r + 8, r + 8, columns c, c + 1, c, c + 1
// of 8-column group i. wgmma's register operand: the same places, two 16-bit values a word, four words for each 16
// columns.
template<typename T, int N> struct rt { REGISTER_TILE_RULES(T, N); uint32_t d[N / 16][4]; };
template<int N> struct rt<float, N> { REGISTER_TILE_RULES(float, N); float d[N / 2]; };
// The 8-bit register operand of wgmma: for each 32 columns four words, of rows r, r + 8, r, r + 8. A thread's word has
// columns 4t to 4t + 3 (t: lane & 3) of the first 16 columns, or of the second. The accumulator gives thread t columns
// 2t, 2t + 1, 8 + 2t, 9 + 2t of each 16 instead. They are not moved. The reduction takes the columns in another order,
// which is the same for both operands: place 4t + 2i + e of each 16 has column 8i + 2t + e (i, e: 0, 1). Only convert()
// and transpose_part() know of it.
template<int N> struct rt<e4m3, N> { REGISTER_TILE_RULES(e4m3, N); uint32_t d[N / 32][4]; };
#define OVERLAY(T, N, name, other) rt<T, N> &name = *(rt<T, N> *)&(other)
struct rv { float d[2]; };                         // rows r and r + 8, the same in the four threads of a row
struct rsum { float d[2]; };                       // rows r and r + 8, this thread's columns only
template<int N> struct cv { float d[N / 4]; };     // columns c, c + 1 of each 8-column group
template<int N> struct csum { float d[N / 4]; };   // as cv, this thread's two rows only
template<int N> struct wv { float d[N / 32]; };    // element lane + 32 k
template<int N> struct gv { GROUP_VECTOR_RULES(N); float d[N / 128]; };   // elements N / 128 t + k of thread t
struct alignas(8) sem { uint64_t b; };

TILE int thread_in_group() { return threadIdx.x & 127; }
TILE int lane() { return threadIdx.x & 31; }
TILE int warp_in_group() { return thread_in_group() >> 5; }
TILE int thread_row() { return warp_in_group() * 16 + (lane() >> 2); }
TILE int thread_col() { return (threadIdx.x & 3) * 2; }
TILE uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
TILE int block_index() { return blockIdx.x; }
TILE int block_count() { return gridDim.x; }
TILE int atomic_next(int *counter) { return atomicAdd(counter, 1); }

// Two floats to one word of 16-bit values, lo in the low half; and back.
template<typename T> TILE uint32_t pack(float lo, float hi) {
  static_assert(sizeof(T) == 2, "a pair of 16-bit values");
  uint32_t r;
  if constexpr (is_bf16<T>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
TILE uint32_t pack_e4m3(float a, float b, float c, float d) {   // a in the lowest byte
  uint32_t r;
  asm("{\n.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\n"
      "mov.b32 %0, {l, h};\n}\n"
      : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
template<typename T> TILE float2 unpack(uint32_t w) {
  static_assert(sizeof(T) == 2, "a pair of 16-bit values");
  if constexpr (is_bf16<T>) return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
  float2 f;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}\n"
      : "=f"(f.x), "=f"(f.y) : "r"(w));
  return f;
}
template<typename T> TILE float to_float(T x) { return unpack<T>(x.u).x; }
