"""Calls of the delta rules as other libraries have them: what a kernel does not compute is refused before anything is.

`plan` looks at a call and returns a function that computes it, or raises Refused with the reason.
"""

import functools

import torch

import margay
from margay import _shared, _torch
from margay.drop_ins import kernel_or_torch
from margay.drop_ins.fallback import Refused

MOST_K, SLICE_OF_V, MOST_STEPS = 128, 128, 8


def check_tensors(q, k, v):
    for t in (q, k, v):
        if type(t) not in (torch.Tensor, torch.nn.Parameter):
            raise Refused(f"a tensor of class {type(t).__name__}")
    if not q.dtype == k.dtype == v.dtype:
        raise Refused("q, k and v of several dtypes")
    if not _torch.has_kernels(q.dtype, q.is_cuda):                             # also in autocast: FLA computes in it
        raise Refused(f"dtype {_shared.dtype_name(q)} on {q.device.type}")
    if reason := kernel_or_torch.no_kernels_for(q):
        raise Refused(reason)


def check_scale(scale):
    if scale is not None and not _shared.SMALLEST_SCALE <= scale <= _shared.LARGEST_SCALE:
        raise Refused("a scale that is not positive, or that float32 cannot hold")


def plan(q, k, v, g, beta, *, scale=None, initial_state=None, cu_seqlens=None, A_log=None, dt_bias=None,
         lower_bound=None, qk_norm=False, beta_sigmoid=False, allow_neg_eigval=False, state_v_first=False,
         in_place=False):
    """A function of no arguments for (out, the last states). g [B, T, HV], [B, T, HV, K] (KDA) or None; beta None: 1.

    in_place: initial_state may become the last one, which is then returned; where that is what a kernel does best."""
    check_tensors(q, k, v)
    check_scale(scale)
    if not q.ndim == k.ndim == v.ndim == 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise Refused("q, k and v that differ in batch or steps")
    (b, steps, heads, dim), (heads_v, dim_v) = q.shape, v.shape[2:]
    if heads < 1 or heads_v % heads:
        raise Refused("heads of v that are no multiple of those of q")
    if dim > MOST_K:
        raise Refused(f"a head dim of q and k over {MOST_K}")
    if min(dim, dim_v) < 1:
        raise Refused("a head dim of 0")
    if cu_seqlens is not None and b != 1:
        raise Refused("packed sequences in a batch")
    by_channel = g is not None and g.ndim == 4
    rows = b if cu_seqlens is None else len(cu_seqlens) - 1
    last = (dim_v, dim) if state_v_first else (dim, dim_v)
    for name, t, shape in (("decays", g, (b, steps, heads_v, *(dim,) * by_channel)), ("betas", beta, v.shape[:3]),
                           ("an initial state", initial_state, (rows, heads_v, *last)), ("an A_log", A_log, None),
                           ("a dt_bias", dt_bias, None)):
        if t is None:
            continue
        if type(t) not in (torch.Tensor, torch.nn.Parameter):
            raise Refused(f"a tensor of class {type(t).__name__}")
        if t.device != q.device:
            raise Refused("tensors on several devices")
        if t.dtype not in (*_torch.DTYPES, torch.float64):
            raise Refused(f"{name} of dtype {_shared.dtype_name(t)}")
        if shape is not None and tuple(t.shape) != tuple(shape):
            raise Refused(f"{name} of another shape")
    if A_log is not None and A_log.numel() != heads_v:
        raise Refused("an A_log of another shape")
    if dt_bias is not None and dt_bias.numel() != heads_v * (dim if by_channel else 1):
        raise Refused("a dt_bias of another shape")
    if A_log is None and lower_bound is not None:
        A_log = torch.zeros(heads_v, device=q.device)
    if lower_bound is not None and not _shared.SMALLEST_SCALE <= -lower_bound <= _shared.LARGEST_SCALE:
        raise Refused("a lower bound that is not negative, or that float32 cannot hold")
    options = dict(scale=scale, use_qk_l2norm=qk_norm, use_beta_sigmoid=beta_sigmoid, allow_neg_eigval=allow_neg_eigval)
    if A_log is not None:
        options |= dict(use_gate=True, A_log=A_log.flatten())
        if dt_bias is not None:
            options["dt_bias"] = dt_bias.reshape(g.shape[2:])
    if by_channel:
        options["lower_bound"] = lower_bound
    elif lower_bound is not None:
        raise Refused("a lower bound of decays for each head")
    return functools.partial(_compute, q, k, v, g, beta, initial_state, cu_seqlens, state_v_first, in_place, options)


def _compute(q, k, v, g, beta, state, cu_seqlens, state_v_first, in_place, options):
    if beta is None:
        beta = torch.ones(v.shape[:3], device=v.device)
    tensors = q, k, v, g, beta, state, options.get("A_log"), options.get("dt_bias")
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if cu_seqlens is None and not wanted and 1 <= q.shape[1] <= MOST_STEPS and not _torch.compiling():
        return _by_steps(q, k, v, g, beta, state, state_v_first, in_place, options)
    return _by_chunks(q, k, v, g, beta, state, cu_seqlens, state_v_first, options)


def _by_steps(q, k, v, g, beta, state, state_v_first, in_place, options):
    if state is None:
        sizes = q.shape[3], v.shape[3]
        state = q.new_zeros(len(q), v.shape[2], *(sizes[::-1] if state_v_first else sizes), dtype=torch.float32)
    elif not in_place or state.dtype not in (torch.float32, q.dtype):
        state = state.to(torch.float32, copy=True)
    step = margay.kda_step if _by_channel(g) else margay.gated_delta_rule_step
    return step(state.mT if state_v_first else state, q, k, v, g, beta, **options), state


def _by_chunks(q, k, v, g, beta, state, cu_seqlens, state_v_first, options):
    return in_slices(margay.kda if _by_channel(g) else margay.gated_delta_rule, q, k, v, state, state_v_first, g=g,
                     beta=beta, cu_seqlens=cu_seqlens, **options)


def in_slices(rule, q, k, v, state, state_v_first=False, **options):
    """(out, the last states). The columns of v are independent of each other: more than a kernel takes are several
    calls."""
    outs, states, dim = [], [], -2 if state_v_first else -1
    for first in range(0, v.shape[3], SLICE_OF_V):
        size = min(SLICE_OF_V, v.shape[3] - first)
        out, after = rule(q, k, v.narrow(3, first, size), **options, output_final_state=True,
                          state_v_first=state_v_first,
                          initial_state=None if state is None else state.narrow(dim, first, size))
        outs.append(out)
        states.append(after)
    return (outs[0], states[0]) if len(outs) == 1 else (torch.cat(outs, -1), torch.cat(states, dim))


def _by_channel(g):
    return g is not None and g.ndim == 4
