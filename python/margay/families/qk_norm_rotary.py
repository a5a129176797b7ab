"""Norms of q's and k's rows, then the rotary embedding, then the cache: one pass over memory."""

from margay._shared import as_int32, check_rank, functions, gradients, integer, is_torch, number, of_row
from margay.families.rotary import offset_of, rows_of_positions, table

FAR = 2**30       # caches are shorter


def qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, *, eps=1e-6, interleaved=False, positions=None, offsets=None,
                   v=None, k_cache=None, v_cache=None, cache_seqlens=None, page_table=None, cache_batch_idx=None):
    """`rotary` of x / sqrt(mean of x^2 + eps) weight, of each row x of q and of k; in float32, rounded once. Returns
    (q, k). With k_cache, k and v go into the caches, in place, as `append_kv` writes them, and q alone is returned.

    q [B, T, H, D], k, v [B, T, HK, D], of any strides with a contiguous last dimension; bfloat16 or float16, on the CPU
    also float32. D is at most 256.
    q_weight, k_weight: [D], float32 or as q; None: that tensor is only turned. (Gemma's norm: 1 + its weight.)
    cos, sin, interleaved, positions, offsets: those of `rotary`. With a cache and no positions, step t of sequence b
        has row cache_seqlens[b] + t.
    k_cache, v_cache, page_table, cache_batch_idx: those of `append_kv`.
    cache_seqlens: how many keys the caches hold already: integers [B], or one. It stays as it is.

    PyTorch tensors; without a cache differentiable in q, k and the weights, by one kernel for all of them, whose
    results repeat bit by bit. With one, gradients are refused. NumPy arrays give NumPy arrays.
    """
    op = "qk_norm_rotary"
    torch_ = is_torch(op, "q", q)
    if k is not None:
        is_torch(op, "k", k)
    check_rank(op, "q", q, 4, "[B, T, H, D]")
    cos, sin, eps = table(op, "cos", cos), table(op, "sin", sin), number(op, "eps", eps)
    if not 0 <= eps < 2.0**127:
        raise ValueError(f"{op}: eps is {eps:g}, expected 0 or more")
    offset, offsets = offset_of(op, offsets)
    positions = rows_of_positions(op, positions, q, torch_)
    given = {"v": v, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens}
    absent = [name for name, t in given.items() if t is None]
    rest = q_weight, k_weight, cos, sin, positions, offsets
    if len(absent) == len(given) and page_table is None and cache_batch_idx is None:
        run = functions.get(op) or of_row(op)
        if k is None:
            return run(q, q[:, :, :0], q_weight, None, *rest[2:], offset, bool(interleaved), eps)[0]
        return run(q, k, *rest, offset, bool(interleaved), eps)
    if absent or k is None:
        raise TypeError(f"{op}: {(absent or ['k'])[0]} is None, expected a tensor: a cache wants k, v, k_cache, "
                        "v_cache and cache_seqlens")
    length, seqlens = _length(op, cache_seqlens)
    tensors = q, k, v, k_cache, v_cache, *rest, seqlens, page_table, cache_batch_idx
    numbers = length, offset, bool(interleaved), eps
    if torch_:
        from margay.families.qk_norm_rotary_torch import append

        return append(tensors, numbers)
    import numpy as np

    from margay import _C

    out = np.empty_like(q)
    _C.qk_norm_rotary_append(out, k_cache, v_cache, *tensors[:3], *tensors[5:], *numbers)
    return out


def _gradient(ctx, *grads):
    from margay.families.qk_norm_rotary_torch import gradient

    return gradient(ctx, *grads)


gradients["qk_norm_rotary"] = _gradient       # now: torch.compile may trace the first call


def _length(op, cache_seqlens):
    """(length of all sequences, tensor of lengths or None)"""
    if hasattr(cache_seqlens, "ndim") and cache_seqlens.ndim:
        return 0, as_int32(op, "cache_seqlens", cache_seqlens)
    length = integer(op, "cache_seqlens", cache_seqlens)
    if not 0 <= length < FAR:
        raise ValueError(f"{op}: cache_seqlens is {length}, expected 0 to what the cache holds")
    return length, None


def _explained(op, library, named, given):
    from margay._explain import explain_row

    forms = dict(given)
    if forms["k"] is None:
        forms["k"] = given["q"][:, :, :0]
    for name in ("cos", "sin"):
        forms[name] = table(op, name, given[name])
    notes, copied, backward = explain_row(op, library, dict(named), {
        name: t for name, t in forms.items() if name not in ("positions", "offsets", "interleaved", "eps")})
    return notes, copied, [] if given.get("k_cache") is not None else backward


EXPLAINED = {"qk_norm_rotary": _explained}
