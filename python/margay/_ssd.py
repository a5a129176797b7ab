"""The Mamba-2 scan of ops.py on top of its row in csrc/ssd/ops.def: what the kernels do not do is done here, by the tensors' library."""

from margay import ops

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8")


def ssd(x, dt, a, b, c, d, z, dt_bias, dt_softplus, dt_limit, initial_states, seq_idx, cu_seqlens, return_final_states):
    library = ops._library_of("ssd", "x", x)
    dt, a, d, dt_bias, initial_states = _as_float32("ssd", library, dt=dt, A=a, D=d, dt_bias=dt_bias, initial_states=initial_states)
    low, high = _limits("ssd", dt_limit)
    if seq_idx is not None and cu_seqlens is not None:
        raise ValueError("ssd: seq_idx and cu_seqlens are given, expected one of them")
    seq_idx, cu_seqlens = (t if t is None else _as_int32(name, t) for name, t in (("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens)))
    if cu_seqlens is not None and cu_seqlens.ndim == 1 and len(cu_seqlens) and not getattr(cu_seqlens, "is_cuda", False) and x.ndim == 4:
        check_last(cu_seqlens, x.shape[1])
    if z is not None:
        _check_like("z", z, "x", x)
    wide = d is not None and d.ndim == 2
    if wide and (x.ndim != 4 or tuple(d.shape) != tuple(x.shape[2:])):
        raise ValueError(f"ssd: D has shape {ops._shape(d)}, expected [heads] or [heads, head dim] of x, which has shape {ops._shape(x)}")
    run = ops._functions.get("ssd") or ops._of_row("ssd")
    y, states = run(x, dt, a, b, c, None if wide else d, dt_bias, initial_states, seq_idx, cu_seqlens, bool(dt_softplus), low, high)
    if wide or z is not None:
        y = _finish(y, x, d if wide else None, z)
    return (y, states) if return_final_states else y


def _as_float32(op, library, **tensors):
    return [t if t is None else library.as_float32(op, name, t) for name, t in tensors.items()]


def _limits(op, dt_limit):
    try:
        low, high = dt_limit
    except (TypeError, ValueError):
        raise TypeError(f"{op}: dt_limit is {dt_limit!r}, expected a pair of numbers") from None
    low, high = ops._number(op, "dt_limit[0]", low), ops._number(op, "dt_limit[1]", high)
    if not low <= high:
        raise ValueError(f"{op}: dt_limit is ({low:g}, {high:g}), expected the smaller number first")
    return low, high


def _as_int32(name, t):
    if not hasattr(t, "dtype") or ops.dtype_name(t) not in _INTEGERS:
        found = f"a tensor of dtype {ops.dtype_name(t)}" if hasattr(t, "dtype") else type(t).__name__
        raise TypeError(f"ssd: {name} is {found}, expected a tensor of int32")
    return t if ops.dtype_name(t) == "int32" else t.int() if hasattr(t, "int") else t.astype("int32")


def check_last(starts, steps):
    """C sees that they begin with 0 and do not fall; steps behind the last sequence would have no result."""
    if _compiling():
        return
    last = int(starts[-1])
    if last < steps:
        raise ValueError(f"ssd: cu_seqlens[{len(starts) - 1}] is {last}, expected {steps} (the steps that there are)")


def _compiling():
    import sys

    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def _check_like(name, t, other_name, other):
    if not hasattr(t, "shape") or tuple(t.shape) != tuple(other.shape):
        found = f"has shape {ops._shape(t)}" if hasattr(t, "shape") else f"is {type(t).__name__}"
        raise ValueError(f"ssd: {name} {found}, expected {ops._shape(other)} (as {other_name})")


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


def ssd_step(state, x, dt, a, b, c, d, z, dt_bias, dt_softplus, dt_limit, state_indices):
    import torch

    op = "ssd_step"
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: x is {type(x).__name__}, expected torch.Tensor")
    library = ops._library_of(op, "x", x)
    library.check_kinds(op, state=state, x=x, dt=dt, A=a, B=b, C=c)
    for name, t, rank, layout in (("state", state, 4, "[states, heads, head dim, N]"), ("x", x, 3, "[batch, heads, head dim]"),
                                  ("dt", dt, 2, "[batch, heads]"), ("A", a, 1, "[heads]"), ("B", b, 3, "[batch, groups, N]"), ("C", c, 3, "[batch, groups, N]")):
        ops._check_rank(op, name, t, rank, layout)
    batch, heads, dim = x.shape
    groups, n = b.shape[1:]
    expected = dict(state=(len(state) if state_indices is not None else batch, heads, dim, n), dt=(batch, heads), A=(heads,), B=(batch, groups, n), C=(batch, groups, n))
    for name, t in dict(state=state, dt=dt, A=a, B=b, C=c).items():
        if tuple(t.shape) != expected[name]:
            raise ValueError(f"{op}: {name} has shape {ops._shape(t)}, expected {list(expected[name])}")
    if groups < 1 or heads % groups:
        raise ValueError(f"{op}: B has {groups} groups, expected a divisor of the {heads} heads of x")
    if z is not None and z.shape != x.shape:
        raise ValueError(f"{op}: z has shape {ops._shape(z)}, expected {ops._shape(x)} (as x)")
    low, high = _limits(op, dt_limit)
    with torch.no_grad():
        dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        dt = (torch.nn.functional.softplus(dt) if dt_softplus else dt).clamp(low, high)
        wide, b, c = x.float(), *(t.float().repeat_interleave(heads // groups, 1) for t in (b, c))
        at = None if state_indices is None else state_indices.long()
        there = None if at is None else at >= 0
        before = state if at is None else state[at.clamp(min=0)]
        after = before.float() * torch.exp(dt * a.float())[..., None, None] + (dt[..., None] * wide)[..., None] * b[:, :, None]
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
