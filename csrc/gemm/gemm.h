// Parameters of the GEMM kernels: c = act(a b + bias). Plain C: filled by gemm/gemm.c, read by gemm.cu.
#pragma once
#include "tile/gmap.h"

typedef struct gemm_params {
  gmap a, b, c;
  const void *bias;         // [n] of c's type, or NULL
  int m, n, k;
  int tasks;                // m_blocks * n_blocks
  int m_blocks, n_blocks;   // c in tasks: how many down and across; a task is what a cluster computes, its blocks'
                            // tiles one below the other
  int sweep_rows;           // rows of tasks that share a sweep over the columns, for the L2
  int activation;           // mg_activation
} gemm_params;
