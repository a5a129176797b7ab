"""attention and attention_varlen on PyTorch tensors."""

import os

import torch

from margay import _C, _shared, _transforms
from margay._shared import checked_scale
from margay._torch import (all_mappable, as_float32, autocast, autocast_anywhere, c_may_be_asked, c_may_read,
                           check_devices, check_kinds, check_same_device, compiling, copy_back, dense_like,
                           grad_enabled, gradient_of_the_first, has_storage, kind, like_but_last, mappable,
                           mappable_empty, register, rows_contiguous, use_torch_threads, without_autocast_keys)
from margay.families.attention.attention import check_attention, check_no_features, check_starts, refuse_start
from margay.families.attention.features import Features

_E4M3 = torch.float8_e4m3fn
CHECK_STARTS = os.environ.get("MARGAY_SYNC") == "1"


# ---- attention


def attention(q, k, v, causal, scale, return_lse, deterministic):
    if q.dtype is _E4M3:
        return attention_fp8(q, k, v, (None, None, None), causal, scale, return_lse)
    if not compiling() and c_may_be_asked(q, k, v):
        try:
            return _attention_eager(q, k, v, causal, scale, return_lse, deterministic)
        except Exception:
            if c_may_read(q, k, v):
                raise
    check_kinds("attention", q=q, k=k, v=v)
    out, lse = torch.ops.margay.attention(q, k, v, scale, causal, deterministic)
    return (out, lse) if return_lse else out


def _attention_eager(q, k, v, causal, scale, return_lse, deterministic):
    if autocast_anywhere() and torch.is_autocast_enabled(q.device.type):
        q, k, v = autocast(q.device.type, q, k, v)
    if grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
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
        # scale, causal, deterministic, return_lse
        return *_attention_gradient(ctx, dout, dlse, _attention_backward), None, None, None, None


# Function.apply, but for its check for transforms, which `c_may_be_asked` and `c_may_read` make.
_apply_attention = super(torch.autograd.Function, _AttentionFunction).apply


def _save_attention(ctx, inputs, output):
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _attention_gradient(ctx, dout, dlse, direct=None):
    """dq, dk, dv. direct: what to call instead of the operator where it may be. What an operator saved may be a
    transform's that is over."""
    if dout is None and dlse is None:
        return None, None, None
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    if direct is None or grad_enabled() or compiling() or not (
            has_storage(dout) and c_may_be_asked(dout, q, q) if dlse is None else c_may_read(dout, dlse, q)):
        direct = torch.ops.margay.attention_backward
    return direct(dout, dlse, q, k, v, out, lse, *ctx.options)


# C checks its arguments. What it refuses may be computed by way of copies, and if not, is refused again in the terms of
# the Python arguments. Calls that need neither pay nothing.


def _attention_forward(q, k, v, scale, causal, want_lse=True, features=()):
    scale = checked_scale("attention", scale)
    try:
        out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else like_but_last(q, v.shape[-1])
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if want_lse else None
        _call_attention_fwd(out, lse, q, k, v, scale, causal, features)
    except Exception:
        return _attention_forward_of_copies(q, k, v, scale, causal, want_lse, features)
    return out, lse


@_shared.one_exception
def _attention_forward_of_copies(q, k, v, scale, causal, want_lse, features):
    check_kinds("attention", q=q, k=k, v=v)
    _check_attention(q, k, v)
    out, lse = _attention_outputs(q, v, want_lse)
    if all_mappable(q, k, v, out):
        raise
    target = mappable_empty(out)
    _call_attention_fwd(target, lse, mappable(q), mappable(k), mappable(v), scale, causal, features)
    copy_back(out, target)
    return out, lse


_ONE_WAVE = 1 << 20   # elements of out; smaller problems have at most about one task for each multiprocessor


