// Waits of roles that have nothing else to do for long. On a GPU a wait asks again and again, and takes issue slots from
// the warps that compute; these sleep in between. Contracts; bodies in sm90/ and cpu/. tile.h does not include this
// file: the kernels that want it do.
#pragma once
#include "tile/tile.h"
TILE void sem_wait_idle(sem &s, uint32_t phase);           // sem_wait(), which may see the phase's end a little later
template<int S, int R> TILE void ring_acquire_idle(ring<S, R> &r, ring_pos p) {
  sem_wait_idle(r.empty[p.stage], p.phase ^ 1);
}
#ifdef __CUDACC__
#include "tile/sm90/idle.h"
#else
#include "tile/cpu/idle.h"
#endif
