"""Softmax attention in a window and linear attention in front of it, over one denominator."""

import sys

from margay._shared import checked_scale, functions, integer, is_torch, of_row, rows_library, shape, starts_of_all


def hedgehog(q, k, v, q_map, k_map, window_factor, linear_factor, *, window=64, sliding=False, scale=None,
             initial_state=None, output_final_state=False, cu_seqlens=None):
    """LoLCATs' hybrid of softmax and linear attention, causal: out_i = N_i / d_i with

    N_i = w sum over j in i's window of e^(s_ij - m_i) v_j + l sum over j in front of it of (f_i . g_j) v_j

    and d_i the same with 1 for v_j. s_ij = scale q_i . k_j, and m_i is its maximum in the window, also in gradients.
    f_i = [softmax(q_i q_map), softmax(-q_i q_map)], g_j the same of k_j and k_map.

    q, k [B, T, H, K], v, out [B, T, H, V], q_map, k_map [H, K, F]; 1 <= K, V <= 128, 1 <= F <= 64. bfloat16 or float16,
    on the CPU also float32. w = window_factor, not 0, and l = linear_factor: [H] of any of these types, or numbers.
    PyTorch tensors are differentiable, but not cu_seqlens; NumPy arrays give NumPy arrays.

    window, sliding: i's window ends with step i. It begins with the block of `window` steps before i's own, blocks
        counted from the sequence's begin (LoLCATs' terraced window; a divisor of 64), or with sliding it is the last
        `window` steps, 1 to 64.
    scale: 1 / sqrt(K) if None.
    initial_state: a pair (S_0, z_0), float32 [B, H, 2 F, V] and [B, H, 2 F]: the sums of g_j v_j^T and of g_j over
        steps before the first, which are in front of all windows. Zero if None.
    output_final_state: return (out, (S, z)). These have all chunks of 64 steps but the last, which the next steps'
        windows reach into: a call that goes on begins with the steps of that chunk.
    cu_seqlens: integers [sequences + 1]. B is 1, and sequence i has steps cu_seqlens[i] to cu_seqlens[i + 1] - 1. The
        states are then those of the sequences.
    """
    op = "hedgehog"
    scale, window = checked_scale(op, scale), integer(op, "window", window)
    library = rows_library(is_torch(op, "q", q))
    window_factor = _factor(op, library, "window_factor", window_factor, q)
    linear_factor = _factor(op, library, "linear_factor", linear_factor, q)
    if initial_state is not None:
        initial_state = _packed(op, library, initial_state)
    if cu_seqlens is not None:
        cu_seqlens = starts_of_all(op, cu_seqlens, q)
    run = functions.get(op) or of_row(op)
    out, state = run(q, k, v, q_map, k_map, window_factor, linear_factor, initial_state, cu_seqlens, window,
                     bool(sliding), scale, (bool(output_final_state),))
    return (out, (state[..., :-1], state[..., -1])) if output_final_state else out


def _factor(op, library, name, factor, q):
    """A head's each, as float32."""
    if hasattr(factor, "dtype"):
        return library.as_float32(op, name, factor)
    if not hasattr(factor, "__float__"):
        raise TypeError(f"{op}: {name} is {type(factor).__name__}, expected a tensor or a number")
    heads = q.shape[2] if q.ndim == 4 else 0
    if hasattr(q, "new_full"):
        return q.new_full((heads,), float(factor), dtype=sys.modules["torch"].float32)
    import numpy as np

    return np.full((heads,), float(factor), np.float32)


def _packed(op, library, state):
    """The row has the sum of the features as one more column."""
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        raise TypeError(f"{op}: initial_state is {type(state).__name__}, expected a pair (S_0, z_0)")
    s, z = (library.as_float32(op, f"initial_state[{i}]", t) for i, t in enumerate(state))
    if s.ndim != 4 or tuple(z.shape) != tuple(s.shape[:3]):
        raise ValueError(f"{op}: initial_state has shapes {shape(s)} and {shape(z)}, expected [B, H, 2 F, V] and "
                         "[B, H, 2 F]")
    if hasattr(s, "new_empty"):
        return sys.modules["torch"].cat([s, z[..., None]], -1)
    import numpy as np

    return np.concatenate([s, z[..., None]], -1)


def _explained(op, library, named, given):
    """The row has factors of each head, and one tensor for a state."""
    from margay._explain import explain_row

    given = dict(given)
    for name in ("window_factor", "linear_factor"):
        given[name] = _factor(op, library, name, given[name], given["q"])
    if given.get("initial_state") is not None:
        given["initial_state"] = _packed(op, library, given["initial_state"])
    return explain_row(op, library, named, given)


EXPLAINED = {"hedgehog": _explained}
