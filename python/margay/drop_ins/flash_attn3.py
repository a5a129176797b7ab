"""The functions of FlashAttention-3 with their names, arguments, layouts and return values, on CUDA and CPU tensors.

    from margay.flash_attn_interface import flash_attn_func      # instead of: from flash_attn_interface import
    flash_attn_func

As `margay.flash_attn`, but return_attn_probs gives (out, lse). num_splits, pack_gqa, sm_margin and scheduler_metadata
tune FlashAttention-3's kernels and change no result: they are accepted and not used, except num_splits with a cache.

attention_chunk: query i is at e = i + Nk - Nq and sees keys of the chunk e // attention_chunk only; 0 for no chunks. qv
[B, Nq, Hq, Dv]: scores are scale (q k^T + qv v^T), the scale by default 1 / sqrt(D + Dv); it is q and k that are joined
with qv and v first. torch.float8_e4m3fn tensors, with q_descale, k_descale, v_descale float32 [B, Hk] or None, give
bfloat16, whose backward raises NotImplementedError; where 8 bits have no kernel (packed rows, a cache, every option but
causal) they are multiplied out to bfloat16 first.
"""

import torch

from margay import _shared, attention
from margay.drop_ins import flash_attn2, kvcache


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False, sm_margin=0, return_attn_probs=False):
    """q [B, Nq, Hq, D], k [B, Nk, Hk, D], v [B, Nk, Hk, Dv] to [B, Nq, Hq, Dv]."""
    op = "flash_attn_func"
    return _dense(op, q, k, v, qv, (q_descale, k_descale, v_descale), attention_chunk, return_attn_probs,
                  scale=softmax_scale, causal=causal, window=flash_attn2.pair(op, window_size), softcap=softcap,
                  deterministic=deterministic)


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
                              window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False,
                              num_heads_q=None, sm_margin=0, return_attn_probs=False):
    """qkv [B, N, 3, H, D], or [B, N, Hq + 2 Hk, D] with num_heads_q = Hq, to [B, N, Hq, D]."""
    op = "flash_attn_qkvpacked_func"
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    else:
        if num_heads_q is None:
            raise ValueError(f"{op}: num_heads_q is None, expected a number where qkv has shape {list(qkv.shape)}")
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, heads_k, heads_k), 2)
    return _dense(op, q, k, v, None, (q_descale, k_descale, v_descale), attention_chunk, return_attn_probs,
                  scale=softmax_scale, causal=causal, window=flash_attn2.pair(op, window_size), softcap=softcap,
                  deterministic=deterministic)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                           seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                           v_descale=None, window_size=(-1, -1), attention_chunk=0,
                           softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
                           return_attn_probs=False):
    """Packed rows q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv] to [Tq, Hq, Dv]. seqused_q, seqused_k int32 [B]: so many
    rows of each sequence are used, the others give 0 and an lse of -inf. They are copied to be behind one another
    first."""
    op = "flash_attn_varlen_func"
    places, descales = None, (q_descale, k_descale, v_descale)
    chunk = _chunk(op, attention_chunk)
    is_8_bit, inputs = getattr(q, "dtype", None) == kvcache.FLOAT8, (q, k, v)
    if seqused_q is not None or seqused_k is not None or qv is not None or chunk or is_8_bit:
        flash_attn2.check_packed(op, q, k, v, cu_seqlens_q, cu_seqlens_k)
    _check_descales(op, q, descales)
    if is_8_bit:
        starts = cu_seqlens_q, cu_seqlens_k, cu_seqlens_k
        qv = None if qv is None else _dequantized(qv, q_descale, cu_seqlens_q)
        q, k, v = (_dequantized(t, scale, at) for t, scale, at in zip((q, k, v), descales, starts))
    q, k, softmax_scale = _joined(op, q, k, v, qv, softmax_scale)
    if seqused_q is not None:
        cu_seqlens_q, rows, places = flash_attn2.used_rows(op, "q", seqused_q, cu_seqlens_q, q.shape[0])
        q = q[rows]
    if seqused_k is not None:
        if v.shape[0] != k.shape[0]:
            raise ValueError(f"{op}: v has {v.shape[0]} rows, expected {k.shape[0]} (same as k)")
        cu_seqlens_k, rows, _ = flash_attn2.used_rows(op, "k", seqused_k, cu_seqlens_k, k.shape[0])
        k, v = k[rows], v[rows]
    if chunk:
        max_seqlen_k = k.shape[0] if isinstance(max_seqlen_k, torch.Tensor) else max_seqlen_k
        cu_seqlens_q, cu_seqlens_k = kvcache.chunked_starts(cu_seqlens_q, cu_seqlens_k, chunk, max_seqlen_k)
        max_seqlen_k = min(chunk, max_seqlen_k)
    out, lse = flash_attn2.packed(op, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                  return_attn_probs, scale=softmax_scale,
                                 causal=causal, window=flash_attn2.pair(op, window_size), softcap=softcap,
                                  deterministic=deterministic)
    if places is not None:
        out, lse = out[places], lse[:, places] if return_attn_probs else None
    out = _without_gradient(out, *inputs) if is_8_bit else out
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
                            cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                            scheduler_metadata=None, num_splits=0, pack_gqa=None,
                            sm_margin=0, return_softmax_lse=False):
    """As margay.flash_attn.flash_attn_with_kvcache. rotary_seqlens int32 [B]: where the rotation begins, cache_seqlens
    if None. With cu_seqlens_q int32 [B + 1] and max_seqlen_q, q is packed rows [Tq, Hq, D], and so are the results;
    with cu_seqlens_k_new, k and v are packed. With return_softmax_lse: (out, lse, None, None)."""
    op = "flash_attn_with_kvcache"
    out, lse = kvcache.with_kvcache(op, q, k_cache, v_cache, k, v, rotary=(rotary_cos, rotary_sin, rotary_interleaved),
                                    cache_seqlens=cache_seqlens,
                                     rotary_seqlens=cache_seqlens if rotary_seqlens is None else rotary_seqlens,
                                    cache_batch_idx=cache_batch_idx,
                                     cache_leftpad=cache_leftpad, page_table=page_table, return_lse=return_softmax_lse,
                                    causal=causal,
                                     window=flash_attn2.pair(op, window_size), qv=qv, cu_seqlens_q=cu_seqlens_q,
                                    cu_seqlens_k_new=cu_seqlens_k_new,
                                     max_seqlen_q=max_seqlen_q, descales=(q_descale, k_descale, v_descale),
                                    attention_chunk=attention_chunk,
                                     scale=softmax_scale, softcap=softcap, num_splits=num_splits)
    return (out, lse, None, None) if return_softmax_lse else out


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """out_partial float32 [S, B, N, H, D] over S parts of the keys with lse_partial [S, B, N, H], to out [B, N, H, D]
    and lse [B, N, H]."""
    lse = torch.logsumexp(lse_partial, 0)
    weights = torch.exp(lse_partial - lse.masked_fill(lse == -torch.inf, 0.0))
    result = (weights[..., None] * out_partial).sum(0).to(out_partial.dtype if out_dtype is None else out_dtype)
    return (result if out is None else out.copy_(result)), lse


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
                           qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                           cache_leftpad=None, page_size=None, max_seqlen_k_new=0,
                           causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0,
                           pack_gqa=None, sm_margin=0):
    """None: there is nothing to prepare."""
    return None


