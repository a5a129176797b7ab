"""attention and attention_varlen on NumPy arrays. Forward only."""

import numpy as np

from margay import _C, _shared
from margay._numpy import as_float32, check_kinds, empty_ordered, kind, of_copies  # noqa: F401
from margay._shared import checked_scale
from margay.families.attention.attention import check_attention, refuse_start
from margay.families.attention.features import Features  # noqa: F401, for attention


def attention(q, k, v, causal, scale, return_lse, deterministic):
    check_kinds("attention", q=q, k=k, v=v)
    return _attention_forward(q, k, v, (), causal, scale, return_lse)


def attention_features(q, k, v, features, causal, scale, return_lse, deterministic):
    check_kinds("attention", features._fields, q=q, k=k, v=v, sink=features.sink, alibi_slopes=features.alibi_slopes,
                cu_seqlens_q=features.cu_seqlens_q, cu_seqlens_k=features.cu_seqlens_k)
    if features.seed is None:
        features = features._replace(seed=int(np.random.randint(0, 1 << 63)))
    return _attention_forward(q, k, v, features, causal, scale, return_lse)


# As in _torch: C checks its arguments, and what it refuses is computed by way of copies or refused again in the terms
# of the Python arguments.


def _attention_forward(q, k, v, features, causal, scale, want_lse):
    scale, causal = checked_scale("attention", scale), bool(causal)
    try:
        out, lse = _attention_outputs(q, v, want_lse)
        _C.attention_fwd(out, lse, q, k, v, scale, causal, None, *features)
    except Exception:
        out, lse = _attention_forward_of_copies(q, k, v, features, causal, scale, want_lse)
    return (out, lse) if want_lse else out


@_shared.one_exception
def _attention_forward_of_copies(q, k, v, features, causal, scale, want_lse):
    check_attention(q, k, v)
    out, lse = _attention_outputs(q, v, want_lse)
    of_copies(lambda q, k, v: _C.attention_fwd(out, lse, q, k, v, scale, causal, None, *features), q, k, v)
    return out, lse


def _attention_outputs(q, v, want_lse):
    return empty_ordered(q, v.shape[3]), np.empty(q.shape[:3], np.float32) if want_lse else None


def attention_fp8(q, k, v, descales, causal, scale, return_lse):
    raise TypeError("attention: q_descale, k_descale or v_descale is given with NumPy arrays, which have no 8-bit "
                    "floats; expected torch.float8_e4m3fn tensors")


def as_starts(name, a):
    if not isinstance(a, np.ndarray) or a.dtype not in (np.int32, np.int64):
        raise TypeError(f"attention: {name} is {kind(a)}, expected the starts of the sequences, an int32 array [B + 1]")
    check_kinds("attention", **{name: a})
    if a.size and not -2**31 <= a.min() <= a.max() < 2**31:
        refuse_start(name, a.ravel().tolist())
    return np.ascontiguousarray(a, np.int32)


def packed(a):
    return a.transpose(1, 0, 2)[None]


def unpacked(a):
    return a[0].transpose(1, 0, 2)


def backward_workspace(q, k, v, causal, deterministic, features):
    return _C.attention_bwd_workspace(None, q, k, v, None, None, None, 0.0, causal, deterministic, *features)
