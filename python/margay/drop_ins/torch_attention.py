"""Attention in plain PyTorch: every option of the kernels, any dtype, differentiable to any order. Memory is quadratic
in the rows.

The drop-ins fall back to it. 16-bit inputs are computed in float32. Nothing here reads a tensor's values on the host.
"""

import math

import torch
import torch.nn.functional as F

from margay.families.attention.attention import drawn_dropout
from margay.families.attention.decode_torch import cache_rows, table_rows


def attention(q, k, v, *, causal=False, scale=None, window=(-1, -1), softcap=0.0, sink=None, alibi_slopes=None,
              dropout_p=0.0, dropout_seed=None, return_lse=False, deterministic=False, mask=None):
    """As `margay.attention`. mask: bool (True: visible) or float (added to the scores), broadcastable to [B, Hq, Nq,
    Nk]."""
    simple = not (softcap or return_lse
                  or dropout_p) and sink is None and alibi_slopes is None and tuple(window) == (-1, -1)
    if simple and (not causal or mask is None and q.shape[2] == k.shape[2]):
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale,
                                              enable_gqa=q.shape[1] != k.shape[1])
    distance = _distance(q.shape[2], k.shape[2], q.device)
    slopes = None if alibi_slopes is None else alibi_slopes[..., None, None]
    out, lse = _attend(q, k, v, distance, None, slopes, causal, scale, window, softcap, sink, dropout_p, dropout_seed,
                       mask)
    return (out, lse) if return_lse else out


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal=False, scale=None,
                     window=(-1, -1), softcap=0.0, sink=None, alibi_slopes=None, dropout_p=0.0, dropout_seed=None,
                     return_lse=False, deterministic=False):
    """As `margay.attention_varlen`; rows behind the last sequence are 0."""
    rows = _packed_rows(q, k, cu_seqlens_q, cu_seqlens_k, alibi_slopes)
    heads_first = [t.transpose(0, 1)[None] for t in (q, k, v)]
    out, lse = _attend(*heads_first, *rows, causal, scale, window, softcap, sink, dropout_p, dropout_seed)
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse else out