def _dense(op, q, k, v, qv, descales, attention_chunk, return_lse, **options):
    kvcache.check_layout(op, kvcache.CACHE_LAYOUT, q=q, k=k, v=v)
    _check_descales(op, q, descales)
    chunk = _chunk(op, attention_chunk)
    is_8_bit, inputs = q.dtype == k.dtype == v.dtype == kvcache.FLOAT8, (q, k, v)
    if is_8_bit:
        q, k, v = (t.detach() for t in inputs)
        if (qv is None and not chunk and options["window"] == (-1, -1) and not options["softcap"] and
                q.shape[3] == v.shape[3]):
            result = attention(*(t.transpose(1, 2) for t in (q, k, v)), q_descale=descales[0], k_descale=descales[1],
                               v_descale=descales[2], causal=options["causal"], scale=options["scale"],
                               return_lse=return_lse)
            out, lse = result if return_lse else (result, None)
            out = _without_gradient(out.transpose(1, 2), *inputs)
            return (out, lse) if return_lse else out
        qv = None if qv is None else kvcache.dequantized(qv, descales[0])
        q, k, v = (kvcache.dequantized(t, scale) for t, scale in zip((q, k, v), descales))
    q, k, options["scale"] = _joined(op, q, k, v, qv, options["scale"])
    out, lse = kvcache.chunked(op, q, k, v, chunk, return_lse,
                               **options) if chunk else flash_attn2.dense(op, q, k, v, return_lse, **options)
    out = _without_gradient(out, *inputs) if is_8_bit else out
    return (out, lse) if return_lse else out


