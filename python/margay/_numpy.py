"""NumPy arrays in, NumPy arrays out, on the CPU. Knows nothing of torch."""

import contextlib

import numpy as np

from margay import _shared


def as_float32(op, name, a):
    if not isinstance(a, np.ndarray) or a.dtype.kind != "f":
        raise TypeError(f"{op}: {name} is {kind(a)}, expected a float32 array")
    check_kinds(op, **{name: a})
    # ascontiguousarray has at least one dimension
    return np.ascontiguousarray(a, np.float32) if a.ndim else a.astype(np.float32)


def wants_gradient(*arrays):
    return False


def kind(a):
    return f"an array of dtype {a.dtype}" if isinstance(a, np.ndarray) else type(a).__name__


def with_copies(call, *arrays):
    """call(*arrays); where C refuses their strides, with copies of those that it does not read in place."""
    try:
        call(*arrays)
    except ValueError:
        of_copies(call, *arrays)


@_shared.one_exception
def of_copies(call, *arrays):
    copies = [a if a is None or why_copied(a) is None else np.ascontiguousarray(a) for a in arrays]
    if all(a is b for a, b in zip(arrays, copies)):
        raise
    call(*copies)


def dtype_in_autocast(a):
    return a.dtype


without_gradients = contextlib.nullcontext


def empty(shape, dtype, like):
    return np.empty(shape, dtype or like.dtype)


def why_dense(a):
    """Why an array that C reads as a whole is copied, or None."""
    return None if a.flags.c_contiguous else "it has gaps or another order in memory"


def why_copied(a, matrix=False, mapped=True):
    """Why kernels cannot read a where it is, or None."""
    if any(n > 1 and stride < 0 for n, stride in zip(a.shape, a.strides)):
        return "it has negative strides"
    if a.shape[-1] < 2 or a.strides[-1] == a.itemsize or matrix and (a.shape[-2] < 2 or a.strides[-2] == a.itemsize):
        return None
    return "neither of its last two dimensions is contiguous" if matrix else "its last dimension is not contiguous"


def check_kinds(op, optional=(), /, **arrays):
    """`optional`: names of arrays that may be None."""
    for name, a in arrays.items():
        if type(a) is np.ndarray or a is None and name in optional:
            continue
        if not isinstance(a, np.ndarray):
            first = next(iter(arrays))
            raise TypeError(f"{op}: {name} is {type(a).__name__}, expected numpy.ndarray (same as {first})")
        if isinstance(a, np.ma.MaskedArray):
            raise TypeError(f"{op}: {name} is a masked array, whose mask would be ignored; expected numpy.ndarray")


def empty_ordered(like, last):
    """Dense array of like's shape but for the last dimension, the others in like's order in memory."""
    strides = like.strides
    if min(strides) < 0:
        strides = [abs(stride) for stride in strides]
    order = _shared.memory_order(strides)
    out = np.empty([like.shape[i] for i in order] + [last], like.dtype)
    return out.transpose([order.index(i) for i in range(3)] + [3])
