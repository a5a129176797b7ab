"""PyTorch tensors.

Two ways to the same kernels. Plain tensors in eager mode call `_C` directly, through an autograd.Function where a gradient is asked. Everything
that wants to see the call (torch.compile, export, tracers, modes, transforms, subclasses, the meta device) gets an operator of `torch.ops.margay`.
"""

import os

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from margay import _C, _transforms, ops
from margay._features import Features

_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_E4M3 = torch.float8_e4m3fn
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_autocast_anywhere = torch._C._is_any_autocast_enabled
_function_modes = torch._C._is_torch_function_mode_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms_active = torch._C._are_functorch_transforms_active
_tracing = torch._C._is_tracing
_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_has_storage = torch._C._has_storage
_library = torch.library.Library("margay", "FRAGMENT")
_threads = 0
CHECK_STARTS = os.environ.get("MARGAY_SYNC") == "1"


# ---- attention


def attention(q, k, v, causal, scale, return_lse, deterministic):
    if q.dtype is _E4M3:
        return attention_fp8(q, k, v, (None, None, None), causal, scale, return_lse)
    if not _compiling() and _c_may_be_asked(q, k, v):
        try:
            return _attention_eager(q, k, v, causal, scale, return_lse, deterministic)
        except Exception:
            if _c_may_read(q, k, v):
                raise
    _check_tensors("attention", q=q, k=k, v=v)
    out, lse = torch.ops.margay.attention(q, k, v, scale, causal, deterministic)
    return (out, lse) if return_lse else out


def _attention_eager(q, k, v, causal, scale, return_lse, deterministic):
    if _autocast_anywhere() and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q.device.type, q, k, v)
    if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _apply_attention(q, k, v, scale, causal, deterministic, return_lse)
    out, lse = _attention_forward(q, k, v, scale, causal, return_lse)
    return (out, lse) if return_lse else out


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, causal, deterministic, return_lse):
        out, lse = _attention_forward(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = scale, causal, deterministic
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse=None):
        return *_attention_gradient(ctx, dout, dlse, _attention_backward), None, None, None, None    # scale, causal, deterministic, return_lse


# Function.apply, but for its check for transforms, which `_c_may_be_asked` and `_c_may_read` make.
_apply_attention = super(torch.autograd.Function, _AttentionFunction).apply


def _save_attention(ctx, inputs, output):
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _attention_gradient(ctx, dout, dlse, direct=None):
    """dq, dk, dv. direct: what to call instead of the operator where it may be. What an operator saved may be a transform's that is over."""
    if dout is None and dlse is None:
        return None, None, None
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    if direct is None or _grad_enabled() or _compiling() or not _c_may_read(dout, dlse, q):
        direct = torch.ops.margay.attention_backward
    return direct(dout, dlse, q, k, v, out, lse, *ctx.options)


# C checks its arguments. What it refuses may be computed by way of copies, and if not, is refused again in the terms of the Python arguments.
# Calls that need neither pay nothing.


def _attention_forward(q, k, v, scale, causal, want_lse=True, features=()):
    scale = ops.attention_scale(scale)
    try:
        out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else _like(q, v.shape[-1])
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if want_lse else None
        _call_attention_fwd(out, lse, q, k, v, scale, causal, features)
    except Exception:
        return _attention_forward_of_copies(q, k, v, scale, causal, want_lse, features)
    return out, lse


@ops.one_exception
def _attention_forward_of_copies(q, k, v, scale, causal, want_lse, features):
    _check_tensors("attention", q=q, k=k, v=v)
    _check_attention(q, k, v)
    out, lse = _attention_outputs(q, v, want_lse)
    if _all_mappable(q, k, v, out):
        raise
    target = _mappable_empty(out)
    _call_attention_fwd(target, lse, _mappable(q), _mappable(k), _mappable(v), scale, causal, features)
    _copy_back(out, target)
    return out, lse


_ONE_WAVE = 1 << 20   # elements of out; smaller problems have at most about one task for each multiprocessor


