// Host half of attention's forward: picks the kernel, fills its parameters, launches it.
#include "attention/attention_problem.h"

// Heads in a section of the causal forward, whose tasks run longest first: k and v in a quarter of the L2, since both
// halves of the chip keep a copy; at least 8, for the last section must balance the multiprocessors; few enough that
// loads of one section run beside products of the last.
static int forward_section(const mg_context *c, int64_t bytes, int64_t heads) {
  return attention_even_section(mg_max(8, mg_min(c->sms / 4, c->l2_bytes * 2 / 7 / mg_max(1, bytes))), heads);
}

// f: what is asked, by the names of the row without descales; 8 bits: all parameters beside `fwd`, else NULL.
static mg_status forward(mg_call *c, const mg_attention_fwd_args *f, attention_fp8_params *all, bool eight_bits) {
  attention_shape x = {ATTENTION_ASKED(f)};
  attention_read(c, &x);
  attention_check_starts(c, &x);
  mg_space(c, f->workspace, f->workspace ? 16 : 0);
  if (x.sink) c->problem.features = (int)mg_max(FEATURES_PACKED, c->problem.features);
  if (!mg_choose(c)) return c->status;
  const mg_tensor *k = f->k, *v = f->v;
  if (x.k_total == 0 || x.batch * x.q_rows == 0) {   // no keys; or packed, and no sequence with rows
    attention_fill(c, f->out, 0);
    if (!f->lse) return c->status;
    if (!x.sink || x.batch * x.q_rows == 0) return attention_fill(c, f->lse, 0xff800000u), c->status;   // -inf
    k = v = f->out;   // lse becomes the sink: the kernel knows how, and sees no key of these zeros
  }
  const mg_kernel_desc *desc = c->desc;
  const int64_t q_blocks = mg_ceil_div(x.q_rows, desc->tile_m), tasks = q_blocks * x.batch * x.q_heads;
  attention_fwd_params *p = &all->fwd;   // what a row without descales takes, at the same address
  *p = (attention_fwd_params){
    .lse = mg_data(f->lse), .tasks = mg_tasks(c, tasks, "row blocks"), .q_blocks = (int)q_blocks,
    .batch = (int)x.batch, .q_heads = (int)x.q_heads,
    .group = (int)(x.q_heads / x.k_heads), .q_total = (int)x.q_total, .k_rows = (int)x.k_rows,
    .diagonal = attention_upper_diagonal(&x),
    .scale_log2 = attention_log2_scale(&x), .features = attention_features_of(&x), .l2_heads = 1,
    .out = f->out->data, .out_row = f->out->stride[2], .out_head = f->out->stride[1], .out_columns = (int)x.dv};
  if (p->diagonal != NO_DIAGONAL) {
    const int64_t bytes = c->problem.span * (x.d + x.dv) * (int64_t)mg_dtype_size(c->problem.dtype) / p->group;
    p->l2_heads = forward_section(&c->context, bytes, x.batch * x.q_heads);
  }
  const int cols = eight_bits && c->problem.d > 64 ? 128 : 64;   // of a panel of the row's tiles, see tile/copy.h
  mg_map_rows(c, &p->q, f->q, 64, cols);
  mg_map_rows(c, &p->k, k, desc->tile_n, cols);
  mg_map_rows(c, &p->v, v, eight_bits ? 64 : desc->tile_n, cols);
  mg_map_rows(c, &p->o, f->out, 64, 64);
  const int64_t blocks = mg_resident(c, tasks);
  if (f->workspace && c->context.persistent && tasks > blocks) {
    p->counter = f->workspace->data;
    mg_set(c, p->counter, 0, sizeof(int), 1);
  }
  return mg_run(c, all, blocks);
}

mg_status mg_attention_fwd(const mg_attention_fwd_args *a) {
  mg_call c;
  attention_fp8_params all;
  return mg_begin(&c, MG_OP_attention_fwd, a) ? forward(&c, a, &all, false) : c.status;
}

mg_status mg_attention_fwd_fp8(const mg_attention_fwd_fp8_args *a) {
  mg_call c;
  if (!mg_begin(&c, MG_OP_attention_fwd_fp8, a)) return c.status;
  attention_fp8_params all = {.q_descale = mg_data(a->q_descale), .k_descale = mg_data(a->k_descale),
                              .v_descale = mg_data(a->v_descale),
                              .k_heads = (int)c.n.HK};
  mg_attention_fwd_args f = mg_attention_fwd_defaults;
  f.out = a->out, f.lse = a->lse, f.q = a->q, f.k = a->k, f.v = a->v, f.workspace = a->workspace,
  f.scale = a->scale, f.causal = a->causal;
  return forward(&c, &f, &all, true);
}
