// Rows of ops.def as data and as checks: every bad input that can be seen in one argument, or in the memory of two,
// ends here with its message. No tensor's data is read.
#include <float.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "runtime/runtime.h"

// ---- rows as data

const char *const mg_size_names[] = {
#define SIZE(name) #name,
  MG_SIZES(SIZE)
#undef SIZE
};

// LET, NEEDS and TAKES as a function that sees sizes, numbers and which tensors are given by name; returns the first
// condition that does not hold.
#define FIRST(x, ...) x
static const float LARGEST = FLT_MAX;
#define SEEN(name) const int64_t name = sizes->name; (void)name;
#define TENSOR(name, ...) const bool name = given->name; (void)name;
#define NUM(type, name, value) const type name = given->name; (void)name;
#define LET(size, ...) { MG_SIZES(SEEN) sizes->size = __VA_ARGS__; }
#define NEED(status, expression, ...) { \
    MG_SIZES(SEEN) \
    static const mg_need need = {#expression, FIRST(__VA_ARGS__, 0), status}; \
    if (!(expression)) return &need; \
  }
#define NEEDS(...) NEED(MG_VALUE, __VA_ARGS__, NULL)
#define TAKES(...) NEED(MG_UNSUPPORTED, __VA_ARGS__, NULL)
#define OP(op, ...) \
  static const mg_need *op##_derive(const void *args, mg_sizes *sizes) { \
    const mg_##op##_args *given = args; \
    (void)given, (void)sizes, (void)LARGEST; \
    __VA_ARGS__ return NULL; \
  }
#include "ops.def"
#undef SEEN
#undef NEED

#define NUM(type, name, value) .name = value,
#define OP(op, ...) const mg_##op##_args mg_##op##_defaults = {__VA_ARGS__ .stream = NULL};
#include "ops.def"

#define CALLED(name) #name,
#define OP(op, ...) static const char *const op##_called[] = {__VA_ARGS__ #op};   // the first is the name in messages
#include "ops.def"

enum {
#define TENSOR(...) + 1
#define NUM(...) + 1
#define OP(op, ...) op##_arguments = 0 __VA_ARGS__,
#include "ops.def"
};

// Each in a function of its own: there `self` is the op's struct, and the names of sizes are their places in mg_sizes.
#define SIZE(name) name,
#define TENSOR(name_, role_, dtype, ...) \
  {.name = #name_, .role = ROLE_##role_, .kind = KIND_##dtype, .dims = sizeof((const char[]){__VA_ARGS__}), \
   .offset = offsetof(self, name_), .size = {__VA_ARGS__}},
#define NUM(type, name_, value) {.name = #name_, .role = ROLE_NUM, .kind = KIND_##type, \
                                 .offset = offsetof(self, name_), .low = value, .high = value},
#define LET(size_, ...) {.name = #__VA_ARGS__, .role = ROLE_LET, .size = {size_}},
#define NEED(role_, expression, ...) {.name = #expression, .role = ROLE_##role_, .text = FIRST(__VA_ARGS__, 0)},
#define NEEDS(...) NEED(NEEDS, __VA_ARGS__, NULL)
#define TAKES(...) NEED(TAKES, __VA_ARGS__, NULL)
#define DRAW(name_, low_, high_) {.name = #name_, .role = ROLE_DRAW, .low = low_, .high = high_},
#define SHOWN(name_, text_) {.name = #name_, .role = ROLE_SHOWN, .text = #text_},
#define ANYWHERE {.name = "anywhere", .role = ROLE_ANYWHERE},
#define OP(op, ...) \
  static const mg_row *op##_row(void) { \
    typedef mg_##op##_args self; \
    _Static_assert((int)op##_arguments <= (int)MG_MAX_ARGS, "MG_MAX_ARGS of runtime.h"); \
    enum { MG_SIZES(SIZE) }; \
    static const mg_field fields[] = {__VA_ARGS__ {.role = ROLE_END}}; \
    static const mg_row row = {.name = #op, .owner = #op, .called = op##_called, \
                               .field = fields, .arguments = op##_arguments, .defaults = &mg_##op##_defaults, \
                               .stream = offsetof(self, stream), .bytes = sizeof(self), .derive = op##_derive}; \
    return &row; \
  }
#define PART(part, op) \
  static const mg_row *part##_row(void) { \
    static const mg_field none = {.role = ROLE_END}; \
    static const mg_row row = {.name = #part, .owner = #op, .called = op##_called, .field = &none}; \
    return &row; \
  }
#include "ops.def"
#undef NEED
#undef SIZE

static const mg_row *(*const rows[MG_OP_COUNT])(void) = {
#define OP(op, ...) op##_row,
#define PART(part, op) part##_row,
#include "ops.def"
};
const mg_row *mg_row_of(mg_op op) { return rows[op](); }

const char *mg_shown(const mg_row *row, const mg_field *f) {
  for (const mg_field *s = row->field; s->role; s++)
    if (s->role == ROLE_SHOWN && !strcmp(s->name, f->name)) return s->text;
  return f->name;
}

const char *mg_op_row(mg_op op) { return mg_row_of(op)->name; }
const char *mg_op_name(mg_op op) { return *mg_row_of(op)->called; }

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
  const mg_row *row;
  const char *op;
  const mg_field *rule;             // of the argument under check
  const mg_field *like;             // the first IN or MAT argument, which the others are compared with
  const mg_tensor *like_tensor;
} call;

