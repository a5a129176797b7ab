"""The functions of FlashAttention-3 with their names, arguments, layouts and return values, on CUDA and CPU tensors.

    from margay.flash_attn_interface import flash_attn_func      # instead of: from flash_attn_interface import flash_attn_func

As `margay.flash_attn`, but return_attn_probs gives (out, lse). num_splits, pack_gqa, sm_margin and scheduler_metadata tune FlashAttention-3's kernels
and change no result: they are accepted and not used, except num_splits with a cache. NotImplementedError names an argument that is not supported.
torch.float8_e4m3fn tensors, with q_descale, k_descale, v_descale float32 [B, Hk] or None, are taken by flash_attn_func and flash_attn_qkvpacked_func, to
bfloat16 and without gradient.
"""

import torch

from margay import attention, flash_attn


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
                    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
    """q [B, Nq, Hq, D], k [B, Nk, Hk, D], v [B, Nk, Hk, Dv] to [B, Nq, Hq, Dv]."""
    op = "flash_attn_func"
    _refuse(op, qv=qv, attention_chunk=attention_chunk or None)
    return _dense(op, q, k, v, (q_descale, k_descale, v_descale), return_attn_probs, scale=softmax_scale, causal=causal, window=flash_attn.pair(op, window_size),
                  softcap=softcap, deterministic=deterministic)


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
                              attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False):
    """qkv [B, N, 3, H, D], or [B, N, Hq + 2 Hk, D] with num_heads_q = Hq, to [B, N, Hq, D]."""
    op = "flash_attn_qkvpacked_func"
    _refuse(op, attention_chunk=attention_chunk or None)
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    else:
        if num_heads_q is None:
            raise ValueError(f"{op}: num_heads_q is None, expected a number where qkv has shape {list(qkv.shape)}")
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, heads_k, heads_k), 2)
    return _dense(op, q, k, v, (q_descale, k_descale, v_descale), return_attn_probs, scale=softmax_scale, causal=causal, window=flash_attn.pair(op, window_size),
                  softcap=softcap, deterministic=deterministic)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
                           causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
                           softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
    """Packed rows q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv] to [Tq, Hq, Dv]. seqused_q, seqused_k int32 [B]: so many rows of each sequence are used,
    the others give 0 and an lse of -inf. They are copied to be behind one another first."""
    op = "flash_attn_varlen_func"
    _refuse(op, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk or None)
    places = None
    if seqused_q is not None or seqused_k is not None:
        flash_attn.check_packed(op, q, k, v, cu_seqlens_q, cu_seqlens_k)
    if seqused_q is not None:
        cu_seqlens_q, rows, places = flash_attn.used_rows(op, "q", seqused_q, cu_seqlens_q, q.shape[0])
        q = q[rows]
    if seqused_k is not None:
        if v.shape[0] != k.shape[0]:
            raise ValueError(f"{op}: v has {v.shape[0]} rows, expected {k.shape[0]} (same as k)")
        cu_seqlens_k, rows, _ = flash_attn.used_rows(op, "k", seqused_k, cu_seqlens_k, k.shape[0])
        k, v = k[rows], v[rows]
    out, lse = flash_attn.packed(op, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_attn_probs, scale=softmax_scale,
                                 causal=causal, window=flash_attn.pair(op, window_size), softcap=softcap, deterministic=deterministic)
    if places is not None:
        out, lse = out[places], lse[:, places] if return_attn_probs else None
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
                            cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1),
                            attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,
                            sm_margin=0, return_softmax_lse=False):
    """As margay.flash_attn.flash_attn_with_kvcache; pages of any size. rotary_seqlens int32 [B]: where the rotation begins, cache_seqlens if None.
    With return_softmax_lse: (out, lse, None, None)."""
    op = "flash_attn_with_kvcache"
    _refuse(op, qv=qv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
            attention_chunk=attention_chunk or None)
    out, lse = flash_attn.with_kvcache(op, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens,
                                       cache_seqlens if rotary_seqlens is None else rotary_seqlens, cache_batch_idx, cache_leftpad, page_table,
                                       rotary_interleaved, return_softmax_lse, causal=causal, scale=softmax_scale, window=flash_attn.pair(op, window_size),
                                       softcap=softcap, num_splits=num_splits)
    return (out, lse, None, None) if return_softmax_lse else out


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """out_partial float32 [S, B, N, H, D] over S parts of the keys with lse_partial [S, B, N, H], to out [B, N, H, D] and lse [B, N, H]."""
    lse = torch.logsumexp(lse_partial, 0)
    weights = torch.exp(lse_partial - lse.masked_fill(lse == -torch.inf, 0.0))
    result = (weights[..., None] * out_partial).sum(0).to(out_partial.dtype if out_dtype is None else out_dtype)
    return (result if out is None else out.copy_(result)), lse


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
                           headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0,
                           causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0):
    """None: there is nothing to prepare."""
    return None


def _dense(op, q, k, v, descales, return_lse, **options):
    if getattr(q, "dtype", None) != torch.float8_e4m3fn:
        _refuse(op, **dict(zip(("q_descale", "k_descale", "v_descale"), descales)))
        out = flash_attn.dense(op, q, k, v, return_lse, **options)
        return out if return_lse else out[0]
    q_descale, k_descale, v_descale = descales
    result = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
                       return_lse=return_lse, **options)
    return (result[0].transpose(1, 2), result[1]) if return_lse else result.transpose(1, 2)


def _refuse(op, **arguments):
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{op}: {name} is given, which is not implemented; expected its default")


__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
           "get_scheduler_metadata"]
