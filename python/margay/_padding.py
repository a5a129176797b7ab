"""Padded batches as packed ones, with tensors of fixed size only: nothing waits for the device, graphs can be captured and compiled."""

import torch
import torch.nn.functional as F

from margay import _dispatch


def attention(op, q, k, v, key_mask, query_mask=None, **options):
    """Attention where padding is not seen.

    q [B, Hq, Nq, D], k [B, Hk, Nk, D], v [B, Hk, Nk, Dv], key_mask bool [B, Nk], query_mask bool [B, Nq] or None: True where there is no padding.
    A causal mask and a window count only what is no padding. Rows of queries that are padding are 0.
    """
    batch, _, rows, _ = q.shape
    order, _, cu_seqlens_k = pack(key_mask)
    real = (torch.arange(order.numel(), device=q.device) < cu_seqlens_k[-1])[:, None, None]
    # what lies behind the last sequence is not read, and its gradient is not written: `where` makes both 0
    k, v = (torch.where(real, t.transpose(1, 2).flatten(0, 1)[order], 0) for t in (k, v))
    q = q.transpose(1, 2).flatten(0, 1)
    if query_mask is None:
        cu_seqlens_q = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=q.device)
        return _attend(op, q, k, v, cu_seqlens_q, cu_seqlens_k, rows, key_mask.shape[1], options).unflatten(0, (batch, rows)).transpose(1, 2)
    order, place, cu_seqlens_q = pack(query_mask)
    real = (torch.arange(order.numel(), device=q.device) < cu_seqlens_q[-1])[:, None, None]
    q = torch.where(real, q[order], 0)
    out = _attend(op, q, k, v, cu_seqlens_q, cu_seqlens_k, rows, key_mask.shape[1], options)
    out = torch.where(query_mask.flatten()[:, None, None], out[place], 0)
    return out.unflatten(0, (batch, rows)).transpose(1, 2)


def pack(mask):
    """Of mask bool [B, N]: the order of its B N places with the True ones first, the place of each in that order, and cu_seqlens int32 [B + 1]."""
    flat = mask.flatten()
    count = flat.cumsum(0)
    place = torch.where(flat, count - 1, count[-1:] + (~flat).cumsum(0) - 1)
    order = torch.empty_like(place).scatter(0, place, torch.arange(flat.numel(), device=mask.device))
    return order, place, F.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)


def _attend(op, q, k, v, cu_seqlens_q, cu_seqlens_k, rows, columns, options):
    return _dispatch.attention_varlen(op, q, k, v, cu_seqlens_q, cu_seqlens_k, rows, columns, **options)
