"""Padded batches as packed ones. A plan says where the sequences are; it may be made once for many layers.

A plan of runs is made on the host, where the mask is known there and what is no padding is one run of each batch row. Then the batch as it lies in memory
is packed already: what is padding belongs to sequences that have keys and no queries, or queries and no keys. A plan of any mask has tensors of
fixed size only and brings the rows in another order: nothing waits for the device, graphs can be captured and compiled.
"""

from typing import NamedTuple

import torch

from margay import _dispatch


class Plan(NamedTuple):
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    longest_q: int
    longest_k: int
    keys: tuple | None = None         # order and real of `pack`, or None: as they lie in memory
    queries: tuple | None = None      # and place, and the mask itself


def attention(op, q, k, v, key_mask, query_mask=None, **options):
    """Attention where padding is not seen.

    q [B, Hq, Nq, D], k [B, Hk, Nk, D], v [B, Hk, Nk, Dv], key_mask bool [B, Nk], query_mask bool [B, Nq] or None: True where there is no padding.
    A causal mask and a window count only what is no padding. Rows of queries that are padding in query_mask are 0.
    """
    return planned_attention(op, q, k, v, plan(key_mask, query_mask, q.shape[2]), **options).transpose(1, 2)


def planned_attention(op, q, k, v, plan, **options):
    """q, k and v as in `attention`; the result is [B, Nq, Hq, Dv]."""
    batch, _, rows, _ = q.shape
    q, k, v = _in_rows(q), _in_rows(k), _in_rows(v)
    if plan.keys is not None:
        k, v = _ordered(k, *plan.keys), _ordered(v, *plan.keys)
    if plan.queries is not None:
        q = _ordered(q, *plan.queries[:2])
    out = _dispatch.attention_packed(op, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *plan[:4], **options).transpose(1, 2)
    if plan.queries is not None:
        _, _, place, mask = plan.queries
        out = torch.where(mask[:, None, None], out[:, place], 0)
    return out.reshape(batch, rows, *out.shape[2:])


def _in_rows(t):
    """[B, H, N, D] as [1, B N, H, D], without a copy where heads lie behind one another in memory, as layers make them."""
    batch, heads, rows, dim = t.shape
    t = t if t.stride(3) == 1 else t.contiguous()
    return t.transpose(1, 2).reshape(1, batch * rows, heads, dim)


def plan(key_mask, query_mask, rows):
    """The plan of any mask, made where the mask is.

    Each batch row becomes two sequences, what is no padding and then the padding, so that every row belongs to one and gets a value.
    """
    order, real, _, cu_seqlens_k = pack(key_mask)
    keys, queries = (order, real), None
    if query_mask is None:
        batch = key_mask.shape[0]
        ends = torch.arange(rows, (batch + 1) * rows, rows, dtype=torch.int32, device=key_mask.device)
        cu_seqlens_q = torch.nn.functional.pad(ends[:, None].expand(-1, 2).flatten(), (1, 0))
    else:
        order, real, place, cu_seqlens_q = pack(query_mask)
        queries = order, real, place, query_mask.flatten()
    return Plan(cu_seqlens_q, cu_seqlens_k, rows, key_mask.shape[1], keys, queries)


def plan_of_runs(key_mask, rows, ordered, device):
    """The plan of a mask bool [B, Nk] on the CPU for queries [B, rows], or None where the True ones of a batch row are not one run.

    ordered: only queries that are no padding count, the last `rows` of the mask.
    """
    batch, columns = key_mask.shape
    if not key_mask.numel():
        return None
    column = torch.arange(columns)
    end = torch.where(key_mask, column + 1, 0).amax(1)
    first = torch.where(key_mask, column, columns).amin(1).minimum(end)
    if not torch.equal(end - first, key_mask.sum(1)):
        return None
    row = torch.arange(batch)
    q_first, q_end = row * rows, (row + 1) * rows
    if ordered:
        q_first, q_end = (q_first + (t - (columns - rows)).clamp(0, rows) for t in (first, end))
    first, end = first + row * columns, end + row * columns
    total_q, total_k, last = batch * rows, batch * columns, int(end[-1])
    if ordered:                                  # sequences: queries of padding, keys of padding, a batch row, queries of padding, ...
        q = _starts((q_first, q_first, q_end), (total_q, total_q))
        k = _starts((torch.cat((end.new_zeros(1), end[:-1])), first, end), (last, total_k))
    else:                                        # keys of padding, a batch row, keys of padding, ...
        q, k = _starts((q_first, q_end), (total_q,)), _starts((first, end), (total_k,))
    starts = torch.stack((q, k))
    longest = starts.diff(dim=1).amax(1).tolist()
    starts = starts.to(torch.int32).to(device, non_blocking=True)
    return Plan(starts[0], starts[1], *longest)


def _starts(of_a_row, behind):
    return torch.cat((torch.zeros(1, dtype=torch.int64), torch.stack(of_a_row, 1).flatten(), torch.tensor(behind)))


def pack(mask):
    """Of mask bool [B, N]: the order of its places with the True ones of each row first, int64 [B N]; the mask in that order; the place of each in
    that order; and cu_seqlens int32 [2 B + 1] of each row's True and False places."""
    batch, columns = mask.shape
    count = mask.sum(1, keepdim=True)
    place = torch.where(mask, mask.cumsum(1), count + (~mask).cumsum(1)) - 1
    column = torch.arange(columns, device=mask.device).expand(batch, columns)
    first = torch.arange(batch, device=mask.device)[:, None] * columns
    order = torch.empty_like(place).scatter(1, place, column)
    ends = torch.cat((first + count, first + columns), 1).flatten()
    cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
    return (order + first).flatten(), (column < count).flatten(), (place + first).flatten(), cu_seqlens


def _ordered(t, order, real):
    """Rows of t in an order. Padding becomes 0, whatever it held, and so does its gradient."""
    return torch.where(real[:, None, None], t[:, order], 0)
