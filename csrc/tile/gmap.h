// gmap: a global tensor seen in tiles. Plain C: the host fills it (runtime/tensormap.c), kernels hand it to tma_load
// and tma_store. Four dimensions, innermost first: columns (contiguous), rows, heads, batch. Same size and alignment on
// every backend.
#pragma once
#include <stdint.h>
#ifdef __cplusplus
#define MG_ALIGNAS(n) alignas(n)
#else
#define MG_ALIGNAS(n) _Alignas(n)
#endif

typedef struct gmap {
  MG_ALIGNAS(64) unsigned char bytes[128];   // GPU: a CUtensorMap. CPU: a gmap_cpu.
} gmap;

typedef struct gmap_cpu {
  char *data;
  int64_t size[4];     // elements, columns first
  int64_t stride[4];   // bytes; stride[0] is the element size
} gmap_cpu;
