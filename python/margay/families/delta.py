"""Delta rules: linear attention whose state forgets what it holds under a key before it writes there."""

import sys

from margay._shared import as_int32, checked_scale, functions, is_torch, of_row, rows_library, shape


def gated_delta_rule(q, k, v, g=None, beta=None, *, scale=None, initial_state=None, output_final_state=False,
                     cu_seqlens=None, A_log=None, dt_bias=None, use_gate=False, use_qk_l2norm=False,
                     use_beta_sigmoid=False, allow_neg_eigval=False, state_v_first=False):
    """out_t = scale S_t^T q_t with S_t = (I - beta_t k_t k_t^T) e^(g_t) S_(t-1) + beta_t k_t v_t^T, causal.

    q, k [B, T, H, K], v, out [B, T, HV, V], HV a multiple of H: heads of v share those of q and k, in groups of
    neighbours; 1 <= K, V <= 128. bfloat16 or float16, on the CPU also float32. g, beta [B, T, HV]: of any of these
    types; float32 computes. PyTorch tensors are differentiable, but not cu_seqlens; NumPy arrays give NumPy arrays.

    g: the logarithm of the decay; 0 if None, which is the plain delta rule. Below -88 it counts as -inf.
    beta: 1 if None. States stay bounded where beta_t |k_t|^2 is at most 2; one that grows may leave what float16 holds
        inside a chunk.
    scale: 1 / sqrt(K) if None.
    initial_state: S_0, float32 [B, HV, K, V]; zero if None.
    output_final_state: return (out, S_T), S_T float32 [B, HV, K, V].
    cu_seqlens: integers [sequences + 1]. B is 1, and sequence i has steps cu_seqlens[i] to cu_seqlens[i + 1] - 1; out
        is 0 behind the last. The states are then those of the sequences, [sequences, HV, K, V].
    use_gate: the decay's logarithm is -exp(A_log) softplus(g + dt_bias), with A_log [HV] and dt_bias [HV] or None.
    use_qk_l2norm: rows of q and k are divided by sqrt(|x|^2 + 1e-6), in float32.
    use_beta_sigmoid: beta is sigmoid(beta); allow_neg_eigval: twice that.
    state_v_first: states are [.., V, K].
    """
    op = "gated_delta_rule"
    library = rows_library(is_torch(op, "q", q))
    form = beta_form(op, beta, use_beta_sigmoid, allow_neg_eigval)
    check_gate(op, g, A_log, dt_bias, use_gate)
    if beta is None:
        beta = ones(v)
    g, beta, A_log, dt_bias, initial_state = (
        t if t is None else library.as_float32(op, name, t)
        for name, t in (("g", g), ("beta", beta), ("A_log", A_log), ("dt_bias", dt_bias),
                        ("initial_state", initial_state)))
    cu_seqlens = cu_seqlens if cu_seqlens is None else as_int32(op, "cu_seqlens", cu_seqlens)
    run = functions.get(op) or of_row(op)
    keep = library.wants_gradient(q, k, v, g, beta, A_log, dt_bias, initial_state)
    out, state = run(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, checked_scale(op, scale),
                     form, bool(use_qk_l2norm), bool(state_v_first), 0, keep,
                     (bool(output_final_state),))
    return (out, state) if output_final_state else out


def beta_form(op, beta, use_beta_sigmoid, allow_neg_eigval):
    """As rows of ops.def have it."""
    if allow_neg_eigval and not use_beta_sigmoid:
        raise ValueError(f"{op}: allow_neg_eigval is True, expected False where use_beta_sigmoid is False: beta is "
                         "taken as it is")
    if use_beta_sigmoid and beta is None:
        raise ValueError(f"{op}: beta is None, expected a tensor where use_beta_sigmoid is True")
    return (2 if allow_neg_eigval else 1) if use_beta_sigmoid else 0


def check_gate(op, g, A_log, dt_bias, use_gate):
    if use_gate and (g is None or A_log is None):
        raise ValueError(f"{op}: {'g' if g is None else 'A_log'} is None, expected a tensor where use_gate is True")
    if not use_gate:
        for name, t in (("A_log", A_log), ("dt_bias", dt_bias)):
            if t is not None:
                raise ValueError(f"{op}: {name} is given, expected None where use_gate is False")


def by_heads(op, dt_bias, v):
    """KDA's bias as [HV, K], which may be given as [HV K]."""
    if not hasattr(dt_bias, "ndim") or dt_bias.ndim != 1 or not hasattr(v, "ndim") or v.ndim < 2:
        return dt_bias
    heads = v.shape[-2]
    if heads == 0 or dt_bias.shape[0] % heads:
        raise ValueError(f"{op}: dt_bias has shape {shape(dt_bias)}, expected [HV, K] or [HV K], with HV = {heads}")
    return dt_bias.reshape(heads, -1)


def ones(v):
    if hasattr(v, "new_ones"):
        return v.new_ones(v.shape[:-1], dtype=sys.modules["torch"].float32)
    import numpy as np

    return np.ones(v.shape[:-1], "float32")


def explained(op, library, named, given):
    """The op's row always has a beta."""
    from margay._explain import explain_row

    return explain_row(op, library, named, given if given.get("beta") is not None else given | {
        "beta": ones(given["v"])})


EXPLAINED = {"gated_delta_rule": explained}