static const char *name_of(const call *c) { return mg_shown(c->row, c->rule); }
static const char *name_of_like(const call *c) { return mg_shown(c->row, c->like); }

typedef struct list_text { char chars[200]; } list_text;
static list_text list(const int64_t *v, int n) {
  list_text text = {"["};
  size_t at = 1;
  for (int i = 0; i < n; i++)
    at += (size_t)snprintf(text.chars + at, sizeof text.chars - at, "%s%lld", i ? ", " : "", (long long)v[i]);
  snprintf(text.chars + at, sizeof text.chars - at, "]");
  return text;
}

static bool is_anywhere(const mg_row *row) {
  for (const mg_field *f = row->field; f->role; f++)
    if (f->role == ROLE_ANYWHERE) return true;
  return false;
}

static mg_status check_dtype(const call *c, const mg_tensor *t) {
  const char *found = mg_dtype_name(t->dtype), *expected = NULL;
  if (c->rule->kind == KIND_F32 && t->dtype != MG_FP32) expected = "float32";
  if (c->rule->kind == KIND_I32 && t->dtype != MG_INT32) expected = "int32";
  if (c->rule->kind == KIND_U8 && t->dtype != MG_UINT8) expected = "uint8";
  if (c->rule->kind == KIND_BF16 && t->dtype != MG_BF16) expected = "bfloat16";
  if (c->rule->kind == KIND_E4M3 && t->dtype != MG_E4M3) expected = "float8_e4m3fn";
  if (c->rule->kind == KIND_HALF && t->dtype != MG_BF16 && t->dtype != MG_FP16 &&
      (t->dtype != MG_FP32 || (t->device != MG_CPU && !is_anywhere(c->row))))
    expected = t->device == MG_CPU || is_anywhere(c->row) ? "bfloat16, float16 or float32"
                                                          : "bfloat16 or float16 (float32 only on the CPU)";
  const bool real = c->rule->kind == KIND_REAL || c->rule->kind == KIND_REAL_ROWS;
  if (real && t->dtype != MG_FP32 && t->dtype != c->like_tensor->dtype)
    return mg_fail(MG_TYPE, "%s: %s has dtype %s, expected float32 or %s (as %s)", c->op, name_of(c), found,
                   mg_dtype_name(c->like_tensor->dtype), name_of_like(c));
  if (expected) return mg_fail(MG_TYPE, "%s: %s has dtype %s, expected %s", c->op, name_of(c), found, expected);
  if (c->rule->kind == KIND_HALF && c->like->kind == KIND_HALF && t->dtype != c->like_tensor->dtype)
    return mg_fail(MG_TYPE, "%s: %s has dtype %s, expected %s (same as %s)", c->op, name_of(c), found,
                   mg_dtype_name(c->like_tensor->dtype), name_of_like(c));
  return MG_OK;
}

static mg_status check_device(const call *c, const mg_tensor *t) {
  const mg_tensor *u = c->like_tensor;
  static const char *const kinds[] = {"the CPU", "a CUDA device"};
  if (t->device != u->device)
    return mg_fail(MG_TYPE, "%s: %s is on %s, expected %s (same as %s)", c->op,
                   name_of(c), kinds[t->device], kinds[u->device], name_of_like(c));
  if (t->device == MG_CUDA && t->device_index != u->device_index)
    return mg_fail(MG_VALUE, "%s: %s is on cuda:%d, expected cuda:%d (same as %s)",
                   c->op, name_of(c), t->device_index, u->device_index, name_of_like(c));
  return MG_OK;
}

