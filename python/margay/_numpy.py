"""NumPy arrays in, NumPy arrays out, on the CPU. Knows nothing of torch."""

import math

import numpy as np

from margay import _C, ops


def attention(q, k, v, causal, scale, return_lse, deterministic):
    _check_arrays("attention", q=q, k=k, v=v)
    ops.check_attention(q, k, v)
    out = _empty_ordered(q, v.shape[3])
    lse = np.empty(q.shape[:3], np.float32) if return_lse else None
    scale = ops.attention_scale(scale)
    try:
        _C.attention_fwd(out, lse, q, k, v, scale, bool(causal))
    except ValueError:
        _attention_of_copies(out, lse, q, k, v, scale, bool(causal))
    return (out, lse) if return_lse else out


def _attention_of_copies(out, lse, q, k, v, *options):     # not in `attention`: what a lambda captures would cost every call
    _of_copies(lambda q, k, v: _C.attention_fwd(out, lse, q, k, v, *options), q, k, v)


def attention_with_features(q, k, v, sink, slopes, starts, numbers, seed, causal, scale, return_lse, deterministic):
    _check_arrays("attention", q=q, k=k, v=v, sink=sink, alibi_slopes=slopes, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    ops.check_attention(q, k, v)
    left, right, softcap, dropout, max_q, max_k = numbers
    if dropout and seed is None:
        seed = int(np.random.randint(0, 1 << 63))
    out = _empty_ordered(q, v.shape[3])
    lse = np.empty(q.shape[:3], np.float32) if return_lse else None
    features = left, right, softcap, dropout, (seed or 0) & 0xFFFFFFFFFFFFFFFF, sink, slopes, *starts, max_q, max_k
    scale = ops.attention_scale(scale)
    with_copies(lambda q, k, v: _C.attention_fwd(out, lse, q, k, v, scale, bool(causal), 0, None, features), q, k, v)
    return (out, lse) if return_lse else out


def attention_fp8(q, k, v, descales, causal, scale, return_lse):
    raise TypeError("attention: q_descale, k_descale or v_descale is given with NumPy arrays, which have no 8-bit floats; expected torch.float8_e4m3fn tensors")


def as_starts(name, a):
    if not isinstance(a, np.ndarray) or a.dtype not in (np.int32, np.int64):
        raise TypeError(f"attention: {name} is {_kind(a)}, expected the starts of the sequences, an int32 array [B + 1]")
    _check_arrays("attention", **{name: a})
    if a.size and not -2**31 <= a.min() <= a.max() < 2**31:
        ops.refuse_start(name, a.ravel().tolist())
    return np.ascontiguousarray(a, np.int32)


def as_float32(op, name, a):
    if not isinstance(a, np.ndarray) or a.dtype.kind != "f":
        raise TypeError(f"{op}: {name} is {_kind(a)}, expected a float32 array")
    _check_arrays(op, **{name: a})
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
    with_copies(lambda a, b, bias: _C.matmul(rows, a, b, bias, activation), a.reshape(_rows(a), a.shape[-1]), b, bias)
    return out


def with_copies(call, *arrays):
    """call(*arrays); where C refuses their strides, with copies of those that it does not read in place."""
    try:
        call(*arrays)
    except ValueError:
        _of_copies(call, *arrays)


@ops.one_exception
def _of_copies(call, *arrays):
    copies = [a if a is None or why_copied(a) is None else np.ascontiguousarray(a) for a in arrays]
    if all(a is b for a, b in zip(arrays, copies)):
        raise
    call(*copies)


def is_gpu(a):
    return False


def why_copied(a, matrix=False, mapped=True):
    """Why kernels cannot read a where it is, or None."""
    if any(n > 1 and stride < 0 for n, stride in zip(a.shape, a.strides)):
        return "it has negative strides"
    if a.shape[-1] < 2 or a.strides[-1] == a.itemsize or matrix and (a.shape[-2] < 2 or a.strides[-2] == a.itemsize):
        return None
    return "neither of its last two dimensions is contiguous" if matrix else "its last dimension is not contiguous"


def is_transposed(a):
    return a.strides[-1] != a.itemsize


def _rows(a):
    return math.prod(a.shape[:-1])


def _check_arrays(op, **arrays):
    for name, a in arrays.items():
        if type(a) is np.ndarray or a is None and name not in ops.REQUIRED:
            continue
        if not isinstance(a, np.ndarray):
            raise TypeError(f"{op}: {name} is {type(a).__name__}, expected numpy.ndarray (same as {next(iter(arrays))})")
        if isinstance(a, np.ma.MaskedArray):
            raise TypeError(f"{op}: {name} is a masked array, whose mask would be ignored; expected numpy.ndarray")


def check_kinds(op, **arrays):
    _check_arrays(op, **arrays)


def _empty_ordered(like, last):
    """Dense array of like's shape but for the last dimension, the others in like's order in memory."""
    strides = like.strides
    if min(strides) < 0:
        strides = [abs(stride) for stride in strides]
    order = ops.memory_order(strides)
    out = np.empty([like.shape[i] for i in order] + [last], like.dtype)
    return out.transpose([order.index(i) for i in range(3)] + [3])