def attention_decode(q, k_cache, v_cache, *, cache_seqlens=None, page_table=None, cache_batch_idx=None, causal=False,
                     scale=None, window=(-1, -1), softcap=0.0, sink=None, alibi_slopes=None, num_splits=0,
                     return_lse=False):
    """As `margay.attention_decode`."""
    if page_table is not None:
        page_table, cache_batch_idx = table_rows(page_table, cache_batch_idx), None
    k, v = (cache_rows(t, page_table, cache_batch_idx, q.shape[0]).transpose(1, 2) for t in (k_cache, v_cache))
    lengths = _lengths(cache_seqlens, k, q.shape[0]).clamp(0, k.shape[2])
    column = torch.arange(k.shape[2], device=q.device)
    row = torch.arange(q.shape[1], device=q.device) + (lengths - q.shape[1])[:, None]
    distance = (column - row[..., None])[:, None]
    allowed = (column < lengths[:, None])[:, None, None]
    slopes = None if alibi_slopes is None else alibi_slopes[..., None, None]
    out, lse = _attend(q.transpose(1, 2), k, v, distance, allowed, slopes, causal, scale, window, softcap, sink)
    out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def append_kv(k_cache, v_cache, k, v, *, cache_seqlens, page_table=None, cache_batch_idx=None):
    """As `margay.append_kv`."""
    batch, new = k.shape[:2]
    if k.numel() == 0 or k_cache.numel() == 0:
        return
    caches, size = k_cache.shape[:2]
    lengths = _lengths(cache_seqlens, k_cache, batch)[:, None]
    position = lengths + torch.arange(new, device=k.device)
    if page_table is None:
        row = torch.arange(batch, device=k.device) if cache_batch_idx is None else cache_batch_idx.long()
        row, there = row[:, None].expand_as(position), (position >= 0) & (position < size)
    else:
        page_table = table_rows(page_table, cache_batch_idx)
        there = (position >= 0) & (position < size * page_table.shape[1])
        row, position = page_table.long().gather(1,
                                                 (position // size).clamp(0, page_table.shape[1] - 1)), position % size
    there = (there & (lengths >= 0) & (row >= 0) & (row < caches)).flatten()
    # What has no place is written where another row goes, with that row's values, or keeps the value of a place where
    # none has one.
    source = torch.arange(batch * new, device=k.device).where(there, there.int().argmax())
    place = [x.flatten()[source].where(there.any(), 0) for x in (row, position)]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache.index_put_(place, rows.flatten(0, 1)[source].where(there.any(), cache[*place]))


def dropped_probabilities(q, k, kept, *, causal, scale, window, softcap, alibi_slopes):
    """softmax(scores) [B, Hq, Nq, Nk] in q's dtype, negative where `kept` is False; for tests, as flash-attn's
    S_dmask."""
    slopes = None if alibi_slopes is None else alibi_slopes[..., None, None]
    with torch.no_grad():
        weights, _ = _weights(q, k, _distance(q.shape[2], k.shape[2], q.device), None, slopes, causal, scale, window,
                              softcap)
        return _signed(weights, kept, q.dtype)


def dropped_probabilities_varlen(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, kept, *, causal, scale,
                                 window, softcap, alibi_slopes):
    """The same for packed rows: [B, Hq, max_seqlen_q, max_seqlen_k], 0 behind a sequence's rows and keys. `kept` is of
    that shape, or of the packed rows'."""
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(cu_seqlens_q.shape[0] - 1, q.shape[1], max_seqlen_q, max_seqlen_k)
    with torch.no_grad():
        rows = _packed_rows(q, k, cu_seqlens_q, cu_seqlens_k, alibi_slopes)
        weights, _ = _weights(*(t.transpose(0, 1)[None] for t in (q, k)), *rows, causal, scale, window, softcap)
        (row, is_row), (column, is_column) = (_places(*lengths)
                                              for lengths in ((cu_seqlens_q, max_seqlen_q, q.shape[0]),
                                                              (cu_seqlens_k, max_seqlen_k, k.shape[0])))
        there = (is_row[:, :, None] & is_column[:, None])[:, None]
        unpacked = lambda t: t[0][:, row[:, :, None], column[:, None]].transpose(0, 1)
        if kept.shape == weights.shape:
            kept = unpacked(kept)
        return _signed(unpacked(weights), kept, q.dtype).where(there, 0)


def kept(shape, p, seed, device):
    """What the dropout of these functions keeps. The kernels' probability: a multiple of 1 / 65536."""
    generator = None if seed is None else torch.Generator(device).manual_seed(seed % 2**63)
    return torch.rand(shape, device=device, generator=generator) >= drawn_dropout(p)


def _signed(weights, kept, dtype):
    # no zero of float16 hides that it was dropped
    return torch.where(kept, weights, -weights.clamp(min=2**-24)).to(dtype)


def _places(starts, longest, total):
    """The packed rows of each sequence, [B, longest], and which of these there are."""
    row = starts[:-1, None].long() + torch.arange(longest, device=starts.device)
    return row.clamp(0, max(total - 1, 0)), row < starts[1:, None]


def visible(rows, columns, causal, window, device):
    """Bool [rows, columns] of a causal mask and a window aligned to the bottom right, or None where all is visible."""
    left, right = window
    if not causal and left < 0 and right < 0:
        return None
    return _visible(_distance(rows, columns, device), causal, window)


def _visible(distance, causal, window):
    left, right = window
    seen = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen = seen & (distance >= -left)
    return seen & (distance <= right) if right >= 0 else seen


def _distance(rows, columns, device):
    return torch.arange(columns, device=device) - torch.arange(columns - rows, columns, device=device)[:, None]


def _packed_rows(q, k, cu_seqlens_q, cu_seqlens_k, slopes):
    """distance, allowed and slopes of `_attend` for packed rows."""
    sequence_q, row, length_q = _sequences(cu_seqlens_q, q.shape[0])
    sequence_k, column, length_k = _sequences(cu_seqlens_k, k.shape[0])
    shift = (length_k - length_q)[sequence_q.clamp(max=len(length_q) - 1)]
    distance = column - (row + shift)[:, None]
    allowed = (sequence_q[:, None] == sequence_k) & (sequence_q < len(length_q))[:, None]
    if slopes is not None:
        slopes = slopes.mT[:, sequence_q.clamp(max=len(length_q) - 1)] if slopes.ndim == 2 else slopes[:, None]
        slopes = slopes[..., None]
    return distance, allowed, slopes


def _attend(q, k, v, distance, allowed, slopes, causal, scale, window, softcap, sink, dropout_p=0.0, dropout_seed=None,
            mask=None):
    """Heads first. distance: column minus the query's diagonal column; allowed: what may be seen besides causal mask
    and window."""
    dtype, device = q.dtype, q.device
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
        q, k, v = (t.to(dtype) for t in (q, k, v))
    with torch.autocast(device.type, enabled=False):
        weights, lse = _weights(q, k, distance, allowed, slopes, causal, scale, window, softcap, sink, mask)
        if dropout_p:
            weights = weights * kept(weights.shape, dropout_p, dropout_seed,
                                     device) / max(1 - drawn_dropout(dropout_p), 1e-38)
        return (weights @ _for_heads(v, q)).to(dtype), lse


def _for_heads(t, q):
    """In float32 or float64, each head once for every head of q."""
    t = t.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    group = q.shape[1] // max(t.shape[1], 1)
    return t.repeat_interleave(group, 1) if group > 1 else t


def _weights(q, k, distance, allowed, slopes, causal, scale, window, softcap, sink=None, mask=None):
    """Probabilities and lse."""
    with torch.autocast(q.device.type, enabled=False):
        q, k = _for_heads(q, q), _for_heads(k, q)
        exact = q.dtype
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            scores = scores - slopes.to(exact) * distance.abs()
        seen = _visible(distance, causal, window)
        seen = seen if allowed is None else seen & allowed
        if mask is not None and mask.dtype == torch.bool:
            seen = seen & mask
        elif mask is not None:
            scores = scores + mask
        scores = scores.masked_fill(~seen, -math.inf)
        top = (scores.detach().amax(3, keepdim=True) if scores.shape[3] else
               scores.new_full((*scores.shape[:3], 1), -math.inf))
        if sink is not None:
            sink = sink.to(exact)[:, None, None]
            top = torch.maximum(top, sink.detach())
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = torch.exp(scores - top)
        total = weights.sum(3, keepdim=True)
        total = total if sink is None else total + torch.exp(sink - top)
        empty = total == 0
        total = total.masked_fill(empty, 1.0)
        lse = (torch.log(total) + top).masked_fill(empty, -math.inf)[..., 0]
        return weights / total, lse


def _sequences(cu_seqlens, total):
    """Of each row its sequence (their number behind the last one) and its place in it; the lengths of all sequences."""
    cu_seqlens = cu_seqlens.long()
    row = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    return sequence, row - cu_seqlens[sequence], cu_seqlens.diff()


def _lengths(cache_seqlens, cache, batch):
    if cache_seqlens is None or isinstance(cache_seqlens, int):
        length = cache.shape[2] if cache_seqlens is None else cache_seqlens
        return torch.full((batch,), length, device=cache.device)
    return cache_seqlens.long()
