// What the host halves of rotary and qk_norm_rotary have in common.
#pragma once
#include "rotary/rotary.h"
#include "runtime/runtime.h"

// Of a dimension that the first does not move along: 0.
static int64_t stride_of(const mg_tensor *t, int i) { return t->shape[i] > 1 ? t->stride[i] : 0; }
static rotary_rows rows_of(const mg_tensor *t) {
  return (rotary_rows){t->data, {stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)}};
}

// Eight columns of each of these, some of which may be NULL, may be one access. On the CPU that is no question, unless
// a tool asks for what the GPU does.
static bool in_eights(const mg_tensor *const *all, int count, const pairing *p) {
  if (all[0]->device == MG_CPU && !mg_intercepted()) return true;
  bool eights = p->pairs % 8 == 0 && p->width % 16 == 0;
  for (int k = 0; k < count && eights; k++) {
    if (!all[k] || mg_is_empty(all[k])) continue;
    eights &= (uintptr_t)all[k]->data % 16 == 0;
    for (int i = 0; i < all[k]->dims - 1; i++) eights &= stride_of(all[k], i) % 8 == 0;
  }
  return eights;
}

static int log2_above(int64_t n) {
  int log2 = 0;
  while ((int64_t)1 << log2 < n) log2++;
  return log2;
}
static int lanes_log2_of(const pairing *p) {
  return log2_above(mg_ceil_div(p->pairs, 8) + mg_ceil_div(p->width - 2 * p->pairs, 16));
}

// As many slots for a step as waste few rows of those in flight, rather more than fewer.
static rotary_side side_of(mg_call *c, const mg_tensor *in, const mg_tensor *out, int64_t heads, int tokens,
                           int slots_log2) {
  const int rows = c->desc->tile_m;
  rotary_side x = {.in = rows_of(in), .out = rows_of(out), .heads = mg_tasks(c, heads, "heads")};
  int64_t least = INT64_MAX;
  for (int log2 = 0; log2 <= slots_log2; log2++) {
    const int64_t pass = (int64_t)rows << log2, taken = mg_ceil_div(heads, pass) * pass;
    if (log2 && taken > least + least / 8) continue;
    least = mg_min(least, taken);
    x.heads_log2 = log2;
  }
  x.blocks = (int)mg_ceil_div(tokens, (int64_t)1 << (slots_log2 - x.heads_log2));
  return x;
}
