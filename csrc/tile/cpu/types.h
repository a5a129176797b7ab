// Tile types of the CPU backend: plain row-major arrays. Sizes and alignments of everything that lives in shared memory
// equal the GPU's, because the host reads a block's shared_bytes from the CPU object.
#pragma once
#include <stdint.h>

struct bf16 { uint16_t u; };
struct fp16 { uint16_t u; };
struct e4m3 { uint8_t u; };
// float is an element type too (CPU_ONLY rows): rt<float, N> is then accumulator and operand alike.
template<typename T, int R, int C> struct alignas(1024) st { SHARED_TILE_RULES(R, C); T d[R * C]; };
template<typename T, int K, int N> struct tt { st<T, N, K> t; };   // columns in their order
template<int N> struct alignas(128) sv { float d[N]; };
struct alignas(128) parked { float d[64], unused[64]; };   // as many bytes as on the GPU
template<int R, int C> struct alignas(128) sm { float d[R * C]; };
template<typename T, int N> struct alignas(64) rt { REGISTER_TILE_RULES(T, N); T d[64][N]; };
#define OVERLAY(T, N, name, other) rt<T, N> name; (void)(other)
struct alignas(64) rv { float d[64]; };
struct alignas(64) rsum { float d[64]; };
template<int N> struct alignas(64) cv { float d[N]; };
template<int N> struct alignas(64) csum { float d[N]; };
template<int N> struct alignas(64) wv { float d[N]; };
template<int N> struct alignas(64) gv { GROUP_VECTOR_RULES(N); float d[N]; };
// Arrivals are counted in warps. bytes goes below zero while copies complete ahead of their expectation.
struct alignas(8) sem {
  int32_t bytes;
  uint8_t count, pending, phase;
};
static_assert(sizeof(sem) == 8, "an mbarrier has 8 bytes");