def _call_attention_fwd(out, lse, q, k, v, scale, causal, features=()):
    balance = None
    if not q.is_cuda:
        _use_torch_threads()
    elif out.numel() > _ONE_WAVE:
        balance = torch.empty(16, dtype=torch.uint8, device=q.device)
    _C.attention_fwd(out, lse, q, k, v, scale, causal, balance, *features)


def _attention_backward(dout, dlse, q, k, v, out, lse, scale, causal, deterministic, features=()):
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    scale = ops.attention_scale(scale)
    dout = _rows_contiguous(dout)
    dlse = None if dlse is None else dlse.contiguous()
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    try:
        _call_attention_bwd(grads, dout, dlse, q, k, v, out, lse, scale, causal, deterministic, features)
    except ValueError:                     # the forward's arguments were right: only addresses and strides can be wrong
        return _attention_backward_of_copies(grads, dout, dlse, q, k, v, out, lse, scale, causal, deterministic, features)
    return grads


@ops.one_exception
def _attention_backward_of_copies(grads, dout, dlse, q, k, v, out, lse, *options):
    if _all_mappable(*grads, dout, q, k, v, out):
        raise
    grads = [_dense_like(t) for t in (q, k, v)]
    targets = [_mappable_empty(t) for t in grads]
    dout, q, k, v, out = map(_mappable, (dout, q, k, v, out))
    _call_attention_bwd(targets, dout, dlse, q, k, v, out, lse, *options)
    for grad, target in zip(grads, targets):
        _copy_back(grad, target)
    return tuple(grads)


def _call_attention_bwd(grads, dout, dlse, q, k, v, out, lse, scale, causal, deterministic, features):
    if not q.is_cuda:
        _use_torch_threads()
    read, numbers = (dout, q, k, v, out, lse, dlse), (scale, causal, deterministic, *features)
    workspace = torch.empty(_C.attention_bwd_workspace(*read, *numbers), dtype=torch.uint8, device=q.device)
    _C.attention_bwd(*grads, *read, workspace, *numbers)


def _check_attention(q, k, v):
    ops.check_attention(q, k, v)
    _check_devices("attention", q=q, k=k, v=v)


def _attention_outputs(q, v, want_lse=True, dtype=None):
    out = _dense_like(q, dtype) if q.shape[-1] == v.shape[-1] else _like(q, v.shape[-1], dtype)
    return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if want_lse else None


def _attention_fake(q, k, v, scale=None, causal=False, deterministic=False):
    _check_attention(q, k, v)
    return _attention_outputs(q, v)


def _attention_backward_fake(dout, dlse, q, k, v, *_):
    return _dense_like(q), _dense_like(k), _dense_like(v)


def _attention_autocast(q, k, v, *options):
    with _without_autocast_keys():
        return torch.ops.margay.attention(*_autocast(q.device.type, q, k, v), *options)


def _attention_no_second_order(ctx, *grads):
    raise NotImplementedError("attention: gradients of gradients (create_graph=True) are not implemented")


# ---- attention of 8-bit floats, forward only


def attention_fp8(q, k, v, descales, causal, scale, return_lse):
    named = dict(q=q, k=k, v=v, **dict(zip(_DESCALES, descales)))
    _check_tensors("attention", **named)
    for name, t in named.items():
        if torch.is_grad_enabled() and t is not None and t.requires_grad:
            raise NotImplementedError(f"attention: {name} requires a gradient, which float8_e4m3fn does not have; expected a call under torch.no_grad()")
    if torch.compiler.is_compiling() or not _c_may_read(*named.values()):
        out, lse = torch.ops.margay.attention_fp8(q, k, v, *descales, scale, causal)
    else:
        out, lse = _attention_fp8(q, k, v, *descales, scale, causal, return_lse)
    return (out, lse) if return_lse else out


_DESCALES = "q_descale", "k_descale", "v_descale"


