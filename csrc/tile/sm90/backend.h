// sm_90a backend: TMA, mbarriers, wgmma, setmaxnreg. All PTX of the library's Hopper kernels is in this folder.
#pragma once
#define TILE static __device__ __forceinline__
#include "tile/sm90/types.h"
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
#include "tile/sm90/block.h"
