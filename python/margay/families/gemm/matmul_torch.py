"""matmul on PyTorch tensors."""

import torch

from margay import _C, _op, _shared, _transforms
from margay._torch import (all_mappable, c_may_read, check_devices, check_kinds, copy_back, mappable_empty,
                           mappable_matrix, rows_of_matrix, use_torch_threads, written)
from margay.families.gemm.matmul import ACTIVATIONS, check_matmul, check_out


def matmul(a, b, bias, activation, out):
    if out is not None:
        return _matmul_out(a, b, bias, activation, out)
    if a.ndim == 2:
        return _matmul(a, b, bias, activation)
    check_kinds("matmul", ("bias", "out"), a=a, b=b, bias=bias)
    # whose sizes are tensors, not to be asked for their value
    if not torch.jit.is_tracing():
        check_matmul(a, b, bias)
    return _matmul(a.flatten(0, -2), b, bias, activation).unflatten(0, a.shape[:-1])


def _matmul_out(a, b, bias, activation, out):
    check_kinds("matmul", ("bias", "out"), a=a, b=b, bias=bias, out=out)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, bias, out)):
        raise RuntimeError("matmul: out is given, which supports no gradient, but an argument requires one")
    check_matmul(a, b, bias)
    check_out(out, a, b)
    if torch.compiler.is_compiling() or not c_may_read(a, b, bias, out):
        return out.copy_(matmul(a, b, bias, activation, None))
    try:
        rows = out.view(-1 if out.numel() else a.shape[:-1].numel(), out.shape[-1])
    except RuntimeError:
        raise ValueError(f"matmul: out has strides {out.stride()}, expected leading dimensions that can be "
                         "flattened") from None
    target = mappable_empty(rows) if rows.is_cuda else rows
    _matmul_into(target, a.flatten(0, -2), b, bias, activation)
    copy_back(rows, target)
    written((out,))
    return out


def _matmul_gradient(ctx, dout):
    if dout is None:
        return None, None, None, None
    (a, b, bias), (activation,) = ctx.saved_tensors, ctx.numbers
    need_a, need_b = ctx.needs_input_grad[:2]
    # the dispatcher leaves out arguments that equal their defaults
    need_bias = bias is not None and ctx.needs_input_grad[2]
    if activation:
        dout = _activation_gradient(activation, dout, matmul(a, b, bias, 0, None))
    dout = dout if dout.is_contiguous() else dout.contiguous()
    da = matmul(dout, b.t(), None, 0, None) if need_a else None
    db = matmul(a.t(), dout, None, 0, None) if need_b else None
    return da, db, dout.sum(0) if need_bias else None, None


def _activation_gradient(activation, dout, x):
    """Gradient of the activation's input x, which is computed again instead of saved."""
    if activation == ACTIVATIONS["relu"]:
        return torch.ops.aten.threshold_backward(dout, x, 0)
    if activation == ACTIVATIONS["silu"]:
        if torch.is_grad_enabled():                            # of its operator, torch has no second derivative
            x, s = x.float(), torch.sigmoid(x.float())
            return (dout * s * (1 + x * (1 - s))).to(dout.dtype)
        return torch.ops.aten.silu_backward(dout, x)
    approximate = "tanh" if activation == ACTIVATIONS["gelu_tanh"] else "none"
    return torch.ops.aten.gelu_backward(dout, x, approximate=approximate)


def _matmul_into(out, a, b, bias, activation):
    if not a.is_cuda:
        use_torch_threads()
    try:
        _C.matmul(out, a, b, bias, activation)
    except Exception:
        _matmul_of_copies(out, a, b, bias, activation)


@_shared.one_exception
def _matmul_of_copies(out, a, b, bias, activation):
    check_devices("matmul", a=a, b=b, bias=bias, out=out)
    rows, columns = rows_of_matrix(a), rows_of_matrix(b)
    if all_mappable(rows, columns, out) and (bias is None or bias.stride(0) == 1):
        raise
    target = mappable_empty(out)
    _C.matmul(target, mappable_matrix(a), mappable_matrix(b), None if bias is None else bias.contiguous(), activation)
    copy_back(out, target)


def _samples_in_rows(op, info, in_dims, inputs):
    """A product: samples of a are rows of it where b and bias are shared."""
    a, *others = inputs
    if any(dim is not None for dim in in_dims[1:]):
        return _transforms.one_by_one(op, info, in_dims, inputs)
    return _transforms.unfold(op(_transforms.fold(a, in_dims[0], info.batch_size, 0), *others), info.batch_size, 0), 0


_matmul = _op.function("matmul", gradient=_matmul_gradient, rule=_samples_in_rows)
_op.for_torch("matmul")
