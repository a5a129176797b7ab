"""Functions of mamba_ssm with its arguments, on `margay.ssd`."""

import torch

from margay.families.ssd import ssd, ssd_step

__all__ = ["mamba_chunk_scan_combined", "selective_state_update"]


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None,
                              seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")),
                              return_final_states=False, return_varlen_states=False, state_dtype=None):
    """As mamba_ssm.ops.triton.ssd_combined's: y, then the last states, then those of the sequences of cu_seqlens, where
    they are asked for.

    chunk_size and state_dtype change nothing: chunks are of 64 steps, states float32. cu_seqlens is read where
    return_varlen_states asks. The sequences are then also those that y is computed by, as seq_idx would have it;
    initial_states, [1, ...], is the first one's.
    """
    B, C = B.to(x.dtype), C.to(x.dtype)
    options = dict(D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit)
    if not return_varlen_states:
        return ssd(x, dt, A, B, C, **options, initial_states=initial_states, seq_idx=seq_idx,
                   return_final_states=return_final_states)
    if cu_seqlens is None:
        raise ValueError("mamba_chunk_scan_combined: cu_seqlens is None, expected the starts of the sequences where "
                         "return_varlen_states is True")
    if initial_states is not None:
        others = initial_states.new_zeros(len(cu_seqlens) - 2, *initial_states.shape[1:])
        initial_states = torch.cat([initial_states, others])
    y, states = ssd(x, dt, A, B, C, **options, initial_states=initial_states, cu_seqlens=cu_seqlens,
                    return_final_states=True)
    return (y, states[-1:], states) if return_final_states else (y, states)


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
                           state_batch_indices=None):
    """As mamba_ssm.ops.triton.selective_state_update's, of Mamba-2: one dt, A, D and bias for a head, which the callers
    expand to its columns.

    state [batch, heads, dim, N], x, dt, z [batch, heads, dim], A [heads, dim, N], D, dt_bias [heads, dim]; other forms
    are refused.
    """
    for name, t in (("dt", dt), ("A", A), ("D", D), ("dt_bias", dt_bias)):
        inner = {"A": (-1, -2)}.get(name, (-1,))
        if t is not None and (x.ndim != 3 or any(t.shape[i] != 1 and t.stride(i) for i in inner)):
            raise NotImplementedError(f"selective_state_update: {name} has shape {list(t.shape)} and strides "
                                      f"{list(t.stride())}, expected one value for each head, expanded")
    first = lambda t: t if t is None else t[..., 0]  # noqa: E731
    return ssd_step(state, x, first(dt), first(first(A)), B, C, D=first(D), z=z, dt_bias=first(dt_bias),
                    dt_softplus=dt_softplus, state_indices=state_batch_indices)
