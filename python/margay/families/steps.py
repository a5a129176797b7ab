"""Steps of generation on PyTorch tensors, of ssd and of linear attention. Rows of ops.def cannot say them yet: a state
is read and written.

Each has its kernel, called with what the caller gave. Where C refuses that, `_again` says what is wrong in the caller's
terms, brings what is small into a form that C takes, or computes by torch's operations what no kernel does: float32 on
CUDA, and mixtures of types.
"""

import torch
from torch.autograd import forward_ad

from margay import _C, _torch, _transforms
from margay._shared import NoKernel, dtype_name, shape

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_function_modes, _dispatch_modes = torch._C._is_torch_function_mode_enabled, torch._C._len_torch_dispatch_stack
_transforms_active, _tracing = torch._C._are_functorch_transforms_active, torch._C._is_tracing
_KERNEL_STATES = {t: (t, torch.float32) for t in _torch.DTYPES}


def _int32(at):
    if at is None or at.dtype is torch.int32:
        return at
    if at.is_floating_point() or at.is_complex():
        raise TypeError("expected integers")
    return at.int()


def _plain(tensors):
    """As much of `_torch.c_may_read` as a call of C is not refused for."""
    if (_function_modes() or _dispatch_modes() or _transforms_active() or _tracing() or forward_ad._current_level >= 0):
        return False
    for t in tensors:
        if t is not None and (type(t) not in _PLAIN or t.is_neg()):
            return False
    return True


def _new(t):
    return torch.empty_like(t) if t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _several(t):
    return "s" if t.ndim == 4 else ""


def ssd_step(state, x, dt, a, b, c, d, z, dt_bias, at, softplus, low, high):
    tensors = state, x, dt, a, b, c, d, z, dt_bias, at
    if _torch.compiling() or not _plain(tensors):
        _torch.check_kinds("ssd_step", _SSD[6:], **dict(zip(_SSD, tensors)))
        return torch.ops.margay.ssd_step(*tensors, softplus, low, high)
    return _ssd_step(*tensors, softplus, low, high)


_SSD = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state_indices")


def _ssd_step(state, x, dt, a, b, c, d, z, dt_bias, at, softplus, low, high):
    try:
        out = _new(x)
        if not x.is_cuda:
            _torch.use_torch_threads()
        wide = d is not None and d.ndim == 2
        call = _C.ssd_step if x.ndim == 3 else _C.ssd_steps
        call(out, state, x, dt, a, b, c, None if wide else d, d if wide else None, z, dt_bias, _int32(at), softplus,
             low, high)
    except Exception:
        return _ssd_again(state, x, dt, a, b, c, d, z, dt_bias, at, softplus, low, high)
    _torch.written((state,))
    return out


def _ssd_again(state, x, dt, a, b, c, d, z, dt_bias, at, softplus, low, high):
    op = "ssd_step"
    if x.is_meta:
        return torch.ops.margay.ssd_step(state, x, dt, a, b, c, d, z, dt_bias, at, softplus, low, high)
    _torch.check_kinds(op, _SSD[6:], **dict(zip(_SSD, (state, x, dt, a, b, c, d, z, dt_bias, at))))
    if x.ndim not in (3, 4):
        raise ValueError(f"{op}: x has shape {shape(x)}, expected 3 dimensions [batch, heads, head dim], or 4 with "
                         "steps")
    if b.ndim != x.ndim:
        raise ValueError(f"{op}: B has shape {shape(b)}, expected {x.ndim} dimensions as x, which has shape {shape(x)}")
    (*steps, heads, dim), (groups, n) = x.shape, b.shape[-2:]
    if groups < 1 or heads % groups:
        raise ValueError(f"{op}: B has {groups} groups, expected a divisor of the {heads} heads of x")
    _check_state(op, state, at, steps[0], (heads, dim, n))
    expected = dict(dt=(*steps, heads), A=(heads,), B=(*steps, groups, n), C=(*steps, groups, n), z=tuple(x.shape),
                    dt_bias=(heads,), D=(heads,) if d is None or d.ndim == 1 else (heads, dim))
    _check_shapes(op, expected, dt=dt, A=a, B=b, C=c, z=z, dt_bias=dt_bias, D=d)
    _torch.check_same_device(op, x=x, state=state, dt=dt, A=a, B=b, C=c, D=d, z=z, dt_bias=dt_bias, state_indices=at)
    dt, a, d, dt_bias = (t if t is None else t.float().contiguous() for t in (dt, a, d, dt_bias))
    if not _has_kernel(state, x, b, c, z) or n > 256:
        _end_dry_run(n, x=x, B=b, C=c, z=z, state=state)
        return _ssd_by_torch(state, x, dt, a, b, c, d, z, dt_bias, at, softplus, low, high)
    x, b, c, z = (t if t is None else _torch.rows_contiguous(t) for t in (x, b, c, z))
    out, wide = torch.empty(x.shape, dtype=x.dtype, device=x.device), d is not None and d.ndim == 2
    getattr(_C, op + _several(x))(out, state, x, dt, a, b, c, None if wide else d, d if wide else None, z, dt_bias,
                                  _int32(at), softplus, low, high)
    _torch.written((state,))
    return out


