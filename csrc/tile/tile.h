// The one include of a kernel file. The build supplies, from the kernel's row in kernels.def:
//   KERNEL     the row's name
//   ELEM       the row's element type
//   CONSTANTS  NAME=value, ...  become enumerators
//   ISA        base, avx2 or avx512; of the host compiler only. nvcc is known by __CUDACC__
//
// A kernel file ends with
//   typedef block<params, shared, init, role<compute, WARPGROUP, NC, 232>, role<loader, THREAD, 1, 40>> kernel;
//   ENTRY(kernel, TILE_M, TILE_N)
// role<body, width, count, registers>
//   body       void body(const params &p, shared &s, int index): index counts the role's members, 0 to count - 1. Its
//              name must not be one of the C library's (norm, gamma, log, round): nvcc finds two of them
//   registers  0, or a multiple of 8 from 24 to 240. 0 everywhere: no setmaxnreg, the compiler's choice stands
// Warpgroup roles come first. Thread and warp roles then share one more warpgroup, one warp each, whose register budget
// is the first such role's.
// OCCUPANCY<n>, CLUSTER<n>, DEPENDENT and FOLLOWED (sync.h: grid_wait) may follow the roles in block<...>, and
// UNLESS<is_done>, of bool is_done(const params &p): where it holds, in all blocks or in none, the kernel does nothing.
// It is asked before anything else, so little of the kernel's code is fetched then.
// EXAMPLE(kernel, blocks, statements that fill p) after ENTRY gives margay.check a problem for a file that is no row of
// kernels.def.
#pragma once
#include "tile/vocabulary.h"
enum { CONSTANTS };
typedef ELEM elem;
#ifdef __CUDACC__
#include "tile/sm90/block.h"
#elif defined(CHECK)
#include "tile/check/block.h"
#else
#include "tile/cpu/block.h"
#endif
