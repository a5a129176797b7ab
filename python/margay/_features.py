"""What the drop-ins call. A function of `margay` where it has the options, PyTorch where it does not yet.

To delete this file once `margay.attention` takes window, softcap, sink, alibi_slopes and dropout, and attention_varlen, attention_decode and
append_kv exist: import the four from `margay.ops` in `_dispatch.py`.
"""

import inspect

from margay import _plain, ops

_BASIC = ("causal", "scale", "return_lse", "deterministic")
_COMPLETE = "window" in inspect.signature(ops.attention).parameters
_NEUTRAL = {"window": (-1, -1), "softcap": 0.0, "sink": None, "alibi_slopes": None, "dropout_p": 0.0, "dropout_seed": None}


def attention(q, k, v, **options):
    if _COMPLETE:
        return ops.attention(q, k, v, **options)
    if all(options.get(name, value) == value if value is not None else options.get(name) is None for name, value in _NEUTRAL.items()):
        return ops.attention(q, k, v, **{name: options[name] for name in _BASIC if name in options})
    return _plain.attention(q, k, v, **options)


attention_varlen = getattr(ops, "attention_varlen", _plain.attention_varlen)
attention_decode = getattr(ops, "attention_decode", _plain.attention_decode)
append_kv = getattr(ops, "append_kv", _plain.append_kv)
