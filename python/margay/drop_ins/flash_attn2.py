"""The functions of flash-attn 2 with their names, arguments, layouts and return values, on CUDA and CPU tensors.

    from margay.flash_attn import flash_attn_func          # instead of: from flash_attn import flash_attn_func

q [B, Nq, Hq, D], k [B, Nk, Hk, D], v [B, Nk, Hk, Dv], or packed rows [T, H, D] with cu_seqlens int32 [B + 1]; bfloat16
or float16, on the CPU also float32. Causal masks and windows are aligned to the bottom right. `return_attn_probs` gives
(out, lse, S_dmask): lse float32 [B, Hq, Nq] or [Hq, T]; S_dmask is None without dropout, else the softmax [B, Hq, Nq,
Nk] (of packed rows [B, Hq, max_seqlen_q, max_seqlen_k], 0 behind a sequence's end), negative where dropped; no kernel
stores it, PyTorch computes it again, for tests. What no kernel computes goes to PyTorch, with a FallbackWarning.
"""

import sys

import torch

from margay import dropout_mask
from margay.drop_ins import bert_padding, kernel_or_torch, kvcache, torch_attention
from margay.drop_ins.bert_padding import pad_input, unpad_input
from margay.drop_ins.kvcache import check_layout as _check
from margay.drop_ins.kvcache import sequence_of as _sequence_of
from margay.drop_ins.stand_ins import StandIns, of_module
from margay.families.attention import attention_torch
from margay.families.attention.attention import check_starts, read_window

