"""Attention without a softmax, with or without decay."""

import sys

from margay._shared import as_int32, checked_scale, functions, is_torch, of_row, rows_library


def linear_attention(q, k, v, g=None, *, scale=None, normalize=False, initial_state=None, output_final_state=False,
                     cu_seqlens=None):
    """out_t = scale S_t^T q_t with S_t = e^(g_t) S_(t-1) + k_t v_t^T: attention without a softmax, causal.

    q, k [B, T, H, K], v [B, T, H, V], out [B, T, H, V]; 1 <= K <= 256, 1 <= V <= 128. bfloat16 or float16, on the CPU
    also float32. PyTorch tensors are differentiable, but not cu_seqlens; NumPy arrays give NumPy arrays.

    g: the logarithm of the decay, of any of these types: [H] for each head (retention, lightning attention), [B, T, H]
        for each step too (simple GLA); 0 if None. It counts as -64 where it is less; -inf may be given.
    scale: 1 / sqrt(K) if None.
    normalize: divide out_t by scale q_t^T z_t + 1e-10, with z_t = e^(g_t) z_(t-1) + k_t.
    initial_state: S_0, float32 [B, H, K, V]; zero if None. With normalize a pair (S_0, z_0), z_0 [B, H, K].
    output_final_state: return (out, S_T), S_T float32 [B, H, K, V]; with normalize (out, (S_T, z_T)).
    cu_seqlens: integers [sequences + 1]. B is 1, and sequence i has steps cu_seqlens[i] to cu_seqlens[i + 1] - 1. The
        states are then those of the sequences, [sequences, H, K, V].
    """
    op = "linear_attention"
    scale = checked_scale(op, scale)
    run = functions.get(op) or of_row(op)
    g_head, z = None, None
    if normalize and initial_state is not None:
        initial_state, z = _pair(op, initial_state)
    if g is not None or initial_state is not None or cu_seqlens is not None:
        as_float32 = rows_library(is_torch(op, "q", q)).as_float32
        g = g if g is None else as_float32(op, "g", g)
        initial_state = initial_state if initial_state is None else as_float32(op, "initial_state", initial_state)
        z = z if z is None else as_float32(op, "initial_state[1]", z)
        if g is not None and g.ndim == 1:
            g, g_head = None, g
        if cu_seqlens is not None:
            cu_seqlens = _starts(op, cu_seqlens, q)
    out, state = run(q, k, v, g, g_head, initial_state, cu_seqlens, scale)
    if normalize:
        ones = _ones_like(v[..., :1])
        sums, z = run(q, k, ones, g, g_head, z if z is None else z[..., None], cu_seqlens, scale)
        out, state = _narrow(_wide(out) / (_wide(sums) + 1e-10), out), (state, z[..., 0])
    return (out, state) if output_final_state else out


def _find_step():
    from margay.families.steps import linear_attention_step as step

    return functions.setdefault("linear_attention_step", step)


def linear_attention_step(state, q, k, v, g=None, *, scale=None, state_indices=None):
    """One step of `linear_attention`, for generation: out [B, H, V]. `state` [B, H, K, V], float32 or as q, becomes the
    next one in place: it is read once and written once. PyTorch tensors; not differentiable.

    q, k [B, H, K], v [B, H, V], 1 <= K <= 256, any V. g: [H] or [B, H], as for `linear_attention`. Several steps at
    once: q, k [B, T, H, K], v, out [B, T, H, V], g [H] or [B, T, H].
    state_indices: integers [B]. Sample i has state[state_indices[i]]; where it is negative, there is none, and out
        is 0. No two samples may have the same state.

    Other floating types, a larger K, and float32 on CUDA, are computed by PyTorch's operations.
    """
    if not is_torch("linear_attention_step", "q", q):
        raise TypeError(f"linear_attention_step: q is {type(q).__name__}, expected torch.Tensor")
    step = functions.get("linear_attention_step") or _find_step()
    return step(state, q, k, v, g, state_indices, checked_scale("linear_attention_step", scale))


def _pair(op, state):
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        raise TypeError(f"{op}: initial_state is {type(state).__name__}, expected a pair (S_0, z_0) where normalize "
                        "is True")
    return state


def _starts(op, starts, q):
    """On the CPU; C sees there that they begin with 0 and do not fall. Steps behind the last sequence would have no
    result."""
    starts = as_int32(op, "cu_seqlens", starts)
    torch = sys.modules.get("torch")
    seen = not getattr(starts, "is_cuda", False) and starts.ndim == 1 and len(starts) and q.ndim == 4
    if torch is not None and isinstance(starts, torch.Tensor):
        seen = seen and not starts.is_meta and not torch.compiler.is_compiling()
    if seen:
        last, steps = int(starts[-1]), q.shape[1]
        if last < steps:
            raise ValueError(f"{op}: cu_seqlens[{len(starts) - 1}] is {last}, expected {steps} (the steps that there "
                             "are)")
    return starts


def _ones_like(t):
    if hasattr(t, "new_ones"):
        return t.new_ones(t.shape)
    import numpy as np

    return np.ones(t.shape, t.dtype)


def _wide(t):
    return t.float() if hasattr(t, "float") else t.astype("float32")


def _narrow(t, like):
    return t.to(like.dtype) if hasattr(t, "to") else t.astype(like.dtype)


def _step_explained(op, library, named, given):
    return [], {}, []


EXPLAINED = {"linear_attention_step": _step_explained}
