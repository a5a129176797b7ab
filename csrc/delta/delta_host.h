// Host halves of the delta rules' parts, for their ops: sizes by the names of gated_delta_rule's row (B, T, H, HV, K, V, R,
// CHUNKS).
#pragma once
#include "runtime/runtime.h"
#include "ssd/scan.h"
#include "delta/delta.h"

// Rows of the call, whole. starts: cu_seqlens or NULL.
delta_rows delta_rows_of(const mg_call *c, const mg_tensor *starts);
// beta_form as in the op's row. norms: [2, B, H, T] or NULL.
delta_gates delta_gates_of(const mg_call *c, const mg_tensor *g, const mg_tensor *beta, const mg_tensor *a_log,
                           const mg_tensor *dt_bias, const mg_tensor *norms, int beta_form);
// Order of states [K, V], or [V, K].
ssd_order delta_order_of(const mg_call *c, bool v_first);
float delta_scale_of(const mg_call *c, float scale);
mg_status delta_run_norms(mg_call *c, const mg_tensor *q, const mg_tensor *k, const mg_tensor *norms);
// M^T and P^T of the rows' chunks; [B, HV, 64 places, 64] each. P goes to `reads`.
mg_status delta_run_prepare(mg_call *c, const mg_tensor *q, const mg_tensor *k, const mg_tensor *inverses,
                            const mg_tensor *reads, const delta_rows *rows, const delta_gates *gates, float scale);
