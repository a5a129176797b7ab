// Rows of ops.def as data and as checks: every bad input that can be seen in one argument, or in the memory of two, ends here with its message.
// Only mg_check_starts reads the tensors' data.
#include <float.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include "runtime/runtime.h"

// ---- rows as data

const char *const mg_size_names[] = {
#define SIZE(name) #name,
  MG_SIZES(SIZE)
#undef SIZE
};

// LET and NEEDS as functions that see sizes and numbers by name.
#define SEEN(name) const int64_t name = n->name; (void)name;
#define LET(size, ...) { MG_SIZES(SEEN) n->size = __VA_ARGS__; }
#define OP(op, ...) static void op##_let(mg_sizes *n) { (void)n; __VA_ARGS__ }
#include "ops.def"

#define NUM(type, name, value) const type name = a->name; (void)name;
#define NEEDS(...) if (!(__VA_ARGS__)) return #__VA_ARGS__;
#define OP(op, ...) \
  static const char *op##_broken(const void *args, const mg_sizes *n) { \
    const mg_##op##_args *a = args; \
    MG_SIZES(SEEN) (void)a; \
    __VA_ARGS__ return NULL; \
  }
#include "ops.def"
#undef SEEN

enum {
#define TENSOR(...) + 1
#define NUM(...) + 1
#define OP(op, ...) op##_arguments = 0 __VA_ARGS__,
#include "ops.def"
};

// Each in a function of its own: there `self` is the op's struct, and the names of sizes are their places in mg_sizes.
#define SIZE(name) name,
#define TENSOR(name, role, dtype, ...) {#name, ROLE_##role, KIND_##dtype, sizeof((const char[]){__VA_ARGS__}), offsetof(self, name), {__VA_ARGS__}, 0, 0},
#define NUM(type, name, value) {#name, ROLE_NUM, KIND_##type, 0, offsetof(self, name), {0}, value, value},
#define LET(size, ...) {#__VA_ARGS__, ROLE_LET, KIND_int, 0, 0, {size}, 0, 0},
#define NEEDS(...) {#__VA_ARGS__, ROLE_NEEDS, KIND_bool, 0, 0, {0}, 0, 0},
#define DRAW(name, low, high) {#name, ROLE_DRAW, KIND_float, 0, 0, {0}, low, high},
#define OP(op, ...) \
  static const mg_row *op##_row(void) { \
    typedef mg_##op##_args self; \
    _Static_assert((int)op##_arguments <= (int)MG_MAX_ARGS, "MG_MAX_ARGS of runtime.h"); \
    enum { MG_SIZES(SIZE) }; \
    static const mg_field fields[] = {__VA_ARGS__ {.role = ROLE_END}}; \
    static const mg_row row = {#op, fields, op##_arguments, false, offsetof(self, stream), sizeof(self), op##_let, op##_broken}; \
    return &row; \
  }
#include "ops.def"
#undef SIZE

// Rows by hand: an array of views.
#define OP(op, ...)
#define ARG(name, role, dims, kind) const mg_tensor *name;
#define BY_HAND(op, ...) typedef struct op##_views { __VA_ARGS__ const mg_tensor *end; } op##_views;
#include "ops.def"
#undef ARG
#define OP(op, ...)
#define ARG(name, role, dims, kind) {#name, ROLE_##role, KIND_##kind, dims, offsetof(self, name), {0}, 0, 0},
#define BY_HAND(op, ...) \
  static const mg_row *op##_row(void) { \
    typedef op##_views self; \
    static const mg_field fields[] = {__VA_ARGS__ {.role = ROLE_END}}; \
    static const mg_row row = {#op, fields, sizeof fields / sizeof *fields - 1, true, 0, sizeof(self), NULL, NULL}; \
    return &row; \
  }
#include "ops.def"
#undef ARG

static const mg_row *(*const rows[MG_OP_COUNT])(void) = {
#define OP(op, ...) op##_row,
#define BY_HAND(op, ...) op##_row,
#include "ops.def"
};
const mg_row *mg_row_of(mg_op op) { return rows[op](); }

const char *mg_op_row(mg_op op) { return mg_row_of(op)->name; }
const char *mg_op_name(mg_op op) {
  switch (op) {
    case MG_OP_attention_fwd: case MG_OP_attention_fwd_fp8: return "attention";
    case MG_OP_attention_bwd: case MG_OP_attention_bwd_pre: case MG_OP_attention_bwd_post: return "attention_backward";
    case MG_OP_attention_combine: return "attention_decode";
    case MG_OP_linear_attention_back: return "linear_attention_bwd";
    case MG_OP_ssd_cuts: case MG_OP_ssd_join: return "ssd";
    case MG_OP_ssd_bwd_states: case MG_OP_ssd_bwd_join: case MG_OP_ssd_bwd_sums: return "ssd_bwd";
    default: return mg_op_row(op);
  }
}

mg_status mg_op_find(mg_op *op, const char *name) {
  char known[512] = "";
  for (int i = 0; i < MG_OP_COUNT; i++) {
    if (!strcmp(mg_op_row((mg_op)i), name)) {
      *op = (mg_op)i;
      return MG_OK;
    }
    snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "", mg_op_row((mg_op)i));
  }
  return mg_fail(MG_VALUE, "there is no op %s, expected one of %s", name, known);
}

