"""What the drop-ins call: a function of `margay` where it exists and has the options, PyTorch where it does not yet.

To delete this file once `margay` has attention with features, attention_varlen, attention_decode and append_kv: in `_dispatch.py`, write
`import margay` for the import of this module, and `margay` for `_features`.
"""

import inspect

import margay
from margay import _plain

_NEUTRAL = {"window": (-1, -1), "softcap": 0.0, "sink": None, "alibi_slopes": None, "dropout_p": 0.0, "dropout_seed": None}


def _attention(q, k, v, **options):
    """The options that margay.attention has always had, or PyTorch."""
    if any(name in options and (options[name] is not value if value is None else options[name] != value) for name, value in _NEUTRAL.items()):
        return _plain.attention(q, k, v, **options)
    return margay.attention(q, k, v, **{name: value for name, value in options.items() if name not in _NEUTRAL})


attention = margay.attention if "window" in inspect.signature(margay.attention).parameters else _attention
attention_varlen = getattr(margay, "attention_varlen", _plain.attention_varlen)
attention_decode = getattr(margay, "attention_decode", _plain.attention_decode)
append_kv = getattr(margay, "append_kv", _plain.append_kv)
