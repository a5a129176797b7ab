"""Padded batches to packed rows and back, with the names and return values of flash_attn.bert_padding.

The number of rows that are no padding is read on the host: on CUDA these functions wait for the device.
"""

import torch
import torch.nn.functional as F


def index_first_axis(x, indices):
    """Rows `indices` of x [N, ...]."""
    return x.index_select(0, indices)


def index_put_first_axis(values, indices, first_axis_dim):
    """values [M, ...] as the rows `indices` of a tensor [first_axis_dim, ...], 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """hidden_states [B, N, ...] and masks [B, N] (nonzero: no padding) to rows [T, ...], indices int64 [T], cu_seqlens
    int32 [B + 1], the largest length, and lengths int32 [B]. Rows of unused_mask are kept as well, at the end of a
    sequence as the masks have it, but not counted in the lengths."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices, cu_seqlens, longest = _unpadded(kept != 0, kept.sum(1))
    return (index_first_axis(hidden_states.flatten(0, 1), indices), indices,
            cu_seqlens, longest, attention_mask.sum(1, dtype=torch.int32))


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """As unpad_input, for rows that hold several sequences: attention_mask_in_length [B, N] has their lengths, then
    zeros."""
    rows = torch.arange(attention_mask_in_length.shape[1], device=attention_mask_in_length.device)
    kept = rows < attention_mask_in_length.sum(1, keepdim=True)
    lengths = attention_mask_in_length.flatten()
    indices, cu_seqlens, longest = _unpadded(kept, lengths[lengths != 0])
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states, indices, batch, seqlen):
    """hidden_states [T, ...] to [batch, seqlen, ...], 0 where `indices` name no row."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _unpadded(kept, lengths):
    return kept.flatten().nonzero().flatten(), F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32), int(lengths.max())


__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input",
           "unpad_input_for_concatenated_sequences"]
