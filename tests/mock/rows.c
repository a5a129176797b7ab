// What tests/mock/kernel_rows.def names: descriptions whose CPU function counts, and images that hold just the kernel's
// name. Also the ops that module.c names, without arithmetic: they check, choose and launch, and so show what becomes
// of a call's arguments.
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include "runtime/runtime.h"

typedef struct params { int magic; atomic_int *hits; } params;   // hits[i]: how often block i ran

_Thread_local size_t mg_machine_lacks;   // as fiber.h's
size_t mock_lacks;                       // bytes that a run finds missing

static void run(const void *raw, int first, int blocks) {
  const params *p = raw;
  if (!blocks) mg_machine_lacks = mock_lacks;
  if (p->hits && first < blocks) atomic_fetch_add(&p->hits[first], 1);
}

#define DESC(name, shared, threads, cluster, dependent, followed) \
  {shared, threads, cluster, 1, sizeof(params), dependent, followed, 64, 64, run}
#define ROW(name, shared, threads, cluster, dependent, followed) \
  extern const mg_kernel_desc name##_base, name##_avx2, name##_avx512; \
  extern const unsigned char name##_image[], name##_image_end[]; \
  const mg_kernel_desc name##_base = DESC(name, shared, threads, cluster, dependent, followed); \
  const mg_kernel_desc name##_avx2 = DESC(name, shared, threads, cluster, dependent, followed); \
  const mg_kernel_desc name##_avx512 = DESC(name, shared, threads, cluster, dependent, followed); \
  const unsigned char name##_image[] = #name; \
  const unsigned char name##_image_end[] = "";
ROW(plain, 1024, 128, 1, 0, 0)
ROW(clustered, 200000, 384, 2, 1, 1)
ROW(on_cpu, 0, 128, 1, 0, 0)
ROW(huge, 300000, 128, 1, 0, 0)
ROW(forward, 100000, 256, 1, 0, 0)
ROW(forward_fp32, 0, 256, 1, 0, 0)
extern const mg_kernel_desc misnamed_base;
const mg_kernel_desc misnamed_base = DESC(misnamed, 0, 32, 1, 0, 0);
extern const unsigned char misnamed_image[], misnamed_image_end[];
const unsigned char misnamed_image[] = "another";
const unsigned char misnamed_image_end[] = "";

static mg_status launch(mg_op op, const mg_tensor *t, mg_problem p, mg_stream stream, int64_t blocks) {
  mg_context c;
  const mg_kernel *row;
  const params params = {.magic = 42};
  mg_status status = mg_context_open(&c, t, stream);
  p.dtype = t->dtype, p.gpu = t->device == MG_CUDA;
  if (status || (status = mg_select(&row, op, &p, &c))) return status;
  return mg_launch(&c, row, &params, blocks);
}

mg_status mg_attention_fwd(const mg_tensor *out, const mg_tensor *lse, const mg_tensor *q, const mg_tensor *k,
                           const mg_tensor *v, const mg_tensor *workspace, const mg_attention_options *options,
                           mg_stream stream) {
  const mg_tensor *const args[15] = {out, lse, q, k, v, workspace};   // the optional ones behind these: absent
  mg_status status = mg_check_by_hand(MG_OP_attention_fwd, args);
  if (status) return status;
  return launch(MG_OP_attention_fwd, q, (mg_problem){.d = q->shape[3], .causal = options->causal}, stream,
                q->shape[0] * q->shape[1]);
}

mg_status mg_attention_fwd_fp8(const mg_tensor *out, const mg_tensor *lse, const mg_tensor *q, const mg_tensor *k,
                               const mg_tensor *v, const mg_tensor *workspace, const mg_tensor *q_descale,
                               const mg_tensor *k_descale, const mg_tensor *v_descale,
                               const mg_attention_options *options, mg_stream stream) {
  (void)options, (void)stream;
  return mg_check_by_hand(MG_OP_attention_fwd_fp8,
                          (const mg_tensor *const[15]){out, lse, q, k, v, workspace, q_descale, k_descale, v_descale});
}

mg_status mg_attention_bwd_workspace(size_t *bytes, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v,
                                     const mg_attention_options *options) {
  (void)options;
  if (!q || !k || !v) return mg_fail(MG_TYPE, "attention_backward: q, k or v is missing, expected tensors");
  *bytes = (size_t)q->shape[2] * 4;
  return MG_OK;
}

