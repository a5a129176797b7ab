"""flash_attn_with_kvcache of flash-attn 2 and FlashAttention-3, and attention in chunks: what the kernels do not take
is brought into a form that they do.

All checks come before the first write to a cache. Nothing here reads a tensor's values on the host.
"""

import math

import torch

from margay import _shared
from margay.drop_ins import kernel_or_torch, torch_attention
from margay.families.attention import decode_torch
from margay.drop_ins.fallback import fall_back

FLOAT8 = torch.float8_e4m3fn
CACHE_LAYOUT = "[batch, rows, heads, head dim]"


def with_kvcache(op, q, k_cache, v_cache, k, v, *, rotary, cache_seqlens, rotary_seqlens, cache_batch_idx,
                 cache_leftpad, page_table, return_lse, causal, window, qv=None, cu_seqlens_q=None,
                 cu_seqlens_k_new=None, max_seqlen_q=None, descales=None, attention_chunk=0, **options):
    """out, and lse or None. rotary: (cos, sin, interleaved); rotary_seqlens: where the rotation of new keys begins.
    descales: of 8-bit q, k and v, or None where these are refused."""
    if cu_seqlens_q is None:
        check_layout(op, CACHE_LAYOUT, q=q, k_cache=k_cache, v_cache=v_cache)
    else:
        check_layout(op, "[rows, heads, head dim]", q=q)
        check_layout(op, CACHE_LAYOUT, k_cache=k_cache, v_cache=v_cache)
    # attends to a copy of the caches' rows
    copied = cache_leftpad is not None or qv is not None or attention_chunk or is_8_bit(q)
    unusual = (copied or cu_seqlens_q is not None or cu_seqlens_k_new is not None or cache_batch_idx is not None or
               rotary[0] is not None)
    if (unusual or k is not None or v is not None or v_cache.shape[3] != k_cache.shape[3]) and (
            unusual or not _is_usual(q, k_cache, v_cache, k, v, cache_seqlens, page_table, descales, options)):
        _check_call(op, dict(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, qv=qv, rotary=rotary,
                             cache_seqlens=cache_seqlens, rotary_seqlens=rotary_seqlens,
                             cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, page_table=page_table,
                             cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q,
                             descales=descales, attention_chunk=attention_chunk, options=options))
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k_new is not None:
        rows = _rows_of_sequences(cu_seqlens_k_new, k.shape[0])
    if cu_seqlens_q is not None:
        padded, packed = _right_aligned(cu_seqlens_q, max_seqlen_q, q.shape[0])
        q, qv = padded(q), None if qv is None else padded(qv)
    if rotary[0] is not None:
        ordered = causal or window != (-1, -1) or attention_chunk
        first = rotary_seqlens
        if cu_seqlens_q is not None and ordered:
            first = rotary_seqlens + cu_seqlens_q.diff() - max_seqlen_q
        q = _rotate(q, rotary, first, ordered)
        if cu_seqlens_k_new is None:
            k = _rotate(k, rotary, rotary_seqlens, True)
        else:
            k = _rotate(k[:, None], rotary, _row_of(rows, rotary_seqlens), True)[:, 0]
    if k is not None:
        new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
        if cu_seqlens_k_new is None:
            _append(k_cache, v_cache, k, v, cache_seqlens, page_table, cache_batch_idx)
        else:
            _append_packed(k_cache, v_cache, k, v, rows, cache_seqlens, page_table, cache_batch_idx)
        cache_seqlens = cache_seqlens + new
    if copied:
        q, k_cache, v_cache, cache_seqlens = _copied(q, qv, k_cache, v_cache, cache_seqlens, page_table,
                                                     cache_batch_idx, cache_leftpad, descales)
        page_table = cache_batch_idx = None
        if options["scale"] is None:
            options["scale"] = q.shape[-1] ** -0.5
    if attention_chunk:
        out, lse = _chunked_cache(op, q, k_cache, v_cache, cache_seqlens, attention_chunk, causal=causal, window=window,
                                  return_lse=True, **options)
    else:
        result = kernel_or_torch.attention_decode(op, q, k_cache, v_cache, cache_seqlens=cache_seqlens,
                                                  page_table=page_table, cache_batch_idx=cache_batch_idx,
                                            causal=causal, window=window, return_lse=return_lse, **options)
        out, lse = result if return_lse else (result, None)
    if cu_seqlens_q is not None:
        out, lse = packed(out, 0.0), packed(lse.transpose(1, 2), -math.inf).mT if return_lse else None
    return out, lse if return_lse else None


