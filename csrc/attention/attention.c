// Host half of attention's forward: checks what the arguments have to agree on, picks the kernel, fills its parameters, launches it.
#include "attention/attention_problem.h"

// Heads in a section of the causal forward, whose tasks run longest first: k and v in a quarter of the L2, since both halves of the chip keep a
// copy; at least 8, for the last section must balance the multiprocessors; few enough that loads of one section run beside products of the last.
static int forward_section(const mg_context *c, int64_t bytes, int64_t heads) {
  return attention_even_section(at_least(8, at_most(c->sms / 4, c->l2_bytes * 2 / 7 / at_least(1, bytes))), heads);
}
static mg_status check_workspace16(const char *op, const mg_tensor *workspace) {
  if (!workspace || (workspace->shape[0] >= 16 && !((uintptr_t)workspace->data & 15))) return MG_OK;
  return mg_fail(MG_VALUE, "%s: workspace has %lld bytes at %p, expected 16 bytes, 16-byte aligned", op, (long long)workspace->shape[0], workspace->data);
}
static const float *floats(const mg_tensor *t) { return t ? t->data : NULL; }

// Forward of arguments that mg_check has seen. descale: of q, k and v of 8 bits, or NULL.
static mg_status forward(mg_op which, const mg_tensor *out, const mg_tensor *lse, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v,
                         const mg_tensor *workspace, const mg_tensor *const *descale, const mg_attention_options *options, mg_stream stream) {
  const char *const op = mg_op_name(which), *const names[] = {"q_descale", "k_descale", "v_descale"};
  attention_shape x = {0};
  mg_status status = attention_read(&x, op, q, k, v, options);
  if (!status) status = attention_check_starts(&x, op, options->features);
  const int64_t factors[] = {x.batch, x.k_heads};
  if (!status) status = attention_check_shape(op, "out", out, 4, x.out);
  if (!status && lse) status = attention_check_shape(op, "lse", lse, 3, x.out);
  if (!status && lse) status = attention_check_contiguous(op, "lse", lse);
  if (!status) status = check_workspace16(op, workspace);
  for (int i = 0; descale && !status && i < 3; i++)
    if (descale[i]) status = attention_check_shape(op, names[i], descale[i], 2, factors);
  if (status) return status;
  mg_context c;
  const mg_kernel *row;
  if ((status = mg_context_open(&c, q, stream))) return status;
  mg_problem problem = attention_problem_of(&x, options, q, c.sms);
  if (options->features && options->features->sink) problem.features = (int)at_least(FEATURES_PACKED, problem.features);
  if ((status = mg_select(&row, which, &problem, &c))) return status;
  if (x.q_heads * x.out[0] * x.q_total == 0) return MG_OK;
  if (x.k_total == 0 || x.batch * x.q_rows == 0) {   // no keys; or packed, and no sequence with rows
    status = mg_is_empty(out) ? MG_OK : attention_fill(&c, out, 0);
    if (status || !lse) return status;
    const bool sink = options->features && options->features->sink && x.batch * x.q_rows > 0;
    if (!sink) return attention_fill(&c, lse, 0xff800000u);   // -inf
    k = v = out;   // lse becomes the sink: the kernel knows how, and sees no key of these zeros
  }
  if (x.dv == 0) return mg_fail(MG_UNSUPPORTED, "%s: v has head dimension 0, accepted are 1 to 256", op);
  const mg_kernel_desc *desc = mg_desc(row);
  attention_fp8_params all = {.fwd = {
    .lse = lse ? lse->data : NULL, .q_blocks = (int)ceil_div(x.q_rows, desc->tile_m), .batch = (int)x.batch, .q_heads = (int)x.q_heads,
    .group = (int)(x.q_heads / x.k_heads), .q_total = (int)x.q_total, .k_rows = (int)x.k_rows,
    .diagonal = attention_upper_diagonal(&x, options), .scale_log2 = attention_log2_scale(&x), .features = attention_features_of(&x, options->features),
    .out = out->data, .out_row = out->stride[2], .out_head = out->stride[1], .out_columns = (int)x.dv}};
  if (descale) {
    all.q_descale = floats(descale[0]);
    all.k_descale = floats(descale[1]);
    all.v_descale = floats(descale[2]);
    all.k_heads = (int)x.k_heads;
  }
  attention_fwd_params *p = &all.fwd;   // what a row without descales takes, at the same address
  int64_t tasks = (int64_t)p->q_blocks * x.batch * x.q_heads, size = (int64_t)mg_dtype_size(q->dtype);
  if (tasks > INT32_MAX / 2) return mg_fail(MG_VALUE, "%s: %lld row blocks, at most 2^30 are accepted", op, (long long)tasks);
  p->tasks = (int)tasks;
  p->l2_heads = p->diagonal != NO_DIAGONAL ? forward_section(&c, problem.span * (x.d + x.dv) * size / p->group, x.batch * x.q_heads) : 1;
  int cols = descale && problem.d > 64 ? 128 : 64;   // of a panel of the row's tiles, see tile/copy.h
  if ((status = attention_map(&p->q, &c, "attention: q", q, 64, cols)) || (status = attention_map(&p->k, &c, "attention: k", k, desc->tile_n, cols)) ||
      (status = attention_map(&p->v, &c, "attention: v", v, descale ? 64 : desc->tile_n, cols)) || (status = attention_map(&p->o, &c, "attention: out", out, 64, 64)))
    return status;
  int64_t blocks = attention_grid(&c, row, tasks);
  if (workspace && c.persistent && tasks > blocks) {
    p->counter = workspace->data;
    if ((status = mg_fill(&c, p->counter, 0, sizeof(int), 1))) return status;
  }
  return mg_launch(&c, row, p, blocks);
}

mg_status mg_attention_fwd(const mg_tensor *out, const mg_tensor *lse, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v,
                           const mg_tensor *workspace, const mg_attention_options *options, mg_stream stream) {
  const mg_attention_features none = {0}, *f = options->features ? options->features : &none;
  mg_status status = mg_check_by_hand(MG_OP_attention_fwd, (const mg_tensor *[]){out, lse, q, k, v, workspace, f->sink, f->slopes, f->q_start, f->k_start});
  return status ? status : forward(MG_OP_attention_fwd, out, lse, q, k, v, workspace, NULL, options, stream);
}

mg_status mg_attention_fwd_fp8(const mg_tensor *out, const mg_tensor *lse, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v,
                               const mg_tensor *workspace, const mg_tensor *q_descale, const mg_tensor *k_descale, const mg_tensor *v_descale,
                               const mg_attention_options *options, mg_stream stream) {
  const mg_tensor *const descale[] = {q_descale, k_descale, v_descale};
  mg_status status = mg_check_by_hand(MG_OP_attention_fwd_fp8, (const mg_tensor *[]){out, lse, q, k, v, workspace, q_descale, k_descale, v_descale});
  if (!status && options->features) status = mg_fail(MG_UNSUPPORTED, "attention: features are given, which exist for bfloat16 and float16, not for float8_e4m3fn");
  return status ? status : forward(MG_OP_attention_fwd_fp8, out, lse, q, k, v, workspace, descale, options, stream);
}
