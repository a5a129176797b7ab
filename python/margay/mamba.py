"""Functions of mamba_ssm with its arguments, on `margay.causal_conv1d`, `margay.ssd` and `margay.gated_rms_norm`."""

import math

import torch
import torch.nn.functional as F

from margay.families.causal_conv1d.causal_conv1d import causal_conv1d
from margay.families.norm import gated_rms_norm
from margay.families.ssd import ssd, ssd_step

__all__ = ["RMSNormGated", "mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined", "rmsnorm_fn",
           "selective_state_update"]


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
        y, states = ssd(x, dt, A, B, C, **options, initial_states=initial_states, seq_idx=seq_idx,
                        return_final_states=True)
        y = y.contiguous()                       # as programs expect, where ssd's is in memory as x is
        return (y, states) if return_final_states else y
    if cu_seqlens is None:
        raise ValueError("mamba_chunk_scan_combined: cu_seqlens is None, expected the starts of the sequences where "
                         "return_varlen_states is True")
    if initial_states is not None:
        others = initial_states.new_zeros(len(cu_seqlens) - 2, *initial_states.shape[1:])
        initial_states = torch.cat([initial_states, others])
    y, states = ssd(x, dt, A, B, C, **options, initial_states=initial_states, cu_seqlens=cu_seqlens,
                    return_final_states=True)
    y = y.contiguous()
    return (y, states[-1:], states) if return_final_states else (y, states)


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
                           state_batch_indices=None):
    """As mamba_ssm.ops.triton.selective_state_update's, of Mamba-2: one dt, A, D and bias for a head, which the callers
    expand to its columns.

    state [batch, heads, dim, N], x, dt, z [batch, heads, dim], A [heads, dim, N], D, dt_bias [heads, dim]; other forms
    are refused.
    """
    name = several_for_a_head(x, dt, A, D, dt_bias)
    if name is not None:
        t = dict(x=x, dt=dt, A=A, D=D, dt_bias=dt_bias)[name]
        raise NotImplementedError(f"selective_state_update: {name} has shape {list(t.shape)} and strides "
                                  f"{list(t.stride())}, expected "
                                  + ("[batch, heads, dim]" if name == "x" else "one value for each head, expanded"))
    first = lambda t: t if t is None else t[..., 0]  # noqa: E731
    return ssd_step(state, x, first(dt), first(first(A)), B, C, D=first(D), z=z, dt_bias=first(dt_bias),
                    dt_softplus=dt_softplus, state_indices=state_batch_indices)


def several_for_a_head(x, dt, A, D, dt_bias):
    """The name of what is not one number for a head, expanded to its columns, or of x where that has no heads; or
    None."""
    if x.ndim != 3:
        return "x"
    for name, t in (("dt", dt), ("A", A), ("D", D), ("dt_bias", dt_bias)):
        if t is not None and any(t.shape[i] != 1 and t.stride(i) for i in ((-1, -2) if name == "A" else (-1,))):
            return name
    return None


def mamba_split_conv1d_scan_combined(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None,
                                     seq_idx=None, dt_limit=(0.0, math.inf), return_final_states=False,
                                     activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None,
                                     outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
                                     state_dtype=None):
    """As mamba_ssm.ops.triton.ssd_combined's: all of a Mamba-2 layer behind its first projection; [batch, steps, d], or
    with return_final_states that and the last states.

    zxbcdt [batch, steps, 2 * mlp + 2 * dim + 2 * ngroups * N + heads]; D [heads] with headdim, or [heads, head dim].
    chunk_size and state_dtype change nothing. The result has zxbcdt's type, as the products of a layer have it.
    """
    dims = D.shape[0] * (headdim if D.ndim == 1 else D.shape[1])
    width = conv1d_weight.shape[0]
    mlp, z, xbc, dt = split_projection(zxbcdt, dims, width, D.shape[0])
    xbc = causal_conv1d(xbc, conv1d_weight, conv1d_bias, activation=activation, seq_idx=int32(seq_idx))
    norm = rmsnorm_weight is not None
    y, states = scan(xbc, dt, A, D, ngroups, dims, None if norm else z, dt_bias=dt_bias, dt_limit=dt_limit,
                     initial_states=initial_states, seq_idx=seq_idx)
    if norm:
        y = rmsnorm_fn(y, rmsnorm_weight, None, z, rmsnorm_eps, dims // ngroups, norm_before_gate)
    y = join_mlp(y, mlp)
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight, outproj_bias)
    return (y, states) if return_final_states else y


def rmsnorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    """As mamba_ssm.ops.triton.layernorm_gated's: each group_size columns over their root mean square, times weight, and
    silu(z) afterwards, or with norm_before_gate=False before. float32 computes, the result is as x. With a bias,
    without z and of other types it is PyTorch's."""
    if z is not None and bias is None and z.dtype == x.dtype and weight.dtype in (x.dtype, torch.float32):
        return gated_rms_norm(x, z, weight, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate)
    gate = None if z is None else F.silu(z.float())
    wide = x.float() if gate is None or norm_before_gate else x * gate      # x is read in its own type
    if group_size is None or group_size == x.shape[-1]:
        wide = F.rms_norm(wide, x.shape[-1:], weight.float(), eps)
    else:
        wide = F.rms_norm(wide.unflatten(-1, (-1, group_size)), (group_size,), eps=eps).flatten(-2) * weight
    if bias is not None:
        wide = wide + bias.float()
    if gate is not None and norm_before_gate:
        wide = wide * gate
    return wide.to(x.dtype)


class RMSNormGated(torch.nn.Module):
    """As mamba_ssm.ops.triton.layernorm_gated's RMSNorm: a layer of `rmsnorm_fn`."""

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x, z=None):
        return rmsnorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)

    def extra_repr(self):
        return (f"{self.weight.shape[0]}, eps={self.eps}, group_size={self.group_size}, "
                f"norm_before_gate={self.norm_before_gate}")


# ---- the parts of a Mamba-2 layer, which margay.nn.Mamba2 has as well


def split_projection(zxbcdt, dims, width, heads):
    """(the gated MLP's columns or None, z, what is convolved, dt) of the first projection's result, views. width: the
    convolution's channels."""
    mlp = zxbcdt.shape[-1] - dims - width - heads
    parts = zxbcdt.split((mlp, dims, width, heads), dim=-1)
    return parts if mlp else (None, *parts[1:])


def scan(xbc, dt, A, D, groups, dims, z=None, **options):
    """y [batch, steps, dims] and the last states, of the convolution's result. z: a gate on y, where no norm has it."""
    x, b, c = xbc.split((dims, *[(xbc.shape[-1] - dims) // 2] * 2), dim=-1)
    x = x.unflatten(-1, (len(A), -1))
    b, c = b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1))
    y, states = ssd(x, dt, A, b, c, D=D, z=z if z is None else z.unflatten(-1, (len(A), -1)), dt_softplus=True,
                    return_final_states=True, **options)
    return y.flatten(2), states


def join_mlp(y, mlp):
    """y behind silu(z0) x0 of the columns z0, x0 of a gated MLP."""
    if mlp is None:
        return y
    gate, value = mlp.chunk(2, dim=-1)
    return torch.cat([F.silu(gate) * value, y], dim=-1)


def int32(seq_idx):
    """What `margay.causal_conv1d` takes; `margay.ssd` takes other integers too."""
    return seq_idx if seq_idx is None else seq_idx.int()