__version__ = "2.8.3"     # whose functions these are; programs ask for it


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """q [B, Nq, Hq, D], k [B, Nk, Hk, D], v [B, Nk, Hk, Dv] to [B, Nq, Hq, Dv]; Hq is a multiple of Hk."""
    return _dense("flash_attn_func", q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                  deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """qkv [B, N, 3, H, D] to [B, N, H, D]."""
    return _dense("flash_attn_qkvpacked_func", *_unbind("flash_attn_qkvpacked_func", "qkv", qkv, 2, 3), dropout_p,
                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                  return_attn_probs)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """q [B, Nq, Hq, D], kv [B, Nk, 2, Hk, D] to [B, Nq, Hq, D]."""
    return _dense("flash_attn_kvpacked_func", q, *_unbind("flash_attn_kvpacked_func", "kv", kv, 2, 2), dropout_p,
                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                  return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None):
    """Packed rows q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv] to [Tq, Hq, Dv].

    block_table int32 [B, pages]: k and v are [pages, page size, Hk, D]; their rows are copied in order first."""
    if block_table is not None:
        _check("flash_attn_varlen_func", "[pages, page size, heads, head dim]", k=k, v=v)
        _check("flash_attn_varlen_func", "[batch, pages]", block_table=block_table)
        _check("flash_attn_varlen_func", "[batch + 1]", cu_seqlens_k=cu_seqlens_k)
        k, v = (_rows_of_pages(t, block_table, cu_seqlens_k) for t in (k, v))
    return _packed("flash_attn_varlen_func", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                   softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):
    """qkv [T, 3, H, D] to [T, H, D]."""
    return _packed("flash_attn_varlen_qkvpacked_func", *_unbind("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 1, 3),
                   cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
                   softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """q [Tq, Hq, D], kv [Tk, 2, Hk, D] to [Tq, Hq, D]."""
    return _packed("flash_attn_varlen_kvpacked_func", q, *_unbind("flash_attn_varlen_kvpacked_func", "kv", kv, 1, 2),
                   cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                   window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None,
                            causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None,
                            num_splits=0, return_softmax_lse=False):
    """q [B, Nq, Hq, D] against a cache, to [B, Nq, Hq, D]; forward only.

    k_cache, v_cache [Bc, N, Hk, D], or [pages, any page size, Hk, D] with block_table int32 [B, pages]. k, v [B, Nnew,
    Hk, D] are written behind cache_seqlens, int or int32 [B], first; all checks come before that. rotary_cos,
    rotary_sin [rows, rotary dim / 2] rotate k from row cache_seqlens on, and q too, or all of q at row cache_seqlens
    where neither causal nor a window orders its rows. cache_batch_idx int32 [B]: the cache of each sequence, or with
    block_table its row of the table. cache_leftpad int32 [B]: first row of each cache that counts; a copy of the
    caches' rows is attended to.
    """
    op = "flash_attn_with_kvcache"
    out, lse = kvcache.with_kvcache(op, q, k_cache, v_cache, k, v, rotary=(rotary_cos, rotary_sin, rotary_interleaved),
                                    cache_seqlens=cache_seqlens,
                                     rotary_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
                                    cache_leftpad=cache_leftpad, page_table=block_table,
                                     return_lse=return_softmax_lse, causal=causal, scale=softmax_scale,
                                    window=pair(op, window_size), softcap=softcap,
                                     alibi_slopes=alibi_slopes, num_splits=num_splits)
    return (out, lse) if return_softmax_lse else out


def install_as_flash_attn():
    """Let `import flash_attn` and `import flash_attn_interface` find these functions, until `.disable()` or the end of
    a `with` block.

    What a program has imported before keeps what it has. The package's metadata is not imitated: a program that asks
    importlib.metadata for flash-attn's version does not find it.
    """
    from margay.drop_ins import flash_attn3

    this = sys.modules[__name__]
    return StandIns(of_module("flash_attn", this, __version__, is_package=True),
                    of_module("flash_attn.flash_attn_interface", this, __version__),
                    of_module("flash_attn.bert_padding", bert_padding, __version__),
                    of_module("flash_attn_interface", flash_attn3, __version__))


# ---- common to flash-attn 2 and 3


def dense(op, q, k, v, return_lse, **options):
    """out, and lse or None; rows first."""
    _check(op, "[batch, rows, heads, head dim]", q=q, k=k, v=v)
    result = kernel_or_torch.attention(op, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                       return_lse=return_lse, **options)
    out, lse = result if return_lse else (result, None)
    return out.transpose(1, 2), lse


def check_packed(op, q, k, v, cu_seqlens_q, cu_seqlens_k):
    _check(op, "[rows, heads, head dim]", q=q, k=k, v=v)
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(t, torch.Tensor) or t.dtype != torch.int32:
            raise TypeError(f"{op}: {name} is {getattr(t, 'dtype', type(t).__name__)}, expected an int32 tensor")


def packed(op, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_lse, **options):
    """out, and lse or None. A largest length that is a tensor would have to be read on the host: the number of rows
    takes its place."""
    check_packed(op, q, k, v, cu_seqlens_q, cu_seqlens_k)
    max_seqlen_q, max_seqlen_k = (t.shape[0] if isinstance(n, torch.Tensor) else n
                                  for n, t in ((max_seqlen_q, q), (max_seqlen_k, k)))
    result = kernel_or_torch.attention_varlen(op, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                              return_lse=return_lse, **options)
    return result if return_lse else (result, None)


def pair(op, window_size):
    return read_window(window_size, op)


def _unbind(op, name, t, dim, parts):
    layout = ("[batch, rows, " if dim == 2 else "[rows, ") + f"{parts}, heads, head dim]"
    _check(op, layout, **{name: t})
    if t.shape[dim] != parts:
        raise ValueError(f"{op}: {name} has shape {list(t.shape)}, expected {layout}")
    return t.unbind(dim)


def _dense(op, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
           return_attn_probs):
    options = dict(causal=causal, scale=softmax_scale, window=pair(op, window_size), softcap=softcap,
                   alibi_slopes=alibi_slopes)
    seed = _drawn_seed() if return_attn_probs and dropout_p else None
    out, lse = dense(op, q, k, v, return_attn_probs, dropout_p=dropout_p, dropout_seed=seed,
                     deterministic=deterministic, **options)
    if seed is None:
        return (out, lse, None) if return_attn_probs else out
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    shape = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    kept = _kept(q, k, v, softmax_scale, dropout_p, seed, shape, shape)
    return out, lse, torch_attention.dropped_probabilities(q, k, kept, **options)


def _packed(op, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes, deterministic, return_attn_probs):
    options = dict(causal=causal, scale=softmax_scale, window=pair(op, window_size), softcap=softcap,
                   alibi_slopes=alibi_slopes)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    seed = _drawn_seed() if return_attn_probs and dropout_p else None
    out, lse = packed(op, q, k, v, *lengths, return_attn_probs, dropout_p=dropout_p, dropout_seed=seed,
                      deterministic=deterministic, **options)
    if seed is None:
        return (out, lse, None) if return_attn_probs else out
    lengths = cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)
    kept = _kept(q, k, v, softmax_scale, dropout_p, seed, (cu_seqlens_q.shape[0] - 1, q.shape[1], *lengths[2:]),
                 (1, q.shape[1], q.shape[0], k.shape[0]))
    return out, lse, torch_attention.dropped_probabilities_varlen(q, k, *lengths, kept, **options)


def _drawn_seed():
    return int(torch.randint(-2**63, 2**63 - 1, (1,)))      # as where the kernels' seed is drawn


def _kept(q, k, v, scale, dropout_p, seed, shape, plain_shape):
    """What the call has kept: the kernels' choice, or that of PyTorch where it has computed."""
    if kernel_or_torch.unsupported(q, k, v, scale, dropout_p):
        return torch_attention.kept(plain_shape, dropout_p, seed, q.device)
    return dropout_mask(dropout_p, seed, *shape).to(q.device)


def _rows_of_pages(pages, table, cu_seqlens):
    """The rows of all sequences behind one another: as many as the table could hold, for their number is not known on
    the host. What the table has behind a sequence's last page may be anything."""
    batch, columns = table.shape
    size = pages.shape[1]
    row = torch.arange(batch * columns * size, device=pages.device)
    sequence = _sequence_of(row, cu_seqlens)
    place = row - cu_seqlens[sequence]
    page = table[sequence, (place // max(size, 1)).clamp(0, columns - 1)].long().clamp(0, pages.shape[0] - 1)
    return pages[page, place % max(size, 1)]


def used_rows(op, name, used, starts, rows):
    """For the first `used` rows of each sequence, were they behind one another: their starts, which of `rows` rows
    comes to each place, and the place of each row. Those that are not used come behind the last sequence, where
    everything is 0, each to a place of its own: equal indices are slow in the backward."""
    if starts.ndim != 1:
        raise ValueError(f"{op}: cu_seqlens_{name} has shape {list(starts.shape)}, expected 1 dimension [batch + 1]")
    if not isinstance(used, torch.Tensor) or used.dtype != torch.int32 or used.shape != starts[1:].shape:
        raise TypeError(f"{op}: seqused_{name} is {list(used.shape) if isinstance(used, torch.Tensor) else ''} "
                        f"{getattr(used, 'dtype', type(used).__name__)}, "
                        f"expected an int32 tensor {list(starts[1:].shape)}")
    if not torch.compiler.is_compiling() and (attention_torch.CHECK_STARTS or not starts.is_cuda):
        check_starts(name, starts.tolist(), rows, rows)          # which C does not see
    if not used.numel():
        return starts, slice(None), slice(None)
    used = torch.minimum(used, starts.diff()).clamp(min=0)
    behind = torch.nn.functional.pad(used.cumsum(0), (1, 0))
    row = torch.arange(rows, device=starts.device)
    sequence = _sequence_of(row, starts)
    row_of_it = row - starts[sequence]
    before = behind[sequence] + row_of_it.clamp(min=0).minimum(used[sequence])       # used rows in front of this one
    place = torch.where(row_of_it < used[sequence], before, behind[-1] + row - before).clamp(0, max(rows - 1, 0))
    return behind.int(), torch.zeros_like(row).scatter(0, place, row), place


__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
           "install_as_flash_attn", "pad_input", "unpad_input"]
