// Host halves of Kimi delta attention's parts, for its ops: sizes by the names of kda's row.
#pragma once
#include "delta/delta_host.h"
#include "delta/kda.h"

kda_gates kda_gates_of(const mg_tensor *g, const mg_tensor *beta, const mg_tensor *a_log, const mg_tensor *dt_bias,
                       float lower_bound, int beta_form, bool l2norm);
// How the pass over rows and the preparation of their chunks share the multiprocessors.
typedef struct kda_plan {
  int *next;                  // as in kda.h, zero, or NULL
  int *done;                  // as in delta.h, zeros; NULL: the pass begins when all is prepared
  int wave;                   // heads of all rows that are worked on at a time
  int ending;                 // multiprocessors that do not prepare: those of the pass, or more
  bool whole;                 // one kernel does both
} kda_plan;
// What a pass with CHANNELS reads: s has the rows, the scale, ends, and the maps of m, p, k, q and w. beta as it acts
// goes to `betas`, where that is not NULL. By kda_prepare, or by kda_tiles where m and p are there. plan NULL: before
// the pass.
mg_status kda_run_prepare(mg_call *c, mg_op part, const mg_tensor *q, const mg_tensor *k, const mg_tensor *g,
                          const kda_gates *gates, const delta_sweep_params *s, float *betas, const kda_plan *plan);
// The passes cannot read what is given.
static inline bool kda_makes_beta(const mg_tensor *beta, int beta_form) { return beta_form || beta->dtype != MG_FP32; }