def _call_attention_fwd(out, lse, q, k, v, scale, causal, features=()):
    workspace = None
    if not q.is_cuda:
        use_torch_threads()
    elif out.numel() > _ONE_WAVE:
        workspace = torch.empty(16, dtype=torch.uint8, device=q.device)
    if features:                           # a call with * costs 0.2 us more
        _C.attention_fwd(out, lse, q, k, v, scale, causal, workspace, *features)
    else:
        _C.attention_fwd(out, lse, q, k, v, scale, causal, workspace)


def _attention_backward(dout, dlse, q, k, v, out, lse, scale, causal, deterministic, features=()):
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    scale = checked_scale("attention", scale)
    dout = rows_contiguous(dout)
    dlse = None if dlse is None else dlse.contiguous()
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    read = dout, q, k, v, out, lse, dlse
    try:
        _call_attention_bwd(grads, read, scale, causal, deterministic, features)
    except ValueError:                     # the forward's arguments were right: only addresses and strides can be wrong
        return _attention_backward_of_copies(grads, read, scale, causal, deterministic, features)
    return grads


@_shared.one_exception
def _attention_backward_of_copies(grads, read, *numbers):
    *mapped, lse, dlse = read
    if all_mappable(*grads, *mapped):
        raise
    grads = [dense_like(t) for t in grads]
    targets = [mappable_empty(t) for t in grads]
    _call_attention_bwd(targets, (*map(mappable, mapped), lse, dlse), *numbers)
    for grad, target in zip(grads, targets):
        copy_back(grad, target)
    return tuple(grads)


def _call_attention_bwd(grads, read, scale, causal, deterministic, features):
    (dq, dk, dv), (dout, q, k, v, out, lse, dlse) = grads, read
    if not q.is_cuda:
        use_torch_threads()
    if features:
        size = _C.attention_bwd_workspace(*read, scale, causal, deterministic, *features)
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        _C.attention_bwd(*grads, *read, workspace, scale, causal, deterministic, *features)
    else:                                  # the sizes follow from q, k and v
        size = _C.attention_bwd_workspace(None, q, k, v, None, None, None, scale, causal, deterministic)
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        _C.attention_bwd(dq, dk, dv, dout, q, k, v, out, lse, dlse, workspace, scale, causal, deterministic)


def _check_attention(q, k, v):
    check_attention(q, k, v)
    check_devices("attention", q=q, k=k, v=v)


def _attention_outputs(q, v, want_lse=True, dtype=None):
    out = dense_like(q, dtype) if q.shape[-1] == v.shape[-1] else like_but_last(q, v.shape[-1], dtype)
    return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if want_lse else None


def _attention_fake(q, k, v, scale=None, causal=False, deterministic=False):
    _check_attention(q, k, v)
    return _attention_outputs(q, v)


def _attention_backward_fake(dout, dlse, q, k, v, *_):
    return dense_like(q), dense_like(k), dense_like(v)


def _attention_autocast(q, k, v, *options):
    with without_autocast_keys():
        return torch.ops.margay.attention(*autocast(q.device.type, q, k, v), *options)


def _attention_no_second_order(ctx, *grads):
    raise NotImplementedError("attention: gradients of gradients (create_graph=True) are not implemented")


# ---- attention of 8-bit floats, forward only


def attention_fp8(q, k, v, descales, causal, scale, return_lse):
    named = dict(q=q, k=k, v=v, **dict(zip(_DESCALES, descales)))
    check_kinds("attention", _DESCALES, **named)
    for name, t in named.items():
        if torch.is_grad_enabled() and t is not None and t.requires_grad:
            raise NotImplementedError(f"attention: {name} requires a gradient, which float8_e4m3fn does not have; "
                                      "expected a call under torch.no_grad()")
    if torch.compiler.is_compiling() or not c_may_read(*named.values()):
        out, lse = torch.ops.margay.attention_fp8(q, k, v, *descales, scale, causal)
    else:
        out, lse = _attention_fp8(q, k, v, *descales, scale, causal, return_lse)
    return (out, lse) if return_lse else out


_DESCALES = "q_descale", "k_descale", "v_descale"


