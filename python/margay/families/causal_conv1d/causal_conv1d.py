"""Causal convolution along the sequence, each channel by itself."""

from margay._shared import as_int32, functions, is_torch, of_row


def _is_silu(op, activation):
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{op}: activation is {activation!r}, expected None, 'silu' or 'swish'")
    return activation is not None


def causal_conv1d(x, weight, bias=None, *, activation=None, initial_states=None, return_final_states=False,
                  cu_seqlens=None, seq_idx=None):
    """out_t = f(bias + sum over j < W of weight[:, j] x_(t - W + 1 + j)): every step sees itself and the W - 1 before.

    x, out [B, T, C], weight [C, W] with W 2 to 4, bias [C]. bfloat16 or float16, on the CPU also float32; weight and
    bias are float32 or as x. PyTorch tensors are differentiable; NumPy arrays give NumPy arrays.

    activation: None, or "silu" ("swish"): f(a) = a sigmoid(a).
    initial_states: the W - 1 steps in front of each sequence, [B, W - 1, C]; zeros if None; differentiable.
    return_final_states: return (out, final_states), the last W - 1 steps of each sequence, to be initial_states.
    cu_seqlens: packed sequences, integers [N + 1], B = 1: sequence i is steps cu_seqlens[i] to cu_seqlens[i + 1] - 1,
        states are [N, W - 1, C]. Steps behind the last sequence become 0.
    seq_idx: integers [B, T]: a step with another number than the one before it begins a sequence; steps of negative
        numbers become 0. Initial states are those of a batch entry's first sequence, final ones those of its last.
    """
    silu = _is_silu("causal_conv1d", activation)
    if seq_idx is not None:
        seq_idx = as_int32("causal_conv1d", "seq_idx", seq_idx)
    if cu_seqlens is None:
        call = functions.get("causal_conv1d") or of_row("causal_conv1d")
        out, states = call(x, weight, bias, initial_states, seq_idx, silu)
    else:
        if seq_idx is not None:
            raise ValueError("causal_conv1d: cu_seqlens and seq_idx are given, expected at most one of them")
        call = functions.get("causal_conv1d_packed") or of_row("causal_conv1d_packed")
        cu_seqlens = as_int32("causal_conv1d", "cu_seqlens", cu_seqlens)
        out, states = call(x, weight, cu_seqlens, bias, initial_states, silu)
    return (out, states) if return_final_states else out


def causal_conv1d_step(x, state, weight, bias=None, *, activation=None, cache_seqlens=None, slots=None):
    """`causal_conv1d` of a few more steps of each sequence, for generation. Not differentiable.

    x, out [B, T, C]; state [N, L, C] with L >= W - 1, in either memory order of its last two dimensions, is updated in
    place: it holds each sequence's last L steps, the oldest first.

    cache_seqlens: int32 [B], the steps that each sequence has had. The state is a ring then: step i is at i % L.
    slots: int32 [B], each sequence's place in state, else i. A sequence of no place, such as -1, is padding: its result
        is 0. No two sequences may have the same place.
    """
    silu = _is_silu("causal_conv1d_step", activation)
    if is_torch("causal_conv1d_step", "x", x):
        from margay.families.causal_conv1d.step_torch import step

        return step(x, state, weight, bias, cache_seqlens, slots, silu)
    import numpy

    from margay import _C

    out = numpy.empty(x.shape, x.dtype)
    _C.causal_conv1d_step(out, numpy.ascontiguousarray(x), weight, state, bias, cache_seqlens, slots, silu)
    return out