def _check_state(op, state, at, batch, rest):
    if at is not None and (at.ndim != 1 or len(at) != batch or at.is_floating_point() or at.is_complex()):
        raise ValueError(f"{op}: state_indices is of dtype {at.dtype} and shape {shape(at)}, expected {batch} integers")
    if state.ndim != 4 or tuple(state.shape[1:]) != rest or at is None and len(state) != batch:
        places = batch if at is None else "places"
        raise ValueError(f"{op}: state has shape {shape(state)}, expected [{places}, {', '.join(map(str, rest))}]")


def _check_shapes(op, expected, **tensors):
    for name, t in tensors.items():
        if t is not None and tuple(t.shape) != expected[name]:
            raise ValueError(f"{op}: {name} has shape {shape(t)}, expected {list(expected[name])}")


def _has_kernel(state, first, *others):
    return (_torch.has_kernels(first.dtype, first.is_cuda) and state.dtype in _KERNEL_STATES[first.dtype]
            and not _torch.has_gaps(state) and all(t is None or t.dtype == first.dtype for t in others))


def _end_dry_run(n, **tensors):
    """Torch's operations would change the state."""
    if _C.runs_dry():
        given = ", ".join(f"{name} {dtype_name(t)}" for name, t in tensors.items() if t is not None)
        on = tensors["state"].device.type
        raise NoKernel(f"PyTorch's operations compute states of {n} with {given} on {on}")


