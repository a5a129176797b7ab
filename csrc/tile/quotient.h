// Division by a number that the host knows. Where a few warps find what is theirs before anything is under way, they
// wait for each of the 35 instructions that a division takes.
#pragma once
#include "tile/vocabulary.h"
#include "runtime/divisor.h"

// n / d, rounded down, of 0 <= n < 2^31: 2 n times is 2^64 n / d and less than 2^32 more.
TILE int quotient(int n, const divisor &d) {
  const uint64_t twice = 2 * (uint64_t)n, low = twice * (uint32_t)d.times;
  return (int)((twice * (uint32_t)(d.times >> 32) + (low >> 32)) >> 32);
}
