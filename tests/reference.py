"""Attention with every option, written as its definition, in the precision of its inputs: float64 for an exact
answer."""

import math

import torch


def attention_scores(q, k, *, causal=False, scale=None, window=(-1, -1), softcap=0.0, alibi_slopes=None, visible=None):
    """[B, Hq, Nq, Nk], -inf where a row does not see a key; arguments as `attention`."""
    rows, columns = q.shape[2], k.shape[2]
    group = q.shape[1] // max(k.shape[1], 1)
    scores = (q @ k.repeat_interleave(group, 1).mT) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    diagonal = columns - rows
    offset = torch.arange(columns, device=q.device) - torch.arange(rows, device=q.device)[:, None] - diagonal
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(q.dtype).expand(q.shape[:2])
        scores = scores - slopes[:, :, None, None] * offset.abs()
    left, right = window
    seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
    seen &= (offset <= 0) | (not causal)
    seen &= (offset >= -left) | (left < 0)
    seen &= (offset <= right) | (right < 0)
    return torch.where(seen if visible is None else seen & visible, scores, -math.inf)


def attention(q, k, v, *, sink=None, dropout=0.0, kept=None, **options):
    """out [B, Hq, Nq, Dv] and lse [B, Hq, Nq] of q [B, Hq, Nq, D], k [B, Hk, Nk, D], v [B, Hk, Nk, Dv].

    Rows without keys are 0, and -inf in lse.
    visible: bool, broadcast to [B, Hq, Nq, Nk], besides the causal mask and the window, which end at the bottom right.
    kept: bool, broadcast to [B, Hq, Nq, Nk], what a dropout of probability `dropout` keeps."""
    scores = attention_scores(q, k, **options)
    columns = scores.shape[3]
    if sink is not None:
        scores = torch.cat([scores, sink.to(q.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], 3)
    empty = (scores == -math.inf).all(3, keepdim=True)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0), 3).masked_fill(empty[..., 0], -math.inf)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), 3).masked_fill(empty, 0.0)[..., :columns]
    if dropout:
        weights = weights * kept.to(q.dtype) / (1 - dropout)
    return weights @ v.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1), lse


def rows_first(q, k, v, **options):
    """The same, of and to [B, N, H, D]."""
    out, lse = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
    return out.transpose(1, 2), lse


def packed(q, k, v, lengths_q, lengths_k, alibi_slopes=None, kept=None, **options):
    """out [T, H, Dv] and lse [H, T] of sequences behind one another; kept: a mask for each."""
    outs, lses = [], []
    for i, (a, b, c) in enumerate(zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))):
        slopes = alibi_slopes[i:i + 1] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        out, lse = rows_first(a[None], b[None], c[None], alibi_slopes=slopes, kept=kept and kept[i], **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def rotate(x, cos, sin, positions, interleaved):
    """x [N, H, D] with its first 2 cos.shape[1] dimensions rotated by the angles of `positions`; a loop over pairs."""
    x, half = x.clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[positions, i, None].to(x.dtype), sin[positions, i, None].to(x.dtype)
        x[..., a], x[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
    return x
