// Margay's public C interface. Usable without Python: link the library, hand in tensor views, check the status.
// Every function runs on the device of its tensors and on the given stream, never synchronises and never allocates device memory.
#pragma once
#include "margay_types.h"
#ifdef __cplusplus
extern "C" {
#endif
#define MG_API __attribute__((visibility("default")))

// ---- ops by their rows in ops.def: a struct of arguments each, and a function that takes it. What is not named is absent, or zero:
//   mg_scaled_add(&(mg_scaled_add_args){.out = &out, .a = &a, .b = &b, .scale = 0.5f, .stream = stream})
#define TENSOR(name, role, dtype, ...) const mg_tensor *name;
#define NUM(type, name, value) type name;
#define OP(op, ...) \
  typedef struct mg_##op##_args { __VA_ARGS__ mg_stream stream; } mg_##op##_args; \
  MG_API mg_status mg_##op(const mg_##op##_args *);
#include "ops.def"
// The names of sizes that rows use.
#define MG_SIZES(X) X(B) X(T) X(H) X(G) X(P) X(M) X(N) X(K) X(V) X(V8) X(CHUNKS) X(R) X(STARTS) X(CUTS) X(N8) X(N2) X(FIT) X(SEG) X(LATER) X(SLOTS) X(STEPS) X(TRIPLE) X(TILES) X(HEADS) X(WIDE) X(SPLIT) X(PARTS) X(HG) X(HH) X(SWEEP)

// ---- ops with an interface by hand. What attention computes besides; zeros and NULL: nothing of it.
typedef struct mg_attention_features {
  bool window;              // query i sees keys i + Nk - Nq - left .. i + Nk - Nq + right; negative: no bound. Besides causal, not instead of it
  int64_t left, right;
  float softcap;            // scaled scores x become softcap tanh(x / softcap)
  float dropout;            // probability of a softmax probability to become 0, rounded to a multiple of 1 / 65536 below 1; the others grow by 1 / (1 - it)
  uint64_t seed;            // of dropout: what is dropped depends on seed, batch, head, row and key alone
  const mg_tensor *sink;    // fp32 [Hq]: a logit of each head that is part of the softmax's sum (and of lse) and has no value
  const mg_tensor *slopes;  // fp32 [1 or B, Hq], ALiBi: score -= slope |i + Nk - Nq - j|
  const mg_tensor *q_start, *k_start;   // int32 [B + 1], both or none: sequence b is rows q_start[b] .. q_start[b + 1] - 1 of q, out and lse, which
                                        // then have batch 1, and keys k_start[b] .. of k and v. Checked on the CPU only. Rows behind the last
                                        // sequence become 0 in outputs and gradients, and -inf in lse
  int64_t max_q, max_k;     // with these: at least the longest sequence's rows and keys
} mg_attention_features;

typedef struct mg_attention_options {
  float scale;              // softmax scale; 0 means 1 / sqrt(D)
  bool causal;              // bottom-right aligned: query i sees keys up to i + Nk - Nq
  bool deterministic;       // backward: bitwise equal results, at some cost
  const mg_attention_features *features;   // NULL: none
} mg_attention_options;

// out [B, Hq, Nq, Dv] = softmax(scale q k^T) v, q [B, Hq, Nq, D], k [B, Hk, Nk, D], v [B, Hk, Nk, Dv], Hq a multiple of Hk.
// lse [B, Hq, Nq] fp32 contiguous, natural-log log-sum-exp of the scaled scores, or NULL. Rows without keys: 0, lse -inf (or the sink).
// workspace: 16 bytes (any contents, uint8 on the same device), with which a GPU balances uneven work better, or NULL.
MG_API mg_status mg_attention_fwd(const mg_tensor *out, const mg_tensor *lse, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v,
                                  const mg_tensor *workspace, const mg_attention_options *options, mg_stream stream);
// The same of q, k and v of MG_E4M3, out MG_BF16; without features, and there is no backward. q_descale, k_descale, v_descale [B, Hk] fp32, positive
// or 0: what q, k and v are to be multiplied by; NULL: 1. The queries' factor too is that of their key head. Probabilities are rounded to e4m3.
MG_API mg_status mg_attention_fwd_fp8(const mg_tensor *out, const mg_tensor *lse, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v,
                                      const mg_tensor *workspace, const mg_tensor *q_descale, const mg_tensor *k_descale, const mg_tensor *v_descale,
                                      const mg_attention_options *options, mg_stream stream);
// Bytes of workspace that mg_attention_bwd wants for these shapes (any contents, 256-byte aligned, uint8 on the same device).
MG_API mg_status mg_attention_bwd_workspace(size_t *bytes, const mg_tensor *q, const mg_tensor *k, const mg_tensor *v,
                                            const mg_attention_options *options);
// Gradients of mg_attention_fwd for q, k and v. dlse [B, Hq, Nq] fp32 is the gradient of lse, or NULL.
MG_API mg_status mg_attention_bwd(const mg_tensor *dq, const mg_tensor *dk, const mg_tensor *dv, const mg_tensor *dout, const mg_tensor *q,
                                  const mg_tensor *k, const mg_tensor *v, const mg_tensor *out, const mg_tensor *lse, const mg_tensor *dlse,
                                  const mg_tensor *workspace, const mg_attention_options *options, mg_stream stream);
// Attention of new queries to a cache of keys and values, for generation.
typedef struct mg_decode_options {
  float scale;              // softmax scale; 0 means 1 / sqrt(D)
  bool causal;              // bottom-right aligned to each sequence's length: the last query sees all keys
  int window_left, window_right;   // query i of a sequence of n keys is at e = n - Nq + i and sees keys e - left to e + right; -1: no limit
  float softcap;            // scores become softcap tanh(score / softcap); 0: they stay
  int length;               // of all sequences where cache_seqlens is NULL; -1: the whole cache
  int splits;               // parts that the keys are cut into, computed in parallel; 0: chosen
} mg_decode_options;

// q, out [B, Nq, Hq, D]; k_cache, v_cache [B or more, N, Hk, D] or, with a page table, [pages, page size, Hk, D]; Hq a multiple of Hk.
// cache_seqlens [B], page_table [B, n], cache_batch_idx [B]: int32 on the same device, or NULL. Page j of a sequence holds its keys from
// j * page size on; the page size is a multiple of 16 (mg_append_kv: any). cache_batch_idx, not with pages: the cache that a sequence has, else cache i. Lengths above the cache's size
// count as that size; a page or cache that does not exist reads as zeros.
// sink [Hq] fp32: a logit that enters the denominator only. alibi_slopes [B or 1, Hq] fp32: score -= slope |e - key|. Both may be NULL.
// lse [B, Hq, Nq] fp32 contiguous, natural-log log-sum-exp (sink included), or NULL. Rows without keys: 0, lse -inf (or the sink).
// workspace: as many bytes as mg_attention_decode_workspace says, NULL where that is 0.
MG_API mg_status mg_attention_decode(const mg_tensor *out, const mg_tensor *lse, const mg_tensor *q, const mg_tensor *k_cache, const mg_tensor *v_cache,
                                     const mg_tensor *cache_seqlens, const mg_tensor *page_table, const mg_tensor *cache_batch_idx,
                                     const mg_tensor *sink, const mg_tensor *alibi_slopes, const mg_tensor *workspace,
                                     const mg_decode_options *options, mg_stream stream);
MG_API mg_status mg_attention_decode_workspace(size_t *bytes, const mg_tensor *q, const mg_tensor *k_cache, const mg_tensor *page_table,
                                               const mg_decode_options *options);
// k, v [B, new, Hk, D] into the caches, in place, behind cache_seqlens (NULL: behind `length`) keys. What would land outside of a cache is dropped.
MG_API mg_status mg_append_kv(const mg_tensor *k_cache, const mg_tensor *v_cache, const mg_tensor *k, const mg_tensor *v, const mg_tensor *cache_seqlens,
                              const mg_tensor *page_table, const mg_tensor *cache_batch_idx, int length, mg_stream stream);

// Text of this thread's last failure: op, argument, what was found, what is accepted. Valid until the thread's next call.
MG_API const char *mg_last_error(void);
// Threads the CPU backend uses; 0 returns to the default (OMP_NUM_THREADS where it is 1 to 1024, else the cores of the process).
MG_API void mg_set_num_threads(int n);
MG_API int mg_num_threads(void);
// Load the kernels of `op` ("attention_fwd", ...; NULL: all) onto a device now instead of at the first call.
MG_API mg_status mg_preload(const char *op, int device_index);

#ifdef __cplusplus
}
#endif
