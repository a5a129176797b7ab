"""Kimi delta attention: the gated delta rule with a decay for each channel of the key."""

from margay._shared import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    as_int32,
    checked_scale,
    dtype_name,
    functions,
    is_torch,
    number,
    of_row,
    rows_library,
)
from margay.families.delta import beta_form, by_heads, check_gate, explained, ones


def kda(q, k, v, g, beta=None, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, A_log=None,
        dt_bias=None, use_gate=False, lower_bound=None, use_qk_l2norm=False, use_beta_sigmoid=False,
        allow_neg_eigval=False, state_v_first=False):
    """out_t = scale S_t^T q_t with S_t = (I - beta_t k_t k_t^T) diag(e^(g_t)) S_(t-1) + beta_t k_t v_t^T, causal.

    q, k [B, T, H, K], v, out [B, T, HV, V], HV a multiple of H: heads of v share those of q and k, in groups of
    neighbours; 1 <= K, V <= 128. bfloat16 or float16, on the CPU also float32. PyTorch tensors are differentiable, but
    not cu_seqlens; NumPy arrays give NumPy arrays.

    g [B, T, HV, K]: the logarithm of the decay of each channel. float32, or as q. Below -88 it counts as -inf; of pairs
        inside a chunk of 64 steps, below -10 as -10.
    beta [B, T, HV]: 1 if None. float32, or as q. States stay bounded where beta_t |k_t|^2 is at most 2; one that grows
        may leave what float16 holds inside a chunk.
    scale: 1 / sqrt(K) if None.
    initial_state: S_0, float32 [B, HV, K, V]; zero if None.
    output_final_state: return (out, S_T), S_T float32 [B, HV, K, V].
    cu_seqlens: integers [sequences + 1]. B is 1, and sequence i has steps cu_seqlens[i] to cu_seqlens[i + 1] - 1; out
        is 0 behind the last. The states are then those of the sequences, [sequences, HV, K, V].
    use_gate: with x = g + dt_bias, dt_bias [HV, K] or [HV K] or None, and A_log [HV], the decay's logarithm is
        -exp(A_log) softplus(x), or lower_bound sigmoid(exp(A_log) x) with lower_bound, a negative number.
    use_qk_l2norm: rows of q and k are divided by sqrt(|x|^2 + 1e-6), in float32.
    use_beta_sigmoid: beta is sigmoid(beta); allow_neg_eigval: twice that.
    state_v_first: states are [.., V, K].
    """
    op = "kda"
    library = rows_library(is_torch(op, "q", q))
    form, bound = beta_form(op, beta, use_beta_sigmoid, allow_neg_eigval), checked_bound(op, lower_bound, use_gate)
    check_gate(op, g, A_log, dt_bias, use_gate)
    like = dtype_name(q)
    g = library.as_float32(op, "g", g) if not _as_given(g, like) else g
    beta = ones(v) if beta is None else beta if _as_given(beta, like) else library.as_float32(op, "beta", beta)
    A_log, dt_bias, initial_state = (t if t is None else library.as_float32(op, name, t) for name, t in
                                     (("A_log", A_log), ("dt_bias", dt_bias), ("initial_state", initial_state)))
    dt_bias = by_heads(op, dt_bias, v)
    cu_seqlens = cu_seqlens if cu_seqlens is None else as_int32(op, "cu_seqlens", cu_seqlens)
    run = functions.get(op) or of_row(op)
    keep = library.wants_gradient(q, k, v, g, beta, A_log, dt_bias, initial_state)
    out, state = run(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, checked_scale(op, scale), bound,
                     form, bool(use_qk_l2norm), bool(state_v_first), 0, keep,
                     (bool(output_final_state),))
    return (out, state) if output_final_state else out


def checked_bound(op, lower_bound, use_gate):
    """A float, 0 for None."""
    if lower_bound is None:
        return 0.0
    bound = number(op, "lower_bound", lower_bound)
    if not use_gate:
        raise ValueError(f"{op}: lower_bound is {bound:g}, expected None where use_gate is False")
    if not SMALLEST_SCALE <= -bound <= LARGEST_SCALE:
        raise ValueError(f"{op}: lower_bound is {bound:g}, expected a negative finite number")
    return bound


def _as_given(t, like):
    """C reads it where it lies."""
    return hasattr(t, "dtype") and dtype_name(t) in ("float32", like)


EXPLAINED = {"kda": explained}
