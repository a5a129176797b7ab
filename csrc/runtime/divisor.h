// A number by which kernels divide, and what makes of that two multiplications (tile/quotient.h). Plain C: filled by
// the host halves.
#pragma once
#include <stdint.h>

typedef struct divisor {
  int by;
  uint64_t times;             // 2^63 / by, rounded down, and 1
} divisor;
static inline divisor mg_divisor(int64_t by) {
  return (divisor){(int)by, by > 0 ? ((uint64_t)1 << 63) / (uint64_t)by + 1 : 0};
}