static bool contiguous(const mg_tensor *t) {
  int64_t expected = 1;
  // No overflow: the caller has computed the tensor's extent
  for (int i = t->dims - 1; i >= 0; expected *= t->shape[i--])
    if (t->shape[i] != 1 && t->stride[i] != expected) return false;
  return true;
}

static bool unit(const mg_tensor *t, int i) { return i < 0 || t->shape[i] == 1 || t->stride[i] == 1; }

static mg_status check_strides(const call *c, const mg_tensor *t) {
  const char *wanted = NULL;
  for (int i = 0; i < t->dims; i++)
    if (t->shape[i] > 1 && t->stride[i] < 0) wanted = "no negative ones";
  const bool dense = c->rule->role == ROLE_SAVE || c->rule->role == ROLE_WORK || c->rule->role == ROLE_OPTWORK;
  const bool rows = !dense && c->rule->kind != KIND_F32 && c->rule->kind != KIND_REAL && c->rule->kind != KIND_U8;
  if (!wanted && !rows && !contiguous(t)) wanted = "a contiguous tensor";
  if (!wanted && rows && !unit(t, t->dims - 1)) {
    const mg_role role = c->rule->role;
    if (role != ROLE_MAT && role != ROLE_INOUTMAT && role != ROLE_OPTINOUTMAT) wanted = "a contiguous last dimension";
    else if (!unit(t, t->dims - 2)) wanted = "one of the last two dimensions contiguous";
  }
  if (!wanted) return MG_OK;
  return mg_fail(MG_VALUE, "%s: %s has shape %s and strides %s, expected %s; call .contiguous() first",
                 c->op, name_of(c),
                 list(t->shape, t->dims).chars, list(t->stride, t->dims).chars, wanted);
}

static mg_status check_range(const call *c, const mg_tensor *t) {
  for (int i = 0; i < t->dims; i++)
    if (t->shape[i] < 0 || t->shape[i] > INT32_MAX)
      return mg_fail(MG_VALUE, "%s: %s has shape %s, expected 0 to 2^31 - 1 in every dimension",
                     c->op, name_of(c), list(t->shape, t->dims).chars);
  return MG_OK;
}

// Memory of an argument, [first, end); empty where it has no elements.
typedef struct span { uintptr_t first, end; } span;

