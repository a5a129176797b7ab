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

// Every op only checks, but matmul and attention's forward, which launch. A workspace has 4 bytes for each row of q.
static mg_status check_only(mg_op op, const void *args) {
  mg_sizes n;
  return mg_check(op, args, &n, false);
}
#define mg_matmul mg_matmul_checked
#define mg_attention_fwd mg_attention_fwd_checked
#define OP(op, ...) mg_status mg_##op(const mg_##op##_args *a) { return check_only(MG_OP_##op, a); }
#include "ops.def"
#undef mg_matmul
#undef mg_attention_fwd
#define SPACE(op) \
  mg_status mg_##op##_workspace(size_t *bytes, const mg_##op##_args *a) { \
    mg_call c; \
    if (mg_begin_space(&c, MG_OP_##op, a)) *bytes = (size_t)c.n.NQ * 4; \
    return c.status; \
  }
#define OP(op, ...) __VA_ARGS__
#include "ops.def"
mg_status mg_matmul(const mg_matmul_args *a) {
  mg_call c;
  const params params = {.magic = 42};
  if (!mg_open(&c, MG_OP_matmul, a)) return c.status;
  return mg_run(&c, &params, 1);
}
mg_status mg_attention_fwd(const mg_attention_fwd_args *a) {
  mg_call c;
  const params params = {.magic = 42};
  if (!mg_begin(&c, MG_OP_attention_fwd, a)) return c.status;
  c.problem.d = c.n.K;
  c.problem.causal = a->causal;
  mg_choose(&c);
  return mg_run(&c, &params, c.n.BQ * c.n.H);
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