def _attention_fp8(q, k, v, q_descale=None, k_descale=None, v_descale=None, scale=None, causal=False, want_lse=True):
    scale = ops.attention_scale(scale)
    descales = q_descale, k_descale, v_descale
    out, lse = _attention_fp8_fake(q, k, v, *descales, want_lse=want_lse)
    q, k, v, target = _mappable(q), _mappable(k), _mappable(v), _mappable_empty(out)
    balance = torch.empty(16, dtype=torch.uint8, device=q.device) if q.is_cuda and out.numel() > _ONE_WAVE else None
    if not q.is_cuda:
        _use_torch_threads()
    _C.attention_fwd_fp8(target, lse, q, k, v, balance, *(None if t is None else as_float32("attention", name, t) for name, t in zip(_DESCALES, descales)), scale, causal)
    _copy_back(out, target)
    return out, lse


def _attention_fp8_fake(q, k, v, q_descale=None, k_descale=None, v_descale=None, scale=None, causal=False, want_lse=True):
    if q.dtype is not _E4M3:
        given = next((f"{n} is given, but " for n, t in zip(_DESCALES, (q_descale, k_descale, v_descale)) if t is not None), "")
        raise TypeError(f"attention: {given}q has dtype {ops.dtype_name(q)}, expected float8_e4m3fn")
    ops.check_attention(q, k, v)
    for name, t in zip(_DESCALES, (q_descale, k_descale, v_descale)):
        if t is not None and t.shape != k.shape[:2]:
            raise ValueError(f"attention: {name} has shape {list(t.shape)}, expected {list(k.shape[:2])} (batch and heads of k)")
    _check_same_device("attention", q=q, k=k, v=v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return _attention_outputs(q, v, want_lse, torch.bfloat16)


def _attention_fp8_no_gradient(ctx, *_):
    raise NotImplementedError("attention: float8_e4m3fn has no gradient")


# ---- attention with windows, softcap, sinks, ALiBi, dropout; packed sequences
#
# q, k, v are [1, heads, total, dim] where sequences are packed. `features`: margay._features.Features, whose seed of dropout is drawn here if None.


def attention_features(q, k, v, features, causal, scale, return_lse, deterministic):
    sink, slopes = features.sink, features.alibi_slopes
    tensors = q, k, v, sink, slopes, features.cu_seqlens_q, features.cu_seqlens_k
    if q.dtype is _E4M3:
        ops.check_no_features(features)
        return attention_fp8(q, k, v, (None, None, None), causal, scale, return_lse)
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("attention: alibi_slopes requires a gradient, which is not computed; pass alibi_slopes.detach()")
    if torch.compiler.is_compiling() or k is None or v is None or not _c_may_read(*tensors):
        _check_tensors("attention", **dict(zip(_FEATURE_TENSORS, tensors)))
        out, lse, _ = torch.ops.margay.attention_features(q, k, v, *_operator_order(features), scale, causal, deterministic)
        return (out, lse) if return_lse else out
    if _autocast_anywhere() and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q.device.type, q, k, v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or sink is not None and sink.requires_grad):
        return _apply_features(q, k, v, sink, features, scale, causal, deterministic, return_lse)
    out, lse, _ = _features_forward(q, k, v, features, scale, causal, return_lse)
    return (out, lse) if return_lse else out


_FEATURE_TENSORS = "q", "k", "v", "sink", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k"


def _operator_order(f):
    return f.sink, f.alibi_slopes, f.cu_seqlens_q, f.cu_seqlens_k, f.left, f.right, f.softcap, f.dropout_p, f.max_seqlen_q, f.max_seqlen_k, f.seed


def _features_of(sink, slopes, q_start, k_start, left, right, softcap, dropout_p, max_q, max_k, seed):
    """Of the operator's arguments."""
    return Features(left, right, softcap, dropout_p, seed, sink, slopes, q_start, k_start, max_q, max_k)