def _joined(op, q, k, v, qv, scale):
    """q, k and scale with which scores are scale (q k^T + qv v^T)."""
    if qv is None:
        return q, k, scale
    if not isinstance(qv, torch.Tensor):
        raise TypeError(f"{op}: qv is {type(qv).__name__}, expected torch.Tensor")
    if qv.shape != (*q.shape[:-1], v.shape[-1]):
        raise ValueError(f"{op}: qv has shape {list(qv.shape)}, expected {[*q.shape[:-1], v.shape[-1]]} (q's, with the "
                         "head dim of v)")
    if qv.dtype != q.dtype:
        raise TypeError(f"{op}: qv has dtype {str(qv.dtype).removeprefix('torch.')}, expected "
                        f"{str(q.dtype).removeprefix('torch.')} (same as q)")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{op}: v has shape {list(v.shape)}, expected {[*k.shape[:-1], v.shape[-1]]} (same as k but "
                         "for the head dim)")
    scale = (q.shape[-1] + v.shape[-1]) ** -0.5 if scale is None else scale
    return torch.cat((q, qv), -1), torch.cat((k, v), -1), scale


class _WithoutGradient(torch.autograd.Function):
    """out, whose backward says that there is none."""

    @staticmethod
    def forward(out, *inputs):
        return out

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("the backward of attention of float8_e4m3fn tensors is not implemented; expected "
                                  "bfloat16 or float16")


def _without_gradient(out, *inputs):
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return _WithoutGradient.apply(out, *inputs)
    return out


def _dequantized(t, descale, starts):
    """bfloat16 of packed rows; descale [B, Hk]."""
    t = t.detach()
    if descale is None or starts.shape[0] < 2:
        return t.to(torch.bfloat16)
    sequence = kvcache.sequence_of(torch.arange(t.shape[0], device=t.device), starts)
    return kvcache.dequantized(t[None].transpose(0, 1), descale.to(t.device)[sequence])[:, 0]


def _chunk(op, attention_chunk):
    size = _shared.integer(op, "attention_chunk", attention_chunk)
    if size < 0:
        raise ValueError(f"{op}: attention_chunk is {size}, expected 0 (none) or more")
    return size


def _check_descales(op, q, descales):
    for name, t in zip(("q_descale", "k_descale", "v_descale"), descales):
        if t is not None and getattr(q, "dtype", None) != kvcache.FLOAT8:
            raise NotImplementedError(f"{op}: {name} is given with "
                                      f"{str(getattr(q, 'dtype', None)).removeprefix('torch.')}, expected None "
                                      "(it is for float8_e4m3fn)")


__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_with_kvcache", "get_scheduler_metadata"]