// ---- checks

// What the checks of one call share.
typedef struct call {
  const char *op;
  const mg_field *rule;             // of the argument under check
  const mg_field *like;             // the first IN or MAT argument, which the others are compared with
  const mg_tensor *like_tensor;
} call;

typedef struct list_text { char chars[200]; } list_text;
static list_text list(const int64_t *v, int n) {
  list_text text = {"["};
  size_t at = 1;
  for (int i = 0; i < n; i++) at += (size_t)snprintf(text.chars + at, sizeof text.chars - at, "%s%lld", i ? ", " : "", (long long)v[i]);
  snprintf(text.chars + at, sizeof text.chars - at, "]");
  return text;
}

static mg_status check_dtype(const call *c, const mg_tensor *t) {
  const char *found = mg_dtype_name(t->dtype), *expected = NULL;
  if (c->rule->kind == KIND_F32 && t->dtype != MG_FP32) expected = "float32";
  if (c->rule->kind == KIND_I32 && t->dtype != MG_INT32) expected = "int32";
  if (c->rule->kind == KIND_U8 && t->dtype != MG_UINT8) expected = "uint8";
  if (c->rule->kind == KIND_BF16 && t->dtype != MG_BF16) expected = "bfloat16";
  if (c->rule->kind == KIND_E4M3 && t->dtype != MG_E4M3) expected = "float8_e4m3fn";
  if (c->rule->kind == KIND_HALF && t->dtype != MG_BF16 && t->dtype != MG_FP16 && (t->dtype != MG_FP32 || t->device != MG_CPU))
    expected = t->device == MG_CPU ? "bfloat16, float16 or float32" : "bfloat16 or float16 (float32 only on the CPU)";
  if (expected) return mg_fail(MG_TYPE, "%s: %s has dtype %s, expected %s", c->op, c->rule->name, found, expected);
  if (c->rule->kind == KIND_HALF && c->like->kind == KIND_HALF && t->dtype != c->like_tensor->dtype)
    return mg_fail(MG_TYPE, "%s: %s has dtype %s, expected %s (same as %s)", c->op, c->rule->name, found,
                   mg_dtype_name(c->like_tensor->dtype), c->like->name);
  return MG_OK;
}

static mg_status check_device(const call *c, const mg_tensor *t) {
  const mg_tensor *u = c->like_tensor;
  static const char *const kinds[] = {"the CPU", "a CUDA device"};
  if (t->device != u->device)
    return mg_fail(MG_TYPE, "%s: %s is on %s, expected %s (same as %s)", c->op, c->rule->name, kinds[t->device], kinds[u->device],
                   c->like->name);
  if (t->device == MG_CUDA && t->device_index != u->device_index)
    return mg_fail(MG_VALUE, "%s: %s is on cuda:%d, expected cuda:%d (same as %s)", c->op, c->rule->name, t->device_index, u->device_index,
                   c->like->name);
  return MG_OK;
}

static bool contiguous(const mg_tensor *t) {
  int64_t expected = 1;
  for (int i = t->dims - 1; i >= 0; expected *= t->shape[i--])   // no overflow: the caller has computed the tensor's extent
    if (t->shape[i] != 1 && t->stride[i] != expected) return false;
  return true;
}

static bool unit(const mg_tensor *t, int i) { return i < 0 || t->shape[i] == 1 || t->stride[i] == 1; }