def _features_forward(q, k, v, features, scale, causal, want_lse=True):
    """out, lse, and the seed of dropout as a CPU tensor; drawn from torch's generator where none is given."""
    if features.dropout_p:
        used = torch.randint(-2**63, 2**63 - 1, (1,)) if features.seed is None else torch.tensor([_signed(features.seed)])
        features = features._replace(seed=used.item())
    else:
        used = torch.zeros(1, dtype=torch.int64)
        features = features._replace(seed=0) if features.seed is None else features
    starts = features.cu_seqlens_q, features.cu_seqlens_k
    if CHECK_STARTS and starts[0] is not None and q.is_cuda:
        ops.check_starts("q", starts[0].tolist(), q.shape[2], features.max_seqlen_q)
        ops.check_starts("k", starts[1].tolist(), k.shape[2], features.max_seqlen_k)
    return *_attention_forward(q, k, v, scale, causal, want_lse, features), used


def _signed(seed):
    seed &= 0xFFFFFFFFFFFFFFFF
    return seed - (1 << 64) if seed >> 63 else seed


class _FeaturesFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, features, scale, causal, deterministic, return_lse):
        """sink: that of features, for autograd to see."""
        out, lse, used = _features_forward(q, k, v, features, scale, causal)
        _save_features(ctx, (q, k, v, *_operator_order(features), scale, causal, deterministic), (out, lse, used))
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        return *_features_gradient(ctx, dout, dlse, direct=_features_backward), None, None, None, None, None    # features and what follows


_apply_features = super(torch.autograd.Function, _FeaturesFunction).apply


def _save_features(ctx, inputs, output):
    q, k, v, sink, slopes, q_start, k_start, left, right, softcap, dropout, max_q, max_k, seed, scale, causal, deterministic = inputs
    out, lse, used = output
    ctx.save_for_backward(q, k, v, sink, slopes, q_start, k_start, out, lse, used)
    ctx.options = left, right, softcap, dropout, max_q, max_k, scale, causal, deterministic
    ctx.set_materialize_grads(False)


def _features_gradient(ctx, dout, dlse, *_, direct=None):
    """dq, dk, dv, dsink."""
    if dout is None and dlse is None:
        return None, None, None, None
    q, k, v, sink, slopes, q_start, k_start, out, lse, used = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    if direct is None or _grad_enabled() or _compiling() or not _c_may_read(dout, dlse, q):
        direct = torch.ops.margay.attention_features_backward
    dq, dk, dv = direct(dout, dlse, q, k, v, sink, slopes, q_start, k_start, out, lse, used, *ctx.options)
    dsink = None
    if sink is not None and ctx.needs_input_grad[3]:   # the sink's probability times -delta, as of any score
        delta = (dout.float() * out.float()).sum(-1)
        share = torch.exp(sink[:, None] - lse) * (delta if dlse is None else delta - dlse)
        if q_start is not None:                          # rows behind the last sequence see no sink
            share = share.where(torch.arange(share.shape[2], device=share.device) < q_start[-1], 0)
        dsink = -share.sum((0, 2))
    return dq, dk, dv, dsink


def _features_backward(dout, dlse, q, k, v, sink, slopes, q_start, k_start, out, lse, used, left, right, softcap, dropout, max_q, max_k, scale, causal,
                       deterministic):
    features = _features_of(sink, slopes, q_start, k_start, left, right, softcap, dropout, max_q, max_k, used.item())
    return _attention_backward(dout, dlse, q, k, v, out, lse, scale, causal, deterministic, features)


def _features_fake(q, k, v, sink, slopes, q_start, k_start, *_):
    _check_attention(q, k, v)
    _check_devices("attention", q=q, sink=sink, alibi_slopes=slopes, cu_seqlens_q=q_start, cu_seqlens_k=k_start)
    return *_attention_outputs(q, v), torch.empty(1, dtype=torch.int64, device="cpu")


def _features_kernel(q, k, v, *features_and_options):
    *features, scale, causal, _ = features_and_options
    return _features_forward(q, k, v, _features_of(*features), scale, causal)


def _features_backward_fake(dout, dlse, q, k, v, *_):
    return _dense_like(q), _dense_like(k), _dense_like(v)


