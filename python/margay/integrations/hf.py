"""Hugging Face transformers: attn_implementation="margay".

A model asks a mask function once per forward pass, and gives the result to the attention function of every layer. The mask is one of

    None                    every query sees every key, or the causal part (module.is_causal)
    bool [B, L]             True where a key is no padding; only the first L keys count
    int32 [B, 1, 1, 1]      the number of keys that count, of a cache that is longer
    int32 [1, 1, 1, S + 1]  cu_seqlens of sequences that are packed behind one another
    bool, float, 4 dims     any other mask, which PyTorch computes

Models hand masks of 4 dimensions on as they are; others they may convert and give to the mask function again, which leaves bool [B, L] as it is.
The window comes from the layer's sliding_window, as in transformers' own flash attention.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from margay import _dispatch, _padding, _plain
from margay._switch import Switch

_OP = "attn_implementation='margay'"


def register(name="margay"):
    """Make attn_implementation=name known to transformers, until `.disable()` or the end of a `with` block."""
    interfaces = (AttentionInterface, attention), (AttentionMaskInterface, attention_mask)
    before = [interface._global_mapping.get(name) for interface, _ in interfaces]
    for interface, function in interfaces:
        interface.register(name, function)

    def undo():
        for (interface, _), function in zip(interfaces, before):
            if function is None:
                interface._global_mapping.pop(name, None)
            else:
                interface.register(name, function)

    return Switch(undo)


def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, sliding_window=None, softcap=None, s_aux=None,
              position_bias=None, cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None, max_length_k=None, cache=None, **kwargs):
    """query [B, Hq, Nq, D], key [B, Hk, Nk, D], value [B, Hk, Nk, Dv] to [B, Nq, Hq, Dv] and None, for the attention weights are never stored."""
    if cache is not None:
        raise NotImplementedError(f"{_OP}: cache is given (continuous batching), which is not implemented")
    if not query.dtype == key.dtype == value.dtype:
        query, key = query.to(value.dtype), key.to(value.dtype)
    options = dict(scale=scaling, softcap=softcap or 0.0, sink=None if s_aux is None else s_aux.float(), dropout_p=dropout)
    causal = _is_causal(module, is_causal)
    whole = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.dtype != torch.int32
    if whole or position_bias is not None:
        _dispatch.warn(_OP, "a mask that is not made of causal, window, padding and packed sequences" if whole else "position_bias")
        mask = _whole_mask(query, key, attention_mask, causal, position_bias)
        return _rows_first(_plain.attention(query, key, value, mask=mask, **options)), None

    options["causal"] = causal
    if sliding_window is not None:
        options["window"] = (sliding_window - 1, -1 if causal else sliding_window - 1)
    if _is_cu_seqlens(attention_mask):
        cu_seqlens = attention_mask.flatten()
        out = _packed(query, key, value, cu_seqlens, cu_seqlens, query.shape[2], query.shape[2], options)
    elif attention_mask is not None and attention_mask.dim() == 4:
        out = _partly_filled(query, key, value, attention_mask.flatten(), options)
    elif attention_mask is not None:
        out = _padded(query, key, value, attention_mask, options)
    elif cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        out = _packed(query, key, value, cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32), max_length_q, max_length_k, options)
    else:
        out = _dispatch.attention(_OP, query, key, value, **options)
    return _rows_first(out), None


def attention_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function, attention_mask=None,
                   allow_is_causal_skip=True, local_size=None, use_vmap=False, config=None, device="cpu", **kwargs):
    """The mask as the module's docstring says. attention_mask: bool [B, rows] of what is no padding."""
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.dtype != torch.bool):
        return attention_mask                                                   # made before
    every = dict(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
                 attention_mask=attention_mask, allow_is_causal_skip=False, use_vmap=use_vmap, device=device)
    bidirectional = "allow_is_bidirectional_skip" in kwargs or mask_function is bidirectional_mask_function
    if use_vmap or not _is_known(mask_function, local_size, config):
        return sdpa_mask(**every)
    if bidirectional:
        return None if attention_mask is None or _is_all_true(attention_mask) else _columns(attention_mask, kv_offset, kv_length)
    if attention_mask is None and not allow_is_causal_skip and q_length == kv_length > 1 and mask_function is not causal_mask_function:
        return _cu_seqlens(mask_function, batch_size, q_length, device)
    if isinstance(q_offset, torch.Tensor) and q_length > 1 and not _compiling_or_capturing():
        q_offset = int(q_offset)
    if isinstance(q_offset, torch.Tensor):                                      # of a static cache, whose fill is not known on the host
        filled = (q_offset + (q_length - kv_offset)).to(torch.int32).clamp(max=kv_length)
        if attention_mask is None:
            return filled.expand(batch_size)[:, None, None, None]
        if q_length > 1:
            return sdpa_mask(**every)
        return _columns(attention_mask, kv_offset, kv_length) & (torch.arange(kv_length, device=device) < filled)
    filled = min(q_offset + q_length - kv_offset, kv_length)
    if attention_mask is not None and (attention_mask.shape[1] < filled or not _is_all_true(attention_mask)):
        return _columns(attention_mask, kv_offset, filled)
    return None if filled == kv_length else torch.full((batch_size, 1, 1, 1), filled, dtype=torch.int32, device=device)


