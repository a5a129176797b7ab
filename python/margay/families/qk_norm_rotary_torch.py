"""qk_norm_rotary on PyTorch tensors: its gradient, and the form that writes into a cache, which rows cannot say yet."""

import torch

from margay import _C, _torch, _transforms
from margay._shared import of_row

_OP = "qk_norm_rotary"
_APPEND = ("q", "k", "v", "k_cache", "v_cache", "q_weight", "k_weight", "cos", "sin", "positions", "offsets",
           "cache_seqlens", "page_table", "cache_batch_idx")


def gradient(ctx, dq_out, dk_out):
    """By one kernel. Where something has to see the operations, or differentiates them again, rotary's turns back, and
    the norm's is torch's."""
    saved = q, k, q_weight, k_weight, cos, sin, positions, offsets = ctx.saved_tensors    # once, for checkpoints
    offset, interleaved, eps = ctx.numbers
    dq_out, dk_out = (torch.zeros_like(x) if d is None else d if d.stride(-1) == 1 else d.contiguous()
                      for d, x in ((dq_out, q), (dk_out, k)))
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()) and _torch.c_may_read(
            dq_out, dk_out, *saved):
        need = ctx.needs_input_grad                       # the dispatcher leaves out what equals its default
        want = tuple(i < len(need) and need[i] for i in range(4))
        return *of_row("qk_norm_rotary_bwd")(dq_out, dk_out, *saved, offset, interleaved, eps, want), *(None,) * 7
    turned = of_row("rotary")(dq_out, dk_out, cos, -sin, positions, offsets, offset, interleaved)
    (dq, dq_weight), (dk, dk_weight) = (_of_norm(*t, eps) for t in zip(turned, (q, k), (q_weight, k_weight)))
    return dq, dk, dq_weight, dk_weight, *(None,) * 7


def _of_norm(d, x, weight, eps):
    """The gradients of x / sqrt(mean of x^2 + eps) weight, where d is that of the result."""
    if weight is None:
        return d, None
    d, wide = d.float(), x.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * factor
    dweight = (d * normed).sum((0, 1, 2)).to(weight.dtype)
    d = d * weight.float()
    return (factor * (d - normed * (d * normed).mean(-1, keepdim=True))).to(x.dtype), dweight


def append(tensors, numbers):
    if torch.is_grad_enabled() and any(t is not None and getattr(t, "requires_grad", False) for t in tensors):
        raise NotImplementedError(f"{_OP}: an argument requires a gradient, which k and v in a cache do not have; call "
                                  "it under torch.no_grad(), or without a cache")
    if torch.compiler.is_compiling() or not _torch.c_may_read(*tensors):
        _torch.check_kinds(_OP, _APPEND[5:7] + _APPEND[9:], **dict(zip(_APPEND, tensors)))
        return torch.ops.margay.qk_norm_rotary_append(*tensors, *numbers)
    return _append(*tensors, *numbers)


def _append(q, k, v, k_cache, v_cache, q_weight, k_weight, cos, sin, positions, offsets, *rest):
    q, k, v, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v, cos, sin))
    q_weight, k_weight, positions, offsets, *others = (
        t.contiguous() if isinstance(t, torch.Tensor) else t for t in (q_weight, k_weight, positions, offsets, *rest))
    if not q.is_cuda:
        _torch.use_torch_threads()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _C.qk_norm_rotary_append(out, k_cache, v_cache, q, k, v, q_weight, k_weight, cos, sin, positions, offsets, *others)
    _torch.written((k_cache, v_cache))
    return out


def _fake(q, *_):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


_NAME = "qk_norm_rotary_append"
_torch.library.define(f"{_NAME}(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
                      "Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, Tensor? positions, Tensor? offsets, "
                      "Tensor? cache_seqlens, Tensor? page_table, Tensor? cache_batch_idx, int length, int offset, "
                      "bool interleaved, float eps) -> Tensor", tags=_torch._TAGS)
for _device in ("CPU", "CUDA"):
    _torch.library.impl(_NAME, _transforms.without_tangents(_NAME, _append), _device)
torch.library.register_fake(f"margay::{_NAME}", _fake, lib=_torch.library)
_transforms.install(_torch.library, _NAME, _NAME, None)
