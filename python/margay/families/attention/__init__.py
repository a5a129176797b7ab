"""Attention: softmax(q k^T) v over tensors and, for generation, over caches.

    attention           attention, attention_varlen, dropout_mask: docstrings, options, checks
    decode              attention_decode, append_kv: the same
    features            what attention has beside a causal mask and a scale, as `_C` takes it
    *_torch, *_numpy    the two on PyTorch tensors and on NumPy arrays
"""
