"""causal_conv1d_step on PyTorch tensors, which rows cannot say yet: its state is read and written."""

import torch

from margay import _C, _torch, _transforms


def step(x, state, weight, bias, cache_seqlens, slots, silu):
    given = x, state, weight, bias, cache_seqlens, slots
    if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in given):
        raise NotImplementedError("causal_conv1d_step: an argument requires a gradient, which this op does not have; "
                                  "call it under torch.no_grad(), or margay.causal_conv1d")
    names = ("x", "state", "weight", "bias", "cache_seqlens", "slots")
    if torch.compiler.is_compiling() or not _torch.c_may_read(*given):
        _torch.check_kinds("causal_conv1d_step", names[3:], **dict(zip(names, given)))
        return torch.ops.margay.causal_conv1d_step(*given, silu)
    return _kernel(*given, silu)


def _kernel(x, state, weight, bias, cache_seqlens, slots, silu):
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.is_cuda:
        _torch.use_torch_threads()
    _C.causal_conv1d_step(out, x, weight.contiguous(), state, bias, cache_seqlens, slots, silu)
    _torch.written((state,))
    return out


def _fake(x, state, weight, bias, cache_seqlens, slots, silu):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_torch.library.define("causal_conv1d_step(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, "
                      "Tensor? cache_seqlens, Tensor? slots, bool silu) -> Tensor", tags=_torch._TAGS)
for _device in ("CPU", "CUDA"):
    _torch.library.impl("causal_conv1d_step", _transforms.without_tangents("causal_conv1d_step", _kernel), _device)
torch.library.register_fake("margay::causal_conv1d_step", _fake, lib=_torch.library)
_transforms.install(_torch.library, "causal_conv1d_step", "causal_conv1d_step", None)
