// The runtime's own interface: what the host half of an op (kernels/attention.c, kernels/gemm.c) stands on.
// Called by it in this order: check.c, launch.c (the context), dispatch.c, tensormap.c, launch.c or cpu.c.
#pragma once
#include <stdarg.h>
#include "margay.h"
#include "tile/gmap.h"
#include "tile/kernel_desc.h"

// ---- error.c: message of this thread; returns `status` so that a check is one line
__attribute__((format(printf, 2, 3))) mg_status mg_fail(mg_status status, const char *format, ...);
const char *mg_dtype_name(mg_dtype t);
size_t mg_dtype_size(mg_dtype t);
// a b of sizes, which are not negative; INT64_MAX where it is more.
static inline int64_t mg_times(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

// ---- check.c: rows of ops.def
typedef enum mg_op {
#define OP(name, ...) MG_OP_##name,
#include "ops.def"
#undef OP
  MG_OP_COUNT
} mg_op;
// Ranks, dtypes, devices, strides, overlap and read-only outputs of `args` as the op's row in ops.def says; args in the row's order,
// NULL for an absent optional one. What several arguments have to agree on beyond that is the op's own check.
mg_status mg_check(mg_op op, const mg_tensor *const *args);
// Only the sizes of one argument: 0 to 2^31 - 1 in each dimension.
mg_status mg_check_sizes(const char *op, const char *name, const mg_tensor *t);
// The starts of packed sequences, `name`_{q,k}, an int32 vector that mg_check has passed: they begin with 0, do not fall and end with at most `total`,
// and no sequence has more than max_seqlen rows. Reads the CPU's tensors; what a GPU holds is not looked at.
mg_status mg_check_starts(const char *op, char which, const mg_tensor *starts, int64_t total, int64_t max_seqlen);

mg_status mg_check_softcap(const char *op, float softcap);
// As kernels take it: with a reciprocal in fp32, and room for log2 e. Scores below 2^-126 are 0 to a softmax, and none is above 2^125.
static inline float mg_softcap(float x) { return x == 0 ? 0 : x < 0x1p-126f ? 0x1p-126f : x > 0x1p125f ? 0x1p125f : x; }

const char *mg_op_name(mg_op op);                                     // as in messages: "attention", "attention_backward"
const char *mg_op_row(mg_op op);                                      // as in ops.def
mg_status mg_op_find(mg_op *op, const char *name);                    // the name of a row of ops.def

// ---- dispatch.c: rows of kernels.def
typedef struct mg_problem {   // what the `when` column of kernels.def may ask; unused fields are 0
  mg_dtype dtype;
  bool gpu, causal, deterministic, trans_a, trans_b;
  int64_t d;                  // attention: larger of the head dims of q and v
  int64_t dv;                 // attention: of v
  int64_t batch, heads_q, heads_k, nq, nk;
  int64_t m, n, k;
  int64_t span;               // attention: keys that a row sees at most
  int64_t page;               // attention_decode: keys of a page of the cache, 0 where it is not paged
  int splits;                 // attention_decode: parts that the caller wants the keys cut into, 0 to choose
  int features;               // attention: 0 none, 1 windows, 2 packed sequences or sinks, 3 others, 4 these with an unusual softcap (attention_problem.c)
  int sms;                    // multiprocessors of the device
} mg_problem;

typedef enum mg_isa { MG_ISA_BASE, MG_ISA_AVX2, MG_ISA_AVX512, MG_ISA_COUNT } mg_isa;   // AVX512: F, BW, VL, DQ and BF16
typedef enum mg_where { MG_ANY, MG_CPU_ONLY, MG_GPU_ONLY } mg_where;
typedef struct mg_kernel {
  const char *name, *source, *when_text, *constants;
  mg_op op;
  mg_dtype dtype;
  mg_where where;
  bool (*when)(const mg_problem *);
  const mg_kernel_desc *desc[MG_ISA_COUNT];         // NULL where an instruction set was not built; BASE always exists
  const unsigned char *image, *image_end;           // the GPU's fatbin; both NULL in a CPU-only build
} mg_kernel;
extern const mg_kernel mg_kernels[];
extern const int mg_kernel_count;
extern const bool mg_has_images;                    // was the library built with GPU kernels?

static inline bool mg_is_empty(const mg_tensor *t) {
  for (int i = 0; i < t->dims; i++)
    if (t->shape[i] == 0) return true;
  return false;
}

// ---- a call's device side
typedef struct mg_context {
  mg_device device;
  int device_index;
  mg_stream stream;
  int sms;                    // multiprocessors; threads on the CPU
  int64_t l2_bytes;
  size_t shared_bytes;        // dynamic shared memory a block may have
  bool persistent;            // a grid is the blocks that are resident together; else, on the CPU, a block per task
} mg_context;
// Fill `c` for the device of `t`. Fails with the reason why a GPU cannot be used.
mg_status mg_context_open(mg_context *c, const mg_tensor *t, mg_stream stream);
// First row of `op` that takes the problem on this device; MG_UNSUPPORTED with the reason of every row for its dtype and device when none does.
mg_status mg_select(const mg_kernel **row, mg_op op, const mg_problem *p, const mg_context *c);
// This thread's calls end, with MG_UNSUPPORTED, where they would choose a row; what the first of them asks is kept in `run`. NULL ends that.
typedef struct mg_dry_run { bool asked; mg_op op; mg_problem problem; mg_context context; } mg_dry_run;
void mg_run_dry(mg_dry_run *run);
// For experiments and tests: this thread's calls take the row `name` wherever its condition holds, before the others; NULL ends that.
mg_status mg_prefer(const char *name);
const mg_kernel_desc *mg_desc(const mg_kernel *row);                  // of the running CPU's best instruction set

// ---- tensormap.c
// Map a view of 4 dimensions [batch, head, row, column] (strides in elements, column stride 1) with a box of box_rows x box_cols elements.
// On the GPU: base and strides must be multiples of 16 bytes, a box at most 256 x 256, rows of 16-bit and 8-bit elements, which are swizzled, at
// most 128 bytes, or 64, which have a swizzle of their own; fp32 tiles lie row after row. A failed rule is named.
mg_status mg_map(gmap *m, const mg_context *c, const char *name, void *data, mg_dtype dtype, const int64_t shape[4],
                 const int64_t stride[4], int box_rows, int box_cols);
// The same for a tensor that is read once, from end to end: the L2 fetches no more than was asked for, which is faster then by a tenth.
mg_status mg_map_once(gmap *m, const mg_context *c, const char *name, void *data, mg_dtype dtype, const int64_t shape[4],
                      const int64_t stride[4], int box_rows, int box_cols);

// ---- launch.c, cpu.c
mg_isa mg_host_isa(void);                           // the running CPU's best, at most the environment's MARGAY_ISA
const char *mg_isa_name(mg_isa isa);
mg_status mg_check_isa(void);                       // fails where MARGAY_ISA is set to none of the names
// blocks is a multiple of the row's cluster. CPU: runs to the end. GPU: enqueued on the context's stream.
mg_status mg_launch(const mg_context *c, const mg_kernel *row, const void *params, int64_t blocks);
// For tools: this thread's launches go to `take`, as if there were `sms` multiprocessors, and are run as usual only where it returns false.
// mg_prefer()'s row is then taken whatever its place and condition. NULL ends that.
typedef bool (*mg_launch_taker)(const char *row, const void *params, int64_t blocks);
void mg_intercept(mg_launch_taker take, int sms);
bool mg_intercepted(void);
// Fill n 16- or 32-bit words; GPU: asynchronously on the stream.
mg_status mg_fill(const mg_context *c, void *data, uint32_t word, size_t word_bytes, int64_t n);

// ---- text for explain(); written to buf, always terminated; returns the length that was needed
// c NULL: on the kind of device the problem says, as if it were there (an H100 for the GPU). *row: what takes the problem, or NULL.
size_t mg_explain(const mg_kernel **row, mg_op op, const mg_problem *p, const mg_context *c, char *buf, size_t n);
// attention_decode.c: into how many splits attention_decode cuts the keys and why, and the kernel that adds them up.
size_t mg_explain_splits(const mg_problem *p, const mg_context *c, char *buf, size_t n);
