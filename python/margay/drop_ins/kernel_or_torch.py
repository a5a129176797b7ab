"""A drop-in's call: a kernel computes it, or PyTorch with a warning where none does."""

import torch

import margay
from margay import _shared, _torch, info
from margay.drop_ins import torch_attention
from margay.drop_ins.fallback import fall_back
from margay.families.attention import attention_torch
from margay.families.attention.attention import DROPS_ALL, MAX_HEAD_DIM
from margay.families.attention.features import Features

_gpus: dict = {}        # device index -> why no kernel runs on it, or None


def attention(op, q, k, v, **options):
    return _call(op, "attention", q, k, v, **options)


def attention_varlen(op, q, k, v, *lengths, **options):
    return _call(op, "attention_varlen", q, k, v, *lengths, **options)


def attention_packed(op, q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, causal=False, scale=None,
                     window=(-1, -1), softcap=0.0, sink=None, dropout_p=0.0):
    """attention_varlen of [1, H, T, D] to [1, H, T, Dv], without its checks: the starts are margay's own, int32 and in
    order."""
    reason = unsupported(q, k, v, scale, dropout_p)
    if reason is None:
        features = Features(*window, softcap, dropout_p, None, sink, None, cu_seqlens_q, cu_seqlens_k, longest_q,
                            longest_k)
        return attention_torch.attention_features(q, k, v, features, causal, scale, False, False)
    fall_back(op, reason)
    rows = (t[0].transpose(0, 1) for t in (q, k, v))
    return torch_attention.attention_varlen(*rows, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, causal=causal,
                                            scale=scale, window=window, softcap=softcap,
                                   sink=sink, dropout_p=dropout_p).transpose(0, 1)[None]


def attention_decode(op, q, k_cache, v_cache, **options):
    refuse_8_bits(op, q)
    if reason := _unsupported_cache(q, v_cache):
        fall_back(op, reason)
        return torch_attention.attention_decode(q, k_cache, v_cache, **options)
    return _call(op, "attention_decode", q, k_cache, v_cache, **options)


def append_kv(k_cache, v_cache, k, v, **options):
    """PyTorch where the attention that follows falls back as well, and says so."""
    reason = unsupported(k, k_cache, v_cache) or _unsupported_cache(k, v_cache)
    (torch_attention if reason else margay).append_kv(k_cache, v_cache, k, v, **options)


def unsupported(q, k, v, scale=None, dropout_p=0.0):
    """Why no kernel computes attention of these tensors, or None. Looks at nothing but dtypes, devices and shapes."""
    reason = no_kernels_for(q)
    if reason is not None:
        return reason
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return f"a head dim over {MAX_HEAD_DIM}"
    if scale is not None and not _shared.SMALLEST_SCALE <= scale <= _shared.LARGEST_SCALE:
        return "a scale that float32 cannot hold" if scale > 0 else "a scale that is not positive"
    if DROPS_ALL <= dropout_p <= 1:
        return "a dropout probability of 1"
    return None


def no_kernels_for(x):
    """Why no kernel reads this tensor's type where it is, or None."""
    if not (x.is_cpu or x.is_cuda):
        return f"device {x.device.type}"
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type) and dtype in _torch.DTYPES:
        dtype = torch.get_autocast_dtype(x.device.type)
    if not _torch.has_kernels(dtype, x.is_cuda):
        return f"dtype {_shared.dtype_name(x)} on {x.device.type}"
    return _why_not_gpu(x.device.index) if x.is_cuda else None


def refuse_8_bits(op, q):
    """PyTorch has no attention of them to fall back to."""
    if q.dtype.itemsize == 1:
        raise NotImplementedError(f"{op}: q has dtype {_shared.dtype_name(q)}, expected bfloat16, float16 or float32; "
                                  "float8_e4m3fn is taken by margay.attention, "
                                  "and by margay.flash_attn_interface")


def _unsupported_cache(q, v_cache):
    return "a cache whose keys and values differ in head dim" if v_cache.shape[-1] != q.shape[-1] else None


def _why_not_gpu(index):
    if index not in _gpus:
        reason, capability = info()["gpu_reason"], torch.cuda.get_device_capability(index)
        other = None if capability == (9, 0) else "a GPU other than compute capability 9.0"
        _gpus[index] = f"a GPU that is not used ({reason})" if reason else other
    return _gpus[index]


_why_not_gpu._dynamo_marked_constant = True     # torch.compiler.assume_constant_result, without importing the compiler


def _call(op, name, q, k, v, *lengths, **options):
    refuse_8_bits(op, q)
    reason = unsupported(q, k, v, options.get("scale"), options.get("dropout_p", 0.0))
    if reason is None:
        return getattr(margay, name)(q, k, v, *lengths, **options)
    fall_back(op, reason)
    return getattr(torch_attention, name)(q, k, v, *lengths, **options)
