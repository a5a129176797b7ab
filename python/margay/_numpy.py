"""NumPy arrays in, NumPy arrays out, on the CPU. Knows nothing of torch."""

import math

import numpy as np

from margay import _C, ops


def attention(q, k, v, causal, scale, return_lse, deterministic):
    _check_arrays("attention", q=q, k=k, v=v)
    ops.check_attention(q, k, v)
    out = _empty_ordered(q, v.shape[3])
    lse = np.empty(q.shape[:3], np.float32) if return_lse else None
    _C.attention_fwd(out, lse, q, k, v, ops.attention_scale(scale), bool(causal))
    return (out, lse) if return_lse else out


def attention_with_features(q, k, v, sink, slopes, starts, numbers, seed, causal, scale, return_lse, deterministic):
    _check_arrays("attention", q=q, k=k, v=v, sink=sink, alibi_slopes=slopes, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    ops.check_attention(q, k, v)
    left, right, softcap, dropout, max_q, max_k = numbers
    if dropout and seed is None:
        seed = int(np.random.randint(0, 1 << 63))
    out = _empty_ordered(q, v.shape[3])
    lse = np.empty(q.shape[:3], np.float32) if return_lse else None
    features = left, right, softcap, dropout, (seed or 0) & 0xFFFFFFFFFFFFFFFF, sink, slopes, *starts, max_q, max_k
    _C.attention_fwd(out, lse, q, k, v, ops.attention_scale(scale), bool(causal), 0, None, features)
    if lse is not None and sink is not None and k.shape[2] == 0:
        lse[:] = sink[:, None]
        if starts[0] is not None:
            lse[..., starts[0][-1]:] = -np.inf
    return (out, lse) if return_lse else out


def attention_fp8(q, k, v, descales, causal, scale, return_lse):
    raise TypeError("attention: q_descale, k_descale or v_descale is given with NumPy arrays, which have no 8-bit floats; expected torch.float8_e4m3fn tensors")


def as_starts(name, a):
    if not isinstance(a, np.ndarray) or a.dtype not in (np.int32, np.int64):
        raise TypeError(f"attention: {name} is {_kind(a)}, expected the starts of the sequences, an int32 array [B + 1]")
    return np.ascontiguousarray(a, np.int32)


def as_float32(op, name, a):
    if not isinstance(a, np.ndarray) or a.dtype.kind != "f":
        raise TypeError(f"{op}: {name} is {_kind(a)}, expected a float32 array")
    return np.ascontiguousarray(a, np.float32) if a.ndim else a.astype(np.float32)      # ascontiguousarray has at least one dimension


def _kind(a):
    return f"an array of dtype {a.dtype}" if isinstance(a, np.ndarray) else type(a).__name__


def packed(a):
    return a.transpose(1, 0, 2)[None]


def unpacked(a):
    return a[0].transpose(1, 0, 2)


def matmul(a, b, bias, activation, out):
    _check_arrays("matmul", a=a, b=b, bias=bias, out=out)
    ops.check_matmul(a, b, bias)
    if out is None:
        out = np.empty((*a.shape[:-1], b.shape[1]), a.dtype)
    else:
        ops.check_out(out, a, b)
    rows = out.reshape(_rows(out), out.shape[-1])
    if out.size and not np.may_share_memory(rows, out):
        raise ValueError(f"matmul: out has strides {out.strides}, expected leading dimensions that can be flattened")
    _C.matmul(rows, a.reshape(_rows(a), a.shape[-1]), b, bias, activation)
    return out


def is_gpu(a):
    return False


def is_mappable(a):
    return True


def is_transposed(a):
    return a.strides[-1] != a.itemsize


def _rows(a):
    return math.prod(a.shape[:-1])


def _check_arrays(op, **arrays):
    for name, a in arrays.items():
        if a is not None and not isinstance(a, np.ndarray):
            raise TypeError(f"{op}: {name} is {type(a).__name__}, expected numpy.ndarray (same as {next(iter(arrays))})")


def _empty_ordered(like, last):
    """Dense array of like's shape but for the last dimension, the others in like's order in memory."""
    order = ops.memory_order(like.strides)
    out = np.empty([like.shape[i] for i in order] + [last], like.dtype)
    return out.transpose([order.index(i) for i in range(3)] + [3])
