// Rows of kernels.def as a table, the choice among them, and its explanation. kernel_rows.def is what setup.py makes of
// them: a row each for every choice from their sets.
// MARGAY_CUDA: the build has embedded the rows' GPU images. MARGAY_X86: it has compiled the rows for AVX2 and AVX-512
// too.
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include "runtime/driver.h"

#define HIDDEN __attribute__((visibility("hidden")))

// What the rows refer to.
#define KERNEL(name, ...) \
  extern HIDDEN const mg_kernel_desc name##_base, name##_avx2, name##_avx512; \
  extern HIDDEN const unsigned char name##_image[], name##_image_end[];
#include "kernel_rows.def"
#undef KERNEL

// Is the row one of those beside the call's kernel of op `main`? See csrc/kernels.def.
static inline bool stands_beside(const mg_kernel *row, mg_op main, const mg_problem *p);
#define BESIDE(op) stands_beside(row, MG_OP_##op, problem)

// Conditions see the fields of the problem and its sizes as plain names.
#define FIELDS(X) \
  X(bool, gpu) X(bool, causal) X(bool, deterministic) X(bool, trans_a) X(bool, trans_b) X(int64_t, d) X(int64_t, dv) \
  X(int64_t, batch) X(int64_t, heads_q) X(int64_t, heads_k) X(int64_t, nq) X(int64_t, nk) X(int64_t, span) \
  X(int, features) X(int64_t, sms)
#define UNPACK(type, field) \
  const type field = problem->field; \
  (void)field;
#define KERNEL(name, op, source, dtype, where, condition, ...) \
  static bool name##_when(const mg_kernel *row, const mg_problem *problem) { \
    (void)row; \
    FIELDS(UNPACK) MG_SIZES(UNPACK_SIZE) \
    return condition; \
  }
#define UNPACK_SIZE(name) \
  const int64_t name = problem->size.name; \
  (void)name;
#include "kernel_rows.def"
#undef KERNEL
#undef UNPACK
#undef UNPACK_SIZE

// What rows do not have among their constants is 0: theirs hide these.
enum { D = 0, DV = 0, FEATURES = 0, LINES = 0 };
#define KERNEL(name, op, source, dtype, where, condition, ...) \
  static mg_constants name##_constant(void) { enum { __VA_ARGS__ }; return (mg_constants){D, DV, FEATURES, LINES}; }
#include "kernel_rows.def"
#undef KERNEL

#ifdef MARGAY_CUDA
#define IMAGE_ANY(name) name##_image, name##_image_end
const bool mg_has_images = true;
#else
#define IMAGE_ANY(name) NULL, NULL
const bool mg_has_images = false;
#endif
#define IMAGE_GPU_ONLY(name) IMAGE_ANY(name)
#define IMAGE_CPU_ONLY(name) NULL, NULL

#ifdef MARGAY_X86
#define DESC_ANY(name) {&name##_base, &name##_avx2, &name##_avx512}
#else
#define DESC_ANY(name) {&name##_base, NULL, NULL}
#endif
#define DESC_CPU_ONLY(name) DESC_ANY(name)
#define DESC_GPU_ONLY(name) {&name##_base, NULL, NULL}

#define DTYPE_bf16 MG_BF16
#define DTYPE_fp16 MG_FP16
#define DTYPE_e4m3 MG_E4M3
#define DTYPE_fp32 MG_FP32
#define DTYPE_float MG_FP32

