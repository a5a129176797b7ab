"""attention_decode and append_kv on PyTorch tensors: eager calls go to `_C`, everything that has to see the call gets an operator."""

import torch

from margay import _C, _torch, _transforms
from margay._decode import APPEND_NAMES, NAMES, check_ranks
from margay._torch import as_float32

_OPTIONAL = "Tensor? cache_seqlens, Tensor? page_table, Tensor? cache_batch_idx"


def attention_decode(tensors, options, want_lse):
    _refuse_gradient("attention_decode", tensors)
    if torch.compiler.is_compiling() or not _torch._plain(*tensors):
        _torch._check_tensors("attention_decode", **dict(zip(NAMES, tensors)))
        return torch.ops.margay.attention_decode(*tensors, *options)
    return _decode(tensors, options, want_lse)


def append_kv(tensors, length):
    _refuse_gradient("append_kv", tensors)
    if torch.compiler.is_compiling() or not _torch._plain(*tensors):
        _torch._check_tensors("append_kv", **dict(zip(APPEND_NAMES, tensors)))
        read = tensors if torch.compiler.is_compiling() else [t if t is None else t.resolve_neg() for t in tensors]
        torch.ops.margay.append_kv(*read, length)
        for cache, t in zip(tensors[:2], read):        # torch negates no argument that is written beside one that is None
            _torch._copy_back(cache, t)
    else:
        _append(tensors, length)


def _refuse_gradient(op, tensors):
    if torch.is_grad_enabled() and any(t is not None and getattr(t, "requires_grad", False) for t in tensors):
        raise NotImplementedError(f"{op}: an argument requires a gradient, which this op does not have; call it under torch.no_grad(), or margay.attention")


def _decode(tensors, options, want_lse=True):
    q, k_cache, v_cache, _, page_table, *_ = tensors
    if not q.is_cuda:
        _torch._use_torch_threads()
    out = None
    try:
        size = _C.attention_decode_workspace(q, k_cache, page_table, *options)
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device) if size else None
        out, lse = _outputs(q, want_lse)
        _C.attention_decode(out, lse, *tensors, workspace, *options)
    except Exception:
        _check_decode(q, k_cache, v_cache)
        if out is None or not q.is_cuda or _torch._all_mappable(k_cache, v_cache):
            raise
        _C.attention_decode(out, lse, q, _torch._mappable(k_cache), _torch._mappable(v_cache), *tensors[3:], workspace, *options)
    return out, lse


def _append(tensors, length):
    if not tensors[0].is_cuda:
        _torch._use_torch_threads()
    try:
        _C.append_kv(*tensors, length)
    except Exception:
        _check_append(*tensors)
        raise
    _torch.written(tensors[:2])


def _check_decode(*tensors):
    named = dict(zip(NAMES, tensors))
    check_ranks("attention_decode", **dict(zip(NAMES[:3], tensors)))
    _torch._check_devices("attention_decode", **named)


def _check_append(*tensors):
    check_ranks("append_kv", **dict(zip(APPEND_NAMES[:4], tensors)))
    _torch._check_devices("append_kv", **dict(zip(APPEND_NAMES, tensors)))


def _outputs(q, want_lse=True):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    batch, queries, heads, _ = q.shape
    return out, torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device) if want_lse else None


def _decode_fake(*arguments):
    _check_decode(*arguments[:8])
    return _outputs(arguments[0])


_torch._library.define(f"attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, {_OPTIONAL}, Tensor? sink, Tensor? alibi_slopes, float scale, "
                       "bool causal, int left, int right, float softcap, SymInt length, int num_splits) -> (Tensor, Tensor)", tags=_torch._TAGS)
_torch._library.define(f"append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, {_OPTIONAL}, SymInt length) -> ()", tags=_torch._TAGS)
for _device in ("CPU", "CUDA"):
    _torch._library.impl("attention_decode", _transforms.without_tangents("attention_decode", lambda *a: _decode(a[:8], a[8:])), _device)
    _torch._library.impl("append_kv", _transforms.without_tangents("append_kv", lambda *a: _append(a[:7], a[7])), _device)
torch.library.register_fake("margay::attention_decode", _decode_fake, lib=_torch._library)
torch.library.register_fake("margay::append_kv", lambda *arguments: _check_append(*arguments[:7]), lib=_torch._library)
_transforms.install(_torch._library, "attention_decode", _transforms.one_by_one)
_transforms.install(_torch._library, "append_kv", None)
