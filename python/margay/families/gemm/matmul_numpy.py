"""matmul on NumPy arrays."""

import math

import numpy as np

from margay import _C
from margay._numpy import check_kinds, with_copies
from margay.families.gemm.matmul import check_matmul, check_out


def matmul(a, b, bias, activation, out):
    check_kinds("matmul", ("bias", "out"), a=a, b=b, bias=bias, out=out)
    check_matmul(a, b, bias)
    if out is None:
        out = np.empty((*a.shape[:-1], b.shape[1]), a.dtype)
    else:
        check_out(out, a, b)
    rows = out.reshape(_rows(out), out.shape[-1])
    if out.size and not np.may_share_memory(rows, out):
        raise ValueError(f"matmul: out has strides {out.strides}, expected leading dimensions that can be flattened")
    with_copies(lambda a, b, bias: _C.matmul(rows, a, b, bias, activation), a.reshape(_rows(a), a.shape[-1]), b, bias)
    return out


def _rows(a):
    return math.prod(a.shape[:-1])
