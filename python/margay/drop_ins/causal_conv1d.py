"""The functions of the package causal-conv1d: same names, arguments, shapes and layouts.

x is [B, C, T]. Where its channels are contiguous (a transposed view of [B, T, C]) it is read as it is, and results are
such views; otherwise it is copied there and back. More than the package: states beside seq_idx, any C, gradients of
final states that come with packed sequences.
"""
import torch

import margay

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]


def _activation(activation):
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")
    return activation


def _steps_first(t):
    """[B, C, T] as [B, T, C] with contiguous channels, a view where it can be."""
    t = t.transpose(1, 2)
    return t if t.stride(2) == 1 or t.shape[2] == 1 else t.contiguous()


def _weights(x, *weights):
    """fp32 or as x, dense."""
    return [w if w is None else (w if w.dtype in (x.dtype, torch.float32) else w.float()).contiguous() for w in weights]


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):
    """x [B, C, T], weight [C, W], bias [C], seq_idx int32 [B, T]; initial_states, final_states_out [B, C, W - 1].

    Returns out [B, C, T], with return_final_states (out, final states); these are written to final_states_out where
    that is given.
    """
    out, final = channels_last(x, weight, bias, seq_idx, initial_states, activation)
    if x.stride(1) != 1 and x.stride(2) == 1 and x.shape[2] > 1:
        out = out.contiguous()                     # in memory as x is
    if not return_final_states:
        return out
    return out, final if final_states_out is None else final_states_out.copy_(final)


def channels_last(x, weight, bias=None, seq_idx=None, initial_states=None, activation=None):
    """out and final states of `causal_conv1d_fn`, whose channels are contiguous whatever those of x are."""
    weight, bias = _weights(x, weight, bias)
    states = None if initial_states is None else _steps_first(initial_states)
    out, final = margay.causal_conv1d(_steps_first(x), weight, bias, activation=_activation(activation),
                                      initial_states=states, return_final_states=True, seq_idx=seq_idx)
    return out.transpose(1, 2), final.transpose(1, 2)


@torch.no_grad()
def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None,
                         conv_state_indices=None):
    """x [B, C] or [B, C, T]; conv_state [B, C, L], with conv_state_indices [N, C, L], updated in place.

    cache_seqlens int32 [B]: the state is a ring, and the new steps begin at cache_seqlens % L. conv_state_indices
    int32 [B]: each sequence's place in conv_state; -1 is padding, whose result is 0.
    """
    activation = _activation(activation)
    weight, bias = _weights(x, weight, bias)
    steps = x[:, None] if x.dim() == 2 else _steps_first(x)
    out = margay.causal_conv1d_step(steps, conv_state.transpose(1, 2), weight, bias, activation=activation,
                                    cache_seqlens=cache_seqlens, slots=conv_state_indices)
    return out[:, 0] if x.dim() == 2 else out.transpose(1, 2)


def causal_conv1d_varlen_states(x, cu_seqlens, state_len):
    """The last state_len steps of each packed sequence, after zeros where it has fewer: [T, C] to [N, C, state_len]."""
    end, start = cu_seqlens[1:, None].long(), cu_seqlens[:-1, None].long()
    step = end - state_len + torch.arange(state_len, device=x.device)
    rows = x[step.clamp(min=0)] if x.shape[0] else x.new_zeros(*step.shape, x.shape[1])
    return torch.where((step >= start)[..., None], rows, 0).transpose(1, 2)
