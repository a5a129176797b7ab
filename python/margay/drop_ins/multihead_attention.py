"""The layer torch.nn.MultiheadAttention on Margay's kernels."""

import torch
import torch.nn.functional as F

from margay.drop_ins import kernel_or_torch, padding
from margay.drop_ins.fallback import fall_back


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention on Margay's kernels: the same constructor, state dict, arguments and results.

    query [Nq, B, E], key [Nk, B, kdim], value [Nk, B, vdim], or batch first, or without B. key_padding_mask may be bool
    [B, Nk] (True: padding), attn_mask a causal mask with is_causal=True. With need_weights=True, which is torch's
    default, other masks, add_bias_kv or add_zero_attn, PyTorch computes, and a FallbackWarning says so.
    """

    __module__ = "margay.nn"      # which pickles name

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True,
                attn_mask=None, average_attn_weights=True, is_causal=False):
        if is_causal and attn_mask is None:
            raise RuntimeError("MultiheadAttention: is_causal is True and attn_mask is None, expected the causal "
                               "mask as well")
        reason = self._unsupported(query, key, value, key_padding_mask, need_weights, attn_mask, is_causal)
        if reason is not None:
            fall_back("MultiheadAttention", reason)
            return super().forward(query, key, value, key_padding_mask, need_weights,
                                   attn_mask, average_attn_weights, is_causal)
        rows = 1 if query.dim() == 3 and self.batch_first else 0
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)) for t in self._project(query, key, value))
        q, k, v = (t.transpose(0, 1)[None] if t.dim() == 3 else t.transpose(1, 2) if rows else t.permute(1, 2, 0, 3)
                   for t in (q, k, v))
        if is_causal:                     # aligned to the top left: later keys are seen by nobody
            k, v = k[:, :, :q.shape[2]], v[:, :, :q.shape[2]]
        dropout_p = self.dropout if self.training else 0.0
        if key_padding_mask is None:
            out = kernel_or_torch.attention("MultiheadAttention", q, k, v, causal=is_causal, dropout_p=dropout_p)
        else:
            mask = ~key_padding_mask if key_padding_mask.dim() == 2 else ~key_padding_mask[None]
            out = padding.attention("MultiheadAttention", q, k, v, mask, dropout_p=dropout_p)
        out = out[0].transpose(0, 1) if query.dim() == 2 else out.transpose(1, 2) if rows else out.permute(2, 0, 1, 3)
        return F.linear(out.flatten(-2), self.out_proj.weight, self.out_proj.bias), None

    def _project(self, query, key, value):
        if not self._qkv_same_embed_dim:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        elif query is key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(x, weight, bias) for x, weight, bias in zip((query, key, value), weights, biases)]

    def _unsupported(self, query, key, value, key_padding_mask, need_weights, attn_mask, is_causal):
        """Why PyTorch has to compute, or None."""
        if need_weights:
            return "need_weights is True"
        if attn_mask is not None and not is_causal:
            return "attn_mask without is_causal"
        if key_padding_mask is not None and (key_padding_mask.dtype != torch.bool or is_causal):
            return "key_padding_mask with is_causal" if is_causal else "key_padding_mask that is not bool"
        if self.bias_k is not None or self.add_zero_attn:
            return "add_bias_kv or add_zero_attn"
        if (not query.dim() == key.dim() == value.dim() or query.dim() not in (2, 3) or
            query.is_nested or key.is_nested or value.is_nested):
            return "nested tensors, or other than 2 or 3 dimensions"
        rows = 1 if query.dim() == 3 and self.batch_first else 0
        if is_causal and query.shape[rows] > key.shape[rows]:
            return "is_causal with more queries than keys"
        return None                       # of dtype, device and head dim, kernel_or_torch decides
