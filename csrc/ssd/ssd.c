// Host half of ssd_fwd. On the GPU H is a multiple of 4, P at most 64, N at most 128.
#include "ssd/ssd.h"
#include "runtime/runtime.h"

mg_status mg_ssd_fwd(const mg_ssd_fwd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_ssd_fwd, a)) return c.status;
  // no steps: the state is zero
  if (!c.n.T) return mg_fill(&c.context, a->state->data, 0, 4, c.n.B * c.n.H * c.n.P * c.n.N);
  if (!mg_choose(&c)) return c.status;
  ssd_fwd_params p = {.a = a->a->data, .d = a->d->data, .state = a->state->data, .chunks = (int)mg_ceil_div(c.n.T, 64),
                      .heads = (int)c.n.H,
                      .group_heads = (int)(c.n.H / c.n.G), .head_dim = (int)c.n.P, .state_dim = (int)c.n.N};
  mg_map_bthd(&c, &p.x, a->x, 64, 64);
  mg_map_bthd(&c, &p.y, a->y, 64, 64);
  mg_map_bthd(&c, &p.b, a->b, 64, 64);
  mg_map_bthd(&c, &p.c, a->c, 64, 64);
  mg_map_rows(&c, &p.dt, a->dt, 64, 4);
  return mg_run(&c, &p, c.n.B * (c.n.H / c.desc->tile_n));
}