static mg_status check_strides(const call *c, const mg_tensor *t) {
  const char *wanted = NULL;
  for (int i = 0; i < t->dims; i++)
    if (t->shape[i] > 1 && t->stride[i] < 0) wanted = "no negative ones";
  const bool dense = c->rule->role == ROLE_SAVE || c->rule->role == ROLE_WORK;
  const bool rows = !dense && c->rule->kind != KIND_F32 && c->rule->kind != KIND_U8;
  if (!wanted && !rows && !contiguous(t)) wanted = "a contiguous tensor";
  if (!wanted && rows && !unit(t, t->dims - 1)) {
    if (c->rule->role != ROLE_MAT) wanted = "a contiguous last dimension";
    else if (!unit(t, t->dims - 2)) wanted = "one of the last two dimensions contiguous";
  }
  if (!wanted) return MG_OK;
  return mg_fail(MG_VALUE, "%s: %s has shape %s and strides %s, expected %s; call .contiguous() first", c->op, c->rule->name,
                 list(t->shape, t->dims).chars, list(t->stride, t->dims).chars, wanted);
}

mg_status mg_check_sizes(const char *op, const char *name, const mg_tensor *t) {
  for (int i = 0; i < t->dims; i++)
    if (t->shape[i] < 0 || t->shape[i] > INT32_MAX)
      return mg_fail(MG_VALUE, "%s: %s has shape %s, expected 0 to 2^31 - 1 in every dimension", op, name, list(t->shape, t->dims).chars);
  return MG_OK;
}

// Memory of an argument, [first, end); empty where it has no elements.
typedef struct span { uintptr_t first, end; } span;

static mg_status check_memory(const call *c, const mg_tensor *t, span *s) {
  int64_t size = (int64_t)mg_dtype_size(t->dtype), bytes = size;
  *s = (span){0, 0};
  mg_status status = MG_OK;
  if (c->rule->kind != KIND_U8 || t->shape[0] < 0) status = mg_check_sizes(c->op, c->rule->name, t);   // a workspace is only bytes
  if (status || mg_is_empty(t)) return status;
  for (int i = 0; i < t->dims; i++) {
    int64_t step;
    if (t->shape[i] < 2 || t->stride[i] < 0) continue;
    if (__builtin_mul_overflow(t->shape[i] - 1, t->stride[i], &step) || __builtin_mul_overflow(step, size, &step) ||
        __builtin_add_overflow(bytes, step, &bytes) || bytes > INTPTR_MAX / 2)
      return mg_fail(MG_VALUE, "%s: %s with shape %s and strides %s reaches past the end of memory", c->op, c->rule->name,
                     list(t->shape, t->dims).chars, list(t->stride, t->dims).chars);
  }
  if ((status = check_strides(c, t))) return status;
  if (!t->data) return mg_fail(MG_VALUE, "%s: %s has no memory (a null pointer)", c->op, c->rule->name);
  uintptr_t first = (uintptr_t)t->data;
  if (first % (uintptr_t)size || first > UINTPTR_MAX - (uintptr_t)bytes)
    return mg_fail(MG_VALUE, "%s: %s is at address %p, expected a multiple of %d", c->op, c->rule->name, t->data, (int)size);
  *s = (span){first, first + (uintptr_t)bytes};
  return MG_OK;
}

// True where no two elements share memory; false where that is not evident.
static bool distinct(const mg_tensor *t) {
  int64_t reach = 1;                // elements spanned by the dimensions passed so far, from the smallest stride up
  for (unsigned passed = 0; passed + 1 < 1u << t->dims;) {
    int next = -1;
    for (int i = 0; i < t->dims; i++)
      if (!(passed >> i & 1) && (next < 0 || t->stride[i] < t->stride[next])) next = i;
    passed |= 1u << next;
    if (t->shape[next] < 2) continue;
    if (t->stride[next] < reach) return false;
    reach += (t->shape[next] - 1) * t->stride[next];
  }
  return true;
}

// Bytes that a tensor spans within one period: its dimensions whose strides are not whole periods.
static int64_t reach_in_period(const mg_tensor *t, int64_t period) {
  int64_t size = (int64_t)mg_dtype_size(t->dtype), bytes = size;
  for (int i = 0; i < t->dims; i++)
    if (t->shape[i] > 1 && t->stride[i] * size % period) bytes += (t->shape[i] - 1) * t->stride[i] * size;
  return bytes;
}