static mg_status check_memory(const call *c, const mg_tensor *t, span *s) {
  int64_t size = (int64_t)mg_dtype_size(t->dtype), bytes = size;
  *s = (span){0, 0};
  mg_status status = MG_OK;
  if (c->rule->kind != KIND_U8 || t->shape[0] < 0) status = check_range(c, t);   // a workspace is only bytes
  if (status || mg_is_empty(t)) return status;
  for (int i = 0; i < t->dims; i++) {
    int64_t step;
    if (t->shape[i] < 2 || t->stride[i] < 0) continue;
    if (__builtin_mul_overflow(t->shape[i] - 1, t->stride[i], &step) || __builtin_mul_overflow(step, size, &step) ||
        __builtin_add_overflow(bytes, step, &bytes) || bytes > INTPTR_MAX / 2)
      return mg_fail(MG_VALUE, "%s: %s with shape %s and strides %s reaches past the end of memory",
                     c->op, name_of(c),
                     list(t->shape, t->dims).chars, list(t->stride, t->dims).chars);
  }
  if ((status = check_strides(c, t))) return status;
  if (!t->data) return mg_fail(MG_VALUE, "%s: %s has no memory (a null pointer)", c->op, name_of(c));
  uintptr_t first = (uintptr_t)t->data;
  if (first % (uintptr_t)size || first > UINTPTR_MAX - (uintptr_t)bytes)
    return mg_fail(MG_VALUE, "%s: %s is at address %p, expected a multiple of %d",
                   c->op, name_of(c), t->data, (int)size);
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

// Evidence that overlapping ranges share no byte: some stride of `a` is a period in which both occupy fixed, disjoint
// windows, as the slices of one fused buffer do. Every address of a tensor is, modulo the period, within its reach of
// the first one's.
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

// A tensor that is given, and its memory.
typedef struct given { const mg_field *rule; const mg_tensor *tensor; span memory; } given;

static mg_status check_outputs(const call *c, const given *g, int n) {
  for (int i = 0; i < n; i++) {
    const mg_tensor *t = g[i].tensor;
    if (!mg_is_written(g[i].rule) || g[i].memory.first == g[i].memory.end) continue;
    if (t->read_only)
      return mg_fail(MG_BUFFER, "%s: %s is written, but its memory is read-only", c->op, mg_shown(c->row, g[i].rule));
    if (!distinct(t))
      return mg_fail(MG_BUFFER, "%s: %s is written, but with shape %s and strides %s its elements may share memory",
                     c->op,
                     mg_shown(c->row, g[i].rule), list(t->shape, t->dims).chars, list(t->stride, t->dims).chars);
    for (int j = 0; j < n; j++)
      if (j != i && g[j].memory.first != g[j].memory.end && (j > i || !mg_is_written(g[j].rule)) &&
          !disjoint(t, g[i].memory, g[j].tensor, g[j].memory))
        return mg_fail(MG_BUFFER, "%s: %s is written, but shares memory with %s",
                       c->op, mg_shown(c->row, g[i].rule), mg_shown(c->row, g[j].rule));
  }
  return MG_OK;
}

// s NULL: only what can be seen without memory.
static mg_status check_arg(call *c, const mg_field *rule, const mg_tensor *t, span *s) {
  mg_status status;
  c->rule = rule;
  if (t->dims != rule->dims)
    return mg_fail(MG_VALUE, "%s: %s has %d dimensions, expected %d", c->op, name_of(c), t->dims, rule->dims);
  if ((status = check_device(c, t)) || (status = check_dtype(c, t))) return status;
  return s ? check_memory(c, t, s) : check_range(c, t);
}

// ---- sizes that arguments share

typedef struct bound { const mg_field *field; int dim; } bound;   // where a size was seen first

static const char *let_of(const mg_row *row, int size) {   // its expression
  for (const mg_field *f = row->field; f->role; f++)
    if (f->role == ROLE_LET && f->size[0] == size) return f->name;
  return "?";
}

static mg_status compare(const char *op, const mg_row *row, const mg_field *f,
                         const mg_tensor *t, int64_t *n, bound *first) {
  for (int i = 0; i < f->dims; i++) {
    const int s = f->size[i];
    if (!first[s].field && n[s] < 0) {
      first[s] = (bound){f, i};
      n[s] = t->shape[i];
    } else if (t->shape[i] != n[s]) {
      const bool let = !first[s].field;
      return mg_fail(MG_VALUE, "%s: %s has size %lld in dimension %d, expected %lld (%s %s %s)",
                     op, mg_shown(row, f), (long long)t->shape[i], i,
                     (long long)n[s], mg_size_names[s], let ? "=" : "of",
                     let ? let_of(row, s) : mg_shown(row, first[s].field));
    }
  }
  return MG_OK;
}

static bool in_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}
static bool mentions(const char *expression, const char *name) {
  const size_t length = strlen(name);
  for (const char *at = expression; (at = strstr(at, name)); at += length)
    if ((at == expression || !in_word(at[-1])) && !in_word(at[length])) return true;
  return false;
}

// The fewest digits from which float32 finds x again.
static void print_float(char text[32], float x) {
  int digits = 6;
  do snprintf(text, 32, "%.*g", digits, (double)x);
  while (++digits < 10 && x == x && strtof(text, NULL) != x);
}

static void print_number(char text[32], const mg_field *f, const void *p) {
  switch (f->kind) {
    case KIND_float: print_float(text, *(const float *)p); break;
    case KIND_bool: snprintf(text, 32, "%d", *(const bool *)p); break;
    case KIND_int64_t: snprintf(text, 32, "%" PRId64, *(const int64_t *)p); break;
    case KIND_uint64_t: snprintf(text, 32, "%" PRIu64, *(const uint64_t *)p); break;
    default: snprintf(text, 32, "%d", *(const int *)p);
  }
}

// "ssd_fwd: H = 4 (dimension 2 of x), G = 3 (dimension 2 of b), expected H == 0 || ..."
static mg_status refuse(const char *op, const mg_row *row, const void *args,
                        const mg_need *need, const int64_t *n, const bound *first) {
  char found[600] = "", number[32];
  size_t at = 0;
#define FOUND(...) at += (size_t)snprintf(found + at, at < sizeof found ? sizeof found - at : 0, __VA_ARGS__)
  for (const mg_field *f = row->field; f->role; f++)
    for (int i = 0; i < f->dims; i++) {
      const int s = f->size[i];
      if (first[s].field == f && first[s].dim == i && mentions(need->expression, mg_size_names[s]))
        FOUND("%s%s = %lld (dimension %d of %s)", at ? ", " : "", mg_size_names[s], (long long)n[s], i,
              mg_shown(row, f));
    }
  for (const mg_field *f = row->field; f->role; f++)
    if (f->role == ROLE_LET && n[f->size[0]] >= 0 && mentions(need->expression, mg_size_names[f->size[0]]))
      FOUND("%s%s = %lld", at ? ", " : "", mg_size_names[f->size[0]], (long long)n[f->size[0]]);
  for (const mg_field *f = row->field; f < row->field + row->arguments; f++) {
    const void *p = (const char *)args + f->offset;
    if (!mentions(need->expression, f->name)) continue;
    if (f->role == ROLE_NUM) print_number(number, f, p);
    FOUND("%s%s is %s", at ? ", " : "", mg_shown(row, f),
          f->role == ROLE_NUM ? number : mg_arg(args, f) ? "given" : "missing");
  }
#undef FOUND
  return mg_fail(need->status, "%s: %s, expected %s", op, found, need->text ? need->text : need->expression);
}

