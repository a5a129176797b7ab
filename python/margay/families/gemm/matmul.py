"""matmul: docstring, and checks in the terms of this function."""

from margay import _shared

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}


def matmul(a, b, *, bias=None, activation=None, out=None):
    """activation(a b + bias).

    a [..., M, K], b [K, N], bias [N]. bfloat16 or float16, on the CPU also float32; sums in float32. activation: None,
    "relu", "gelu", "gelu_tanh" or "silu".

    out: [..., M, N] to write to, its last dimension contiguous, where no gradient is asked. Transposed views are read
    in place. A tensor neither of whose last two dimensions is contiguous, or with negative strides, and on CUDA one
    whose address or strides are not multiples of 16 bytes, is copied first; `explain` says so.
    """
    return _library_of("matmul", "a", a).matmul(a, b, bias, activation_code(activation), out)


def activation_code(name):
    known = name is None or isinstance(name, str)
    if not known or name not in ACTIVATIONS:
        error = ValueError if known else TypeError
        raise error(f"matmul: activation is {name!r}, expected one of {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[name]


def check_matmul(a, b, bias):
    """Raise unless the ranks, shapes and dtypes of the arguments agree."""
    if a.ndim < 2:
        raise ValueError(f"matmul: a has shape {_shared.shape(a)}, expected [..., M, K]")
    _shared.check_rank("matmul", "b", b, 2, "[K, N]")
    _shared.check_dtype("matmul", "b", b, "a", a)
    if a.shape[-1] != b.shape[0]:
        raise ValueError(f"matmul: b has shape {_shared.shape(b)}, expected [{a.shape[-1]}, N] (K of a, which has "
                         f"shape {_shared.shape(a)})")
    if bias is not None:
        _shared.check_rank("matmul", "bias", bias, 1, "[N]")
        _shared.check_dtype("matmul", "bias", bias, "a", a)
        if bias.shape[0] != b.shape[1]:
            raise ValueError(f"matmul: bias has shape {_shared.shape(bias)}, expected [{b.shape[1]}] (N of b, which "
                             f"has shape {_shared.shape(b)})")


def check_out(out, a, b):
    shape = (*a.shape[:-1], b.shape[1])
    if tuple(out.shape) != shape:
        raise ValueError(f"matmul: out has shape {_shared.shape(out)}, expected {list(shape)}")
    _shared.check_dtype("matmul", "out", out, "a", a)


def _of_torch():
    from margay.families.gemm import matmul_torch as library
    return library


def _of_numpy():
    from margay.families.gemm import matmul_numpy as library
    return library


_library_of = _shared.library_of(_of_torch, _of_numpy)