// Evidence that overlapping ranges share no byte: some stride of `a` is a period in which both occupy fixed, disjoint windows, as the
// slices of one fused buffer do. Every address of a tensor is, modulo the period, within its reach of the first one's.
static bool interleaved(const mg_tensor *a, const mg_tensor *b) {
  for (int i = 0; i < a->dims; i++) {
    if (a->shape[i] < 2 || a->stride[i] == 0) continue;
    int64_t period = a->stride[i] * (int64_t)mg_dtype_size(a->dtype);
    uint64_t p = (uint64_t)period, from_a = (uintptr_t)a->data % p, from_b = (uintptr_t)b->data % p;
    uint64_t gap = from_b >= from_a ? from_b - from_a : p - (from_a - from_b);   // from a's window up to b's
    if ((uint64_t)reach_in_period(a, period) <= gap && (uint64_t)reach_in_period(b, period) <= p - gap) return true;
  }
  return false;
}

static bool disjoint(const mg_tensor *a, span x, const mg_tensor *b, span y) {
  return x.end <= y.first || y.end <= x.first || interleaved(a, b) || interleaved(b, a);
}

static mg_status check_outputs(const call *c, const mg_field *args, int n, const mg_tensor *const *t, const span *s) {
  for (int i = 0; i < n; i++) {
    if (!t[i] || !mg_is_written(&args[i]) || s[i].first == s[i].end) continue;
    if (t[i]->read_only) return mg_fail(MG_BUFFER, "%s: %s is written, but its memory is read-only", c->op, args[i].name);
    if (!distinct(t[i]))
      return mg_fail(MG_BUFFER, "%s: %s is written, but with shape %s and strides %s its elements may share memory", c->op, args[i].name,
                     list(t[i]->shape, t[i]->dims).chars, list(t[i]->stride, t[i]->dims).chars);
    for (int j = 0; j < n; j++)
      if (j != i && t[j] && s[j].first != s[j].end && (j > i || !mg_is_written(&args[j])) && !disjoint(t[i], s[i], t[j], s[j]))
        return mg_fail(MG_BUFFER, "%s: %s is written, but shares memory with %s", c->op, args[i].name, args[j].name);
  }
  return MG_OK;
}

static mg_status check_arg(call *c, const mg_field *rule, const mg_tensor *t, span *s) {
  mg_status status;
  c->rule = rule;
  if (t->dims != rule->dims) return mg_fail(MG_VALUE, "%s: %s has %d dimensions, expected %d", c->op, rule->name, t->dims, rule->dims);
  if ((status = check_device(c, t)) || (status = check_dtype(c, t))) return status;
  return check_memory(c, t, s);
}

// ---- sizes that arguments share

typedef struct bound { const mg_field *field; int dim; } bound;   // where a size was seen first

static mg_status compare(const char *op, const mg_field *f, const mg_tensor *t, int64_t *n, bound *first) {
  for (int i = 0; i < f->dims; i++) {
    const int s = f->size[i];
    if (!first[s].field) {
      first[s] = (bound){f, i};
      n[s] = t->shape[i];
    } else if (t->shape[i] != n[s]) {
      const bool let = first[s].field->role == ROLE_LET;
      return mg_fail(MG_VALUE, "%s: %s has size %lld in dimension %d, expected %lld (%s %s %s)", op, f->name, (long long)t->shape[i], i,
                     (long long)n[s], mg_size_names[s], let ? "=" : "of", first[s].field->name);
    }
  }
  return MG_OK;
}

static bool in_word(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; }
static bool mentions(const char *expression, const char *name) {
  const size_t length = strlen(name);
  for (const char *at = expression; (at = strstr(at, name)); at += length)
    if ((at == expression || !in_word(at[-1])) && !in_word(at[length])) return true;
  return false;
}

// "ssd_fwd: H = 4 (dimension 2 of x), G = 3 (dimension 2 of b), expected H == 0 || ..."
static mg_status refuse(const char *op, const mg_row *row, const void *args, const char *expression, const int64_t *n, const bound *first) {
  char found[400] = "";
  size_t at = 0;
#define FOUND(...) at += (size_t)snprintf(found + at, at < sizeof found ? sizeof found - at : 0, __VA_ARGS__)
  for (int s = 0; s < MG_SIZE_COUNT; s++) {
    if (!first[s].field || !mentions(expression, mg_size_names[s])) continue;
    FOUND("%s%s = %lld", at ? ", " : "", mg_size_names[s], (long long)n[s]);
    if (first[s].field->role != ROLE_LET) FOUND(" (dimension %d of %s)", first[s].dim, first[s].field->name);
  }
  for (const mg_field *f = row->field; f->role; f++) {
    const char *p = (const char *)args + f->offset;
    if (f->role != ROLE_NUM || !mentions(expression, f->name)) continue;
    if (f->kind == KIND_float) FOUND("%s%s is %g", at ? ", " : "", f->name, (double)*(const float *)(const void *)p);
    else FOUND("%s%s is %d", at ? ", " : "", f->name, f->kind == KIND_bool ? *(const bool *)p : *(const int *)(const void *)p);
  }
#undef FOUND
  return mg_fail(MG_VALUE, "%s: %s, expected %s", op, found, expression);
}

