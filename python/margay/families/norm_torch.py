"""x and residual of a norm as matrices, where both are leaves."""

import torch

from margay import _torch


class _Rows(torch.autograd.Function):
    """A gradient that both share comes back as one tensor, which torch copies for one of the leaves."""

    @staticmethod
    def forward(ctx, x, residual):
        ctx.shape = x.shape
        return x.reshape(-1, x.shape[-1]), residual.reshape(-1, x.shape[-1])

    @staticmethod
    def backward(ctx, dx, dresidual):
        same, dx = dx is dresidual, dx.reshape(ctx.shape)
        return dx, dx if same else dresidual.reshape(ctx.shape)


def rows_of_both(x, residual):
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and _torch.c_may_read(x, residual):
        return _Rows.apply(x, residual)
    return x.reshape(-1, x.shape[-1]), residual.reshape(-1, x.shape[-1])
