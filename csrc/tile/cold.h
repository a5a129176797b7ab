// Code of cases that few calls or chunks have. Where kernels are longer than the cache of instructions, what lies between
// the instructions that all want is fetched with them. A COLD function is called instead, and lies elsewhere.
#pragma once
#ifdef __CUDACC__
#define COLD static __device__ __noinline__
#else
#define COLD static __attribute__((noinline, cold))
#endif
