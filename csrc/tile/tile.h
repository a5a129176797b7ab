// The one include of a kernel file. The build supplies, from the kernel's row in kernels.def:
//   KERNEL     the row's name
//   TYPE       the row's element type
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
// OCCUPANCY<n>, CLUSTER<n>, DEPENDENT and FOLLOWED (sync.h: grid_wait) may follow the roles in block<...>.
// EXAMPLE(kernel, blocks, statements that fill p) after ENTRY gives margay.check a problem for a file that is no row of
// kernels.def.
#pragma once
#include "tile/gmap.h"
#include "tile/kernel_desc.h"
#include "tile/types.h"
#include "tile/rules.h"
// UNROLLED stands in front of a loop over parts of register tiles, whose index must become a constant. ROLLED stands in
// front of one that must stay a loop.
#ifdef __CUDACC__
#define UNROLLED _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#include "tile/sm90/backend.h"
#else
#define UNROLLED _Pragma("GCC unroll 16")
#define ROLLED _Pragma("GCC unroll 1")
#ifdef CHECK   // the protocol checker's build
#include "tile/check/backend.h"
#else
#include "tile/cpu/backend.h"
#endif
#endif
enum { CONSTANTS };
typedef TYPE elem;