def _features_autocast(q, k, v, *options):
    with _without_autocast_keys():
        return torch.ops.margay.attention_features(*_autocast(q.device.type, q, k, v), *options)


def as_starts(name, t):
    if not isinstance(t, torch.Tensor) or t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"attention: {name} is {_kind(t)}, expected the starts of the sequences, an int32 tensor [B + 1]")
    _check_tensors("attention", **{name: t})
    if t.dtype is torch.int64:
        t = _as_int32(name, t)
    return t.contiguous()


def _as_int32(name, t):
    """Values that int32 does not have become the nearest that it has, which no sequence has either; on the CPU they are refused."""
    starts = t.clamp(-2**31, 2**31 - 1)
    if t.is_cpu and not torch.compiler.is_compiling() and _c_may_read(t) and not torch.equal(starts, t):
        ops.refuse_start(name, t.flatten().tolist())
    return starts.to(torch.int32)


def as_float32(op, name, t):
    if not isinstance(t, torch.Tensor) or t.dtype not in (*DTYPES, torch.float64):
        raise TypeError(f"{op}: {name} is {_kind(t)}, expected a float32 tensor")
    _check_tensors(op, **{name: t})
    return t.to(torch.float32).contiguous()


def _kind(t):
    return f"a tensor of dtype {ops.dtype_name(t)}" if isinstance(t, torch.Tensor) else type(t).__name__


def packed(t):
    return t.transpose(0, 1).unsqueeze(0)


def unpacked(t):
    return t.squeeze(0).transpose(0, 1)


def dropout_mask(p, seed, batch, heads, rows, keys):
    word = (1 << 32) - 1

    def mix(x):
        x = (x ^ x >> 16) * 0x7FEB352D & word
        x = (x ^ x >> 15) * 0x846CA68B & word
        return x ^ x >> 16

    seed &= (1 << 64) - 1
    head = torch.arange(batch * heads).view(batch, heads, 1, 1)
    head = mix((seed & word) ^ mix((seed >> 32) + head * 0x9E3779B9 & word))
    row = torch.arange(rows).view(-1, 1)
    bits = mix(mix(head + (row & ~8) * 0x85EBCA6B & word) ^ (torch.arange(keys) * 0xC2B2AE35 & word))
    return (bits >> 2 * (row & 8) & 0xFFFF) >= p * 65536


# ---- matmul


def matmul(a, b, bias, activation, out):
    if out is not None:
        return _matmul_out(a, b, bias, activation, out)
    if a.ndim == 2:
        return _matmul(a, b, bias, activation)
    _check_tensors("matmul", a=a, b=b, bias=bias)
    if not torch.jit.is_tracing():                             # whose sizes are tensors, not to be asked for their value
        ops.check_matmul(a, b, bias)
    return _matmul(a.flatten(0, -2), b, bias, activation).unflatten(0, a.shape[:-1])


def _matmul_out(a, b, bias, activation, out):
    _check_tensors("matmul", a=a, b=b, bias=bias, out=out)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, bias, out)):
        raise RuntimeError("matmul: out is given, which supports no gradient, but an argument requires one")
    ops.check_matmul(a, b, bias)
    ops.check_out(out, a, b)
    if torch.compiler.is_compiling() or not _c_may_read(a, b, bias, out):
        return out.copy_(matmul(a, b, bias, activation, None))
    try:
        rows = out.view(-1 if out.numel() else a.shape[:-1].numel(), out.shape[-1])
    except RuntimeError:
        raise ValueError(f"matmul: out has strides {out.stride()}, expected leading dimensions that can be flattened") from None
    target = _mappable_empty(rows) if rows.is_cuda else rows
    _matmul_into(target, a.flatten(0, -2), b, bias, activation)
    _copy_back(rows, target)
    written((out,))
    return out


