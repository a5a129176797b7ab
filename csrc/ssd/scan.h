// Host halves of the scan, for the ops that are made of it: the tensors by ssd's names, and c's sizes as in its rows.
// What f says is read in place of the arguments dt, a, dt_bias and limits.
#pragma once
#include "runtime/runtime.h"
#include "ssd/ssd.h"

// scale: of y. order: of the states. op: whose rows compute it; without `cuts` among the tensors no row is cut.
typedef struct ssd_form { ssd_dt dt; float scale; ssd_order order; mg_op op; } ssd_form;
mg_status ssd_scan(mg_call *c, const mg_ssd_args *a, const ssd_form *f);
mg_status ssd_scan_bwd(mg_call *c, const mg_ssd_bwd_args *a, const ssd_form *f);
// Of cu_seqlens, where the CPU has them; also for other ops of packed sequences.
mg_status ssd_check_starts(mg_op op, const mg_tensor *starts, int64_t steps);