mg_status mg_attention_bwd(const mg_tensor *dq, const mg_tensor *dk, const mg_tensor *dv, const mg_tensor *dout,
                           const mg_tensor *q, const mg_tensor *k, const mg_tensor *v, const mg_tensor *out,
                           const mg_tensor *lse, const mg_tensor *dlse, const mg_tensor *workspace,
                           const mg_attention_options *options, mg_stream stream) {
  // the optional ones behind these: absent
  const mg_tensor *const args[15] = {dq, dk, dv, dout, q, k, v, out, lse, dlse, workspace};
  (void)options, (void)stream;
  return mg_check_by_hand(MG_OP_attention_bwd, args);
}

mg_status mg_attention_decode(const mg_tensor *out, const mg_tensor *lse, const mg_tensor *q, const mg_tensor *k_cache,
                              const mg_tensor *v_cache, const mg_tensor *cache_seqlens, const mg_tensor *page_table,
                              const mg_tensor *cache_batch_idx, const mg_tensor *sink, const mg_tensor *alibi_slopes,
                              const mg_tensor *workspace, const mg_decode_options *options, mg_stream stream) {
  const mg_tensor *const args[] = {
      out, lse, q, k_cache, v_cache, cache_seqlens, page_table, cache_batch_idx, sink, alibi_slopes, workspace};
  (void)options, (void)stream;
  return mg_check_by_hand(MG_OP_attention_decode, args);
}

mg_status mg_attention_decode_workspace(size_t *bytes, const mg_tensor *q, const mg_tensor *k_cache,
                                        const mg_tensor *page_table, const mg_decode_options *options) {
  (void)q, (void)k_cache, (void)page_table, (void)options;
  *bytes = 0;
  return MG_OK;
}

mg_status mg_append_kv(const mg_tensor *k_cache, const mg_tensor *v_cache, const mg_tensor *k, const mg_tensor *v,
                       const mg_tensor *cache_seqlens, const mg_tensor *page_table, const mg_tensor *cache_batch_idx,
                       int length, mg_stream stream) {
  const mg_tensor *const args[] = {k_cache, v_cache, k, v, cache_seqlens, page_table, cache_batch_idx};
  (void)length, (void)stream;
  return mg_check_by_hand(MG_OP_append_kv, args);
}

// Rows that name their sizes: matmul launches, the others only check.
static mg_status check_only(mg_op op, const void *args) {
  mg_sizes n;
  return mg_check(op, args, &n);
}
#define mg_matmul mg_matmul_checked
#define OP(op, ...) mg_status mg_##op(const mg_##op##_args *a) { return check_only(MG_OP_##op, a); }
#include "ops.def"
#undef mg_matmul
mg_status mg_matmul(const mg_matmul_args *a) {
  mg_call c;
  const params params = {.magic = 42};
  if (!mg_open(&c, MG_OP_matmul, a)) return c.status;
  return mg_run(&c, &params, 1);
}

size_t mg_explain_splits(const mg_problem *p, const mg_context *c, char *buf, size_t n) {
  (void)p, (void)c, (void)buf, (void)n;
  return 0;
}

// For ctypes: launch a row by its number.
mg_status test_launch(int row, int device, int index, void *stream, const void *params, int64_t blocks) {
  mg_context c;
  const mg_tensor t = {.device = (mg_device)device, .device_index = index};
  mg_status status = mg_context_open(&c, &t, stream);
  return status ? status : mg_launch(&c, &mg_kernels[row], params, blocks);
}
mg_status test_fill(int device, void *data, uint32_t word, size_t word_bytes, int64_t n) {
  mg_context c;
  const mg_tensor t = {.device = (mg_device)device};
  mg_status status = mg_context_open(&c, &t, (void *)0x30);
  return status ? status : mg_fill(&c, data, word, word_bytes, n);
}
mg_status test_map(int device, void *data, int dtype, const int64_t *shape, const int64_t *stride, int rows, int cols,
                   gmap_cpu *view) {
  mg_context c;
  gmap m;
  const mg_tensor t = {.device = (mg_device)device};
  mg_status status = mg_context_open(&c, &t, NULL);
  if (!status) status = mg_map(&m, &c, "test: x", data, (mg_dtype)dtype, shape, stride, rows, cols);
  memcpy(view, &m, sizeof *view);
  return status;
}