def _matmul_gradient(ctx, dout):
    if dout is None:
        return None, None, None, None
    (a, b, bias), (activation,) = ctx.saved_tensors, ctx.numbers
    need_a, need_b = ctx.needs_input_grad[:2]
    need_bias = bias is not None and ctx.needs_input_grad[2]   # the dispatcher leaves out arguments that equal their defaults
    if activation:
        dout = _activation_gradient(activation, dout, matmul(a, b, bias, 0, None))
    dout = dout if dout.is_contiguous() else dout.contiguous()
    da = matmul(dout, b.t(), None, 0, None) if need_a else None
    db = matmul(a.t(), dout, None, 0, None) if need_b else None
    return da, db, dout.sum(0) if need_bias else None, None


def _activation_gradient(activation, dout, x):
    """Gradient of the activation's input x, which is computed again instead of saved."""
    if activation == ops.ACTIVATIONS["relu"]:
        return torch.ops.aten.threshold_backward(dout, x, 0)
    if activation == ops.ACTIVATIONS["silu"]:
        if torch.is_grad_enabled():                            # of its operator, torch has no second derivative
            x, s = x.float(), torch.sigmoid(x.float())
            return (dout * s * (1 + x * (1 - s))).to(dout.dtype)
        return torch.ops.aten.silu_backward(dout, x)
    approximate = "tanh" if activation == ops.ACTIVATIONS["gelu_tanh"] else "none"
    return torch.ops.aten.gelu_backward(dout, x, approximate=approximate)


def _matmul_into(out, a, b, bias, activation):
    if not a.is_cuda:
        _use_torch_threads()
    try:
        _C.matmul(out, a, b, bias, activation)
    except Exception:
        _matmul_of_copies(out, a, b, bias, activation)


@ops.one_exception
def _matmul_of_copies(out, a, b, bias, activation):
    _check_devices("matmul", a=a, b=b, bias=bias, out=out)
    rows, columns = _rows_of_matrix(a), _rows_of_matrix(b)
    if _all_mappable(rows, columns, out) and (bias is None or bias.stride(0) == 1):
        raise
    target = _mappable_empty(out)
    _C.matmul(target, _mappable_matrix(a), _mappable_matrix(b), None if bias is None else bias.contiguous(), activation)
    _copy_back(out, target)


# ---- what explain() and attention_varlen ask


without_gradients = torch.no_grad


def backward_workspace(q, k, v, causal, deterministic, features):
    if _autocast_anywhere() and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q.device.type, q, k, v)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return _C.attention_bwd_workspace(None, q, k, v, None, None, None, 0.0, causal, deterministic, *features)


def check_kinds(op, **tensors):
    _check_tensors(op, **tensors)


def why_copied(t, matrix=False, mapped=True):
    """Why kernels cannot read t where it is, or None. mapped: by TMA, on CUDA."""
    t = t.mT if matrix and t.stride(-1) != 1 and t.stride(-2) == 1 else t
    if _has_gaps(t):
        return "neither of its last two dimensions is contiguous" if matrix else "its last dimension is not contiguous"
    return None if not mapped or _readable(t) else "its address or strides are not multiples of 16 bytes"


# ---- tensors


def _c_may_be_asked(q, k, v):
    """As much of `_c_may_read` as a call of C is not refused for. No complex type is made of bfloat16, whose negative bit is therefore never set."""
    return (type(q) in _PLAIN_TYPES and type(k) in _PLAIN_TYPES and type(v) in _PLAIN_TYPES and
            not (_function_modes() or _dispatch_modes() or _transforms_active() or _tracing() or forward_ad._current_level >= 0) and
            (q.dtype is torch.bfloat16 or not (q.is_neg() or k.is_neg() or v.is_neg())))


def _c_may_read(*tensors):
    """May C read these tensors now, with nothing in torch that would have to see the call? Sparse tensors and those of a transform have no storage."""
    for t in tensors:
        if t is None:
            continue
        if type(t) not in _PLAIN_TYPES or not _has_storage(t) or t.is_neg() or not (t.is_cpu or t.is_cuda):
            return False
    return not (_function_modes() or _dispatch_modes() or _transforms_active() or _tracing() or forward_ad._current_level >= 0)


