"""Padded batches as packed ones, with tensors of fixed size only: nothing waits for the device, graphs can be captured and compiled."""

import torch

from margay import _dispatch


def attention(op, q, k, v, key_mask, query_mask=None, **options):
    """Attention where padding is not seen.

    q [B, Hq, Nq, D], k [B, Hk, Nk, D], v [B, Hk, Nk, Dv], key_mask bool [B, Nk], query_mask bool [B, Nq] or None: True where there is no padding.
    A causal mask and a window count only what is no padding. Rows of queries that are padding are 0.

    Each batch row becomes two sequences, what is no padding and then the padding, so that every row belongs to one and gets a value.
    """
    batch, _, rows, _ = q.shape
    order, _, real, cu_seqlens_k = pack(key_mask)
    k, v = (_ordered(t, order, real) for t in (k, v))
    if query_mask is None:
        ends = torch.arange(rows, (batch + 1) * rows, rows, dtype=torch.int32, device=q.device)
        cu_seqlens_q = torch.cat((ends.new_zeros(1), ends.repeat_interleave(2)))
        q = q.transpose(1, 2).flatten(0, 1)
    else:
        order, place, real, cu_seqlens_q = pack(query_mask)
        q = _ordered(q, order, real)
    out = _dispatch.attention_varlen(op, q, k, v, cu_seqlens_q, cu_seqlens_k, rows, key_mask.shape[1], **options)
    if query_mask is not None:
        out = torch.where(query_mask.flatten()[:, None, None], out[place], 0)
    return out.unflatten(0, (batch, rows)).transpose(1, 2)


def pack(mask):
    """Of mask bool [B, N]: the order of its places with the True ones of each row first, int64 [B N]; the place of each in that order; the mask in
    that order; and cu_seqlens int32 [2 B + 1] of each row's True and False places."""
    batch, columns = mask.shape
    count = mask.sum(1, keepdim=True)
    place = torch.where(mask, mask.cumsum(1), count + (~mask).cumsum(1)) - 1
    column = torch.arange(columns, device=mask.device).expand(batch, columns)
    first = torch.arange(batch, device=mask.device)[:, None] * columns
    order = torch.empty_like(place).scatter(1, place, column)
    ends = torch.cat((first + count, first + columns), 1).flatten()
    cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
    return (order + first).flatten(), (place + first).flatten(), (column < count).flatten(), cu_seqlens


def _ordered(t, order, real):
    """Rows of t in an order. Padding becomes 0, whatever it held, and so does its gradient."""
    return torch.where(real[:, None, None], t.transpose(1, 2).flatten(0, 1)[order], 0)
