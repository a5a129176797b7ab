"""Layers for torch.nn models."""

import torch

from margay.drop_ins.delta_layers import GatedDeltaNet, KimiDeltaAttention
from margay.drop_ins.linear_layers import Based, Hedgehog, LinearAttention
from margay.drop_ins.long_conv import LongConv
from margay.drop_ins.mamba2 import Mamba2
from margay.drop_ins.multihead_attention import MultiheadAttention
from margay.families.attention.attention import attention

__all__ = ["Attention", "Based", "GatedDeltaNet", "Hedgehog", "KimiDeltaAttention", "LinearAttention", "LongConv",
           "Mamba2", "MultiheadAttention"]


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
