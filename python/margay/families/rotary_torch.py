"""rotary in place on PyTorch tensors. Whatever has to see the call gets the op that writes elsewhere, and a copy."""

import torch

from margay import _C, _torch
from margay._shared import of_row


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, positions, offsets, *numbers):
        _kernel(q, k, cos, sin, positions, offsets, *numbers)
        ctx.mark_dirty(*(t for t in (q, k) if t is not None))
        ctx.save_for_backward(cos, sin, positions, offsets)
        ctx.numbers = numbers
        return q if k is None else (q, k)

    @staticmethod
    def backward(ctx, dq, dk=None):
        """The same turn the other way: that of -sin."""
        cos, sin, *rows = ctx.saved_tensors
        turned = of_row("rotary")(dq, _other(dq, dk), cos, -sin, *rows, *ctx.numbers)
        return turned[0], None if dk is None else turned[1], *(None,) * 6


def _other(q, k):
    return q[:, :, :0] if k is None else k


def in_place(q, k, cos, sin, positions, offsets, offset, interleaved):
    given = q, k, cos, sin, positions, offsets, offset, interleaved
    if torch.compiler.is_compiling() or not _torch.c_may_read(*given[:6]):
        for t, turned in zip((q, k), of_row("rotary")(q, _other(q, k), *given[2:])):
            if t is not None:
                t.copy_(turned)
    elif torch.is_grad_enabled() and (q.requires_grad or k is not None and k.requires_grad):
        if k is not None and (q._is_view() or k._is_view()):       # of several views torch takes one at a time
            _InPlace.apply(k, None, *given[2:])
            given = q, None, *given[2:]
        _InPlace.apply(*given)
    else:
        _kernel(*given)


def _kernel(q, k, cos, sin, positions, offsets, offset, interleaved):
    if not q.is_cuda:
        _torch.use_torch_threads()
    k = _other(q, k)
    _C.rotary_in_place(q, k, cos, sin, positions, offsets, offset, interleaved)
    _torch.written((q, k))
