// Host halves of the delta rules' parts, for their ops: sizes by the names of gated_delta_rule's row (B, T, H, HV, K,
// V, R, CHUNKS).
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
// Matrices of chunks, [B, HV, 64 chunks, 64], as a map that begins with chunk `first`.
void delta_map_matrices(mg_call *c, gmap *m, const mg_tensor *t, int64_t first);
mg_status delta_run_norms(mg_call *c, const mg_tensor *q, const mg_tensor *k, const mg_tensor *norms);
// M^T and P^T of the rows' chunks; [B, HV, 64 places, 64] each. P goes to `reads`. taken: as in delta.h
mg_status delta_run_prepare(mg_call *c, const mg_tensor *q, const mg_tensor *k, const mg_tensor *inverses,
                            const mg_tensor *reads, const delta_rows *rows, const delta_gates *gates, float scale,
                            const int *taken);

// The pass of p over the rows by the kernel that has been chosen; or, where that takes less time, or with `all`, over
// segments of dense rows, by the kernels of these ops. `cuts` and `turns` as in gated_delta_rule's row; p->v is the map
// of v.
typedef struct delta_parts { mg_op segments, cuts; } delta_parts;
mg_status delta_run_sweep(mg_call *c, delta_sweep_params *p, const delta_parts *parts, const mg_tensor *cuts,
                          const mg_tensor *turns, bool all);
// Segments of a row that it takes, and chunks of one. time: of all, in hundredths of that of a chunk of 64 columns.
typedef struct delta_pieces { int64_t n, chunks, time; } delta_pieces;
delta_pieces delta_pieces_of(const mg_call *c, const delta_rows *rows, const mg_tensor *cuts, bool all);
// Segments of dense rows that begin early (delta.h), of as many blocks as there are: `time` in nanoseconds, with
// `chunk` for one; all: as many as there may be. n is 0 where there are none.
// passes: that have as many blocks each at a time, and cuts of their own.
delta_pieces delta_early_of(const mg_call *c, const delta_rows *rows, const mg_tensor *cuts, int64_t chunk, bool all,
                            int passes);
enum { DELTA_MOST_EARLY = 8 };      // chunks
// How early they begin: of f `heads`, `columns` and the decays, and `back`. p, of which rows are read, gets what the
// kernel that passes over them wants of `early` and `cuts`, of those the parts of pass number `pass`.
mg_status delta_begin_early(mg_call *c, delta_sweep_params *p, delta_fades_params *f, const delta_pieces *cut,
                            const mg_tensor *early, const mg_tensor *cuts, int pass);
// The same of both passes of a backward over rows that are worked on at once: chunk in nanoseconds of both, moved: of a
// chunk and head on the whole device. n is 0 where it does not pay, or not with `all`, where they fit.
delta_pieces delta_early_back_of(const mg_call *c, const delta_rows *rows, const mg_tensor *cuts, int64_t chunk,
                                 int64_t moved, bool all);
delta_fades_params delta_fades_of(const mg_call *c, const delta_gates *gates);   // of decays of heads
// Behind it, whether they may stand, which is for the kernels behind to look at: `taken`.
const int *delta_end_early(mg_call *c, const delta_sweep_params *p);
