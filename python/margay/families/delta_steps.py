"""Steps of the delta rules for generation. What computes them on PyTorch tensors is in steps.py."""

from margay._shared import checked_scale, functions, is_torch, shape
from margay.families.delta import beta_form, by_heads, check_gate
from margay.families.kda import checked_bound


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
    check_gate(op, g, A_log, dt_bias, use_gate)
    return _step(op, state, q, k, v, g, beta, A_log, dt_bias, 0.0, scale, use_qk_l2norm, use_beta_sigmoid,
                 allow_neg_eigval, state_v_first, state_indices, token_indices, num_accepted_tokens,
                 intermediate_states, intermediate_indices, update_state)


def kda_step(state, q, k, v, g, beta=None, *, scale=None, A_log=None, dt_bias=None, lower_bound=None, use_gate=False,
             use_qk_l2norm=False, use_beta_sigmoid=False, allow_neg_eigval=False, state_v_first=False,
             state_indices=None, token_indices=None, num_accepted_tokens=None, intermediate_states=None,
             intermediate_indices=None, update_state=True):
    """One step of `kda`, for generation: out [B, HV, V]. As `gated_delta_rule_step`, but g is of each key: [B, HV, K]
    or, of several steps, [B, T, HV, K]. g, A_log, dt_bias and lower_bound as for `kda`; with lower_bound, A_log may be
    None, which is one of zeros."""
    op = "kda_step"
    bound = checked_bound(op, lower_bound, use_gate)
    if not (bound and A_log is None):
        check_gate(op, g, A_log, dt_bias, use_gate)
    return _step(op, state, q, k, v, g, beta, A_log, by_heads(op, dt_bias, v), bound, scale, use_qk_l2norm,
                 use_beta_sigmoid, allow_neg_eigval, state_v_first, state_indices, token_indices, num_accepted_tokens,
                 intermediate_states, intermediate_indices, update_state)


def _step(op, state, q, k, v, g, beta, A_log, dt_bias, lower_bound, scale, l2norm, beta_sigmoid, allow_neg_eigval,
          state_v_first, *places):
    for name, t in (("q", q), ("v", v)):
        if not is_torch(op, name, t):
            raise TypeError(f"{op}: {name} is {type(t).__name__}, expected torch.Tensor")
    form = beta_form(op, beta, beta_sigmoid, allow_neg_eigval)
    if beta is None:
        beta = v.new_ones(v.shape[:-1])
    step = functions.get("delta_step") or _find_step()
    *indices, kept, kept_at, update_state = places
    if state_v_first:
        last = v.shape[-1:] + q.shape[-1:]
        state, kept = _turned(op, "state", state, last), _turned(op, "intermediate_states", kept, last)
    return step(op, state, q, k, v, g, beta, A_log, dt_bias, *indices, kept, kept_at, checked_scale(op, scale),
                lower_bound, form, bool(l2norm), not update_state)


def _turned(op, name, states, last):
    if states is None:
        return None
    if not is_torch(op, name, states):
        raise TypeError(f"{op}: {name} is {type(states).__name__}, expected torch.Tensor")
    if states.shape[-2:] != last:
        raise ValueError(f"{op}: {name} has shape {shape(states)}, expected [.., {', '.join(map(str, last))}] with "
                         "state_v_first")
    return states.mT


def _find_step():
    from margay.families.steps import delta_step as step

    return functions.setdefault("delta_step", step)


def _step_explained(op, library, named, given):
    return [], {}, []


EXPLAINED = {"gated_delta_rule_step": _step_explained, "kda_step": _step_explained}
