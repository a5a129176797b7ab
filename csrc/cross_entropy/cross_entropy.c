// Host halves of cross_entropy's kernels: of logits of 16 bits and of float32 ones, and of gradients that wait for a
// scale. Products are the caller's.
#include "cross_entropy/cross_entropy.h"
#include "runtime/runtime.h"

// Targets are numbers of columns or the one that is ignored. What a GPU holds is not looked at.
static bool targets_are_wrong(mg_call *c, const mg_tensor *targets, int ignored) {
  const int32_t *target = targets->data;
  for (int64_t i = 0; targets->device == MG_CPU && i < targets->shape[0] && !c->status; i++)
    if (target[i] != ignored && (target[i] < 0 || target[i] >= c->n.N))
      mg_refuse(c, MG_VALUE, "targets[%lld] is %d, expected 0 to %lld, or %d (ignore_index)", (long long)i, target[i],
                (long long)c->n.N - 1, ignored);
  return c->status;
}

static mg_status run(mg_call *c, const mg_tensor *logits, const mg_cross_entropy_rows_args *a) {
  const int64_t stride = logits->shape[0] > 1 ? logits->stride[0] : 0, unit = 16 / mg_dtype_size(logits->dtype);
  if (mg_is_empty(a->loss) || targets_are_wrong(c, a->targets, a->ignore_index)) return c->status;
  if (logits->dtype == MG_FP32 && c->problem.gpu) c->problem.dtype = MG_BF16;   // whose kernel has a branch for them
  if (!mg_choose_other(c, MG_OP_cross_entropy_rows)) return c->status;
  const cross_entropy_params p = {
    .logits = logits->data, .stride = stride, .targets = a->targets->data, .scale = mg_data(a->scale),
    .loss = a->loss->data, .lse = a->lse->data, .rows = mg_tasks(c, c->n.M, "rows"),
    .columns = mg_tasks(c, c->n.N, "columns"), .ignored = a->ignore_index,
    .logits_are_float = logits->dtype == MG_FP32, .scale_of_rows = a->scale && a->scale->shape[0] > 1,
    .in_eights = (uintptr_t)logits->data % 16 == 0 && stride % unit == 0,
    .smoothing = a->label_smoothing, .softcap = a->softcap, .z_loss = a->z_loss};
  return mg_run(c, &p, p.rows);
}

mg_status mg_cross_entropy_rows(const mg_cross_entropy_rows_args *a) {
  mg_call c;
  return mg_begin(&c, MG_OP_cross_entropy_rows, a) ? run(&c, a->logits, a) : c.status;
}

mg_status mg_cross_entropy_float_rows(const mg_cross_entropy_float_rows_args *a) {
  mg_call c;
  const mg_cross_entropy_rows_args same = {
    .loss = a->loss, .lse = a->lse, .targets = a->targets, .scale = a->scale, .ignore_index = a->ignore_index,
    .label_smoothing = a->label_smoothing, .softcap = a->softcap, .z_loss = a->z_loss};
  return mg_begin(&c, MG_OP_cross_entropy_float_rows, a) ? run(&c, a->logits, &same) : c.status;
}

// Rows that lie one after the other are one.
mg_status mg_cross_entropy_scaled(const mg_cross_entropy_scaled_args *a) {
  mg_call c;
  if (!mg_open(&c, MG_OP_cross_entropy_scaled, a)) return c.status;
  const mg_tensor *out = a->out;
  const int64_t stride = out->shape[0] > 1 ? out->stride[0] : c.n.N, size = (int64_t)mg_dtype_size(out->dtype);
  const bool dense = stride == c.n.N;
  const int64_t rows = dense ? 1 : c.n.M, columns = dense ? c.n.M * c.n.N : c.n.N,
                parts = mg_ceil_div(columns, c.desc->tile_n);
  const cross_entropy_scaled_params p = {
    .out = out->data, .sums = mg_data(a->sums), .scale = a->scale->data, .columns = columns, .stride = stride,
    .parts = mg_tasks(&c, parts, "parts"), .tasks = mg_tasks(&c, rows * parts, "parts of rows"),
    .in_eights = (uintptr_t)out->data % 16 == 0 && (uintptr_t)mg_data(a->sums) % 16 == 0 &&
                 (dense || (stride * size % 16 == 0 && (!a->sums || columns % 4 == 0)))};
  return mg_run_resident(&c, &p, p.tasks);
}
