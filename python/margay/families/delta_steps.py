"""Steps of the delta rules for generation. What computes them on PyTorch tensors is in steps.py."""

from margay._shared import checked_scale, functions, is_torch


def gated_delta_rule_step(state, q, k, v, g=None, beta=None, *, scale=None, A_log=None, dt_bias=None, use_gate=False,
                          use_qk_l2norm=False, use_beta_sigmoid=False, allow_neg_eigval=False, state_v_first=False,
                          state_indices=None, token_indices=None, num_accepted_tokens=None, intermediate_states=None,
                          intermediate_indices=None, update_state=True):
    """One step of `gated_delta_rule`, for generation: out [B, HV, V]. `state` [B, HV, K, V], float32 or as q, becomes
    the next one in place: it is read once and written once. PyTorch tensors; not differentiable.

    q, k [B, H, K], v [B, HV, V], g, beta [B, HV], HV a multiple of H; 1 <= K <= 256, any V. Several steps at once: q, k
    [B, T, H, K], v, out [B, T, HV, V], g, beta [B, T, HV]. g, beta, scale, A_log, dt_bias and what begins with use, as
    well as allow_neg_eigval: as for `gated_delta_rule`.
    state_v_first: states are [.., V, K]. Either of their last two dimensions may be the contiguous one.
    state_indices: integers [B]. Sample i has state[state_indices[i]]; where it is negative, there is none, and out
        is 0. No two samples may have the same state.

    For speculative decoding, which drops the last of several tokens, the state behind each can be kept:
    intermediate_states: [B, T or more, HV, K, V], of state's type and order. The state behind token t of sample i
        becomes intermediate_states[i, t] or, with intermediate_indices, integers [B], that of intermediate_indices[i],
        where this is not negative.
    token_indices: integers [B, T or more]. The state behind token t becomes state[token_indices[i, t]] where that is
        not negative, and no other is written. Sample i begins with state[state_indices[i]] or, without state_indices,
        state[token_indices[i, num_accepted_tokens[i] - 1]]; num_accepted_tokens: integers [B], 1 if None.
    update_state: False leaves state as it is.

    Other floating types, a larger K, and float32 on CUDA, are computed by PyTorch's operations.
    """
    op = "gated_delta_rule_step"
    if use_gate and (g is None or A_log is None):
        raise ValueError(f"{op}: {'g' if g is None else 'A_log'} is None, expected a tensor where use_gate is True")
    return _step(op, state, q, k, v, g, beta, A_log, dt_bias, use_gate, None, scale, use_qk_l2norm, use_beta_sigmoid,
                 allow_neg_eigval, state_v_first, state_indices, token_indices, num_accepted_tokens,
                 intermediate_states, intermediate_indices, update_state)


def kda_step(state, q, k, v, g, beta=None, *, scale=None, A_log=None, dt_bias=None, lower_bound=None, use_gate=False,
             use_qk_l2norm=False, use_beta_sigmoid=False, allow_neg_eigval=False, state_v_first=False,
             state_indices=None, token_indices=None, num_accepted_tokens=None, intermediate_states=None,
             intermediate_indices=None, update_state=True):
    """One step of `kda`, for generation: out [B, HV, V]. As `gated_delta_rule_step`, but g is of each key: [B, HV, K]
    or, of several steps, [B, T, HV, K]. g, A_log, dt_bias [HV, K] and lower_bound as for `kda`."""
    op = "kda_step"
    if use_gate and A_log is None and lower_bound is None:
        raise ValueError(f"{op}: A_log is None, expected a tensor where use_gate is True and lower_bound is None")
    if lower_bound is not None and not use_gate:
        raise ValueError(f"{op}: lower_bound is given, expected None where use_gate is False")
    if lower_bound is not None and not -1e38 < lower_bound < 0:
        raise ValueError(f"{op}: lower_bound is {lower_bound}, expected a negative finite number")
    return _step(op, state, q, k, v, g, beta, A_log, dt_bias, use_gate, lower_bound, scale, use_qk_l2norm,
                 use_beta_sigmoid, allow_neg_eigval, state_v_first, state_indices, token_indices, num_accepted_tokens,
                 intermediate_states, intermediate_indices, update_state)


def _step(op, state, q, k, v, g, beta, A_log, dt_bias, use_gate, lower_bound, scale, l2norm, beta_sigmoid,
          allow_neg_eigval, state_v_first, *places):
    if not is_torch(op, "q", q):
        raise TypeError(f"{op}: q is {type(q).__name__}, expected torch.Tensor")
    if not use_gate and (A_log is not None or dt_bias is not None):
        raise ValueError(f"{op}: {'dt_bias' if A_log is None else 'A_log'} is given, expected None where use_gate is "
                         "False")
    if allow_neg_eigval and not beta_sigmoid:
        raise ValueError(f"{op}: allow_neg_eigval is True, expected False where use_beta_sigmoid is False: beta is "
                         "taken as it is")
    if beta is None:
        if beta_sigmoid:
            raise ValueError(f"{op}: beta is None, expected a tensor where use_beta_sigmoid is True")
        beta = v.new_ones(v.shape[:-1])
    step = functions.get("delta_step") or _find_step()
    *indices, kept, kept_at, update_state = places
    if state_v_first:
        state, kept = _turned(op, "state", state), _turned(op, "intermediate_states", kept)
    return step(op, state, q, k, v, g, beta, A_log, dt_bias, *indices, kept, kept_at, checked_scale(op, scale),
                lower_bound or 0.0, beta_sigmoid * (1 + bool(allow_neg_eigval)), bool(l2norm), not update_state)


def _turned(op, name, states):
    if states is None:
        return None
    if not is_torch(op, name, states) or states.ndim < 2:
        raise TypeError(f"{op}: {name} is {type(states).__name__}, expected torch.Tensor [.., V, K]")
    return states.mT


def _find_step():
    from margay.families.steps import delta_step as step

    return functions.setdefault("delta_step", step)


def _step_explained(op, library, named, given):
    return [], {}, []


EXPLAINED = {"gated_delta_rule_step": _step_explained, "kda_step": _step_explained}
