// Host half of matmul: out = activation(a b + bias).
#include "gemm/gemm.h"
#include "runtime/runtime.h"

enum { BLOCK_K = 64, C_BOX = 64, PAGE = 16 };   // BLOCK_K: gemm.cu's BK; PAGE: bytes that rows of a GPU map must be a
                                                // multiple of

// A row step that a map takes; a single row needs none.
static bool regular(int64_t rows, int64_t step, size_t size) { return rows <= 1 || step * (int64_t)size % PAGE == 0; }

// mg_check saw that at least one of the two dimensions is contiguous. Where both are (vectors), the one that a GPU map
// takes.
static bool is_transposed(const mg_tensor *t) {
  size_t size = mg_dtype_size(t->dtype);
  bool plain = t->shape[1] <= 1 || t->stride[1] == 1, turned = t->shape[0] <= 1 || t->stride[0] == 1;
  return !plain || (turned && !regular(t->shape[0], t->stride[0], size) && regular(t->shape[1], t->stride[1], size));
}

static void map(mg_call *c, gmap *m, const mg_tensor *t, bool transposed, int box_rows) {
  (transposed ? mg_map_turned : mg_map_rows)(c, m, t, box_rows, C_BOX);
}

// Rows of tiles for which a wave of blocks covers about a square of out: it then reads least of a and b.
static int square_group(int sms, const mg_kernel_desc *d) {
  int rows = 1;
  while ((int64_t)(rows + 1) * (rows + 1) * d->tile_m <= (int64_t)sms * d->tile_n) rows++;
  return rows > (int)d->cluster ? rows / (int)d->cluster : 1;
}

mg_status mg_matmul(const mg_matmul_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_matmul, a)) return c.status;
  const bool trans_a = c.problem.trans_a = c.n.K > 0 && is_transposed(a->a),
             trans_b = c.problem.trans_b = c.n.K > 0 && is_transposed(a->b);
  if (!mg_choose(&c)) return c.status;
  const mg_kernel_desc *d = c.desc;
  const int64_t m_blocks = mg_ceil_div(c.n.M, (int64_t)d->tile_m * d->cluster),
                n_blocks = mg_ceil_div(c.n.N, d->tile_n);
  gemm_params p = {.bias = a->bias ? a->bias->data : NULL, .m = (int)c.n.M,
                   .n = (int)c.n.N, .k = (int)c.n.K, .activation = a->activation,
                   .tasks = mg_tasks(&c, m_blocks * n_blocks, "tiles"), .m_blocks = (int)m_blocks,
                   .n_blocks = (int)n_blocks,
                   .sweep_rows = square_group(c.context.sms, d)};
  // K = 0: the kernel reads only outside of this.
  const mg_tensor nothing = {.data = a->out->data, .dtype = a->out->dtype, .dims = 2, .shape = {1, 1},
                             .stride = {0, 1}};
  map(&c, &p.a, c.n.K ? a->a : &nothing, trans_a, BLOCK_K);
  map(&c, &p.b, c.n.K ? a->b : &nothing, trans_b, trans_b ? d->tile_n / (int)d->cluster : BLOCK_K);
  mg_map_rows(&c, &p.c, a->out, C_BOX, C_BOX);
  return mg_run_resident(&c, &p, p.tasks);
}
