// Host half of matmul: out = activation(a b + bias).
#include "kernels/gemm.h"
#include "runtime/runtime.h"

enum { BLOCK_K = 64, C_BOX = 64, PAGE = 16 };   // BLOCK_K: gemm.cu's BK; PAGE: bytes that rows of a GPU map must be a multiple of

// A matrix as it lies in memory: rows of contiguous elements, `step` elements apart.
typedef struct stored { void *data; int64_t rows, cols, step; } stored;

// A row step that a map takes; a single row needs none.
static bool regular(int64_t rows, int64_t step, size_t size) { return rows <= 1 || step * (int64_t)size % PAGE == 0; }

// mg_check saw that at least one of the two dimensions is contiguous. Where both are (vectors), the one that a GPU map takes.
static bool is_transposed(const mg_tensor *t) {
  size_t size = mg_dtype_size(t->dtype);
  bool plain = t->shape[1] <= 1 || t->stride[1] == 1, turned = t->shape[0] <= 1 || t->stride[0] == 1;
  return !plain || (turned && !regular(t->shape[0], t->stride[0], size) && regular(t->shape[1], t->stride[1], size));
}
static stored stored_as(const mg_tensor *t, bool transposed) {
  return (stored){t->data, t->shape[transposed], t->shape[!transposed], t->stride[transposed]};
}

static mg_status check_shapes(const mg_tensor *out, const mg_tensor *a, const mg_tensor *b, const mg_tensor *bias, int activation) {
  long long m = a->shape[0], k = a->shape[1], n = b->shape[1];
  if (b->shape[0] != k)
    return mg_fail(MG_VALUE, "matmul: b has %lld rows, expected %lld (as many as a has columns)", (long long)b->shape[0], k);
  if (out->shape[0] != m || out->shape[1] != n)
    return mg_fail(MG_VALUE, "matmul: out has shape [%lld, %lld], expected [%lld, %lld] (rows of a, columns of b)",
                   (long long)out->shape[0], (long long)out->shape[1], m, n);
  if (bias && bias->shape[0] != n)
    return mg_fail(MG_VALUE, "matmul: bias has %lld elements, expected %lld (as many as b has columns)", (long long)bias->shape[0], n);
  if (activation < MG_NONE || activation > MG_SILU)
    return mg_fail(MG_VALUE, "matmul: activation is %d, expected %d to %d (see mg_activation)", activation, MG_NONE, MG_SILU);
  return MG_OK;
}

static mg_status map(gmap *m, const mg_context *c, const char *name, mg_dtype dtype, stored s, int box_rows) {
  return mg_map(m, c, name, s.data, dtype, (int64_t[4]){1, 1, s.rows, s.cols}, (int64_t[4]){0, 0, s.step, 1}, box_rows, C_BOX);
}

// Rows of tiles for which a wave of blocks covers about a square of out: it then reads least of a and b.
static int square_group(int sms, const mg_kernel_desc *d) {
  int rows = 1;
  while ((int64_t)(rows + 1) * (rows + 1) * d->tile_m <= (int64_t)sms * d->tile_n) rows++;
  return rows > (int)d->cluster ? rows / (int)d->cluster : 1;
}

static mg_status plan(gemm_params *p, const mg_context *c, const mg_kernel_desc *d) {
  int64_t cluster_m = (int64_t)d->tile_m * d->cluster;
  int64_t m_blocks = (p->m + cluster_m - 1) / cluster_m, n_blocks = (p->n + (int64_t)d->tile_n - 1) / d->tile_n;
  if (m_blocks * n_blocks > INT32_MAX / 2)
    return mg_fail(MG_UNSUPPORTED, "matmul: out [%d, %d] has more than 2^30 tiles of %lld x %d", p->m, p->n, (long long)cluster_m,
                   d->tile_n);
  p->m_blocks = (int)m_blocks;
  p->n_blocks = (int)n_blocks;
  p->tasks = p->m_blocks * p->n_blocks;
  p->sweep_rows = square_group(c->sms, d);
  return MG_OK;
}

mg_status mg_matmul(const mg_tensor *out, const mg_tensor *a, const mg_tensor *b, const mg_tensor *bias, mg_activation activation,
                    mg_stream stream) {
  mg_status status;
  mg_context c;
  const mg_kernel *row;
  const mg_tensor *args[] = {out, a, b, bias};
  if ((status = mg_check(MG_OP_matmul, args)) || (status = check_shapes(out, a, b, bias, activation))) return status;
  int64_t m = out->shape[0], n = out->shape[1], k = a->shape[1];
  if (m == 0 || n == 0) return MG_OK;
  if ((status = mg_context_open(&c, out, stream))) return status;
  mg_problem problem = {.dtype = out->dtype, .gpu = c.device == MG_CUDA, .m = m, .n = n, .k = k, .sms = c.sms,
                        .trans_a = k > 0 && is_transposed(a), .trans_b = k > 0 && is_transposed(b)};
  if ((status = mg_select(&row, MG_OP_matmul, &problem, &c))) return status;
  const mg_kernel_desc *d = mg_desc(row);
  gemm_params p = {.bias = bias ? bias->data : NULL, .m = (int)m, .n = (int)n, .k = (int)k, .activation = (int)activation};
  stored nothing = {out->data, 1, 1, 0};   // k = 0: the kernel reads only outside of it
  stored sa = k ? stored_as(a, problem.trans_a) : nothing, sb = k ? stored_as(b, problem.trans_b) : nothing;
  int b_box = problem.trans_b ? d->tile_n / (int)d->cluster : BLOCK_K;
  if ((status = plan(&p, &c, d)) || (status = map(&p.a, &c, "matmul: a", a->dtype, sa, BLOCK_K)) ||
      (status = map(&p.b, &c, "matmul: b", b->dtype, sb, b_box)) ||
      (status = map(&p.c, &c, "matmul: out", out->dtype, stored_as(out, false), C_BOX)))
    return status;
  int64_t clusters = (int64_t)c.sms * d->blocks_per_sm / d->cluster;   // resident at a time; the CPU's pool balances single tasks
  if (!c.persistent || clusters > p.tasks) clusters = p.tasks;
  return mg_launch(&c, row, &p, (clusters ? clusters : 1) * d->cluster);
}
