// Host half of ssd_fwd.
#include "kernels/ssd.h"
#include "runtime/runtime.h"

static mg_status check_shape(const char *name, const mg_tensor *t, const char *meaning, int64_t s0, int64_t s1, int64_t s2, int64_t s3) {
  const int64_t expected[] = {s0, s1, s2, s3};
  for (int i = 0; i < t->dims; i++)
    if (t->shape[i] != expected[i])
      return mg_fail(MG_VALUE, "ssd_fwd: %s has %lld elements in dimension %d, expected %lld (%s)", name, (long long)t->shape[i], i,
                     (long long)expected[i], meaning);
  return MG_OK;
}

static mg_status map(gmap *m, const mg_context *c, const char *name, const mg_tensor *t) {   // [batch, step, head, ...]
  const int64_t shape[] = {t->shape[0], t->shape[2], t->shape[1], t->shape[3]}, stride[] = {t->stride[0], t->stride[2], t->stride[1], 1};
  return mg_map(m, c, name, t->data, t->dtype, shape, stride, 64, 64);
}
static mg_status map_dt(gmap *m, const mg_context *c, const mg_tensor *t) {
  const int64_t shape[] = {t->shape[0], 1, t->shape[1], t->shape[2]}, stride[] = {t->stride[0], 0, t->stride[1], 1};
  return mg_map(m, c, "ssd_fwd: dt", t->data, t->dtype, shape, stride, 64, 4);
}

// No steps: the state is zero.
static mg_status clear(const mg_tensor *state, mg_stream stream) {
  mg_context context;
  if (mg_is_empty(state)) return MG_OK;
  mg_status status = mg_context_open(&context, state, stream);
  return status ? status : mg_fill(&context, state->data, 0, 4, state->shape[0] * state->shape[1] * state->shape[2] * state->shape[3]);
}

mg_status mg_ssd_fwd(const mg_tensor *y, const mg_tensor *state, const mg_tensor *x, const mg_tensor *dt, const mg_tensor *b,
                     const mg_tensor *c, const mg_tensor *a, const mg_tensor *d, mg_stream stream) {
  mg_status status;
  mg_context context;
  const mg_kernel *row;
  const mg_tensor *args[] = {y, state, x, dt, b, c, a, d};
  if ((status = mg_check(MG_OP_ssd_fwd, args))) return status;
  const int64_t batch = x->shape[0], steps = x->shape[1], heads = x->shape[2], dim = x->shape[3], groups = b->shape[2], n = b->shape[3];
  if ((status = check_shape("y", y, "x", batch, steps, heads, dim)) ||
      (status = check_shape("state", state, "[B, H, P, N]", batch, heads, dim, n)) ||
      (status = check_shape("dt", dt, "[B, T, H]", batch, steps, heads, 0)) ||
      (status = check_shape("b", b, "[B, T, G, N]", batch, steps, groups, n)) ||
      (status = check_shape("c", c, "b", batch, steps, groups, n)) ||
      (status = check_shape("a", a, "[H]", heads, 0, 0, 0)) || (status = check_shape("d", d, "[H]", heads, 0, 0, 0)))
    return status;
  if (heads && (!groups || heads % groups))
    return mg_fail(MG_VALUE, "ssd_fwd: x has %lld heads, expected a multiple of the %lld groups of b", (long long)heads, (long long)groups);
  if (n < 1) return mg_fail(MG_VALUE, "ssd_fwd: b has a last dimension (the state's) of 0, expected at least 1");
  if (mg_is_empty(x)) return clear(state, stream);
  if ((status = mg_context_open(&context, y, stream))) return status;
  mg_problem problem = {.dtype = x->dtype, .gpu = context.device == MG_CUDA, .d = dim, .batch = batch, .heads_q = heads, .heads_k = groups,
                        .nq = steps, .n = n, .sms = context.sms};
  if ((status = mg_select(&row, MG_OP_ssd_fwd, &problem, &context))) return status;
  ssd_fwd_params p = {.a = a->data, .d = d->data, .state = state->data, .chunks = (int)((steps + 63) / 64), .heads = (int)heads,
                      .group_heads = (int)(heads / groups), .head_dim = (int)dim, .state_dim = (int)n};
  if ((status = map(&p.x, &context, "ssd_fwd: x", x)) || (status = map(&p.y, &context, "ssd_fwd: y", y)) ||
      (status = map(&p.b, &context, "ssd_fwd: b", b)) || (status = map(&p.c, &context, "ssd_fwd: c", c)) ||
      (status = map_dt(&p.dt, &context, dt)))
    return status;
  return mg_launch(&context, row, &p, batch * (heads / mg_desc(row)->tile_n));
}
