// What a compiled row of kernels.def tells the host about itself. Exported by the row's CPU object, one per instruction
// set.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct mg_kernel_desc {
  uint32_t shared_bytes;      // dynamic shared memory of one block, bytes; the GPU image uses the same layout
  uint32_t threads;           // threads of one block on the GPU
  uint32_t cluster;           // blocks in a cluster, 1 without clusters
  uint32_t blocks_per_sm;     // resident blocks the register budget was made for
  uint32_t params_bytes;      // size of the kernel's parameter struct
  uint32_t dependent;         // 1: begins before the kernel in front of it in the stream is over, and waits for that
                              // itself
  uint32_t followed;          // 1: a dependent kernel behind it begins as soon as all its blocks have begun
  int32_t tile_m, tile_n;     // rows and columns of the problem that one task covers
  // Run the cluster that holds blocks [first, first + cluster) of a grid of `blocks` on the calling thread.
  void (*run)(const void *params, int first, int blocks);
} mg_kernel_desc;