def _is_causal(module, is_causal):
    """The call's word, the module's, and the configuration's that makes a decoder bidirectional."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True) and getattr(getattr(module, "config", None), "is_causal", True) is not False
    return bool(is_causal)


def _is_known(mask_function, local_size, config):
    """Is the function made of causal, window and packed sequences only? Told from what compiled code can see too: identity, name, arguments."""
    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        return True
    if not mask_function.__qualname__.startswith("and_masks."):
        return False
    return local_size is None or local_size == getattr(config, "sliding_window", None) and getattr(config, "attention_chunk_size", None) is None


def _columns(padding, first, count):
    """Columns first .. first + count of a padding mask; False behind its end. A mask without the columns before `first` is taken as it is."""
    if padding.shape[1] != count:
        padding = padding[:, first:first + count]
    return padding if padding.shape[1] == count else torch.nn.functional.pad(padding, (0, count - padding.shape[1]))


def _cu_seqlens(mask_function, batch, rows, device):
    """Sequences begin where a row does not see the one before it."""
    index = torch.arange(rows, device=device)
    sees = mask_function(torch.arange(batch, device=device)[:, None], index[0], index[None, 1:], index[None, :-1])
    begins = torch.nn.functional.pad(~sees.expand(batch, -1), (1, 0), value=True).flatten()
    total = batch * rows
    if not _compiling_or_capturing():
        return torch.nn.functional.pad(begins.nonzero().flatten(), (0, 1), value=total).to(torch.int32)[None, None, None]
    place = torch.where(begins, begins.cumsum(0) - 1, total + 1)                # of fixed size: the rest of the sequences is empty
    ends = torch.full((total + 2,), total, device=device).scatter(0, place, torch.arange(total, device=device))
    return ends[:-1].to(torch.int32)[None, None, None]


def _is_all_true(mask):
    """Read on the host, once per forward pass; where that cannot be done, no."""
    return not _compiling_or_capturing() and bool(mask.all())


def _compiling_or_capturing():
    return torch.compiler.is_compiling() or torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _is_cu_seqlens(mask):
    return mask is not None and mask.dtype == torch.int32 and mask.shape[3] > 1


def _rows_first(out):
    return out.transpose(1, 2).contiguous()


def _packed(query, key, value, cu_seqlens_q, cu_seqlens_k, max_length_q, max_length_k, options):
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    # a length on the device would have to be read: that of a row bounds it
    longest_q, longest_k = (n if isinstance(n, int) else t.shape[0] for n, t in ((max_length_q, q), (max_length_k, k)))
    out = _dispatch.attention_varlen(_OP, q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


def _partly_filled(query, key, value, lengths, options):
    wants_gradient = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if wants_gradient or options["dropout_p"]:
        return _padding.attention(_OP, query, key, value, torch.arange(key.shape[2], device=key.device) < lengths[:, None], **options)
    options = {name: value for name, value in options.items() if name != "dropout_p"}
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return _dispatch.attention_decode(_OP, q, k, v, cache_seqlens=lengths, **options).transpose(1, 2)


def _padded(query, key, value, mask, options):
    rows, columns = query.shape[2], mask.shape[1]
    key, value = key[:, :, :columns], value[:, :, :columns]
    ordered = options["causal"] or "window" in options                          # then padding among the queries counts too
    query_mask = mask[:, columns - rows:] if ordered and 1 < rows <= columns else None
    return _padding.attention(_OP, query, key, value, mask, query_mask, **options)


def _whole_mask(query, key, mask, causal, bias):
    """One mask of 4 dimensions, from any and a bias of the scores."""
    rows, columns = query.shape[2], key.shape[2]
    if _is_cu_seqlens(mask):
        raise NotImplementedError(f"{_OP}: position_bias is given for packed sequences, which is not implemented")
    if mask is None or mask.dim() == 2 or mask.dtype == torch.int32:
        column = torch.arange(columns, device=query.device)
        filled = columns if mask is None else mask.shape[1] if mask.dim() == 2 else mask
        last = torch.arange(rows, device=query.device)[:, None] + (filled - rows) if causal else filled - 1
        seen = column <= last
        if mask is not None and mask.dim() == 2:
            seen = seen & _columns(mask, 0, columns)[:, None, None]
        mask = seen if seen.dim() == 4 else seen.expand(1, 1, rows, columns)
    mask = mask[..., :columns]
    if bias is None:
        return mask
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