def _attention_fp8(q, k, v, q_descale=None, k_descale=None, v_descale=None, scale=None, causal=False, want_lse=True):
    scale = checked_scale("attention", scale)
    descales = q_descale, k_descale, v_descale
    out, lse = _attention_fp8_fake(q, k, v, *descales, want_lse=want_lse)
    q, k, v, target = mappable(q), mappable(k), mappable(v), mappable_empty(out)
    workspace = torch.empty(16, dtype=torch.uint8, device=q.device) if q.is_cuda and out.numel() > _ONE_WAVE else None
    if not q.is_cuda:
        use_torch_threads()
    _C.attention_fwd_fp8(target, lse, q, k, v, workspace,
                         *(None if t is None else as_float32("attention", name, t)
                           for name, t in zip(_DESCALES, descales)), scale, causal)
    copy_back(out, target)
    return out, lse


def _attention_fp8_fake(q, k, v, q_descale=None, k_descale=None, v_descale=None, scale=None, causal=False,
                        want_lse=True):
    if q.dtype is not _E4M3:
        given = next((f"{n} is given, but " for n, t in zip(_DESCALES, (q_descale, k_descale, v_descale))
                      if t is not None), "")
        raise TypeError(f"attention: {given}q has dtype {_shared.dtype_name(q)}, expected float8_e4m3fn")
    check_attention(q, k, v)
    for name, t in zip(_DESCALES, (q_descale, k_descale, v_descale)):
        if t is not None and t.shape != k.shape[:2]:
            raise ValueError(f"attention: {name} has shape {list(t.shape)}, expected {list(k.shape[:2])} (batch and "
                             "heads of k)")
    check_same_device("attention", q=q, k=k, v=v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return _attention_outputs(q, v, want_lse, torch.bfloat16)


def _attention_fp8_no_gradient(ctx, *_):
    raise NotImplementedError("attention: float8_e4m3fn has no gradient")


# ---- attention with windows, softcap, sinks, ALiBi, dropout; packed sequences
#
# q, k, v are [1, heads, total, dim] where sequences are packed. `features`: a features.Features, whose seed of dropout
# is drawn here if None.


def attention_features(q, k, v, features, causal, scale, return_lse, deterministic):
    sink, slopes = features.sink, features.alibi_slopes
    tensors = q, k, v, sink, slopes, features.cu_seqlens_q, features.cu_seqlens_k
    if q.dtype is _E4M3:
        check_no_features(features)
        return attention_fp8(q, k, v, (None, None, None), causal, scale, return_lse)
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("attention: alibi_slopes requires a gradient, which is not computed; pass "
                                  "alibi_slopes.detach()")
    if torch.compiler.is_compiling() or k is None or v is None or not c_may_read(*tensors):
        check_kinds("attention", _FEATURE_TENSORS[3:], **dict(zip(_FEATURE_TENSORS, tensors)))
        out, lse, _ = torch.ops.margay.attention_features(q, k, v, *_operator_order(features), scale, causal,
                                                          deterministic)
        return (out, lse) if return_lse else out
    if autocast_anywhere() and torch.is_autocast_enabled(q.device.type):
        q, k, v = autocast(q.device.type, q, k, v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or sink is not None
                                    and sink.requires_grad):
        return _apply_features(q, k, v, sink, features, scale, causal, deterministic, return_lse)
    out, lse, _ = _features_forward(q, k, v, features, scale, causal, return_lse)
    return (out, lse) if return_lse else out


_FEATURE_TENSORS = "q", "k", "v", "sink", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k"


def _operator_order(f):
    return (f.sink, f.alibi_slopes, f.cu_seqlens_q, f.cu_seqlens_k, f.left, f.right, f.softcap, f.dropout_p,
            f.max_seqlen_q, f.max_seqlen_k, f.seed)


def _features_of(sink, slopes, q_start, k_start, left, right, softcap, dropout_p, max_q, max_k, seed):
    """Of the operator's arguments."""
    return Features(left, right, softcap, dropout_p, seed, sink, slopes, q_start, k_start, max_q, max_k)


def _features_forward(q, k, v, features, scale, causal, want_lse=True):
    """out, lse, and the seed of dropout as a CPU tensor; drawn from torch's generator where none is given."""
    if features.dropout_p:
        drawn = features.seed is None
        used = torch.randint(-2**63, 2**63 - 1, (1,)) if drawn else torch.tensor([_signed(features.seed)])
        features = features._replace(seed=used.item())
    else:
        used = torch.zeros(1, dtype=torch.int64)
        features = features._replace(seed=0) if features.seed is None else features
    starts = features.cu_seqlens_q, features.cu_seqlens_k
    if CHECK_STARTS and starts[0] is not None and q.is_cuda:
        check_starts("q", starts[0].tolist(), q.shape[2], features.max_seqlen_q)
        check_starts("k", starts[1].tolist(), k.shape[2], features.max_seqlen_k)
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
        # features and what follows
        return *_features_gradient(ctx, dout, dlse, direct=_features_backward), None, None, None, None, None


_apply_features = super(torch.autograd.Function, _FeaturesFunction).apply


def _save_features(ctx, inputs, output):
    (q, k, v, sink, slopes, q_start, k_start, left, right, softcap, dropout, max_q, max_k, seed, scale, causal,
     deterministic) = inputs
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
    if direct is None or grad_enabled() or compiling() or not c_may_read(dout, dlse, q):
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


def _features_backward(dout, dlse, q, k, v, sink, slopes, q_start, k_start, out, lse, used, left, right, softcap,
                       dropout, max_q, max_k, scale, causal, deterministic):
    features = _features_of(sink, slopes, q_start, k_start, left, right, softcap, dropout, max_q, max_k, used.item())
    return _attention_backward(dout, dlse, q, k, v, out, lse, scale, causal, deterministic, features)


def _features_fake(q, k, v, sink, slopes, q_start, k_start, *_):
    _check_attention(q, k, v)
    check_devices("attention", q=q, sink=sink, alibi_slopes=slopes, cu_seqlens_q=q_start, cu_seqlens_k=k_start)
    return *_attention_outputs(q, v), torch.empty(1, dtype=torch.int64, device="cpu")


def _features_kernel(q, k, v, *features_and_options):
    *features, scale, causal, _ = features_and_options
    return _features_forward(q, k, v, _features_of(*features), scale, causal)


def _features_backward_fake(dout, dlse, q, k, v, *_):
    return dense_like(q), dense_like(k), dense_like(v)


def _features_autocast(q, k, v, *options):
    with without_autocast_keys():
        return torch.ops.margay.attention_features(*autocast(q.device.type, q, k, v), *options)


def as_starts(name, t):
    if not isinstance(t, torch.Tensor) or t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"attention: {name} is {kind(t)}, expected the starts of the sequences, "
                        "an int32 tensor [B + 1]")
    check_kinds("attention", **{name: t})
    if t.dtype is torch.int64:
        t = _as_int32(name, t)
    return t.contiguous()


