"""Mamba-2's scan. What its kernels do not do, D of a head's columns and z, is done here by the tensors' library."""

import math
import sys

from margay._shared import (as_int32, check_rank, dtype_name, functions, is_torch, number, of_row, rows_library,
                            shape)


def ssd(x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, math.inf),
        initial_states=None, seq_idx=None, cu_seqlens=None, return_final_states=False):
    """Mamba-2's scan: S_t = e^(dt_t A) S_(t-1) + dt_t x_t B_t^T, y_t = S_t C_t + D x_t, times silu(z_t).

    x, z, y [batch, T, H, P], B, C [batch, T, G, N], G a divisor of H; 1 <= P <= 128, 1 <= N <= 256. bfloat16 or
    float16, on the CPU also float32. dt [batch, T, H], A, dt_bias [H], D [H] or [H, P]: of any of these types; float32
    computes. All but seq_idx and cu_seqlens are differentiable.

    dt_bias, dt_softplus, dt_limit: dt becomes dt + dt_bias, then softplus of that, then at least dt_limit[0] and at
        most dt_limit[1].
    initial_states: S_0, [batch, H, P, N]; zero if None. It is that of sequence 0 where seq_idx is given.
    seq_idx: integers [batch, T]. Where it changes, the state begins anew with zeros.
    cu_seqlens: integers [sequences + 1]. x has batch 1, and sequence i has steps cu_seqlens[i] to
        cu_seqlens[i + 1] - 1. The states are then those of the sequences, [sequences, H, P, N].
    return_final_states: return (y, S_T), S_T float32 [batch, H, P, N].
    """
    library = rows_library(is_torch("ssd", "x", x))
    dt, A, D, dt_bias, initial_states = (
        t if t is None else library.as_float32("ssd", name, t)
        for name, t in (("dt", dt), ("A", A), ("D", D), ("dt_bias", dt_bias), ("initial_states", initial_states)))
    low, high = _limits("ssd", dt_limit)
    if seq_idx is not None and cu_seqlens is not None:
        raise ValueError("ssd: seq_idx and cu_seqlens are given, expected one of them")
    seq_idx, cu_seqlens = (t if t is None else as_int32("ssd", name, t)
                           for name, t in (("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens)))
    if cu_seqlens is not None and x.ndim == 4:
        _check_last(cu_seqlens, x.shape[1])
    if z is not None:
        _check_z(library, x, z)
    wide = D is not None and D.ndim == 2
    if wide and (x.ndim != 4 or tuple(D.shape) != tuple(x.shape[2:])):
        raise ValueError(f"ssd: D has shape {shape(D)}, expected [heads] or [heads, head dim] of x, which has shape "
                         f"{shape(x)}")
    run = functions.get("ssd") or of_row("ssd")
    y, states = run(x, dt, A, B, C, None if wide else D, dt_bias, initial_states, seq_idx, cu_seqlens,
                    bool(dt_softplus), low, high)
    if wide or z is not None:
        y = _finish(y, x, D if wide else None, z)
    return (y, states) if return_final_states else y


def _check_z(library, x, z):
    """z is not the row's: nobody else looks at it."""
    library.check_kinds("ssd", x=x, z=z)
    if dtype_name(z) not in ("bfloat16", "float16", "float32"):
        raise TypeError(f"ssd: z has dtype {dtype_name(z)}, expected bfloat16, float16 or float32")
    if tuple(z.shape) != tuple(x.shape):
        raise ValueError(f"ssd: z has shape {shape(z)}, expected {shape(x)} (as x)")
    if getattr(z, "device", None) != getattr(x, "device", None):
        raise ValueError(f"ssd: z is on {z.device}, expected {x.device} (same as x)")


def _limits(op, dt_limit):
    try:
        low, high = dt_limit
    except (TypeError, ValueError):
        raise TypeError(f"{op}: dt_limit is {dt_limit!r}, expected a pair of numbers") from None
    low, high = number(op, "dt_limit[0]", low), number(op, "dt_limit[1]", high)
    if not low <= high:
        raise ValueError(f"{op}: dt_limit is ({low:g}, {high:g}), expected the smaller number first")
    return low, high


def _check_last(starts, steps):
    """On the CPU; C sees there that they begin with 0 and do not fall. Steps behind the last sequence would have no
    result."""
    torch = sys.modules.get("torch")
    if getattr(starts, "is_cuda", False) or starts.ndim != 1 or not len(starts):
        return
    if torch is not None and isinstance(starts, torch.Tensor) and (torch.compiler.is_compiling() or starts.is_meta):
        return
    last = int(starts[-1])
    if last < steps:
        raise ValueError(f"ssd: cu_seqlens[{len(starts) - 1}] is {last}, expected {steps} (the steps that there are)")


def _wide(t):
    return t.float() if hasattr(t, "float") else t.astype("float32")


def _narrow(t, like):
    return t.to(like.dtype) if hasattr(t, "to") else t.astype(like.dtype)


def _silu(t):
    if hasattr(t, "sigmoid"):
        return t * t.sigmoid()
    import numpy as np

    return t / (1 + np.exp(-np.clip(t, -80, None)))


def _finish(y, x, d, z):
    """(y + d x) silu(z), in float32."""
    wide = _wide(y)
    if d is not None:
        wide = wide + d * _wide(x)
    if z is not None:
        wide = wide * _silu(_wide(z))
    return _narrow(wide, y)


def ssd_step(state, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, math.inf),
             state_indices=None):
    """One step of `ssd`, for generation: y [batch, H, P]. `state` [batch, H, P, N], of any floating type, becomes the
    next one in place. PyTorch tensors; not differentiable.

    x, z [batch, H, P], dt [batch, H], B, C [batch, G, N], the rest as for `ssd`.
    state_indices: integers [batch]. Sample i has state[state_indices[i]]; where it is negative, there is none, and
        y is 0.
    """
    op = "ssd_step"
    if not is_torch(op, "x", x):
        raise TypeError(f"{op}: x is {type(x).__name__}, expected torch.Tensor")
    import torch

    rows_library(True).check_kinds(op, state=state, x=x, dt=dt, A=A, B=B, C=C)
    a, b, c, d = A, B, C, D
    for name, t, rank, layout in (("state", state, 4, "[states, heads, head dim, N]"),
                                  ("x", x, 3, "[batch, heads, head dim]"), ("dt", dt, 2, "[batch, heads]"),
                                  ("A", a, 1, "[heads]"), ("B", b, 3, "[batch, groups, N]"),
                                  ("C", c, 3, "[batch, groups, N]")):
        check_rank(op, name, t, rank, layout)
    batch, heads, dim = x.shape
    groups, n = b.shape[1:]
    states = batch if state_indices is None else len(state)
    expected = dict(state=(states, heads, dim, n), dt=(batch, heads), A=(heads,), B=(batch, groups, n),
                    C=(batch, groups, n))
    for name, t in dict(state=state, dt=dt, A=a, B=b, C=c).items():
        if tuple(t.shape) != expected[name]:
            raise ValueError(f"{op}: {name} has shape {shape(t)}, expected {list(expected[name])}")
    if groups < 1 or heads % groups:
        raise ValueError(f"{op}: B has {groups} groups, expected a divisor of the {heads} heads of x")
    if z is not None and z.shape != x.shape:
        raise ValueError(f"{op}: z has shape {shape(z)}, expected {shape(x)} (as x)")
    low, high = _limits(op, dt_limit)
    with torch.no_grad():
        dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        dt = (torch.nn.functional.softplus(dt) if dt_softplus else dt).clamp(low, high)
        wide, b, c = x.float(), *(t.float().repeat_interleave(heads // groups, 1) for t in (b, c))
        at = None if state_indices is None else state_indices.long()
        there = None if at is None else at >= 0
        before = state if at is None else state[at.clamp(min=0)]
        decay = torch.exp(dt * a.float())[..., None, None]
        after = decay * before.float() + (dt[..., None] * wide)[..., None] * b[:, :, None]
        if at is None:
            state.copy_(after)
        else:
            state[at[there]] = after[there].to(state.dtype)
        y = (after * c[:, :, None]).sum(-1)
        if d is not None:
            y = y + wide * (d.float() if d.ndim == 2 else d.float()[:, None])
        if z is not None:
            y = y * torch.nn.functional.silu(z.float())
        if there is not None:
            y = torch.where(there[:, None, None], y, 0.0)
        return y.to(x.dtype)


def _explained(op, library, named, given):
    """The op's row has small letters for A, B, C and D."""
    from margay._explain import explain_row

    capitals, shown = {name.lower(): name for name in given}, {name.lower(): t for name, t in named.items()}
    result = explain_row(op, library, shown, {name.lower(): given[name] for name in given})
    named |= {capitals.get(name, name): t for name, t in shown.items()}
    return result


EXPLAINED = {"ssd": _explained}
