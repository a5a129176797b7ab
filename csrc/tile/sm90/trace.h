// Debug builds of margay.check --device: every warp's first lane writes down the synchronising calls of its role, and chosen warps are delayed at
// each of them. The operations are numbered as in check/check.h (enum ck_op).
#pragma once
struct trace_event { uint32_t op_and_offset; int32_t value; };   // offset in the block's shared struct plus 1, times 32; 0: none
struct trace_state {
  trace_event *events;       // [block][16 warps][capacity], the first of each being the number of events
  uint32_t capacity, delayed, longest, seed;   // delayed: bit per warp; longest: of a delay, ns
};
extern "C" { __device__ trace_state mg_trace; }

TILE void trace(int op, const void *at, int value) {
  if ((threadIdx.x & 31) != 0) return;
  const trace_state t = mg_trace;
  const uint32_t warp = threadIdx.x >> 5;
  trace_event *e = t.events + ((size_t)blockIdx.x * 16 + warp) * t.capacity;
  const uint32_t n = e->op_and_offset + 1;
  const uint32_t offset = at ? (shared_address(at) & 0x3ffff) - (shared_address(block_memory) & 0x3ffff) + 1 : 0;
  e->op_and_offset = n;
  if (n < t.capacity) e[n] = {offset << 5 | (uint32_t)op, value};
  if (t.delayed >> warp & 1) __nanosleep(((n * 2654435761u ^ t.seed) >> 7) % (t.longest + 1));
}
