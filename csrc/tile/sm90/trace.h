// Debug builds of margay.check --device: every warp's first lane writes down the synchronising calls of its role, and
// chosen warps are delayed at each of them. The operations are numbered as in check/check.h (enum ck_op).
#pragma once
// offset in the block's shared struct plus 1, times 32; 0: none
struct trace_event { uint32_t op_and_offset; int32_t value; };
struct trace_state {
  trace_event *events;       // [block][32 warps][capacity], the first of each being the number of events; capacity 0:
                             // nothing is written
  uint32_t capacity, delayed, longest, seed;   // delayed: bit per warp; longest: of a delay, ns
};
extern "C" { __constant__ trace_state mg_trace; }

TILE void trace(int op, const void *at, int value) {
  if ((threadIdx.x & 31) != 0) return;
  const uint32_t warp = threadIdx.x >> 5, capacity = mg_trace.capacity;
  if (capacity) {
    trace_event *e = mg_trace.events + ((size_t)blockIdx.x * 32 + warp) * capacity;
    const uint32_t n = ++e->op_and_offset,
                   offset = at ? (shared_address(at) & 0x3ffff) - (shared_address(block_memory) & 0x3ffff) + 1 : 0;
    if (n < capacity) e[n] = {offset << 5 | (uint32_t)op, value};
  }
  if (mg_trace.delayed >> warp & 1)
    __nanosleep((((uint32_t)clock64() ^ mg_trace.seed) * 2654435761u >> 8) % (mg_trace.longest + 1));
}