// What is read decides, then LET; results are compared with both. NEEDS come before them: a LET may divide by what they ask for.
static mg_status check_sizes(const char *op, const mg_row *row, const void *args, const mg_tensor *const *t, mg_sizes *sizes) {
  int64_t *n = (int64_t *)sizes;
  bound first[MG_SIZE_COUNT] = {0};
  mg_status status = MG_OK;
  for (int s = 0; s < MG_SIZE_COUNT; s++) n[s] = -1;
  for (int i = 0; i < row->arguments && !status; i++)
    if (t[i] && !mg_is_written(&row->field[i])) status = compare(op, &row->field[i], t[i], n, first);
  const char *broken = status ? NULL : row->broken(args, sizes);
  if (broken) status = refuse(op, row, args, broken, n, first);
  if (status) return status;
  row->let(sizes);
  for (const mg_field *f = row->field; f->role; f++)
    if (f->role == ROLE_LET) first[f->size[0]] = (bound){f, 0};
  for (int i = 0; i < row->arguments && !status; i++)
    if (t[i] && mg_is_written(&row->field[i])) status = compare(op, &row->field[i], t[i], n, first);
  return status;
}

static mg_status check_row(mg_op op, const void *args, mg_sizes *sizes) {
  const mg_row *row = mg_row_of(op);
  const mg_field *rule = row->field;
  const int n = row->arguments;
  call c = {.op = mg_op_name(op)};
  const mg_tensor *t[MG_MAX_ARGS];
  span spans[MG_MAX_ARGS];
  for (int i = 0; i < n; i++) {
    t[i] = NULL;
    if (!mg_is_tensor(&rule[i])) continue;
    t[i] = mg_arg(args, &rule[i]);
    if (!t[i] && !mg_may_miss(&rule[i])) return mg_fail(MG_TYPE, "%s: %s is missing, expected a tensor", c.op, rule[i].name);
    if (!c.like && (rule[i].role == ROLE_IN || rule[i].role == ROLE_MAT)) {
      c.like = &rule[i];
      c.like_tensor = t[i];
    }
  }
  mg_status status = check_arg(&c, c.like, c.like_tensor, spans);   // first, so that the others are not blamed for its faults
  for (int i = 0; i < n && !status; i++)
    if (t[i]) status = check_arg(&c, &rule[i], t[i], &spans[i]);
  if (!status && sizes) status = check_sizes(c.op, row, args, t, sizes);
  return status ? status : check_outputs(&c, rule, n, t, spans);
}

mg_status mg_check(mg_op op, const void *args, mg_sizes *n) { return check_row(op, args, n); }
mg_status mg_check_by_hand(mg_op op, const mg_tensor *const *args) { return check_row(op, args, NULL); }

mg_status mg_check_softcap(const char *op, float softcap) {
  if (softcap >= 0 && softcap <= FLT_MAX) return MG_OK;
  return mg_fail(MG_VALUE, "%s: softcap is %g, expected 0 (none) or a positive number", op, (double)softcap);
}

mg_status mg_check_starts(const char *op, char which, const mg_tensor *starts, int64_t total, int64_t max_seqlen) {
  if (starts->device != MG_CPU) return MG_OK;
  const int32_t *start = starts->data;
  if (start[0] != 0) return mg_fail(MG_VALUE, "%s: cu_seqlens_%c[0] is %d, expected 0", op, which, start[0]);
  for (int64_t i = 1; i < starts->shape[0]; i++) {
    if (start[i] < start[i - 1] || start[i] > total)
      return mg_fail(MG_VALUE, "%s: cu_seqlens_%c[%lld] is %d, expected %d (the one before) to %lld (the rows that there are)", op, which, (long long)i,
                     start[i], start[i - 1], (long long)total);
    if (start[i] - start[i - 1] > max_seqlen)
      return mg_fail(MG_VALUE, "%s: max_seqlen_%c is %lld, expected at least %d (rows of sequence %lld)", op, which, (long long)max_seqlen,
                     start[i] - start[i - 1], (long long)i - 1);
  }
  return MG_OK;
}
