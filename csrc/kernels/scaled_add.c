// Host half of scaled_add: check -> problem -> row -> maps -> launch, as in every op.
#include "kernels/scaled_add.h"
#include "runtime/runtime.h"

static mg_status check_shape(const char *name, const mg_tensor *t, const mg_tensor *a) {
  if (t->shape[0] == a->shape[0] && t->shape[1] == a->shape[1]) return MG_OK;
  return mg_fail(MG_VALUE, "scaled_add: %s has shape [%lld, %lld], expected [%lld, %lld] (same as a)", name, (long long)t->shape[0],
                 (long long)t->shape[1], (long long)a->shape[0], (long long)a->shape[1]);
}

static mg_status map(gmap *m, const mg_context *c, const char *name, const mg_tensor *t, int rows) {
  return mg_map(m, c, name, t->data, t->dtype, (int64_t[4]){1, 1, t->shape[0], t->shape[1]}, (int64_t[4]){0, 0, t->stride[0], 1}, rows, 64);
}

mg_status mg_scaled_add(const mg_tensor *out, const mg_tensor *a, const mg_tensor *b, float scale, mg_stream stream) {
  mg_status status;
  mg_context c;
  const mg_kernel *row;
  const mg_tensor *args[] = {out, a, b};
  if ((status = mg_check(MG_OP_scaled_add, args)) || (status = check_shape("out", out, a)) || (status = check_shape("b", b, a)))
    return status;
  if (a->shape[0] == 0 || a->shape[1] == 0) return MG_OK;
  if ((status = mg_context_open(&c, out, stream))) return status;
  mg_problem problem = {.dtype = out->dtype, .gpu = c.device == MG_CUDA, .m = a->shape[0], .n = a->shape[1], .sms = c.sms};
  if ((status = mg_select(&row, MG_OP_scaled_add, &problem, &c))) return status;
  const mg_kernel_desc *d = mg_desc(row);
  int64_t row_blocks = (a->shape[0] + d->tile_m - 1) / d->tile_m, col_blocks = (a->shape[1] + d->tile_n - 1) / d->tile_n;
  int64_t tasks = row_blocks * col_blocks, resident = (int64_t)c.sms * d->blocks_per_sm;
  if (tasks > INT32_MAX / 2) return mg_fail(MG_UNSUPPORTED, "scaled_add: out has more than 2^30 tiles of %d x %d", d->tile_m, d->tile_n);
  scaled_add_params p = {.tasks = (int)tasks, .col_blocks = (int)col_blocks, .scale = scale};
  if ((status = map(&p.a, &c, "scaled_add: a", a, d->tile_m)) || (status = map(&p.b, &c, "scaled_add: b", b, d->tile_m)) ||
      (status = map(&p.out, &c, "scaled_add: out", out, d->tile_m)))
    return status;
  return mg_launch(&c, row, &p, tasks < resident ? tasks : resident);
}
