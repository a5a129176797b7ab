// Rows of ops.def as checks: every bad input that can be seen in one argument, or in the memory of two, ends here with its message.
// Only mg_check_starts reads the tensors' data.
#include <float.h>
#include <stdio.h>
#include <string.h>
#include "runtime/runtime.h"

enum { MAX_ARGS = 15 };
typedef enum role { ROLE_OUT, ROLE_OPTOUT, ROLE_WORK, ROLE_IN, ROLE_OPT, ROLE_MAT } role;
typedef enum kind { KIND_HALF, KIND_F32, KIND_I32, KIND_U8, KIND_BF16, KIND_E4M3 } kind;
typedef struct arg_rule { const char *name; role role; int dims; kind kind; } arg_rule;
typedef struct op_rule { const char *name; arg_rule args[MAX_ARGS + 1]; } op_rule;   // the last argument is followed by one without a name

static const op_rule rules[MG_OP_COUNT] = {
#define ARG(name, role, dims, kind) {#name, ROLE_##role, dims, KIND_##kind},
#define OP(name, ...) {#name, {__VA_ARGS__ {NULL, ROLE_OUT, 0, KIND_HALF}}},
#include "ops.def"
#undef OP
#undef ARG
};

const char *mg_op_row(mg_op op) { return rules[op].name; }
const char *mg_op_name(mg_op op) {
  switch (op) {
    case MG_OP_attention_fwd: case MG_OP_attention_fwd_fp8: return "attention";
    case MG_OP_attention_bwd: case MG_OP_attention_bwd_pre: case MG_OP_attention_bwd_post: return "attention_backward";
    case MG_OP_attention_combine: return "attention_decode";
    default: return rules[op].name;
  }
}

mg_status mg_op_find(mg_op *op, const char *name) {
  char known[512] = "";
  for (int i = 0; i < MG_OP_COUNT; i++) {
    if (!strcmp(rules[i].name, name)) {
      *op = (mg_op)i;
      return MG_OK;
    }
    snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "", rules[i].name);
  }
  return mg_fail(MG_VALUE, "there is no op %s, expected one of %s", name, known);
}

// What the checks of one call share.
typedef struct call {
  const char *op;
  const arg_rule *rule;             // of the argument under check
  const arg_rule *like;             // the first IN or MAT argument, which the others are compared with
  const mg_tensor *like_tensor;
} call;

static bool written(role r) { return r == ROLE_OUT || r == ROLE_OPTOUT || r == ROLE_WORK; }
static bool optional(role r) { return r == ROLE_OPTOUT || r == ROLE_OPT; }

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
  const bool rows = c->rule->kind != KIND_F32 && c->rule->kind != KIND_U8;
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

static mg_status check_outputs(const call *c, const arg_rule *args, int n, const mg_tensor *const *t, const span *s) {
  for (int i = 0; i < n; i++) {
    if (!t[i] || !written(args[i].role) || s[i].first == s[i].end) continue;
    if (t[i]->read_only) return mg_fail(MG_BUFFER, "%s: %s is written, but its memory is read-only", c->op, args[i].name);
    if (!distinct(t[i]))
      return mg_fail(MG_BUFFER, "%s: %s is written, but with shape %s and strides %s its elements may share memory", c->op, args[i].name,
                     list(t[i]->shape, t[i]->dims).chars, list(t[i]->stride, t[i]->dims).chars);
    for (int j = 0; j < n; j++)
      if (j != i && t[j] && s[j].first != s[j].end && (j > i || !written(args[j].role)) && !disjoint(t[i], s[i], t[j], s[j]))
        return mg_fail(MG_BUFFER, "%s: %s is written, but shares memory with %s", c->op, args[i].name, args[j].name);
  }
  return MG_OK;
}

static mg_status check_arg(call *c, const arg_rule *rule, const mg_tensor *t, span *s) {
  mg_status status;
  c->rule = rule;
  if (t->dims != rule->dims) return mg_fail(MG_VALUE, "%s: %s has %d dimensions, expected %d", c->op, rule->name, t->dims, rule->dims);
  if ((status = check_device(c, t)) || (status = check_dtype(c, t))) return status;
  return check_memory(c, t, s);
}

mg_status mg_check(mg_op op, const mg_tensor *const *args) {
  const arg_rule *rule = rules[op].args;
  call c = {.op = mg_op_name(op)};
  span spans[MAX_ARGS];
  int n = 0;
  for (; rule[n].name; n++) {
    if (!args[n] && !optional(rule[n].role)) return mg_fail(MG_TYPE, "%s: %s is missing, expected a tensor", c.op, rule[n].name);
    if (!c.like && (rule[n].role == ROLE_IN || rule[n].role == ROLE_MAT)) {
      c.like = &rule[n];
      c.like_tensor = args[n];
    }
  }
  mg_status status = check_arg(&c, c.like, c.like_tensor, spans);   // first, so that the others are not blamed for its faults
  for (int i = 0; i < n && !status; i++)
    if (args[i]) status = check_arg(&c, &rule[i], args[i], &spans[i]);
  return status ? status : check_outputs(&c, rule, n, args, spans);
}

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
