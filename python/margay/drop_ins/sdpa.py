"""torch.nn.functional.scaled_dot_product_attention on Margay's kernels.

The switch is a kernel of the operator aten::scaled_dot_product_attention for CPU and CUDA, so every caller is reached
(layers, names imported before, compiled code), masks and alignment are seen as the caller gave them, and gradients,
autocast and tracing work as for any operator. torch's registry of flash attention implementations is not used: it
replaces inner CUDA operators whose signatures differ between releases, after torch has chosen a backend, which on
Hopper is cuDNN.
"""

import threading

import torch
from torch.autograd import forward_ad

from margay.drop_ins import kernel_or_torch, padding
from margay.drop_ins.fallback import fall_back
from margay.drop_ins.switch import Switch

_OP = torch.ops.aten.scaled_dot_product_attention.default
_SCHEMA = ("aten::scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float "
           "dropout_p=0., "
           "bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor")
# The last: before a transform of torch.func sees the call
_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "FuncTorchDynamicLayerFrontMode")
_TYPES = {"Tensor", "Parameter", "Buffer", "FakeTensor", "FunctionalTensor"}
_lock = threading.Lock()
_library = None
_users = 0
_tag = None


def enable_sdpa():
    """Let F.scaled_dot_product_attention run on Margay, until `.disable()` or the end of a `with` block; may be nested.

    PyTorch keeps, with one FallbackWarning per reason: masks other than bool [B, 1, 1, Nk], causal attention with Nq >
    Nk, dtypes, head dims and devices without kernels, tensor subclasses, forward-mode derivatives. Where
    `torch.nn.attention.sdpa_kernel` rules flash attention out, PyTorch computes too, and nobody is warned. Gradients of
    gradients are not implemented. Functions compiled before keep what they have.
    """
    if str(_OP._schema) != _SCHEMA:
        raise RuntimeError(f"enable_sdpa: torch {torch.__version__} has {_OP._schema}, expected {_SCHEMA}")
    with _lock:
        _add_user()
    return Switch(_remove_user)


def _add_user():
    global _library, _users, _tag
    _users += 1
    if _users > 1:
        return
    _library = torch.library.Library("aten", "IMPL")
    for key in _KEYS:
        _library.impl("scaled_dot_product_attention", _attention, key)
    config = torch.compiler.config
    if hasattr(config, "cache_key_tag"):          # compiled code on disk is for one of the two
        _tag = config.cache_key_tag
        config.cache_key_tag = _tag + "margay.sdpa"


def _remove_user():
    global _library, _users
    with _lock:
        _users -= 1
        if _users:
            return
        _library._destroy()
        _library = None
        if _tag is not None:
            torch.compiler.config.cache_key_tag = _tag


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    def original():
        return _OP._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, query,
                          key, value, attn_mask, dropout_p, is_causal, scale=scale,
                          enable_gqa=enable_gqa)

    if (not torch.backends.cuda.flash_sdp_enabled() or
        not _well_formed(query, key, value, attn_mask, is_causal, enable_gqa)):
        return original()                         # which has its own opinion, or its own error
    reason = _unsupported(query, key, value, attn_mask, is_causal, scale, dropout_p)
    if reason is not None:
        fall_back("scaled_dot_product_attention", reason)
        return original()
    q, k, v = query, key, value
    if q.dim() == 3:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    if is_causal and k.shape[2] > q.shape[2]:     # torch aligns to the top left: later keys are seen by nobody
        k, v = k[:, :, :q.shape[2]], v[:, :, :q.shape[2]]
    options = dict(scale=scale, dropout_p=dropout_p)
    if attn_mask is None:
        out = kernel_or_torch.attention("scaled_dot_product_attention", q, k, v, causal=is_causal, **options)
    else:
        key_mask = attn_mask[:, 0, 0].expand(q.shape[0], -1)
        out = padding.attention("scaled_dot_product_attention", q, k, v, key_mask, **options)
    return out.squeeze(1) if query.dim() == 3 else out


def _well_formed(q, k, v, mask, is_causal, enable_gqa):
    if (not q.dim() == k.dim() == v.dim() or q.dim() < 2 or not q.dtype == k.dtype == v.dtype or
        not q.device == k.device == v.device):
        return False
    if (k.shape[-2] != v.shape[-2] or q.shape[-1] != k.shape[-1] or not q.shape[-1] or
        not v.shape[-1] or mask is not None and is_causal):
        return False
    if q.dim() == 4 and not enable_gqa:
        return q.shape[1] == k.shape[1] == v.shape[1]
    return q.dim() < 4 or bool(k.shape[-3]) and k.shape[-3] == v.shape[-3] and q.shape[-3] % k.shape[-3] == 0


def _unsupported(q, k, v, mask, is_causal, scale, dropout_p):
    for t in (q, k, v):
        if type(t).__name__ not in _TYPES:
            return f"a {type(t).__name__}"
    if q.dim() not in (3, 4):
        return f"{q.dim()} dimensions"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return "batches that are broadcast"
    if is_causal and q.shape[-2] > k.shape[-2]:
        return "is_causal with more queries than keys"
    if mask is not None and not (mask.dtype == torch.bool and mask.dim() == 4 == q.dim() and
                                 mask.shape[1:3] == (1, 1) and
                                 mask.shape[0] in (1, q.shape[0]) and mask.shape[3] == k.shape[2]):
        return "attn_mask"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives"
    return kernel_or_torch.unsupported(q, k, v, scale, dropout_p)
