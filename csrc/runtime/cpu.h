// The CPU backend's threads.
#pragma once
#include "runtime/runtime.h"
// Run every cluster of a grid of `blocks` on the pool and the caller; returns when all are done. Any number of threads may call at a time.
void mg_cpu_run(const mg_kernel_desc *desc, const void *params, int blocks);
