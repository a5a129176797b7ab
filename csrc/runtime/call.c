// A call of an op between its check and its launch. Errors stick.
#include <stdio.h>
#include <string.h>
#include "runtime/runtime.h"

bool mg_begin(mg_call *c, mg_op op, const void *args) {
  const mg_row *row = mg_row_of(op);
  const mg_tensor *like = NULL, *first = NULL;   // the first HALF tensor that is read; the first of any
  bool some = false;
  c->op = op;
  c->args = args;
  if ((c->status = mg_check(op, args, &c->n))) return false;
  for (const mg_field *f = row->field; f < row->field + row->arguments; f++) {
    const mg_tensor *t = mg_is_tensor(f) ? mg_arg(args, f) : NULL;
    if (!first && !mg_is_written(f)) first = t;
    if (!like && f->kind == KIND_HALF && !mg_is_written(f)) like = t;
    some |= t && mg_is_written(f) && f->role != ROLE_WORK && !mg_is_empty(t);
  }
  if (!like) like = first;
  if (!some || (c->status = mg_context_open(&c->context, like, *(const mg_stream *)((const char *)args + row->stream))))
    return false;
  c->problem = (mg_problem){.dtype = like->dtype, .gpu = c->context.device == MG_CUDA, .sms = c->context.sms,
                            .size = c->n};
  return true;
}

bool mg_choose_other(mg_call *c, mg_op op) {
  if (c->status || (c->status = mg_select(&c->kernel, op, &c->problem, &c->context))) return false;
  c->desc = mg_desc(c->kernel);
  return true;
}
bool mg_choose(mg_call *c) { return mg_choose_other(c, c->op); }

static const char *name_of(const mg_call *c, const mg_tensor *t) {
  for (const mg_field *f = mg_row_of(c->op)->field; f->role; f++)
    if (mg_is_tensor(f) && mg_arg(c->args, f) == t) return f->name;
  return "a tensor";
}

static void map(mg_call *c, gmap *m, const mg_tensor *t, const int64_t *shape, const int64_t *stride, int box_rows,
                int box_cols) {
  if (c->status || !(c->status = mg_map(m, &c->context, "", t->data, t->dtype, shape, stride, box_rows, box_cols)))
    return;
  char reason[1024];                // begins with " is" or " has"
  snprintf(reason, sizeof reason, "%s", mg_last_error());
  mg_fail(c->status, "%s: %s%s", mg_op_name(c->op), name_of(c, t), reason);
}

void mg_map_rows(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols) {
  const int d = t->dims, row = d - 2;
  map(c, m, t, (int64_t[4]){d > 2 ? t->shape[0] : 1, d > 3 ? t->shape[1] : 1, t->shape[row], t->shape[row + 1]},
      (int64_t[4]){d > 2 ? t->stride[0] : 0, d > 3 ? t->stride[1] : 0, t->stride[row], 1}, box_rows, box_cols);
}

void mg_map_turned(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols) {
  map(c, m, t, (int64_t[4]){1, 1, t->shape[1], t->shape[0]}, (int64_t[4]){0, 0, t->stride[1], 1}, box_rows, box_cols);
}

void mg_map_bthd(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols) {
  map(c, m, t, (int64_t[4]){t->shape[0], t->shape[2], t->shape[1], t->shape[3]},
      (int64_t[4]){t->stride[0], t->stride[2], t->stride[1], 1}, box_rows, box_cols);
}

void mg_map_stack(mg_call *c, gmap *m, const mg_tensor *t, int box_rows, int box_cols) {
  const int d = t->dims;
  int64_t batch = 1;
  for (int i = d - 4; i >= 0; batch *= t->shape[i--])
    if (!c->status && t->shape[i] != 1 && t->stride[i] != batch * t->stride[d - 4])
      c->status = mg_fail(MG_VALUE, "%s: %s has a stride of %lld elements in dimension %d, expected a dense tensor",
                          mg_op_name(c->op), name_of(c, t), (long long)t->stride[i], i);
  map(c, m, t, (int64_t[4]){batch, t->shape[d - 3], t->shape[d - 2], t->shape[d - 1]},
      (int64_t[4]){t->stride[d - 4], t->stride[d - 3], t->stride[d - 2], 1}, box_rows, box_cols);
}

int mg_tasks(mg_call *c, int64_t tasks) {
  if (!c->status && tasks > INT32_MAX / 2)
    c->status = mg_fail(MG_UNSUPPORTED, "%s: more than 2^30 tiles", mg_op_name(c->op));
  return (int)tasks;
}

mg_status mg_run(mg_call *c, const void *params, int64_t blocks) {
  return c->status ? c->status : mg_launch(&c->context, c->kernel, params, blocks);
}

mg_status mg_run_resident(mg_call *c, const void *params, int64_t tasks) {
  const int64_t resident = (int64_t)c->context.sms * c->desc->blocks_per_sm;
  return mg_run(c, params, tasks < resident ? tasks : resident);
}