def is_8_bit(t):
    return t.dtype == FLOAT8


def dequantized(t, descale, heads_dim=2):
    """bfloat16 of 8-bit t; descale [B, Hk] or None, for each group of t's heads."""
    if descale is None:
        return t.to(torch.bfloat16)
    descale = descale.float().repeat_interleave(t.shape[heads_dim] // max(descale.shape[1], 1), 1)
    return (t.float() * descale[:, None, :, None]).to(torch.bfloat16)


# ---- chunks: query i of a sequence is at e = i + Nk - Nq and sees keys of the chunk e // size only


def chunk_starts(start_q, length_q, start_k, length_k, size, most_k):
    """cu_seqlens of q and of k in which each chunk of a sequence is a sequence of its own: its last query stands at its
    last key, so that causal masks and windows stay where they are. In front of a sequence's first chunk come its
    queries in front of all keys, behind the last what lies up to the next start."""
    bound = torch.arange(0, most_k + size, size, device=start_k.device)
    bound_k = start_k[:, None] + torch.minimum(bound, length_k[:, None])
    bound_q = start_q[:, None] + torch.minimum((bound - (length_k - length_q)[:, None]).clamp(min=0), length_q[:, None])
    return (torch.cat((start[:, None], bound), 1).flatten()
            for start, bound in ((start_q, bound_q), (start_k, bound_k)))


def chunked(op, q, k, v, size, return_lse, **options):
    """out, and lse or None; q [B, Nq, Hq, D], k [B, Nk, Hk, D], v [B, Nk, Hk, Dv]."""
    batch, rows, heads, _ = q.shape
    keys = k.shape[1]
    if reason := kernel_or_torch.unsupported(q, k, v, options.get("scale")):
        fall_back(op, reason)
        own = torch.arange(keys - rows, keys, device=q.device) // size
        chunk = torch.arange(keys, device=q.device) // size == own[:, None]
        out, lse = torch_attention.attention(*(t.transpose(1, 2) for t in (q, k, v)), mask=chunk, return_lse=True,
                                             **options)
        return out.transpose(1, 2), lse if return_lse else None
    sequence = torch.arange(batch, device=q.device)
    starts = chunk_starts(sequence * rows, torch.full_like(sequence, rows), sequence * keys,
                          torch.full_like(sequence, keys), size, keys)
    starts = (t.int() if batch else t.new_zeros(1).int() for t in starts)
    out, lse = kernel_or_torch.attention_varlen(op, *(t.flatten(0, 1) for t in (q, k, v)), *starts,
                                                min(rows, max(size, rows - keys)), min(size, keys),
                                          return_lse=True, **options)
    return out.unflatten(0, (batch, rows)), lse.unflatten(1, (batch, rows)).transpose(0, 1) if return_lse else None


def chunked_starts(cu_seqlens_q, cu_seqlens_k, size, max_seqlen_k):
    """cu_seqlens of q and of k in which each chunk is a sequence."""
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    if not lengths_q.numel():
        return cu_seqlens_q, cu_seqlens_k
    return (t.int() for t in chunk_starts(cu_seqlens_q[:-1], lengths_q, cu_seqlens_k[:-1], lengths_k, size,
                                          max_seqlen_k))


def _chunked_cache(op, q, k, v, lengths, size, num_splits=0, **options):
    """k, v [B, N, Hk, D], of which each sequence has its first `lengths` rows."""
    batch, rows, heads, _ = q.shape
    keys = k.shape[1]
    sequence = torch.arange(batch, device=q.device)
    starts = chunk_starts(sequence * rows, torch.full_like(sequence, rows), sequence * keys,
                          lengths.long().clamp(0, keys), min(size, keys + rows + 1), keys)
    starts = (t.int() if batch else t.new_zeros(1).int() for t in starts)
    out, lse = kernel_or_torch.attention_varlen(op, *(t.flatten(0, 1) for t in (q, k, v)), *starts, rows, keys,
                                                **options)
    return out.unflatten(0, (batch, rows)), lse.unflatten(1, (batch, rows)).transpose(0, 1)


# ---- rows


def sequence_of(row, starts):
    """Which sequence each row belongs to; the last one behind it."""
    return torch.searchsorted(starts[1:].contiguous(), row.to(starts.dtype), right=True).clamp(max=starts.shape[0] - 2)


def _rows_of_sequences(starts, total):
    """Of each packed row its sequence, its place in it, and whether it belongs to one."""
    row = torch.arange(total, device=starts.device)
    if starts.shape[0] < 2:
        return row, row, row < 0
    sequence = sequence_of(row, starts)
    return sequence, row - starts[sequence], row < starts[-1]


def _row_of(rows, first):
    """Place of each packed row behind `first` rows of its sequence."""
    sequence, place, _ = rows
    return place + (first[sequence] if isinstance(first, torch.Tensor) and first.numel() else first
                    if isinstance(first, int) else 0)


def _right_aligned(starts, longest, total):
    """Functions from packed rows [T, ...] to [B, longest, ...], where each sequence's last row is the last, and back,
    with `nothing` where no row is."""
    batch = starts.shape[0] - 1
    row = (starts[1:, None] + torch.arange(-longest, 0, device=starts.device)).clamp(0, max(total - 1, 0))
    sequence, place, there = _rows_of_sequences(starts, total)
    place = place + longest - starts.diff()[sequence] if batch else place
    there = there & (place >= 0)

    def pad(t):
        return t[row] if total else t.new_zeros(batch, longest, *t.shape[1:])

    def pack(t, nothing):
        if not t.numel():
            return t.new_full((total, *t.shape[2:]), nothing)
        return t[sequence, place.clamp(0)].where(there[(...,) + (None,) * (t.ndim - 2)], nothing)
    return pad, pack


def _rotate(x, rotary, first, ordered):
    """x [B, N, H, D] rotated at rows first, first + 1, ... of cos and sin, or all at row `first` if not ordered."""
    cos, sin, interleaved = rotary
    row = torch.arange(x.shape[1], device=x.device) if ordered else x.new_zeros(x.shape[1], dtype=torch.int64)
    # what lies outside of a cache is dropped
    row = (row + (first[:, None] if isinstance(first, torch.Tensor) else first)).clamp(0, cos.shape[0] - 1)
    cos, sin = (t.float()[row].unsqueeze(-2) for t in (cos, sin))
    half = cos.shape[-1]
    turned, rest = x.split((2 * half, x.shape[-1] - 2 * half), -1)
    pairs = turned.float().unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1 if interleaved else -2).flatten(-2).to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def _append(k_cache, v_cache, k, v, cache_seqlens, page_table, cache_batch_idx):
    if is_8_bit(k):
        k_cache, v_cache, k, v = (t.view(torch.uint8) for t in (k_cache, v_cache, k, v))
    kernel_or_torch.append_kv(k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, page_table=page_table,
                              cache_batch_idx=cache_batch_idx)


