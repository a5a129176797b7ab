// Margay's public C interface. Usable without Python: link the library, hand in tensor views, check the status.
// Every function runs on the device of its tensors and on the given stream, never synchronises and never allocates
// device memory.
#pragma once
#include "margay_types.h"
#ifdef __cplusplus
extern "C" {
#endif
#define MG_API __attribute__((visibility("default")))

// ---- ops by their rows in ops.def, which say what they compute: a struct of arguments each, and a function that takes
// it. A tensor that is not named is absent, a number 0; mg_<op>_defaults has the row's defaults:
//   mg_scaled_add(&(mg_scaled_add_args){.out = &out, .a = &a, .b = &b, .scale = 0.5f, .stream = stream})
#define TENSOR(name, role, dtype, ...) const mg_tensor *name;
#define NUM(type, name, value) type name;
#define OP(op, ...) \
  typedef struct mg_##op##_args { __VA_ARGS__ mg_stream stream; } mg_##op##_args; \
  extern MG_API const mg_##op##_args mg_##op##_defaults; \
  MG_API mg_status mg_##op(const mg_##op##_args *);
#include "ops.def"
// Bytes of workspace that an op wants for tensors of these sizes. Those that the sizes do not follow from may be
// absent, and what is written.
#define SPACE(op) MG_API mg_status mg_##op##_workspace(size_t *bytes, const mg_##op##_args *);
#define OP(op, ...) __VA_ARGS__
#include "ops.def"
// The names of sizes that rows use.
#define MG_SIZES(X) X(B) X(T) X(H) X(G) X(P) X(M) X(N) X(K) X(V) X(V8) X(CHUNKS) \
  X(BQ) X(HK) X(NQ) X(NK) X(STARTS) X(SLOPES) X(CACHES) X(ROWS) \
  X(TABLE) X(PAGES) X(KEYS) X(NEW) X(BYTES) \
  X(C) X(PAST) X(SEQS) X(LENGTH) X(W) X(W1) X(STATES) X(ENDS) X(PARTS) X(SLOTS) \
  X(R) X(CUTS) X(BOUNDS) X(VALUES) X(SOME) X(TURNS) X(N8) X(N2) X(FIT) X(SEG) X(LATER) X(STEPS) X(TRIPLE) X(TILES) X(HEADS) X(WIDE) X(MADE) X(SPLIT) \
  X(F) X(F2) X(V1) X(MORE) X(NORMS) \
  X(HG) X(HH) X(SWEEP) X(ROOM) X(LONG) X(BOTH) X(MANY) X(FEW) X(GATED) X(DOTS) \
  X(HV) X(S1) X(S2) X(FORM) X(PLACES) X(KEEP) X(ONE_TOKEN) \
  X(TABLES) X(ANGLES) \
  X(L) X(LK) X(RK) X(UNITS) X(WORDS) X(GIVEN) X(OWN) X(KEPT)

// Text of this thread's last failure: op, argument, what was found, what is accepted. Valid until the thread's next
// call.
MG_API const char *mg_last_error(void);
// Threads the CPU backend uses; 0 returns to the default (OMP_NUM_THREADS where it is 1 to 1024, else the cores of the
// process).
MG_API void mg_set_num_threads(int n);
MG_API int mg_num_threads(void);
// Load the kernels of `op` ("attention_fwd", ...; NULL: all) onto a device now instead of at the first call.
MG_API mg_status mg_preload(const char *op, int device_index);

#ifdef __cplusplus
}
#endif
