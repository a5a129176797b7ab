"""Padded batches as packed ones. A plan says where the sequences are; it may be made once for many layers.

A plan of runs is made on the host, where the mask is known there and what is no padding is one run of each batch row.
Then the batch as it lies in memory is packed already: what is padding belongs to sequences that have keys and no
queries, or queries and no keys. A plan of any mask has tensors of fixed size only and brings the rows in another order:
nothing waits for the device, graphs can be captured and compiled.
"""

from typing import NamedTuple

import torch

from margay import _torch
from margay.drop_ins import kernel_or_torch
from margay.families.attention import attention_torch
from margay.families.attention.features import Features


class Plan(NamedTuple):
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    longest_q: int
    longest_k: int
    keys: tuple | None = None         # order and real of `pack`, or None: as they lie in memory
    queries: tuple | None = None      # and place, and the mask itself


def attention(op, q, k, v, key_mask, query_mask=None, **options):
    """Attention where padding is not seen.

    q [B, Hq, Nq, D], k [B, Hk, Nk, D], v [B, Hk, Nk, Dv], key_mask bool [B, Nk], query_mask bool [B, Nq] or None: True
    where there is no padding. A causal mask and a window count only what is no padding. Rows of queries that are
    padding in query_mask are 0.
    """
    return planned_attention(op, q, k, v, plan(key_mask, query_mask, q.shape[2]), **options).transpose(1, 2)


def planned_attention(op, q, k, v, plan, **options):
    """q, k and v as in `attention`; the result is [B, Nq, Hq, Dv]."""
    batch, _, rows, _ = q.shape
    if (plan.keys is None and torch.is_grad_enabled() and not torch.compiler.is_compiling() and
            _records(op, q, k, v, **options)):
        return _InPlace.apply(q, k, v, options["sink"], plan, options)
    q, k, v = _in_rows(q), _in_rows(k), _in_rows(v)
    if plan.keys is not None:
        k, v = _ordered(k, *plan.keys), _ordered(v, *plan.keys)
    if plan.queries is not None:
        q = _ordered(q, *plan.queries[:2])
    out = kernel_or_torch.attention_packed(op, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *plan[:4],
                                           **options).transpose(1, 2)
    if plan.queries is not None:
        _, _, place, mask = plan.queries
        out = torch.where(mask[:, None, None], out[:, place], 0)
    return out.reshape(batch, rows, *out.shape[2:])


def _in_rows(t):
    """[B, H, N, D] as [1, B N, H, D], without a copy where the heads of a row lie behind one another in memory, as
    layers make them."""
    batch, heads, rows, dim = t.shape
    t = t if t.stride(3) == 1 else t.contiguous()
    return t.transpose(1, 2).reshape(1, batch * rows, heads, dim)


def _records(op, q, k, v, sink=None, scale=None, dropout_p=0.0, **options):
    """Is a gradient wanted of a call that kernels compute and nothing in torch has to see?"""
    return ((q.requires_grad or k.requires_grad or v.requires_grad or sink is not None and sink.requires_grad)
            and _torch.c_may_read(q, k, v, sink) and
            not _torch.autocast_anywhere() and kernel_or_torch.unsupported(q, k, v, scale, dropout_p) is None)


class _InPlace(torch.autograd.Function):
    """One node of the graph in place of one for each view."""

    @staticmethod
    def forward(ctx, q, k, v, sink, plan, options):
        batch, _, rows, _ = q.shape
        ctx.rows = rows, k.shape[2]
        features = Features(*options.get("window", (-1, -1)), options["softcap"], options["dropout_p"], None, sink,
                            None, plan.cu_seqlens_q, plan.cu_seqlens_k, plan.longest_q, plan.longest_k)
        q, k, v = (_in_rows(t).transpose(1, 2) for t in (q, k, v))
        out = attention_torch._FeaturesFunction.forward(ctx, q, k, v, sink, features, options["scale"],
                                                        options["causal"], False, False)
        return out.transpose(1, 2).reshape(batch, rows, out.shape[1], out.shape[3])

    @staticmethod
    def backward(ctx, dout):
        batch, rows, heads, dim = dout.shape
        *grads, dsink = attention_torch._features_gradient(ctx,
                                                           dout.reshape(1, batch * rows, heads, dim).transpose(1, 2),
                                                           None, direct=attention_torch._features_backward)
        in_batches = (g.transpose(1, 2).reshape(batch, -1, g.shape[1], g.shape[3]).transpose(1, 2) for g in grads)
        return *in_batches, dsink, None, None


def plan(key_mask, query_mask, rows):
    """The plan of any mask, made where the mask is.

    Each batch row becomes two sequences, what is no padding and then the padding, so that every row belongs to one and
    gets a value.
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


def runs(mask):
    """Where the True ones of each row of a mask bool [B, N] on the CPU begin and end, NumPy arrays [B]; None where
    those of a row are not one run."""
    if not mask.numel():
        return None
    mask = mask.numpy()
    count, first, behind = mask.sum(1), mask.argmax(1), mask[:, ::-1].argmax(1)
    if ((count > 0) & (first + count + behind != mask.shape[1])).any():
        return None
    return first, first + count


def plan_of_runs(first, end, rows, columns, ordered, device):
    """The plan of a mask [B, columns] whose rows are True from first to end, for queries [B, rows].

    ordered: only queries that are no padding count, the last `rows` of the mask.
    """
    import numpy as np                           # transformers, which asks for such plans, has it
    batch, parts = len(first), 3 if ordered else 2
    row = np.arange(batch)
    starts = np.empty((2, parts * batch + parts), np.int32)
    starts[:, 0], starts[:, -1] = 0, (batch * rows, batch * columns)
    inner = starts[:, 1:parts * batch + 1].reshape(2, batch, parts)
    # sequences: queries of padding, keys of padding, a batch row, queries of padding, ...
    if ordered:
        inner[0] = row[:, None] * rows + np.maximum(np.stack((first, first, end), 1) - (columns - rows), 0)
        inner[1, :, 1:] = row[:, None] * columns + np.stack((first, end), 1)
        inner[1, 1:, 0], inner[1, :1, 0] = inner[1, :-1, 2], 0
        starts[:, -2] = batch * rows, inner[1, -1, 2]
    else:                                        # keys of padding, a batch row, keys of padding, ...
        inner[0] = np.stack((row * rows, row * rows + rows), 1)
        inner[1] = row[:, None] * columns + np.stack((first, end), 1)
    longest = np.diff(starts).max(1).tolist()
    starts = torch.from_numpy(starts).to(device, non_blocking=True)
    return Plan(starts[0], starts[1], *longest)


def pack(mask):
    """Of mask bool [B, N]: the order of its places with the True ones of each row first, int64 [B N]; the mask in that
    order; the place of each in that order; and cu_seqlens int32 [2 B + 1] of each row's True and False places."""
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
