// Host half of ssd.
#include "ssd/ssd.h"
#include "runtime/runtime.h"

// cu_seqlens begins with 0, does not fall and ends with the last step: what the CPU holds is looked at.
static mg_status check_starts(const mg_tensor *t, int64_t steps) {
  const int32_t *start = t->data;
  const int64_t n = t->shape[0];
  if (t->device != MG_CPU) return MG_OK;
  if (start[0] != 0) return mg_fail(MG_VALUE, "ssd: cu_seqlens[0] is %d, expected 0", start[0]);
  for (int64_t i = 1; i < n; i++)
    if (start[i] < start[i - 1])
      return mg_fail(MG_VALUE, "ssd: cu_seqlens[%lld] is %d, expected at least %d (the one before)", (long long)i, start[i], start[i - 1]);
  if (start[n - 1] != steps)
    return mg_fail(MG_VALUE, "ssd: cu_seqlens[%lld] is %d, expected %lld (the steps that there are)", (long long)n - 1, start[n - 1], (long long)steps);
  return MG_OK;
}

mg_status mg_ssd(const mg_ssd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_ssd, a)) return c.status;
  if (a->seq_idx && a->cu_seqlens) return mg_fail(MG_VALUE, "ssd: seq_idx and cu_seqlens are given, expected one of them");
  if ((a->cu_seqlens && check_starts(a->cu_seqlens, c.n.T)) || !mg_choose(&c)) return c.status;
  ssd_fwd_params p = {
    .dt = {.dt = a->dt->data, .a = a->a->data, .bias = a->dt_bias ? a->dt_bias->data : NULL, .softplus = a->dt_softplus,
           .low = a->dt_min, .high = a->dt_max},
    .d = a->d ? a->d->data : NULL, .initial = a->initial_states ? a->initial_states->data : NULL,
    .final = a->final_states ? a->final_states->data : NULL, .starts = a->cu_seqlens ? a->cu_seqlens->data : NULL,
    .seq_idx = a->seq_idx ? a->seq_idx->data : NULL, .seq_stride = a->seq_idx ? a->seq_idx->stride[0] : 0,
    .y_data = a->y->data, .y_step = a->y->stride[1], .y_head = a->y->stride[2], .steps = (int)c.n.T, .segments = 1, .heads = (int)c.n.H,
    .group_heads = (int)(c.n.H / c.n.G), .head_dim = (int)c.n.P, .state_dim = (int)c.n.N};
  if (c.n.T) {
    mg_map_bthd(&c, &p.x, a->x, 64, 64);
    mg_map_bthd(&c, &p.y, a->y, 64, 64);
    mg_map_bthd(&c, &p.b, a->b, 64, 64);
    mg_map_bthd(&c, &p.c, a->c, 64, 64);
  }
  return mg_run(&c, &p, mg_tasks(&c, c.n.R * (c.n.H / c.desc->tile_n)));
}
