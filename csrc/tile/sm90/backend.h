// sm_90a backend: TMA, mbarriers, wgmma, setmaxnreg. All PTX of the library's Hopper kernels is in this folder.
#pragma once
#define TILE static __device__ __forceinline__
#include "tile/sm90/types.h"
extern __shared__ __align__(1024) char block_memory[];   // the shared struct; an extern symbol, so that its addresses
                                                         // are constants
#ifdef TRACED
#include "tile/sm90/trace.h"
#else
#include "tile/sm90/quiet.h"
#endif
#include "tile/math.h"
#include "tile/sync.h"
#include "tile/copy.h"
#include "tile/mma.h"
#include "tile/scan.h"
#include "tile/sm90/sync.h"
#include "tile/sm90/math.h"
#include "tile/sm90/copy.h"
#include "tile/sm90/mma.h"
#include "tile/sm90/scan.h"
#include "tile/pipe.h"
#include "tile/sched.h"