def _check_tensors(op, **tensors):
    for name, t in tensors.items():
        if t is None and name not in ops.REQUIRED:
            continue
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{op}: {name} is {type(t).__name__}, expected torch.Tensor (same as {next(iter(tensors))})")
        if t.layout is not torch.strided:
            raise TypeError(f"{op}: {name} has layout {t.layout}, expected torch.strided")


def _check_devices(op, **tensors):
    """One device, one that has kernels, and a dtype that it has kernels for."""
    first, like = _check_same_device(op, **tensors)
    if has_kernels(like.dtype, like.is_cuda):
        return
    if like.dtype is torch.float32:
        raise NotImplementedError(f"{op}: {first} has dtype float32, which has kernels on the CPU only; on CUDA expected bfloat16 or float16")
    raise TypeError(f"{op}: {first} has dtype {ops.dtype_name(like)}, expected bfloat16, float16 or, on the CPU, float32")


def has_kernels(dtype, is_cuda):
    """The one place in Python that says which dtypes have kernels where; of float8_e4m3fn, attention_fp8 says more."""
    return dtype in DTYPES and not (is_cuda and dtype is torch.float32)


def _check_same_device(op, **tensors):
    (first, like), *others = tensors.items()
    for name, t in others:
        if t is not None and t.device != like.device:
            raise ValueError(f"{op}: {name} is on {t.device}, expected {like.device} (same as {first})")
    if like.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{op}: {first} is on {like.device}, expected cpu or cuda")
    return first, like


def _autocast(device, *tensors):
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t is not None and t.dtype in DTYPES else t for t in tensors]


def _without_autocast_keys():
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def _like(t, last, dtype=None):
    """Dense empty tensor of t's shape but for the last dimension, the others in t's order in memory."""
    shape = *t.shape[:-1], last
    if t.is_contiguous():
        return t.new_empty(shape, dtype=dtype)
    order = ops.memory_order(t.stride())
    return t.new_empty([shape[i] for i in order] + [shape[-1]], dtype=dtype).permute([order.index(i) for i in range(len(order))] + [len(order)])


def _has_gaps(t):
    """Is the last dimension not contiguous? That of a tensor without elements is."""
    return t.stride(-1) != 1 and t.shape[-1] > 1 and t.numel() > 0


def _dense_like(t, dtype=None):
    """torch.empty_like, but with a contiguous last dimension."""
    return _like(t, t.shape[-1], dtype) if _has_gaps(t) else torch.empty_like(t, dtype=dtype)


def _rows_contiguous(t):
    return t if t.stride(-1) == 1 else t.contiguous()


# TMA reads and writes a tensor whose address and strides are multiples of 16 bytes. Others go through copies in padded rows. A copy may be
# freed before the kernel ran: torch hands its memory out again in the order of the stream that the kernel is on.


def _aligned(t):
    bits = t.data_ptr()
    for size, stride in zip(t.shape[:-1], t.stride()):
        if size != 1:
            bits |= stride * t.element_size()
    return bits & 15 == 0


def _readable(t):
    return not _has_gaps(t) and (not t.is_cuda or _aligned(t))


def _all_mappable(*tensors):
    return all(map(_readable, tensors))


def _mappable(t):
    """t if kernels can read it where it is, else a copy that they can."""
    return t if _readable(t) else _padded_empty(t).copy_(t)


def _rows_of_matrix(t):
    """A matrix or its transpose: whose rows are contiguous, if any are."""
    return t.t() if t.stride(-1) != 1 and t.stride(0) == 1 else t


def _mappable_matrix(t):
    rows = _rows_of_matrix(t)
    return _mappable(t) if rows is t else _mappable(rows).t()


def _mappable_empty(out):
    """out if kernels can write it and nothing beside it, else an empty tensor to write instead and to copy back. One that `_C` refuses
    to write, with gaps in its last dimension, stays as it is."""
    whole = not out.is_cuda or _has_gaps(out) or _aligned(out) and out.shape[-1] * out.element_size() % 16 == 0
    return out if whole else _padded_empty(out)


