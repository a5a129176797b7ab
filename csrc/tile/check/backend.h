// Backend of the protocol checker: the CPU backend's arithmetic on hooks that tell the checker's runtime
// (check/check.h) what every operation reads, writes, issues and waits for. Everything is inlined into the roles'
// bodies, so that an address in the code stands for a chain of calls.
#pragma once
#pragma GCC optimize("no-trapping-math")
#define TILE static inline __attribute__((always_inline))
#include <math.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <type_traits>
#include "check/check.h"
#include "tile/check/types.h"
#include "tile/cpu/vector.h"
#include "tile/check/hooks.h"

#include "tile/sync.h"
#include "tile/copy.h"
#include "tile/math.h"
#include "tile/mma.h"
#include "tile/scan.h"
#include "tile/check/sync.h"
#include "tile/cpu/copy.h"
#include "tile/cpu/math.h"
#include "tile/cpu/mma.h"
#include "tile/cpu/scan.h"
#include "tile/pipe.h"
#include "tile/sched.h"
