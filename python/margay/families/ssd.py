"""Mamba-2's scan. What its kernels do not do, D of a head's columns and z, is done here by the tensors' library."""

import math

from margay._shared import as_int32, dtype_name, functions, is_torch, number, of_row, rows_library, shape


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
        cu_seqlens[i + 1] - 1; y is 0 behind the last. The states are then those of the sequences,
        [sequences, H, P, N].
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
    if z is not None:
        _check_z(library, x, z)
    wide = D is not None and D.ndim == 2
    if wide and (x.ndim != 4 or tuple(D.shape) != tuple(x.shape[2:])):
        raise ValueError(f"ssd: D has shape {shape(D)}, expected [heads] or [heads, head dim] of x, which has shape "
                         f"{shape(x)}")
    run = functions.get("ssd") or of_row("ssd")
    y, states = run(x, dt, A, B, C, None if wide else D, dt_bias, initial_states, seq_idx, cu_seqlens,
                    bool(dt_softplus), low, high, (bool(return_final_states),))
    if wide or z is not None:
        y = _finish(y, x, D if wide else None, z, cu_seqlens)
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


def _wide(t):
    return t.float() if hasattr(t, "float") else t.astype("float32")


def _narrow(t, like):
    return t.to(like.dtype) if hasattr(t, "to") else t.astype(like.dtype)


def _silu(t):
    if hasattr(t, "sigmoid"):
        return t * t.sigmoid()
    import numpy as np

    return t / (1 + np.exp(-np.clip(t, -80, None)))


def _in_sequences(t, starts):
    if is_torch("ssd", "x", t):
        import torch as library

        steps = library.arange(t.shape[1], device=t.device)
    else:
        import numpy as library

        steps = library.arange(t.shape[1])
    return library.where((steps < starts[-1])[:, None, None], t, library.zeros_like(t))


def _finish(y, x, d, z, starts):
    """(y + d x) silu(z), in float32; 0 behind the last sequence."""
    wide = _wide(y)
    if d is not None:
        skip = d * _wide(x)
        wide = wide + (skip if starts is None else _in_sequences(skip, starts))
    if z is not None:
        wide = wide * _silu(_wide(z))
    return _narrow(wide, y)


def _find_step():
    from margay.families.steps import ssd_step as step

    return functions.setdefault("ssd_step", step)


def ssd_step(state, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, math.inf),
             state_indices=None):
    """One step of `ssd`, for generation: y [batch, H, P]. `state` [batch, H, P, N], float32 or as x, becomes the next
    one in place: it is read once and written once. PyTorch tensors; not differentiable.

    x, z [batch, H, P], dt [batch, H], B, C [batch, G, N], the rest as for `ssd`; 1 <= N <= 256, any P. Several steps at
    once: x, z, y [batch, T, H, P], dt [batch, T, H], B, C [batch, T, G, N].
    state_indices: integers [batch]. Sample i has state[state_indices[i]]; where it is negative, there is none, and
        y is 0. No two samples may have the same state.

    Other floating types, a larger N, and float32 on CUDA, are computed by PyTorch's operations.
    """
    if not is_torch("ssd_step", "x", x):
        raise TypeError(f"ssd_step: x is {type(x).__name__}, expected torch.Tensor")
    low, high = _limits("ssd_step", dt_limit)
    step = functions.get("ssd_step") or _find_step()
    return step(state, x, dt, A, B, C, D, z, dt_bias, state_indices, bool(dt_softplus), low, high)


def _step_explained(op, library, named, given):
    return [], {}, []


EXPLAINED = {"ssd_step": _step_explained}
