// The CPU backend's threads.
#pragma once
#include "runtime/runtime.h"
// Run every cluster of a grid of `blocks` on the pool and the caller; returns when all are done. Any number of threads
// may call at a time. MG_MEMORY where the threads that take part have not the memory that a cluster needs.
mg_status mg_cpu_run(const mg_kernel *row, const void *params, int blocks);
