// What no row changes: the build compiles it once for each instruction set, for all rows (setup.py: vocabulary_job).
// None of the row's macros may stand here or in what is included; tile.h includes what needs them.
#pragma once
#include "tile/gmap.h"
#include "tile/kernel_desc.h"
#include "tile/types.h"
#include "tile/rules.h"
// UNROLLED stands in front of a loop over parts of register tiles, whose index must become a constant. ROLLED stands in
// front of one that must stay a loop, CONSTANT_INDEX in front of one over an array of vectors, whose index must be a
// constant for nvcc only: to unroll it for the CPU would only take time.
#ifdef __CUDACC__
#define UNROLLED _Pragma("unroll")
#define CONSTANT_INDEX _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#include "tile/sm90/backend.h"
#else
#define UNROLLED _Pragma("GCC unroll 16")
#define CONSTANT_INDEX _Pragma("GCC unroll 1")
#define ROLLED _Pragma("GCC unroll 1")
#ifdef CHECK   // the protocol checker's build
#include "tile/check/backend.h"
#else
#include "tile/cpu/backend.h"
#endif
#endif