const mg_kernel mg_kernels[] = {
#define KERNEL(name, op, source, dtype, where, condition, ...) \
  {#name, #source, #condition, #__VA_ARGS__, MG_OP_##op, DTYPE_##dtype, MG_##where, name##_when, name##_constant, \
   DESC_##where(name), IMAGE_##where(name)},
#include "kernel_rows.def"
#undef KERNEL
};
const int mg_kernel_count = sizeof mg_kernels / sizeof *mg_kernels;

const mg_kernel_desc *mg_desc(const mg_kernel *row) {
  int isa = mg_host_isa();
  while (!row->desc[isa] && isa > MG_ISA_BASE) isa--;
  return row->desc[isa];
}

// Text that grows in a buffer of fixed size; `length` is what the whole would need. append() to none, NULL, does
// nothing.
typedef struct text { char *chars; size_t size, length; } text;

__attribute__((format(printf, 2, 3))) static void append(text *t, const char *format, ...) {
  if (!t) return;
  va_list args;
  va_start(args, format);
  size_t at = t->length < t->size ? t->length : t->size;
  int n = vsnprintf(t->size ? t->chars + at : NULL, t->size - at, format, args);
  va_end(args);
  t->length += n > 0 ? (size_t)n : 0;
}

// Does the row take the problem? If not and `why` is given, says why.
static bool takes(const mg_kernel *row, const mg_problem *p, const mg_context *c, text *why) {
  const size_t shared = c && p->gpu ? c->shared_bytes : SIZE_MAX;
  if (row->dtype != p->dtype) append(why, "computes in %s", mg_dtype_name(row->dtype));
  else if (p->gpu && row->where == MG_CPU_ONLY) append(why, "runs on the CPU only");
  else if (!p->gpu && row->where == MG_GPU_ONLY) append(why, "runs on the GPU only");
  else if (!row->when(row, p)) append(why, "needs %s", row->when_text);
  else if (p->gpu && c && !row->image) append(why, "was built without its GPU image");
  else if (row->desc[MG_ISA_BASE]->shared_bytes > shared)
    append(why, "needs %u bytes of shared memory, a block has %zu", row->desc[MG_ISA_BASE]->shared_bytes, shared);
  else return true;
  return false;
}

static _Thread_local const mg_kernel *preferred;

mg_status mg_prefer(const char *name) {
  preferred = NULL;
  for (int i = 0; name && !preferred && i < mg_kernel_count; i++)
    if (!strcmp(mg_kernels[i].name, name)) preferred = &mg_kernels[i];
  return name && !preferred ? mg_fail(MG_VALUE, "there is no kernel %s, kernels() lists them", name) : MG_OK;
}

static const mg_kernel *first_taker(mg_op op, const mg_problem *p, const mg_context *c) {
  if (preferred && preferred->op == op && (mg_intercepted() || takes(preferred, p, c, NULL))) return preferred;
  for (int i = 0; i < mg_kernel_count; i++)
    if (mg_kernels[i].op == op && takes(&mg_kernels[i], p, c, NULL)) return &mg_kernels[i];
  return NULL;
}

static inline bool stands_beside(const mg_kernel *row, mg_op op, const mg_problem *p) {
  const mg_kernel *main = p->main ? p->main : first_taker(op, p, NULL);
  if (!main) return false;
  const mg_constants mine = row->constant(), theirs = main->constant();
  return (!mine.D || mine.D == theirs.D) && (!mine.DV || mine.DV == (theirs.DV ? theirs.DV : theirs.D));
}

static bool has_size(mg_op op, int size) {
  const mg_row *row = mg_row_of(op);
  for (const mg_field *f = row->field; f->role; f++)
    for (int i = 0; i < f->dims; i++)
      if (f->size[i] == size) return true;
  return false;
}

static void append_problem(text *t, mg_op op, const mg_problem *p) {
  const int64_t *sizes = (const int64_t *)&p->size;
  append(t, "%s", mg_dtype_name(p->dtype));
#define FIELD(type, field) \
  if (p->field && strcmp(#field, "gpu") && strcmp(#field, "sms") && (strcmp(#field, "dv") || p->dv != p->d)) \
    append(t, ", %s=%lld", #field, (long long)p->field);
  FIELDS(FIELD)
#undef FIELD
  // Attention's: its rows' sizes are some of the fields
  const bool in_fields = has_size(op, offsetof(mg_sizes, NQ) / sizeof *sizes);
  for (int i = 0; i < MG_SIZE_COUNT && !in_fields; i++)
    if (has_size(op, i) && sizes[i] > 0) append(t, ", %s=%lld", mg_size_names[i], (long long)sizes[i]);
  append(t, p->gpu ? ", on the GPU" : ", on the CPU");
}

// The rows before `end` that compute in the problem's dtype on its kind of device, and why each does not take it.
static void append_reasons(text *t, mg_op op, const mg_problem *p, const mg_context *c, const mg_kernel *end) {
  int elsewhere = 0;
  for (const mg_kernel *row = mg_kernels; row < mg_kernels + mg_kernel_count && row != end; row++) {
    if (row->op != op) continue;
    if (row->dtype != p->dtype || row->where == (p->gpu ? MG_CPU_ONLY : MG_GPU_ONLY)) {
      elsewhere++;
      continue;
    }
    append(t, "\n  %s ", row->name);
    takes(row, p, c, t);
  }
  if (elsewhere) append(t, "\n  %d more for other dtypes or devices", elsewhere);
}

static _Thread_local mg_dry_run *dry_run;

void mg_run_dry(mg_dry_run *run) { dry_run = run; }
bool mg_runs_dry(void) { return dry_run != NULL; }

mg_status mg_select(const mg_kernel **row, mg_op op, const mg_problem *p, const mg_context *c) {
  if (dry_run) {
    if (!dry_run->asked) *dry_run = (mg_dry_run){true, op, *p, *c};
    return mg_fail(MG_UNSUPPORTED, "%s: a dry run ends here", mg_op_name(op));
  }
  if ((*row = first_taker(op, p, c))) return MG_OK;
  char chars[6144] = "";
  text t = {chars, sizeof chars, 0};
  append_problem(&t, op, p);
  append_reasons(&t, op, p, c, NULL);
  return mg_fail(
      MG_UNSUPPORTED, "%s: no kernel for %s%s", mg_op_name(op), chars,
      p->gpu && !mg_has_images ? "\n  (this build has no GPU kernels: nvcc was not found, or MARGAY_CUDA=0)" : "");
}

size_t mg_explain(const mg_kernel **taken, mg_op op, const mg_problem *p, const mg_context *c, char *buf, size_t n) {
  text t = {buf, n, 0};
  if (n) *buf = 0;
  const mg_kernel *row = *taken = first_taker(op, p, c);
  append(&t, "%s for ", mg_op_name(op));
  append_problem(&t, op, p);
  append(&t, ": %s", row ? row->name : "no kernel");
  append_reasons(&t, op, p, c, row);
  if (!row) return t.length;
  const mg_kernel_desc *d = mg_desc(row);
  append(&t, "\n  %s takes it (condition: %s)\n    %s.cu, %s, tiles of %d x %d", row->name, row->when_text, row->source,
         row->constants, d->tile_m, d->tile_n);
  if (p->gpu)
    append(&t, ", %u threads and %u bytes of shared memory a block, clusters of %u", d->threads, d->shared_bytes,
           d->cluster);
  else append(&t, ", %s instructions", mg_isa_name(mg_host_isa()));
  return t.length;
}