// A size that follows from no argument that is given: which ones have it.
static mg_status check_known(const char *op, const mg_row *row, const int64_t *n) {
  for (const mg_field *f = row->field; f < row->field + row->arguments; f++)
    for (int i = 0; i < f->dims && mg_is_read(f) && !mg_may_miss(f); i++)
      if (n[f->size[i]] < 0)
        return mg_fail(MG_TYPE, "%s: %s is missing, expected a tensor, or another of size %s in one of its dimensions",
                       op, mg_shown(row, f), mg_size_names[f->size[i]]);
  return MG_OK;
}

// What is read decides, and LET; what is read is compared with LET, and results with both.
static mg_status check_sizes(const char *op, const mg_row *row, const void *args,
                             const given *g, int count, bool only_space,
                             mg_sizes *sizes) {
  int64_t *n = (int64_t *)sizes;
  bound first[MG_SIZE_COUNT] = {0};
  mg_status status = MG_OK;
  for (int s = 0; s < MG_SIZE_COUNT; s++) n[s] = -1;
  for (int i = 0; i < count && !status; i++)
    if (mg_is_read(g[i].rule)) status = compare(op, row, g[i].rule, g[i].tensor, n, first);
  if (!status && only_space) status = check_known(op, row, n);
  const mg_need *broken = status ? NULL : row->derive(args, sizes);
  if (broken) status = refuse(op, row, args, broken, n, first);
  for (const mg_field *f = row->field; f->role; f++)
    if (f->role == ROLE_LET) first[f->size[0]].field = NULL;
  for (int i = 0; i < count && !status; i++)
    if (mg_is_read(g[i].rule)) status = compare(op, row, g[i].rule, g[i].tensor, n, first);
  for (int i = 0; i < count && !status; i++)
    if (!mg_is_read(g[i].rule)) status = compare(op, row, g[i].rule, g[i].tensor, n, first);
  return status;
}

mg_status mg_check(mg_op op, const void *args, mg_sizes *sizes, bool only_space) {
  const mg_row *row = mg_row_of(op);
  call c = {.row = row, .op = *row->called};
  given g[MG_MAX_ARGS];
  int n = 0, like = -1;
  for (const mg_field *f = row->field; f < row->field + row->arguments; f++) {
    if (!mg_is_tensor(f) || (only_space && !mg_is_read(f))) continue;
    const mg_tensor *t = mg_arg(args, f);
    if (!t && !only_space && !mg_may_miss(f))
      return mg_fail(MG_TYPE, "%s: %s is missing, expected a tensor", c.op, mg_shown(row, f));
    if (!t) continue;
    if (like < 0 && (f->role == ROLE_IN || f->role == ROLE_MAT)) like = n;
    g[n++] = (given){.rule = f, .tensor = t};
  }
  if (like < 0) return check_sizes(c.op, row, args, g, n, only_space, sizes);
  // Where all HALF tensors are written in place, one of those is what REAL ones are as.
  const bool real = g[like].rule->kind == KIND_REAL || g[like].rule->kind == KIND_REAL_ROWS;
  for (int i = 0; real && g[like].rule->kind != KIND_HALF && i < n; i++)
    if (mg_is_read(g[i].rule) && g[i].rule->kind == KIND_HALF) like = i;
  c.like = g[like].rule;
  c.like_tensor = g[like].tensor;
  // `like` first, so that the others are not blamed for its faults
  mg_status status = check_arg(&c, c.like, c.like_tensor, only_space ? NULL : &g[like].memory);
  for (int i = 0; i < n && !status; i++)
    if (i != like) status = check_arg(&c, g[i].rule, g[i].tensor, only_space ? NULL : &g[i].memory);
  if (!status) status = check_sizes(c.op, row, args, g, n, only_space, sizes);
  return status || only_space ? status : check_outputs(&c, g, n);
}
