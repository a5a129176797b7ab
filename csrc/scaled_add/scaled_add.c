// Host halves of scaled_add and its backward: what their rows in ops.def do not say.
#include "scaled_add/scaled_add.h"
#include "runtime/runtime.h"

mg_status mg_scaled_add(const mg_scaled_add_args *a) {
  mg_call c;
  if (!mg_open(&c, MG_OP_scaled_add, a)) return c.status;
  const int64_t col_blocks = mg_ceil_div(c.n.N, c.desc->tile_n),
                tasks = mg_ceil_div(c.n.M, c.desc->tile_m) * col_blocks;
  scaled_add_params p = {.tasks = mg_tasks(&c, tasks, "tiles"), .col_blocks = (int)col_blocks, .scale = a->scale};
  mg_map_rows(&c, &p.a, a->a, c.desc->tile_m, 64);
  mg_map_rows(&c, &p.b, a->b, c.desc->tile_m, 64);
  mg_map_rows(&c, &p.out, a->out, c.desc->tile_m, 64);
  return mg_run_resident(&c, &p, tasks);
}

// da = dout, db = scale dout: two sums by the forward's kernel.
mg_status mg_scaled_add_bwd(const mg_scaled_add_bwd_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_scaled_add_bwd, a)) return c.status;
  mg_scaled_add_args sum = {.out = a->da, .a = a->dout, .b = a->dout, .scale = 0, .stream = a->stream};
  if (a->da && (c.status = mg_scaled_add(&sum))) return c.status;
  sum.out = a->db;
  sum.scale = a->scale - 1;
  return a->db ? mg_scaled_add(&sum) : MG_OK;
}