def _append_packed(k_cache, v_cache, k, v, rows, cache_seqlens, page_table, cache_batch_idx):
    """Each row as a sequence with one new row: of its own cache, or with a table of the one page that it comes to."""
    if not k.shape[0]:
        return
    sequence, _, there = rows
    place = _row_of(rows, cache_seqlens).where(there, -1)
    if page_table is None:
        cache = (sequence if cache_batch_idx is None else cache_batch_idx[sequence]).int()
    else:
        size, columns = max(k_cache.shape[1], 1), page_table.shape[1]
        table = decode_torch.table_rows(page_table, cache_batch_idx)
        page = table[sequence, (place // size).clamp(0, max(columns - 1, 0))] if columns else place
        page_table, cache, place = page.where((place >= 0) & (place < size * columns),
                                              -1).int()[:, None], None, place % size
    _append(k_cache, v_cache, k[:, None], v[:, None], place.int(), page_table, cache)


def _copied(q, qv, k_cache, v_cache, lengths, page_table, cache_batch_idx, leftpad, descales):
    """q, keys, values [B, N, Hk, D] and their lengths."""
    batch = q.shape[0]
    if page_table is not None and cache_batch_idx is not None:
        page_table, cache_batch_idx = decode_torch.table_rows(page_table, cache_batch_idx), None
    caches = [t.view(torch.uint8) if is_8_bit(t) else t for t in (k_cache, v_cache)]
    keys, values = (decode_torch.cache_rows(t, page_table, cache_batch_idx, batch, leftpad) for t in caches)
    if lengths is None or isinstance(lengths, int):
        lengths = torch.full((batch,), keys.shape[1] if lengths is None else lengths, dtype=torch.int32,
                             device=q.device)
    lengths = lengths if leftpad is None else lengths - leftpad
    if is_8_bit(q):
        q, keys, values = (dequantized(t.view(FLOAT8), scale) for t, scale in zip((q, keys, values), descales))
        qv = None if qv is None else dequantized(qv, descales[0])
    if qv is not None:                       # scores are q k^T + qv v^T
        q, keys = torch.cat((q, qv), -1), torch.cat((keys, values), -1)
    return q, keys, values, lengths


# ---- checks


def check_layout(op, layout, **tensors):
    rank = layout.count(",") + 1
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{op}: {name} is {type(t).__name__}, expected torch.Tensor")
        if t.dim() != rank:
            raise ValueError(f"{op}: {name} has shape {list(t.shape)}, expected {rank} dimensions {layout}")


def _is_usual(q, k_cache, v_cache, k, v, seqlens, table, descales, options):
    """Whether _check_call would accept a call that brings no more than this: what programs ask for in every layer, a
    tenth of its time."""
    if (not (type(k) is type(v) is type(seqlens) is torch.Tensor) or
            table is not None and type(table) is not torch.Tensor or torch.is_grad_enabled()):
        return False
    shape, held, new, dtype, device, scale = q.shape, k_cache.shape, k.shape, q.dtype, q.device, options["scale"]
    return (v_cache.shape == held and v.shape == new and len(new) == 4 and seqlens.ndim == 1
            and new[0] == shape[0] == seqlens.shape[0] and new[2:] == held[2:] and shape[3] == held[3]
            and held[2] > 0 and shape[2] % held[2] == 0
            and dtype == k_cache.dtype == v_cache.dtype == k.dtype == v.dtype and dtype.is_floating_point
            and device == k_cache.device == v_cache.device == k.device == v.device == seqlens.device
            and seqlens.dtype == torch.int32
            and (held[0] >= shape[0] if table is None else table.dtype == torch.int32 and table.ndim == 2
                 and table.shape[0] == shape[0] and table.device == device)
            and max(held[0], held[1] if table is None else held[1] * table.shape[1]) < 1 << 30
            and (descales is None or all(t is None for t in descales))
            and (scale is None or type(scale) is float and math.isfinite(scale)) and options["softcap"] == 0.0
            and options["num_splits"] in (0, 1)
            and options.get("alibi_slopes") is None)


def _check_call(op, given):
    """Everything that the ops would refuse, and what they do not see."""
    q, k_cache, v_cache, k, v, qv = (given[name] for name in ("q", "k_cache", "v_cache", "k", "v", "qv"))
    cu_seqlens_q, cu_seqlens_k_new, table, seqlens = (given[name]
                                                      for name in ("cu_seqlens_q", "cu_seqlens_k_new", "page_table",
                                                                   "cache_seqlens"))
    packed_q, packed_k = cu_seqlens_q is not None, cu_seqlens_k_new is not None
    for name, t, packed in (("q", q, packed_q), ("k_cache", k_cache, False), ("v_cache", v_cache, False),
                            ("k", k, packed_k), ("v", v, packed_k), ("qv", qv, packed_q)):
        if t is None:
            continue
        check_layout(op, "[rows, heads, head dim]" if packed else CACHE_LAYOUT, **{name: t})
        if t.dtype != q.dtype:
            raise TypeError(f"{op}: {name} has dtype {_shared.dtype_name(t)}, expected {_shared.dtype_name(q)} (same "
                            "as q)")
        if t.device != q.device:
            raise ValueError(f"{op}: {name} is on {t.device}, expected {q.device} (where q is)")
        if torch.is_grad_enabled() and t.requires_grad:
            raise NotImplementedError(f"{op}: {name} requires a gradient, which this function does not have; call it "
                                      "under torch.no_grad()")
    if q.dtype == FLOAT8 and given["descales"] is None:
        kernel_or_torch.refuse_8_bits(op, q)
    if not q.dtype.is_floating_point:
        raise TypeError(f"{op}: q has dtype {_shared.dtype_name(q)}, expected bfloat16, float16 or float32")
    if packed_q:
        _check_tensor(op, "cu_seqlens_q", cu_seqlens_q, q, torch.int32, (None,), "[batch + 1]")
        if given["max_seqlen_q"] is None:
            raise ValueError(f"{op}: max_seqlen_q is None, expected an int where cu_seqlens_q is given")
        if _shared.integer(op, "max_seqlen_q", given["max_seqlen_q"]) < 0:
            raise ValueError(f"{op}: max_seqlen_q is {given['max_seqlen_q']}, expected 0 or more")
        if not cu_seqlens_q.numel():
            raise ValueError(f"{op}: cu_seqlens_q has shape [0], expected [batch + 1]")
    batch = cu_seqlens_q.shape[0] - 1 if packed_q else q.shape[0]
    indexed = given["cache_batch_idx"] is not None
    _check_tensor(op, "page_table", table, q, torch.int32, (None if indexed else batch, None), "[batch, pages]")
    caches, rows, heads, dim = k_cache.shape
    dim_v, total = v_cache.shape[3], rows if table is None else rows * table.shape[-1]
    _check_shape(op, "v_cache", v_cache, (caches, rows, heads, None), "same as k_cache but for the head dim")
    _check_shape(op, "q", q, (None,) * (q.dim() - 1) + (dim,), "the head dim of k_cache")
    if q.shape[-2] % heads if heads else q.shape[-2]:
        raise ValueError(f"{op}: q has {q.shape[-2]} heads and k_cache has {heads}, expected a multiple of k_cache's")
    _check_shape(op, "qv", qv, (*q.shape[:-1], dim_v), "q's, with the head dim of v_cache")
    if (k is None) != (v is None):
        raise ValueError(f"{op}: {'k' if k is None else 'v'} is None, expected a tensor (k and v are given together)")
    if k is None and packed_k:
        raise ValueError(f"{op}: k is None, expected a tensor where cu_seqlens_k_new is given")
    if k is not None:
        first = (None,) if packed_k else (batch, None)
        _check_shape(op, "k", k, (*first, heads, dim), "the batch, and k_cache's heads and head dim")
        _check_shape(op, "v", v, (*k.shape[:-1], dim_v), "k's, with the head dim of v_cache")
        if seqlens is None:
            raise ValueError(f"{op}: cache_seqlens is None, expected an int or a tensor where k is given")
        if packed_k:
            _check_tensor(op, "cu_seqlens_k_new", cu_seqlens_k_new, q, torch.int32, (batch + 1,), "[batch + 1]")
    for name in ("cache_seqlens", "rotary_seqlens"):
        if isinstance(given[name], torch.Tensor):
            _check_tensor(op, name, given[name], q, torch.int32, (batch,), "[batch]")
        elif given[name] is not None and not isinstance(given[name], int):
            raise TypeError(f"{op}: {name} is {type(given[name]).__name__}, expected an int or an int32 tensor")
    new = k.shape[1] if k is not None and not packed_k else 0
    if isinstance(seqlens, int) and not 0 <= seqlens <= total - new:
        raise ValueError(f"{op}: cache_seqlens is {seqlens}, expected 0 to {total - new} (what the cache "
                         f"holds{f', less the {new} rows of k' if new else ''})")
    for name in ("cache_batch_idx", "cache_leftpad"):
        _check_tensor(op, name, given[name], q, torch.int32, (batch,), "[batch]")
    if table is None and not indexed and caches < batch:
        raise ValueError(f"{op}: k_cache has shape {list(k_cache.shape)}, expected at least {batch} in dimension 0 "
                         "(the batch)")
    if max(caches, total) >= 1 << 30:
        raise ValueError(f"{op}: k_cache has {caches} parts and {total} rows a sequence, expected less than 2^30 of "
                         "both")
    _check_rotary(op, *given["rotary"][:2], k, q)
    _check_options(op, given, batch, q)


def _check_rotary(op, cos, sin, k, q):
    if cos is None:
        return
    if k is None or sin is None:
        raise ValueError(f"{op}: {'k' if k is None else 'rotary_sin'} is None, expected a tensor where rotary_cos is "
                         "given")
    for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(t, torch.Tensor) or not t.dtype.is_floating_point:
            raise TypeError(f"{op}: {name} is {getattr(t, 'dtype', type(t).__name__)}, expected a tensor of floats "
                            "[rows, rotary dim / 2]")
        if t.dim() != 2 or t.shape != cos.shape or 2 * t.shape[1] > q.shape[-1] or not t.shape[0]:
            raise ValueError(f"{op}: {name} has shape {list(t.shape)}, expected [rows, at most {q.shape[-1] // 2}], "
                             "the same for both")
        if t.device != q.device:
            raise ValueError(f"{op}: {name} is on {t.device}, expected {q.device} (where q is)")


def _check_options(op, given, batch, q):
    options, heads = given["options"], q.shape[-2]
    scale, softcap = (None if options[name] is None else _shared.number(op, name, options[name])
                      for name in ("scale", "softcap"))
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"{op}: softmax_scale is {scale:g}, expected a finite number")
    if softcap is None or not 0 <= softcap < math.inf:
        raise ValueError(f"{op}: softcap is {softcap}, expected 0 or a positive finite number")
    if not 0 <= _shared.integer(op, "num_splits", options["num_splits"]) <= 128:
        raise ValueError(f"{op}: num_splits is {options['num_splits']}, expected 0 (chosen) to 128")
    if _shared.integer(op, "attention_chunk", given["attention_chunk"]) < 0:
        raise ValueError(f"{op}: attention_chunk is {given['attention_chunk']}, expected 0 (none) or more")
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        _check_tensor(op, "alibi_slopes", slopes, q, torch.float32, (heads,) if slopes.ndim == 1 else (batch, heads),
                      "[heads of q] or [batch, heads of q]")
    descales = given["descales"] or ()
    for name, t in zip(("q_descale", "k_descale", "v_descale"), descales):
        if t is not None and not is_8_bit(q):
            raise NotImplementedError(f"{op}: {name} is given with {_shared.dtype_name(q)}, expected None (it is for "
                                      "float8_e4m3fn)")
        _check_tensor(op, name, t, q, torch.float32, (batch, given["k_cache"].shape[2]), "[batch, heads of k_cache]")


def _check_tensor(op, name, t, q, dtype, shape, meaning):
    if t is None:
        return
    if not isinstance(t, torch.Tensor) or t.dtype != dtype:
        found = f"a tensor of dtype {_shared.dtype_name(t)}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise TypeError(f"{op}: {name} is {found}, expected a tensor of dtype {str(dtype).removeprefix('torch.')}")
    if t.device != q.device:
        raise ValueError(f"{op}: {name} is on {t.device}, expected {q.device} (where q is)")
    _check_shape(op, name, t, shape, meaning)


def _check_shape(op, name, t, shape, meaning):
    if t is not None and (t.dim() != len(shape)
                          or any(want is not None and n != want for n, want in zip(t.shape, shape))):
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{op}: {name} has shape {list(t.shape)}, expected [{expected}] ({meaning})")
