"""Attention without a softmax, with or without decay."""

from margay._shared import checked_scale, dtype_name, functions, is_torch, of_row, rows_library, starts_of_all


def linear_attention(q, k, v, g=None, *, scale=None, normalize=False, initial_state=None, output_final_state=False,
                     cu_seqlens=None):
    """out_t = scale S_t^T q_t with S_t = e^(g_t) S_(t-1) + k_t v_t^T: attention without a softmax, causal.

    q, k [B, T, H, K], v [B, T, H, V], out [B, T, H, V]; 1 <= K <= 256, 1 <= V. bfloat16 or float16, on the CPU
    also float32. PyTorch tensors are differentiable, but not cu_seqlens; NumPy arrays give NumPy arrays.

    g: the logarithm of the decay, of any of these types: [H] for each head (retention, lightning attention), [B, T, H]
        for each step too (simple GLA); 0 if None. It counts as -64 where it is less; -inf may be given.
    scale: 1 / sqrt(K) if None.
    normalize: divide out_t by scale q_t^T z_t + 1e-10, with z_t = e^(g_t) z_(t-1) + k_t. It costs a scan of q and k, or
        where V % 64 is 1 to 56 only a copy of v, and a pass over out.
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
            cu_seqlens = starts_of_all(op, cu_seqlens, q)
    want = (bool(output_final_state),)
    scan = lambda v, state: run(q, k, v, g, g_head, state, cu_seqlens, scale, want)  # noqa: E731
    out, state = _normalized(scan, v, initial_state, z) if normalize else scan(v, initial_state)
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


# Columns of ones that v gets, or that are scanned by themselves: 16 bytes of the 16-bit types, as copies want.
_ONES = 8


def _normalized(scan, v, state, z):
    """q^T z is what the scan makes of a column of ones. A tile of v has 64 columns: where its last one has room, the
    ones go there, and else a second scan reads q and k once more."""
    columns = v.shape[-1] if v.ndim == 4 else 0
    ones, wide_z = _ones(v), z if z is None else _repeated(z)
    if columns % 64 and columns % 64 <= 64 - _ONES:
        out, after = scan(_join(v, ones), state if state is None else _join(state, wide_z))
        out, sums = out[..., :columns], out[..., columns:]
        z = after if after is None else after[..., columns]
        after = after if after is None else after[..., :columns]
    else:
        (out, after), (sums, z) = scan(v, state), scan(ones, wide_z)
        z = z if z is None else z[..., 0]
    return _quotient(out, sums[..., :1]), (after, z)


def _is_tensor(t):
    return hasattr(t, "new_ones")


def _ones(v):
    shape = (*v.shape[:-1], _ONES)
    if _is_tensor(v):
        return v.new_ones(shape)
    import numpy as np

    return np.ones(shape, v.dtype)


def _repeated(z):
    if _is_tensor(z):
        return z[..., None].repeat(*(1 for _ in z.shape), _ONES)
    return z[..., None].repeat(_ONES, -1)


def _join(a, b):
    if _is_tensor(a):
        import torch

        return torch.cat((a, b), -1)
    import numpy as np

    return np.concatenate((a, b), -1)


def _quotient(out, sums):
    """In bfloat16 one pass over memory, and two for the gradients: a factor for each row, which is rounded too. Of
    float16 it would be less than float16 has."""
    if not _is_tensor(out):
        return (out.astype("float32") / (sums.astype("float32") + 1e-10)).astype(out.dtype)
    if dtype_name(out) != "bfloat16":
        return (out.float() / (sums.float() + 1e-10)).to(out.dtype)
    return out * (1 / (sums.float() + 1e-10)).to(out.dtype)


def _step_explained(op, library, named, given):
    return [], {}, []


EXPLAINED = {"linear_attention_step": _step_explained}
