"""Layers for torch.nn models."""

import torch

from margay.drop_ins.delta_layers import GatedDeltaNet, KimiDeltaAttention
from margay.drop_ins.linear_layers import Based, Hedgehog, LinearAttention
from margay.drop_ins.long_conv import LongConv
from margay.drop_ins.mamba2 import Mamba2
from margay.drop_ins.multihead_attention import MultiheadAttention
from margay.families.attention.attention import attention
from margay.families.norm import gated_rms_norm, layer_norm, rms_norm

__all__ = ["Attention", "Based", "GatedDeltaNet", "GatedRMSNorm", "Hedgehog", "KimiDeltaAttention", "LayerNorm",
           "LinearAttention", "LongConv", "Mamba2", "MultiheadAttention", "RMSNorm"]


class Attention(torch.nn.Module):
    """Self-attention: one projection to queries, keys and values, attention, one projection back. x [batch, rows,
    embed_dim] to the same shape.

    num_kv_heads: heads of keys and values, each shared by num_heads / num_kv_heads query heads; num_heads if None.
    head_dim: embed_dim / num_heads if None.
    The heads are read and the result is written in the layout of the projections: nothing is copied or transposed.
    """

    def __init__(self, embed_dim, num_heads, num_kv_heads=None, head_dim=None, *, bias=False, causal=True, scale=None,
                 deterministic=False, device=None, dtype=None):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"Attention: num_heads is {num_heads}, expected a multiple of num_kv_heads, which is "
                             f"{num_kv_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"Attention: embed_dim is {embed_dim}, expected a multiple of num_heads, which is "
                             f"{num_heads}, or a head_dim")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.causal, self.scale, self.deterministic = causal, scale, deterministic
        self.qkv_proj = torch.nn.Linear(embed_dim, (num_heads + 2 * num_kv_heads) * self.head_dim, bias, device, dtype)
        self.out_proj = torch.nn.Linear(num_heads * self.head_dim, embed_dim, bias, device, dtype)

    def forward(self, x):
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        out = self.attend(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        """The attention of the layer, for a subclass to do something before or instead of it."""
        return attention(q, k, v, causal=self.causal, scale=self.scale, deterministic=self.deterministic)

    def extra_repr(self):
        return (f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
                f"head_dim={self.head_dim}, "
                f"causal={self.causal}")


_EPSILON = torch.finfo(torch.float32).eps


class _Norm(torch.nn.Module):
    """Of the last dimensions, normalized_shape, as torch.nn's. weight, bias: parameters of that shape, or None."""

    def __init__(self, normalized_shape, eps, weight, bias, device, dtype):
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape:
            raise ValueError(f"{type(self).__name__}: normalized_shape is {normalized_shape!r}, expected one size or "
                             "more")
        self.normalized_shape, self.eps = shape, eps
        for name, given in (("weight", weight), ("bias", bias)):
            made = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if given else None
            self.register_parameter(name, made)
        self.reset_parameters()

    def reset_parameters(self):
        if self.weight is not None:
            torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def rows(self, name, t):
        """t with the normalised dimensions as one."""
        dims = len(self.normalized_shape)
        if tuple(t.shape[-dims:]) != self.normalized_shape:
            raise ValueError(f"{type(self).__name__}: {name} has shape {list(t.shape)}, expected "
                             f"[..., {', '.join(map(str, self.normalized_shape))}]")
        return t if dims == 1 else t.flatten(-dims)

    def normed(self, function, x, residual, options):
        weight, bias = (t if t is None else t.flatten() for t in (self.weight, self.bias))
        dims = len(self.normalized_shape)
        residual = residual if residual is None else self.rows("residual", residual)
        found = function(self.rows("x", x), weight, bias, residual=residual, eps=self.eps, **options)
        wide = lambda t: t.view(x.shape) if t.dim() > x.dim() - dims else t  # noqa: E731   of rows there is one number
        return tuple(map(wide, found)) if isinstance(found, tuple) else wide(found)

    def extra_repr(self):
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class LayerNorm(_Norm):
    """torch.nn.LayerNorm's arguments and state dict. forward(x, residual=None, **options): as `margay.layer_norm`,
    whose options are prenorm, dropout_p, residual_in_fp32, seed, generator, out_dtype and out_scale."""

    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, device=None, dtype=None):
        super().__init__(normalized_shape, eps, elementwise_affine, elementwise_affine and bias, device, dtype)

    def forward(self, x, residual=None, **options):
        return self.normed(layer_norm, x, residual, options)


class RMSNorm(_Norm):
    """torch.nn.RMSNorm's arguments and state dict, which are transformers' too. forward(x, residual=None, **options):
    as `margay.rms_norm`. zero_centred: the parameter is the weight less 1, as in Gemma and Qwen3-Next.

    eps: torch's, the machine epsilon of float32, if None. (Older releases took that of x's dtype.)
    """

    def __init__(self, normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None, *,
                 zero_centred=False):
        self.zero_centred = zero_centred
        super().__init__(normalized_shape, eps, elementwise_affine, False, device, dtype)

    def reset_parameters(self):
        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 0.0 if self.zero_centred else 1.0)

    def forward(self, x, residual=None, **options):
        def norm(*given, eps, **options):
            eps = _EPSILON if eps is None else eps
            return rms_norm(*given, eps=eps, zero_centred=self.zero_centred, **options)
        return self.normed(norm, x, residual, options)


class GatedRMSNorm(torch.nn.Module):
    """As mamba_ssm's RMSNormGated and transformers' Qwen3NextRMSNormGated, with their state dict:
    `margay.gated_rms_norm` of hidden_size columns. forward(x, gate)."""

    def __init__(self, hidden_size, eps=1e-6, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x, gate):
        return gated_rms_norm(x, gate, self.weight, eps=self.eps, group_size=self.group_size,
                              norm_before_gate=self.norm_before_gate)
