"""FlashInfer's function of the gated delta rule, with its arguments, for those who serve with it.

Sequences are packed: q, k [T, heads, K], v [T, heads, V]. Decays are factors, not logarithms. States are [.., V, K].
"""

import torch

import margay

__all__ = ["chunk_gated_delta_rule"]
_STATES = torch.float32, torch.bfloat16, torch.float16


@torch.no_grad()
def chunk_gated_delta_rule(q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
                           cu_seqlens=None, use_qk_l2norm_in_kernel=False, output=None, output_state=None,
                           state_checkpoints=None, checkpoint_cu_starts=None, checkpoint_every_n_tokens=0,
                           use_cp="auto", state_indices=None, _cp_chunk_len=None):
    """As flashinfer's: out [T, heads, V], or with output_final_state (out, the last states).

    g: factors, g = 0 forgets all; 1 if None. beta: 1 if None. Heads are as many as q or v has, whichever is more: of q
    more than of k and v, each k and v serves several q, which costs a copy of them. initial_state, output_state
    [sequences, heads, V, K], or with state_indices pools of such, float32, bfloat16 or float16. A sequence whose index
    is negative has no place there, as what fills up a batch has none: it begins with zeros, and how it ends is not
    kept. output and output_state are written where they are given. use_cp changes nothing. Checkpoints of the states
    are refused. Not differentiable.
    """
    op = "chunk_gated_delta_rule"
    if checkpoint_every_n_tokens or state_checkpoints is not None or checkpoint_cu_starts is not None:
        raise NotImplementedError(f"{op}: checkpoint_every_n_tokens is {checkpoint_every_n_tokens}, expected 0 and no "
                                  "checkpoints")
    if cu_seqlens is None:
        raise ValueError(f"{op}: cu_seqlens is None, expected the starts of the sequences")
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(f"{op}: q, k and v have {q.ndim}, {k.ndim} and {v.ndim} dimensions, expected 3 [T, heads, "
                         "columns]")
    for name, t in (("initial_state", initial_state), ("output_state", output_state)):
        if t is not None and t.dtype not in _STATES:
            raise TypeError(f"{op}: {name} has dtype {str(t.dtype).removeprefix('torch.')}, expected float32, bfloat16 "
                            "or float16")
    if state_indices is not None and output_final_state and output_state is None:
        raise ValueError(f"{op}: output_state is None, expected a pool of states where state_indices and "
                         "output_final_state are given")
    heads = max(q.shape[1], v.shape[1])
    if q.shape[1] > k.shape[1]:
        if not k.shape[1] or q.shape[1] % k.shape[1] or v.shape[1] != k.shape[1]:
            raise ValueError(f"{op}: q has {q.shape[1]} heads, k {k.shape[1]} and v {v.shape[1]}, expected as many of "
                             "k and v, and of q a multiple of them")
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    places = None if state_indices is None else state_indices.long()
    for name, t in (("initial_state", initial_state), ("output_state", output_state)):
        if (places is not None and t is not None and not places.is_cuda and places.numel()
                and places.max() >= len(t)):
            raise ValueError(f"{op}: state_indices are up to {int(places.max())}, expected at most {len(t) - 1} "
                             f"(places of {name})")
    state = initial_state
    if state is not None:
        state = state.float() if places is None else _states_at(state, places)
    one = lambda t: None if t is None else t[None]  # noqa: E731
    out, last = margay.gated_delta_rule(
        q[None], k[None], v[None], None if g is None else g.float().log()[None], one(beta), scale=scale or None,
        initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, use_qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=True)
    out = out[0] if output is None else output.copy_(out[0])
    if output_state is not None and (output_final_state or places is None):
        if places is None:
            output_state.copy_(last)
        else:
            _keep(output_state, places, last)
        last = output_state
    return (out, last) if output_final_state else out


def _exist(places, pool):
    return (places >= 0) & (places < len(pool))


def _states_at(pool, places):
    there = _exist(places, pool).view(-1, *[1] * (pool.ndim - 1))
    return torch.where(there, pool[places.clamp(0, len(pool) - 1)].float(), 0.0)


def _keep(pool, places, states):
    """Nothing waits for how many places there are: who has none writes what another one writes there too, or, where
    nobody has one, what is there."""
    if not len(places):
        return
    there = _exist(places, pool)
    source = torch.where(there, torch.arange(len(places), device=places.device), there.int().argmax())
    at = places[source].clamp(0, len(pool) - 1)
    pool[at] = torch.where(there.any(), states[source].to(pool.dtype), pool[at])