def _as_int32(name, t):
    """Values that int32 does not have become the nearest that it has, which no sequence has either; on the CPU they are
    refused."""
    starts = t.clamp(-2**31, 2**31 - 1)
    if t.is_cpu and not torch.compiler.is_compiling() and c_may_read(t) and not torch.equal(starts, t):
        refuse_start(name, t.flatten().tolist())
    return starts.to(torch.int32)


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


def backward_workspace(q, k, v, causal, deterministic, features):
    if autocast_anywhere() and torch.is_autocast_enabled(q.device.type):
        q, k, v = autocast(q.device.type, q, k, v)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return _C.attention_bwd_workspace(None, q, k, v, None, None, None, 0.0, causal, deterministic, *features)


# ---- operators


def _samples_in_batch_or_heads(op, info, in_dims, inputs):
    """Attention with features: a sink is shared by the batch, starts of packed sequences by the heads. What is dropped
    depends on batch and head, so with dropout, as with starts of their own, the samples are computed one by one."""
    names = [argument.name for argument in op._schema.arguments]
    given, dims = dict(zip(names, inputs)), dict(zip(names, in_dims))
    if given["dropout_p"] and given["seed"] is None and info.randomness != "different":
        if info.randomness == "error":
            raise RuntimeError("attention: dropout_seed is None, which torch.vmap(randomness='error') does not allow; "
                               "expected a seed, or randomness "
                               "'different' or 'same'")
        given["seed"] = torch.randint(-2**63, 2**63 - 1, (1,)).item()
    if given["dropout_p"] or any(dims[name] is not None for name in ("cu_seqlens_q", "cu_seqlens_k", "seed")):
        return _transforms.one_by_one(op, info, in_dims, given.values())
    size, batch = info.batch_size, _transforms.unbatched_shape(given["q"], dims["q"])[0]
    at = int(given["cu_seqlens_q"] is not None or dims["sink"] is not None)
    for name, t in given.items():
        if not isinstance(t, torch.Tensor) or name in ("cu_seqlens_q", "cu_seqlens_k", "seed"):
            continue
        if name == "sink":
            given[name] = _transforms.samples_first(t, dims[name], size).flatten().contiguous() if at else t
        elif name == "alibi_slopes" and not at:
            slopes = _transforms.samples_first(t, dims[name], size)
            given[name] = slopes.expand(size, batch, slopes.shape[2]).flatten(0, 1).contiguous()
        else:
            given[name] = _transforms.fold(t, dims[name], size, at)
    outputs = op(*given.values())
    places = [at if t.dim() > 1 else None for t in outputs]
    return tuple(t if place is None else _transforms.unfold(t, size, at)
                 for t, place in zip(outputs, places)), tuple(places)