def _padded_empty(t):
    unit = 16 // t.element_size()
    columns = t.shape[-1]
    return t.new_empty((*t.shape[:-1], -(-columns // unit) * unit))[..., :columns]


def _copy_back(out, target):
    if target is not out:
        out.copy_(target)


def _use_torch_threads():
    global _threads
    threads = torch.get_num_threads()
    if threads != _threads:
        _C.set_num_threads(threads)
        _threads = threads


def _find_increment():
    """increment_version, of several tensors, of which inference mode's keep no count: torch's own, but for releases where it takes one and refuses those."""
    with torch.inference_mode():
        sample = torch.empty(0)
    try:
        increment_version((sample,))
    except (RuntimeError, TypeError):
        return lambda tensors: [increment_version(t) for t in tensors if not t.is_inference()]
    return increment_version


written = _find_increment()     # tells autograd what C wrote, as torch's own operators in place do: a backward that needs what was there raises


# ---- operators


def _of_the_first(gradient):
    """A backward formula of an operator: what `gradient` computes is of its first arguments; the others have none."""
    def padded(ctx, *grads):
        found = gradient(ctx, *grads)
        return *found, *(None,) * (len(ctx.needs_input_grad) - len(found))
    return padded


def _register(schema, kernel, fake, rule, gradient, save=None, autocast=None, tags=()):
    name = schema[:schema.index("(")]
    _library.define(schema, tags=(*_TAGS, *tags))
    for device in ("CPU", "CUDA"):
        _library.impl(name, _transforms.without_tangents(name, kernel), device)
        if autocast is not None:
            _library.impl(name, autocast, "Autocast" + device)
    torch.library.register_fake(f"margay::{name}", fake, lib=_library)
    torch.library.register_autograd(f"margay::{name}", gradient, setup_context=save, lib=_library)
    _transforms.install(_library, name, rule, gradient, save, autocast)


_register("attention(Tensor q, Tensor k, Tensor v, float? scale=None, bool causal=False, bool deterministic=False) -> (Tensor, Tensor)",
          lambda q, k, v, scale=None, causal=False, deterministic=False: _attention_forward(q, k, v, scale, causal),
          _attention_fake, _transforms.samples_in_batch, _of_the_first(_attention_gradient), _save_attention, _attention_autocast)
_register("attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float? scale, bool causal, "
          "bool deterministic) -> (Tensor, Tensor, Tensor)",
          _attention_backward, _attention_backward_fake, _transforms.samples_in_batch, _attention_no_second_order)
_register("attention_fp8(Tensor q, Tensor k, Tensor v, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, float? scale=None, "
          "bool causal=False) -> (Tensor, Tensor)", _attention_fp8, _attention_fp8_fake, _transforms.samples_in_batch, _attention_fp8_no_gradient, lambda *_, **__: None)
_FEATURES = "Tensor? sink, Tensor? alibi_slopes, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_NUMBERS = "SymInt left, SymInt right, float softcap, float dropout_p, SymInt max_seqlen_q, SymInt max_seqlen_k"
_register(f"attention_features(Tensor q, Tensor k, Tensor v, {_FEATURES}, {_NUMBERS}, int? seed, float? scale, bool causal, bool deterministic) "
          "-> (Tensor, Tensor, Tensor)", _features_kernel,
          _features_fake, _transforms.samples_in_batch_or_heads, _of_the_first(_features_gradient), _save_features, _features_autocast, (torch.Tag.nondeterministic_seeded,))
_register(f"attention_features_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, {_FEATURES}, Tensor out, Tensor lse, Tensor seed, "
          f"{_NUMBERS}, float? scale, bool causal, bool deterministic) -> (Tensor, Tensor, Tensor)",
          _features_backward, _features_backward_fake, _transforms.samples_in_batch_or_heads, _attention_no_second_order)

from margay import _op  # noqa: E402  its functions are made of this module's

_matmul = _op.function("matmul", gradient=_matmul_gradient, rule=_transforms.samples_in_rows)
_op.for_torch("matmul")
