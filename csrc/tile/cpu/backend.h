// CPU backend of the tile vocabulary: roles are fibers (fiber.h), tile operations are loops that the compiler
// vectorises, products a micro kernel (mma.h). Everything is static: objects for several instruction sets are linked
// into one library.
#pragma once
#if !defined(__clang__)
#pragma GCC optimize("no-trapping-math")   // else the compiler keeps a branch around arithmetic that only one side of a
                                           // condition needs
#endif
#define TILE static inline
#include <math.h>

#include "tile/cpu/types.h"
#include "tile/cpu/vector.h"
#include "tile/cpu/fiber.h"

TILE int block_index() { return mg_machine->first + self().rank; }
TILE int block_count() { return mg_machine->blocks; }
TILE int atomic_next(int *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
#include "tile/cpu/hooks.h"

#include "tile/sync.h"
#include "tile/copy.h"
#include "tile/math.h"
#include "tile/mma.h"
#include "tile/scan.h"
#include "tile/cpu/sync.h"
#include "tile/cpu/copy.h"
#include "tile/cpu/math.h"
#include "tile/cpu/mma.h"
#include "tile/cpu/scan.h"
#include "tile/pipe.h"
#include "tile/sched.h"