def _ssd_by_torch(state, x, dt, a, b, c, d, z, dt_bias, at, softplus, low, high):
    with torch.no_grad():
        dt = dt if dt_bias is None else dt + dt_bias
        dt = (torch.nn.functional.softplus(dt) if softplus else dt).clamp(low, high)
        wide, b, c = x.float(), *(t.float().repeat_interleave(x.shape[-2] // t.shape[-2], -2) for t in (b, c))

        def step(before, *now):
            x, dt, b, c = now
            after = torch.exp(dt * a)[..., None, None] * before + (dt[..., None] * x)[..., None] * b[:, :, None]
            return after, (after * c[:, :, None]).sum(-1)

        y = _by_torch(step, state, at, wide, dt, b, c)
        if d is not None:
            y = y + wide * (d if d.ndim == 2 else d[:, None])
        if z is not None:
            y = y * torch.nn.functional.silu(z.float())
        return _where_state(y, at).to(x.dtype)


def _by_torch(step, state, at, *inputs):
    """Outputs of one step or several, state becomes the last one."""
    places = None if at is None else at.long()
    now = (state if at is None else state[places.clamp(min=0)]).float()
    several = inputs[0].ndim == 4
    outs = []
    for i in range(inputs[0].shape[1] if several else 1):
        now, out = step(now, *(t[:, i] if several else t for t in inputs))
        outs.append(out)
    if at is None:
        state.copy_(now)
    else:
        there = places >= 0
        state[places[there]] = now[there].to(state.dtype)
    return torch.stack(outs, 1) if several else outs[0]


def _where_state(out, at):
    return out if at is None else torch.where((at >= 0).view(-1, *[1] * (out.ndim - 1)), out, 0.0)


def linear_attention_step(state, q, k, v, g, at, scale):
    tensors = state, q, k, v, g, at
    if _torch.compiling() or not _plain(tensors):
        _torch.check_kinds("linear_attention_step", _LINEAR[4:], **dict(zip(_LINEAR, tensors)))
        return torch.ops.margay.linear_attention_step(*tensors, scale)
    return _linear_attention_step(*tensors, scale)


_LINEAR = ("state", "q", "k", "v", "g", "state_indices")


def _linear_attention_step(state, q, k, v, g, at, scale):
    try:
        out = _new(v)
        if not v.is_cuda:
            _torch.use_torch_threads()
        head = g is not None and g.ndim == 1
        call = _C.linear_attention_step if q.ndim == 3 else _C.linear_attention_steps
        call(out, state, q, k, v, None if head else g, g if head else None, _int32(at), scale)
    except Exception:
        return _linear_attention_again(state, q, k, v, g, at, scale)
    _torch.written((state,))
    return out


def _linear_attention_again(state, q, k, v, g, at, scale):
    op = "linear_attention_step"
    if q.is_meta:
        return torch.ops.margay.linear_attention_step(state, q, k, v, g, at, scale)
    _torch.check_kinds(op, _LINEAR[4:], **dict(zip(_LINEAR, (state, q, k, v, g, at))))
    if q.ndim not in (3, 4):
        raise ValueError(f"{op}: q has shape {shape(q)}, expected 3 dimensions [batch, heads, K], or 4 with steps")
    if v.ndim != q.ndim:
        raise ValueError(f"{op}: v has shape {shape(v)}, expected {q.ndim} dimensions as q, which has shape {shape(q)}")
    (*steps, heads, dim), dim_v = q.shape, v.shape[-1]
    _check_state(op, state, at, steps[0], (heads, dim, dim_v))
    _check_shapes(op, dict(k=(*steps, heads, dim), v=(*steps, heads, dim_v)), k=k, v=v)
    if g is not None and tuple(g.shape) not in ((heads,), (*steps, heads)):
        raise ValueError(f"{op}: g has shape {shape(g)}, expected [{heads}] or {[*steps, heads]}")
    _torch.check_same_device(op, q=q, state=state, k=k, v=v, g=g, state_indices=at)
    g = g if g is None else g.float().contiguous()
    if not _has_kernel(state, q, k, v) or dim > 256:
        _end_dry_run(dim, q=q, k=k, v=v, state=state)
        return _linear_attention_by_torch(state, q, k, v, g, at, scale or dim ** -0.5)
    q, k, v = (_torch.rows_contiguous(t) for t in (q, k, v))
    out, head = torch.empty(v.shape, dtype=v.dtype, device=v.device), g is not None and g.ndim == 1
    getattr(_C, op + _several(q))(out, state, q, k, v, None if head else g, g if head else None, _int32(at), scale)
    _torch.written((state,))
    return out


def _linear_attention_by_torch(state, q, k, v, g, at, scale):
    with torch.no_grad():
        decay = torch.zeros((), device=q.device) if g is None else g.clamp(min=-64.0)
        decay = decay.exp().expand(q.shape[:-1])[..., None]

        def step(before, *now):
            q, k, v, decay = now
            after = decay[..., None] * before + k[..., None] * v[:, :, None]
            return after, scale * (q[:, :, None] @ after)[:, :, 0]

        out = _by_torch(step, state, at, q.float(), k.float(), v.float(), decay)
        return _where_state(out, at).to(q.dtype)


def _fake_ssd(state, x, *_):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_linear(state, q, k, v, *_):
    return torch.empty(v.shape, dtype=q.dtype, device=v.device)


def _define(name, schema, kernel, fake):
    _torch.library.define(f"{name}(Tensor(a!) state, {schema}) -> Tensor", tags=_torch._TAGS)
    for device in ("CPU", "CUDA"):
        _torch.library.impl(name, _transforms.without_tangents(name, kernel), device)
    torch.library.register_fake(f"margay::{name}", fake, lib=_torch.library)
    _transforms.install(_torch.library, name, name, None)


_define("ssd_step", "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
        "Tensor? state_indices, bool dt_softplus, float low, float high", _ssd_step, _fake_ssd)
_define("linear_attention_step", "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? state_indices, float scale",
        _linear_attention_step, _fake_linear)
