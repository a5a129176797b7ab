"""NumPy arrays in, NumPy arrays out, on the CPU. Knows nothing of torch."""

import contextlib
import math

import numpy as np

from margay import _C, _decode, ops
from margay._features import Features  # noqa: F401, for ops


def attention(q, k, v, causal, scale, return_lse, deterministic):
    _check_arrays("attention", q=q, k=k, v=v)
    return _attention_forward(q, k, v, (), causal, scale, return_lse)


def attention_features(q, k, v, features, causal, scale, return_lse, deterministic):
    _check_arrays("attention", q=q, k=k, v=v, sink=features.sink, alibi_slopes=features.alibi_slopes, cu_seqlens_q=features.cu_seqlens_q,
                  cu_seqlens_k=features.cu_seqlens_k)
    if features.seed is None:
        features = features._replace(seed=int(np.random.randint(0, 1 << 63)))
    return _attention_forward(q, k, v, features, causal, scale, return_lse)


# As in _torch: C checks its arguments, and what it refuses is computed by way of copies or refused again in the terms of the Python arguments.


def _attention_forward(q, k, v, features, causal, scale, want_lse):
    scale, causal = ops.attention_scale(scale), bool(causal)
    try:
        out, lse = _attention_outputs(q, v, want_lse)
        _C.attention_fwd(out, lse, q, k, v, scale, causal, None, *features)
    except Exception:
        out, lse = _attention_forward_of_copies(q, k, v, features, causal, scale, want_lse)
    return (out, lse) if want_lse else out


@ops.one_exception
def _attention_forward_of_copies(q, k, v, features, causal, scale, want_lse):
    ops.check_attention(q, k, v)
    out, lse = _attention_outputs(q, v, want_lse)
    _of_copies(lambda q, k, v: _C.attention_fwd(out, lse, q, k, v, scale, causal, None, *features), q, k, v)
    return out, lse


def _attention_outputs(q, v, want_lse):
    return _empty_ordered(q, v.shape[3]), np.empty(q.shape[:3], np.float32) if want_lse else None


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


def attention_decode(tensors, options, want_lse):
    q, k_cache, v_cache, seqlens, page_table, index, *others = tensors
    _check_arrays("attention_decode", **dict(zip(_decode.NAMES, tensors)))
    _decode.check_ranks("attention_decode", q=q, k_cache=k_cache, v_cache=v_cache)
    if _decode.needs_order(page_table, index, k_cache, v_cache) and (index is None or index.shape[0] == q.shape[0]):
        page_table = _table_rows(page_table, index)
        if k_cache.shape[1] % _decode.PAGE_UNIT and page_table.shape[0] == q.shape[0]:
            k_cache, v_cache, page_table = _pages_in_order(k_cache, page_table), _pages_in_order(v_cache, page_table), None
        tensors = q, k_cache, v_cache, seqlens, page_table, None, *others
    out = np.empty(q.shape, q.dtype)
    lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32) if want_lse else None
    size = _C.attention_decode_workspace(*tensors, *options)
    workspace = np.empty(size // 8 + 2, np.int64).view(np.uint8)[:size] if size else None
    with_copies(lambda *tensors: _C.attention_decode(out, lse, *tensors, workspace, *options), *tensors)
    return out, lse


def append_kv(tensors, length):
    _check_arrays("append_kv", **dict(zip(_decode.APPEND_NAMES, tensors)))
    _decode.check_ranks("append_kv", **dict(zip(_decode.APPEND_NAMES[:4], tensors)))
    k_cache, v_cache, k, v, seqlens, page_table, index = tensors
    if index is not None and _decode.needs_order(page_table, index) and index.shape[0] == k.shape[0]:
        page_table, index = _table_rows(page_table, index), None
    with_copies(lambda *rest: _C.append_kv(k_cache, v_cache, *rest, length), k, v, seqlens, page_table, index)


def _table_rows(table, index):
    """As _decode_torch.table_rows."""
    if index is None:
        return table
    there = (index >= 0) & (index < table.shape[0])
    rows = np.full((index.shape[0], table.shape[1]), -1, np.int32)
    rows[there] = table[index[there]]
    return rows


def _pages_in_order(cache, table):
    """As _decode_torch.cache_rows."""
    there = (table >= 0) & (table < cache.shape[0])
    rows = np.zeros((*table.shape, *cache.shape[1:]), cache.dtype)
    rows[there] = cache[table[there]]
    return rows.reshape(table.shape[0], -1, *cache.shape[2:])


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


without_gradients = contextlib.nullcontext


def backward_workspace(q, k, v, causal, deterministic, features):
    return _C.attention_bwd_workspace(None, q, k, v, None, None, None, 0.0, causal, deterministic, *features)


def why_copied(a, matrix=False, mapped=True):
    """Why kernels cannot read a where it is, or None."""
    if any(n > 1 and stride < 0 for n, stride in zip(a.shape, a.strides)):
        return "it has negative strides"
    if a.shape[-1] < 2 or a.strides[-1] == a.itemsize or matrix and (a.shape[-2] < 2 or a.strides[-2] == a.itemsize):
        return None
    return "neither of its last two dimensions is contiguous" if matrix else "its last dimension is not contiguous"


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
