// Host halves of Kimi delta attention's parts, for its ops: sizes by the names of kda's row.
#pragma once
#include "delta/delta_host.h"
#include "delta/kda.h"

kda_gates kda_gates_of(const mg_tensor *g, const mg_tensor *beta, const mg_tensor *a_log, const mg_tensor *dt_bias,
                       float lower_bound, int beta_form, bool l2norm);
// How the pass over rows and the preparation of their chunks share the multiprocessors.
typedef struct kda_plan {
  int zeros;                  // so many marks, the first of which is `next`, are to become 0
  int *next;                  // as in kda.h, or NULL
  int *done;                  // as in delta.h; NULL: the pass begins when all is prepared
  int wave;                   // heads of all rows that are worked on at a time
  int ending;                 // multiprocessors that do not prepare: those of the pass, or more
  bool whole;                 // one kernel does both
  int *taken;                 // one is tried first: as of kda_whole_params; or NULL
  delta_pieces early;         // one is tried first, of ranges that begin early, or n is 0
} kda_plan;
// Log decays and betas as they act, of rows' steps `from` to `to` - 1.
typedef struct kda_acting { mg_tensor g; kda_gates gates; } kda_acting;
// They are what was given, unless that is raw, or a beta not float: then they are made, in `decays` and `betas`. decays
// NULL: raw gates stay raw, for kda_tiles.
mg_status kda_run_decays(mg_call *c, kda_acting *acting, const mg_tensor *g, const kda_gates *given,
                         const mg_tensor *decays, const mg_tensor *betas, const delta_rows *rows);
// What a pass with CHANNELS reads: s has the rows, the scale, ends, and the maps of m, p, k, q and w. By kda_prepare,
// or by kda_tiles where m and p are there. plan NULL: before the pass.
mg_status kda_run_prepare(mg_call *c, mg_op part, const mg_tensor *q, const mg_tensor *k, const kda_acting *acting,
                          const delta_sweep_params *s, const kda_plan *plan);
delta_fades_params kda_fades_of(const mg_call *c, const kda_gates *acting);
static inline bool kda_makes_beta(const kda_gates *given) { return given->most > 0 || !given->beta.is_float; }
// A pass reads of beta what acts.
static inline delta_gates kda_beta_of(const kda_gates *given, const mg_tensor *betas) {
  return (delta_gates){.beta = kda_makes_beta(given) ? mg_data(betas) : given->beta.data, .most = 1};
}
