// Tile types of the checker: the CPU backend's, with a state in everything that lives in registers.
#pragma once
#include <stdint.h>

struct bf16 { uint16_t u; };
struct fp16 { uint16_t u; };
struct e4m3 { uint8_t u; };
// A register tile knows whether it was written and which products still use it; leaving its scope before they are done
// is an error.
struct state_of_registers : ck_register {
  state_of_registers() : ck_register{} {}
  ~state_of_registers() { ck_register_ends(this); }
};
template<typename T, int R, int C> struct alignas(1024) st { SHARED_TILE_RULES(R, C); T d[R * C]; };
template<typename T, int K, int N> struct tt { st<T, N, K> t; };   // columns in their order
template<int N> struct alignas(128) sv { float d[N]; };
struct alignas(128) parked { float d[64], unused[64]; };   // as many bytes as on the GPU
template<int R, int C> struct alignas(128) sm { float d[R * C]; };
template<typename T, int N> struct rt { REGISTER_TILE_RULES(T, N); alignas(64) T d[64][N]; state_of_registers state; };
#define OVERLAY(T, N, name, other) rt<T, N> name; (void)(other)
struct rv { alignas(64) float d[64]; state_of_registers state; };
struct rsum { alignas(64) float d[64]; state_of_registers state; };
template<int N> struct cv { alignas(64) float d[N]; state_of_registers state; };
template<int N> struct csum { alignas(64) float d[N]; state_of_registers state; };
template<int N> struct wv { alignas(64) float d[N]; state_of_registers state; };
template<int N> struct gv { GROUP_VECTOR_RULES(N); alignas(64) float d[N]; state_of_registers state; };
struct alignas(8) sem { uint8_t opaque[8]; };
