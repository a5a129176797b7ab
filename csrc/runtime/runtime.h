// The runtime's own interface: what the host half of an op (attention/attention.c, gemm/gemm.c) stands on.
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
#define MG_LOG2E 1.4426950408889634
static inline int64_t mg_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t mg_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t mg_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline size_t mg_round_up(size_t bytes) { return (bytes + 255) & ~(size_t)255; }
static inline void *mg_data(const mg_tensor *t) { return t ? t->data : NULL; }
// a b of sizes, which are not negative; INT64_MAX where it is more.
static inline int64_t mg_times(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

// ---- check.c: rows of ops.def
typedef enum mg_op {
#define OP(name, ...) MG_OP_##name,
#define PART(name, op) MG_OP_##name,
#include "ops.def"
  MG_OP_COUNT
} mg_op;

typedef struct mg_sizes {           // by name: sizes.T; -1 where no argument has one
#define SIZE(name) int64_t name;
  MG_SIZES(SIZE)
#undef SIZE
} mg_sizes;
enum { MG_SIZE_COUNT = sizeof(mg_sizes) / sizeof(int64_t), MG_MAX_ARGS = 44 };

// A row as data.
typedef enum mg_role {
  ROLE_END, ROLE_OUT, ROLE_OPTOUT, ROLE_SAVE, ROLE_WORK, ROLE_OPTWORK, ROLE_SPACE,
  ROLE_INOUT, ROLE_INOUTMAT, ROLE_OPTINOUTMAT, ROLE_IN, ROLE_OPT, ROLE_MAT, ROLE_NUM, ROLE_LET, ROLE_NEEDS,
  ROLE_TAKES, ROLE_DRAW, ROLE_SHOWN, ROLE_ANYWHERE
} mg_role;
typedef enum mg_kind {
  KIND_HALF, KIND_REAL, KIND_REAL_ROWS, KIND_F32, KIND_I32, KIND_U8, KIND_BF16, KIND_E4M3, KIND_float,
  KIND_int, KIND_bool, KIND_int64_t, KIND_uint64_t
} mg_kind;
typedef struct mg_field {
  const char *name;                 // LET, NEEDS, TAKES: the expression
  const char *text;                 // NEEDS, TAKES: what is accepted, in words, or NULL; SHOWN: the name in messages
  mg_role role;
  mg_kind kind;
  int dims;
  size_t offset;                    // in the op's struct of arguments
  unsigned char size[MG_MAX_DIMS];  // which one each dimension is, as a place in mg_sizes. LET: the one that it
                                    // computes
  double low, high;                 // NUM: its default, twice; DRAW: the range
} mg_field;
typedef struct mg_need { const char *expression, *text; mg_status status; } mg_need;
typedef struct mg_row {
  const char *name;
  const char *owner;                // the op that a caller calls; of a PART, not itself
  const char *const *called;        // its name in messages
  const mg_field *field;            // in order, and one of ROLE_END. Of a PART: only that
  int arguments;                    // tensors and numbers, which come first
  const void *defaults;             // the op's struct of arguments where no argument is given
  size_t stream, bytes;             // offset of the stream in the struct of arguments, and its size
  const mg_need *(*derive)(const void *args, mg_sizes *n);   // computes LETs; the first of NEEDS and TAKES that does
                                                             // not hold, or NULL
} mg_row;
const mg_row *mg_row_of(mg_op op);
const char *mg_shown(const mg_row *row, const mg_field *f);   // the name in messages
extern const char *const mg_size_names[];

static inline const mg_tensor *mg_arg(const void *args, const mg_field *f) {
  return *(const mg_tensor *const *)((const char *)args + f->offset);
}
static inline bool mg_is_tensor(const mg_field *f) { return f->role >= ROLE_OUT && f->role <= ROLE_MAT; }
static inline bool mg_is_written(const mg_field *f) { return f->role >= ROLE_OUT && f->role <= ROLE_OPTINOUTMAT; }
static inline bool mg_is_read(const mg_field *f) { return f->role >= ROLE_INOUT && f->role <= ROLE_MAT; }
static inline bool mg_may_miss(const mg_field *f) {
  return f->role == ROLE_OPTOUT || f->role == ROLE_OPTWORK || f->role == ROLE_SPACE || f->role == ROLE_OPT ||
      f->role == ROLE_OPTINOUTMAT;
}

// Ranks, dtypes, devices, sizes, strides, overlap, read-only outputs and NEEDS of `args`, the op's struct, as its row
// in ops.def says. only_space: what mg_<op>_workspace may ask, of the tensors that are given and read: ranks, devices,
// dtypes, sizes and NEEDS.
mg_status mg_check(mg_op op, const void *args, mg_sizes *n, bool only_space);

// as in messages: "attention", "attention_backward"
const char *mg_op_name(mg_op op);
const char *mg_op_row(mg_op op);                                      // as in ops.def
mg_status mg_op_find(mg_op *op, const char *name);                    // the name of a row of ops.def

// ---- dispatch.c: rows of kernels.def
typedef struct mg_problem {   // what the `when` column of kernels.def may ask; unused fields are 0
  mg_dtype dtype;
  bool gpu, causal, deterministic, trans_a, trans_b;
  int64_t d;                  // attention: larger of the head dims of q and v
  int64_t dv;                 // attention: of v
  int64_t batch, heads_q, heads_k, nq, nk;
  int64_t span;               // attention: keys that a row sees at most
  int64_t page;               // attention_decode: keys of a page of the cache, 0 where it is not paged
  int splits;                 // attention_decode: parts that the caller wants the keys cut into, 0 to choose
  int features;               // attention: FEATURES_* of attention/attention.h, the least set that the problem needs
  int sms;                    // multiprocessors of the device
  mg_sizes size;              // of rows that name theirs: conditions see them by name
  const struct mg_kernel *main;   // for rows BESIDE another op: the kernel chosen for that; NULL: dispatch chooses it
} mg_problem;

// AVX512: F, BW, VL, DQ and BF16
typedef enum mg_isa { MG_ISA_BASE, MG_ISA_AVX2, MG_ISA_AVX512, MG_ISA_COUNT } mg_isa;
typedef enum mg_where { MG_ANY, MG_CPU_ONLY, MG_GPU_ONLY } mg_where;
typedef struct mg_constants { int D, DV, FEATURES, LINES; } mg_constants;
typedef struct mg_kernel {
  const char *name, *source, *when_text, *constants;
  mg_op op;
  mg_dtype dtype;
  mg_where where;
  bool (*when)(const struct mg_kernel *row, const mg_problem *);
  mg_constants (*constant)(void);                   // the row's constants that hosts read; 0: not among them
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
  struct mg_gpu *gpu;         // NULL on the CPU
  mg_device device;
  int device_index;
  mg_stream stream;
  int sms;                    // multiprocessors; threads on the CPU
  int64_t l2_bytes;
  size_t shared_bytes;        // dynamic shared memory a block may have
  bool beside;                // what is launched may begin with the kernel in front of it, where that is FOLLOWED
  bool persistent;            // a grid is the blocks that are resident together; else, on the CPU, a block per task
} mg_context;
// Fill `c` for the device of `t`. Fails with the reason why a GPU cannot be used.
mg_status mg_context_open(mg_context *c, const mg_tensor *t, mg_stream stream);
// First row of `op` that takes the problem on this device; MG_UNSUPPORTED with the reason of every row for its dtype
// and device when none does.
mg_status mg_select(const mg_kernel **row, mg_op op, const mg_problem *p, const mg_context *c);
// This thread's calls end, with MG_UNSUPPORTED, where they would choose a row; what the first of them asks is kept in
// `run`. NULL ends that.
typedef struct mg_dry_run { bool asked; mg_op op; mg_problem problem; mg_context context; } mg_dry_run;
void mg_run_dry(mg_dry_run *run);
bool mg_runs_dry(void);
// For experiments and tests: this thread's calls take the row `name` wherever its condition holds, before the others;
// NULL ends that.
mg_status mg_prefer(const char *name);
const mg_kernel_desc *mg_desc(const mg_kernel *row);                  // of the running CPU's best instruction set

// ---- tensormap.c
// Map a view of 4 dimensions [batch, head, row, column] (strides in elements, column stride 1) with a box of box_rows x
// box_cols elements. On the GPU: base and strides must be multiples of 16 bytes, a box at most 256 x 256, rows of
// 16-bit and 8-bit elements, which are swizzled, at most 128 bytes, or 64, which have a swizzle of their own; fp32
// tiles lie row after row. A failed rule is named.
mg_status mg_map(gmap *m, const mg_context *c, const char *name, void *data, mg_dtype dtype, const int64_t shape[4],
                 const int64_t stride[4], int box_rows, int box_cols);
// The same for a tensor that is read once, from end to end: the L2 fetches no more than was asked for, which is faster
// then by a tenth.
mg_status mg_map_once(gmap *m, const mg_context *c, const char *name, void *data, mg_dtype dtype,
                      const int64_t shape[4], const int64_t stride[4], int box_rows, int box_cols);

// ---- launch.c, cpu.c
mg_isa mg_host_isa(void);                           // the running CPU's best, at most the environment's MARGAY_ISA
const char *mg_isa_name(mg_isa isa);
mg_status mg_check_isa(void);                       // fails where MARGAY_ISA is set to none of the names
// blocks is a multiple of the row's cluster. CPU: runs to the end. GPU: enqueued on the context's stream.
mg_status mg_launch(const mg_context *c, const mg_kernel *row, const void *params, int64_t blocks);
// For tools: this thread's launches go to `take`, as if there were `sms` multiprocessors, and are run as usual only
// where it returns false. mg_prefer()'s row is then taken whatever its place and condition. NULL ends that.
typedef bool (*mg_launch_taker)(const char *row, const void *params, int64_t blocks);
void mg_intercept(mg_launch_taker take, int sms);
bool mg_intercepted(void);
// Fill n 16- or 32-bit words; GPU: asynchronously on the stream.
mg_status mg_fill(const mg_context *c, void *data, uint32_t word, size_t word_bytes, int64_t n);

// ---- call.c: a call of an op, as its host half sees it. A failure sticks: what follows it does nothing, and mg_run
// returns it
typedef struct mg_call {
  mg_status status;
  mg_op op;
  const void *args;
  mg_sizes n;                 // c.n.T
  mg_context context;
  mg_problem problem;
  const mg_kernel *kernel;
  const mg_kernel_desc *desc;
} mg_call;
// Checks, sizes, device, problem. False where nothing is left to do: a failure, or no result has an element. Then
// mg_choose, behind what the host half adds to c->problem for the conditions of kernels.def. mg_open is both.
bool mg_begin(mg_call *c, mg_op op, const void *args);
// The same for mg_<op>_workspace, which knows sizes alone. False: a failure.
bool mg_begin_space(mg_call *c, mg_op op, const void *args);
bool mg_choose(mg_call *c);
static inline bool mg_open(mg_call *c, mg_op op, const void *args) { return mg_begin(c, op, args) && mg_choose(c); }
// The same for another kernel of the call, of a PART or of the op itself; and for one that has been chosen before.
bool mg_choose_other(mg_call *c, mg_op op);
void mg_use(mg_call *c, const mg_kernel *kernel);
// Fails, with the op's name before what is said.
__attribute__((format(printf, 3, 4))) mg_status mg_refuse(mg_call *c, mg_status status, const char *format, ...);
// The first of `bytes` bytes of workspace; NULL and a failure where there are fewer, or not at a multiple of 16.
void *mg_space(mg_call *c, const mg_tensor *workspace, size_t bytes);
void mg_set(mg_call *c, void *data, uint32_t word, size_t word_bytes, int64_t n);   // mg_fill
// t as a map: its last two dimensions are rows and columns, one before them is the batch, two are batch and head. once:
// see mg_map_once.
void mg_map_rows(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols);
void mg_map_rows_once(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols);
void mg_map_turned(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols);   // a matrix, transposed
void mg_map_bthd(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols);     // [batch, row, head, column]
void mg_map_bthd_once(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols);
// dense; [batch ..., head, row, column]
void mg_map_stack(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols);
int mg_tasks(mg_call *c, int64_t tasks, const char *what);   // as an int; more than 2^30 are refused
// Blocks of a grid for `tasks` clusters: where a grid is resident, no more than there is room for at a time.
int64_t mg_resident(const mg_call *c, int64_t tasks);
mg_status mg_run(mg_call *c, const void *params, int64_t blocks);
// The same of a kernel that needs nothing of the FOLLOWED one in front of it, beside which it may run. It calls
// grid_wait() last, so that what is behind it is behind both.
mg_status mg_run_beside(mg_call *c, const void *params, int64_t blocks);
static inline mg_status mg_run_resident(mg_call *c, const void *params, int64_t tasks) {
  return mg_run(c, params, mg_resident(c, tasks));
}

// ---- text for explain(); written to buf, always terminated; returns the length that was needed
// c NULL: on the kind of device the problem says, as if it were there (an H100 for the GPU). *row: what takes the
// problem, or NULL.
size_t mg_explain(const mg_kernel **row, mg_op op, const mg_problem *p, const mg_context *c, char *buf, size_t n);
// attention/attention_decode.c: into how many splits attention_decode cuts the keys and why, and the kernel that adds
// them up.
size_t mg_explain_splits(const mg_problem *p, const mg_context *c, char *buf, size_t n);
