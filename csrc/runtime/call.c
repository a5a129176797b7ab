// A call of an op between its check and its launch. Errors stick.
#include <stdio.h>
#include <string.h>
#include "runtime/runtime.h"

static bool begin(mg_call *c, mg_op op, const void *args, bool only_space) {
  const mg_row *row = mg_row_of(op);
  const mg_tensor *like = NULL, *first = NULL;   // the first HALF tensor that is read; the first of any
  bool some = only_space;
  c->op = op;
  c->args = args;
  if ((c->status = mg_check(op, args, &c->n, only_space))) return false;
  for (const mg_field *f = row->field; f < row->field + row->arguments; f++) {
    const mg_tensor *t = mg_is_tensor(f) ? mg_arg(args, f) : NULL;
    if (!first && mg_is_read(f)) first = t;
    if (!like && f->kind == KIND_HALF && mg_is_read(f)) like = t;
    some |= t && mg_is_written(f) && f->role != ROLE_WORK && f->role != ROLE_OPTWORK &&
        f->role != ROLE_SPACE && !mg_is_empty(t);
  }
  if (!like) like = first;
  if (!some || (c->status = mg_context_open(&c->context, like, *(const mg_stream *)((const char *)args + row->stream))))
    return false;
  c->problem = (mg_problem){.dtype = like->dtype, .gpu = c->context.device == MG_CUDA, .sms = c->context.sms,
                            .size = c->n};
  return true;
}
bool mg_begin(mg_call *c, mg_op op, const void *args) { return begin(c, op, args, false); }
bool mg_begin_space(mg_call *c, mg_op op, const void *args) { return begin(c, op, args, true); }

void mg_use(mg_call *c, const mg_kernel *kernel) {
  if (c->status) return;
  c->kernel = kernel;
  c->desc = mg_desc(kernel);
}
bool mg_choose_other(mg_call *c, mg_op op) {
  const mg_kernel *kernel;
  if (c->status || (c->status = mg_select(&kernel, op, &c->problem, &c->context))) return false;
  mg_use(c, kernel);
  return true;
}
bool mg_choose(mg_call *c) { return mg_choose_other(c, c->op); }

mg_status mg_refuse(mg_call *c, mg_status status, const char *format, ...) {
  char text[1024];
  va_list args;
  if (c->status) return c->status;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return c->status = mg_fail(status, "%s: %s", mg_op_name(c->op), text);
}

void *mg_space(mg_call *c, const mg_tensor *workspace, size_t bytes) {
  if (!bytes) return NULL;
  if (!workspace) mg_refuse(c, MG_VALUE, "workspace is missing, expected %zu bytes, 16-byte aligned", bytes);
  else if (workspace->shape[0] < (int64_t)bytes || ((uintptr_t)workspace->data & 15))
    mg_refuse(c, MG_VALUE, "workspace has %lld bytes at %p, expected %zu bytes, 16-byte aligned",
              (long long)workspace->shape[0], workspace->data, bytes);
  return c->status ? NULL : workspace->data;
}

void mg_set(mg_call *c, void *data, uint32_t word, size_t word_bytes, int64_t n) {
  if (!c->status) c->status = mg_fill(&c->context, data, word, word_bytes, n);
}

static const char *name_of(const mg_call *c, const mg_tensor *t) {
  const mg_row *row = mg_row_of(c->op);
  for (const mg_field *f = row->field; f->role; f++)
    if (mg_is_tensor(f) && mg_arg(c->args, f) == t) return mg_shown(row, f);
  return "a tensor";
}

typedef mg_status mapper(gmap *, const mg_context *, const char *, void *, mg_dtype,
                         const int64_t[4], const int64_t[4], int, int);

static void map(mg_call *c, mapper *make, gmap *m, const mg_tensor *t, const int64_t *shape,
                const int64_t *stride, int box_rows, int box_cols) {
  if (c->status || !(c->status = make(m, &c->context, "", t->data, t->dtype, shape, stride, box_rows, box_cols)))
    return;
  char reason[1024];                // begins with " is" or " has"
  snprintf(reason, sizeof reason, "%s", mg_last_error());
  mg_fail(c->status, "%s: %s%s", mg_op_name(c->op), name_of(c, t), reason);
}

static void map_rows(mg_call *c, mapper *make, gmap *m, const mg_tensor *t, int box_rows, int box_cols) {
  const int d = t->dims, row = d - 2;
  map(c, make, m, t, (int64_t[4]){d > 2 ? t->shape[0] : 1, d > 3 ? t->shape[1] : 1, t->shape[row], t->shape[row + 1]},
      (int64_t[4]){d > 2 ? t->stride[0] : 0, d > 3 ? t->stride[1] : 0, t->stride[row], 1}, box_rows, box_cols);
}
void mg_map_rows(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols) {
  map_rows(c, mg_map, m, t, box_rows, box_cols);
}
void mg_map_rows_once(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols) {
  map_rows(c, mg_map_once, m, t, box_rows, box_cols);
}

void mg_map_turned(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols) {
  map(c, mg_map, m, t, (int64_t[4]){1, 1, t->shape[1], t->shape[0]}, (int64_t[4]){0, 0, t->stride[1], 1},
      box_rows, box_cols);
}

static void map_bthd(mg_call *c, mapper *make, gmap *m, const mg_tensor *t, int box_rows, int box_cols) {
  map(c, make, m, t, (int64_t[4]){t->shape[0], t->shape[2], t->shape[1], t->shape[3]},
      (int64_t[4]){t->stride[0], t->stride[2], t->stride[1], 1},
      box_rows, box_cols);
}
void mg_map_bthd(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols) {
  map_bthd(c, mg_map, m, t, box_rows, box_cols);
}
void mg_map_bthd_once(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols) {
  map_bthd(c, mg_map_once, m, t, box_rows, box_cols);
}

void mg_map_stack(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols) {
  const int d = t->dims;
  int64_t batch = 1;
  for (int i = d - 4; i >= 0; batch *= t->shape[i--])
    if (t->shape[i] != 1 && t->stride[i] != batch * t->stride[d - 4])
      mg_refuse(c, MG_VALUE, "%s has a stride of %lld elements in dimension %d, expected a dense tensor",
                name_of(c, t), (long long)t->stride[i], i);
  map(c, mg_map, m, t, (int64_t[4]){batch, t->shape[d - 3], t->shape[d - 2], t->shape[d - 1]},
      (int64_t[4]){t->stride[d - 4], t->stride[d - 3], t->stride[d - 2], 1}, box_rows, box_cols);
}

int mg_tasks(mg_call *c, int64_t tasks, const char *what) {
  if (tasks > (int64_t)1 << 30) mg_refuse(c, MG_VALUE, "%lld %s, at most 2^30 are accepted", (long long)tasks, what);
  return (int)tasks;
}

int64_t mg_resident(const mg_call *c, int64_t tasks) {
  if (c->status) return 0;
  const int64_t room = (int64_t)c->context.sms * c->desc->blocks_per_sm / c->desc->cluster;
  return (c->context.persistent ? mg_min(mg_max(1, room), tasks) : tasks) * c->desc->cluster;
}

mg_status mg_run(mg_call *c, const void *params, int64_t blocks) {
  return c->status ? c->status : (c->status = mg_launch(&c->context, c->kernel, params, blocks));
}

mg_status mg_run_beside(mg_call *c, const void *params, int64_t blocks) {
  c->context.beside = true;
  mg_run(c, params, blocks);
  c->context.beside = false;
  return c->status;
}