register("attention", "attention(Tensor q, Tensor k, Tensor v, float? scale=None, bool causal=False, "
                      "bool deterministic=False) -> (Tensor, Tensor)",
         lambda q, k, v, scale=None, causal=False, deterministic=False: _attention_forward(q, k, v, scale, causal),
         _attention_fake, _transforms.samples_in_batch, gradient_of_the_first(_attention_gradient), _save_attention,
         _attention_autocast)
register("attention",
         "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
                      "float? scale, bool causal, bool deterministic) -> (Tensor, Tensor, Tensor)",
         _attention_backward, _attention_backward_fake, _transforms.samples_in_batch, _attention_no_second_order)
register("attention", "attention_fp8(Tensor q, Tensor k, Tensor v, Tensor? q_descale=None, Tensor? k_descale=None, "
                      "Tensor? v_descale=None, float? scale=None, bool causal=False) -> (Tensor, Tensor)",
         _attention_fp8, _attention_fp8_fake, _transforms.samples_in_batch, _attention_fp8_no_gradient,
         lambda *_, **__: None)
_FEATURES = "Tensor? sink, Tensor? alibi_slopes, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_NUMBERS = "SymInt left, SymInt right, float softcap, float dropout_p, SymInt max_seqlen_q, SymInt max_seqlen_k"
register("attention", f"attention_features(Tensor q, Tensor k, Tensor v, {_FEATURES}, {_NUMBERS}, int? seed, "
                      "float? scale, bool causal, bool deterministic) -> (Tensor, Tensor, Tensor)",
         _features_kernel, _features_fake, _samples_in_batch_or_heads, gradient_of_the_first(_features_gradient),
         _save_features, _features_autocast, (torch.Tag.nondeterministic_seeded,))
register("attention",
         f"attention_features_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, {_FEATURES}, "
                      f"Tensor out, Tensor lse, Tensor seed, {_NUMBERS}, float? scale, bool causal, "
                      "bool deterministic) -> (Tensor, Tensor, Tensor)",
         _features_backward, _features_backward_fake, _samples_in_batch_or_heads, _attention_no_second_order)
