// Code of cases that few calls or chunks have. Where a kernel's loop is longer than the cache of instructions, what
// lies between those that all want costs time, though it is not run. A COLD function is called, and lies elsewhere. In
// it wgmma may not be, and what it is given of registers goes through memory: it takes shared tiles.
#pragma once
#ifdef __CUDACC__
#define COLD static __device__ __noinline__
#else
#define COLD static __attribute__((noinline, cold))
#endif
