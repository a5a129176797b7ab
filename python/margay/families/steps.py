"""Steps of generation on PyTorch tensors, of ssd, of linear attention and of the delta rules. Rows of ops.def cannot
say them yet: a state is read and written.

Each has its kernel, called with what the caller gave. Where C refuses that, `_again` says what is wrong in the caller's
terms, brings what is small into a form that C takes, or computes by torch's operations what no kernel does: float32 on
CUDA, and mixtures of types.
"""

import functools

import torch
from torch.autograd import forward_ad

from margay import _C, _torch, _transforms
from margay._shared import NoKernel, dtype_name, one_exception, shape

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_function_modes, _dispatch_modes = torch._C._is_torch_function_mode_enabled, torch._C._len_torch_dispatch_stack
_transforms_active, _tracing = torch._C._are_functorch_transforms_active, torch._C._is_tracing
_KERNEL_STATES = {t: (t, torch.float32) for t in _torch.DTYPES}


_INTEGERS = frozenset((torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8))
_FLOATING = frozenset((*_torch.DTYPES, torch.float64))


def _int32(at):
    """What int32 does not hold becomes the nearest that it holds, where no state is either."""
    if at is None or at.dtype is torch.int32:
        return at
    if at.dtype not in _INTEGERS:
        raise TypeError("expected integers")
    return (at.clamp(-1, 2**31 - 1) if at.dtype is torch.int64 else at).int()


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


@one_exception
def _ssd_again(state, x, dt, a, b, c, d, z, dt_bias, at, softplus, low, high):
    op = "ssd_step"
    _torch.check_kinds(op, _SSD[6:], **dict(zip(_SSD, (state, x, dt, a, b, c, d, z, dt_bias, at))))
    _torch.check_same_device(op, x=x, state=state, dt=dt, A=a, B=b, C=c, D=d, z=z, dt_bias=dt_bias, state_indices=at)
    if x.is_meta:
        return torch.ops.margay.ssd_step(state, x, dt, a, b, c, d, z, dt_bias, at, softplus, low, high)
    _check_floating(op, x=x, state=state, dt=dt, A=a, B=b, C=c, D=d, z=z, dt_bias=dt_bias)
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
    dt, a, d, dt_bias = (t if t is None else t.float().contiguous() for t in (dt, a, d, dt_bias))
    if not _has_kernel(state, x, b, c, z) or n > 256:
        _end_dry_run(n, x=x, B=b, C=c, z=z, state=state)
        _check_written(op, state=state)
        return _ssd_by_torch(state, x, dt, a, b, c, d, z, dt_bias, at, softplus, low, high)
    x, b, c, z = (t if t is None else _torch.rows_contiguous(t) for t in (x, b, c, z))
    out, wide = torch.empty(x.shape, dtype=x.dtype, device=x.device), d is not None and d.ndim == 2
    getattr(_C, op + _several(x))(out, state, x, dt, a, b, c, None if wide else d, d if wide else None, z, dt_bias,
                                  _int32(at), softplus, low, high)
    _torch.written((state,))
    return out


def _check_state(op, state, at, batch, rest):
    if at is not None and (at.ndim != 1 or len(at) != batch or at.dtype not in _INTEGERS):
        raise ValueError(f"{op}: state_indices is of dtype {at.dtype} and shape {shape(at)}, expected {batch} integers")
    if state.ndim != 4 or tuple(state.shape[1:]) != rest or at is None and len(state) != batch:
        places = batch if at is None else "places"
        raise ValueError(f"{op}: state has shape {shape(state)}, expected [{places}, {', '.join(map(str, rest))}]")


def _check_floating(op, **tensors):
    for name, t in tensors.items():
        if t is not None and t.dtype not in _FLOATING:
            raise TypeError(f"{op}: {name} has dtype {dtype_name(t)}, expected bfloat16, float16, float32 or float64")


def _check_shapes(op, expected, **tensors):
    for name, t in tensors.items():
        if t is not None and tuple(t.shape) != expected[name]:
            raise ValueError(f"{op}: {name} has shape {shape(t)}, expected {list(expected[name])}")


def _has_kernel(state, first, *others):
    return (_torch.has_kernels(first.dtype, first.is_cuda) and state.dtype in _KERNEL_STATES[first.dtype]
            and not _torch.has_gaps(state) and all(t is None or t.dtype == first.dtype for t in others))


def _check_written(op, **tensors):
    """PyTorch's operations would write elements that share memory."""
    for name, t in tensors.items():
        if t is not None and torch._debug_has_internal_overlap(t) == 1:
            raise BufferError(f"{op}: {name} is written, but with shape {shape(t)} and strides {list(t.stride())} its "
                              "elements may share memory")


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


@one_exception
def _linear_attention_again(state, q, k, v, g, at, scale):
    op = "linear_attention_step"
    _torch.check_kinds(op, _LINEAR[4:], **dict(zip(_LINEAR, (state, q, k, v, g, at))))
    _torch.check_same_device(op, q=q, state=state, k=k, v=v, g=g, state_indices=at)
    if q.is_meta:
        return torch.ops.margay.linear_attention_step(state, q, k, v, g, at, scale)
    _check_floating(op, q=q, state=state, k=k, v=v, g=g)
    if q.ndim not in (3, 4):
        raise ValueError(f"{op}: q has shape {shape(q)}, expected 3 dimensions [batch, heads, K], or 4 with steps")
    if v.ndim != q.ndim:
        raise ValueError(f"{op}: v has shape {shape(v)}, expected {q.ndim} dimensions as q, which has shape {shape(q)}")
    (*steps, heads, dim), dim_v = q.shape, v.shape[-1]
    _check_state(op, state, at, steps[0], (heads, dim, dim_v))
    _check_shapes(op, dict(k=(*steps, heads, dim), v=(*steps, heads, dim_v)), k=k, v=v)
    if g is not None and tuple(g.shape) not in ((heads,), (*steps, heads)):
        raise ValueError(f"{op}: g has shape {shape(g)}, expected [{heads}] or {[*steps, heads]}")
    g = g if g is None else g.float().contiguous()
    if not _has_kernel(state, q, k, v) or dim > 256:
        _end_dry_run(dim, q=q, k=k, v=v, state=state)
        _check_written(op, state=state)
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


_DELTA = ("state", "q", "k", "v", "g", "beta", "A_log", "dt_bias", "state_indices", "token_indices",
          "num_accepted_tokens", "intermediate_states", "intermediate_indices")
_DELTA_ABSENT = ("g", *_DELTA[6:])


def _named_delta(tensors):
    """q first: the others are compared with it."""
    return {"q": tensors[1], **dict(zip(_DELTA, tensors))}


def delta_step(op, *arguments):
    tensors = arguments[:13]
    if _torch.compiling() or not _plain(tensors):
        _torch.check_kinds(op, _DELTA_ABSENT, **_named_delta(tensors))
        return getattr(torch.ops.margay, op)(*arguments)
    return _delta_step(op, *arguments)


def _delta_step(op, state, q, k, v, g, beta, a_log, dt_bias, at, token_at, accepted, kept, kept_at, *numbers):
    try:
        out = _new(v)
        if not v.is_cuda:
            _torch.use_torch_threads()
        _call_delta(op, out, state, q, k, v, g, beta, a_log, dt_bias, at, token_at, accepted, kept, kept_at, numbers)
    except Exception:
        return _delta_again(op, state, q, k, v, g, beta, a_log, dt_bias, at, token_at, accepted, kept, kept_at,
                            *numbers)
    _torch.written((state,) if kept is None else (state, kept))
    return out


def _call_delta(op, out, state, q, k, v, g, beta, a_log, dt_bias, at, token_at, accepted, kept, kept_at, numbers):
    call = getattr(_C, op if q.ndim == 3 else op + "s")
    call(out, state, kept, q, k, v, g, beta, a_log, dt_bias, _int32(at), _int32(token_at), _int32(accepted),
         _int32(kept_at), *numbers)


@one_exception
def _delta_again(op, state, q, k, v, g, beta, a_log, dt_bias, at, token_at, accepted, kept, kept_at, *numbers):
    tensors = state, q, k, v, g, beta, a_log, dt_bias, at, token_at, accepted, kept, kept_at
    _check_delta(op, *tensors)
    if q.is_meta:
        return getattr(torch.ops.margay, op)(*tensors, *numbers)
    small = [t if t is None else t.float().contiguous() for t in (g, beta, a_log, dt_bias)]
    at, token_at, accepted, kept_at = (t if t is None else t.contiguous() for t in (at, token_at, accepted, kept_at))
    if not _has_kernel(state, q, k, v) or q.shape[-1] > 256:
        _end_dry_run(q.shape[-1], q=q, k=k, v=v, state=state)
        _check_written(op, state=state, intermediate_states=kept)
        out = _delta_by_torch(state, q, k, v, *small, at, token_at, accepted, kept, kept_at,
                              numbers[0] or q.shape[-1] ** -0.5, *numbers[1:])
    else:
        q, k, v = (_torch.rows_contiguous(t) for t in (q, k, v))
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        _call_delta(op, out, state, q, k, v, *small, at, token_at, accepted, kept, kept_at, numbers)
        _torch.written((state,) if kept is None else (state, kept))
    return out


def _check_delta(op, state, q, k, v, g, beta, a_log, dt_bias, at, token_at, accepted, kept, kept_at):
    named = _named_delta((state, q, k, v, g, beta, a_log, dt_bias, at, token_at, accepted, kept, kept_at))
    _torch.check_kinds(op, _DELTA_ABSENT if op == "gated_delta_rule_step" else _DELTA[6:], **named)
    _torch.check_same_device(op, **named)
    _check_floating(op, q=q, k=k, v=v, state=state, g=g, beta=beta, A_log=a_log, dt_bias=dt_bias,
                    intermediate_states=kept)
    if q.ndim not in (3, 4):
        raise ValueError(f"{op}: q has shape {shape(q)}, expected 3 dimensions [batch, heads, K], or 4 with steps")
    if v.ndim != q.ndim:
        raise ValueError(f"{op}: v has shape {shape(v)}, expected {q.ndim} dimensions as q, which has shape {shape(q)}")
    (*lead, heads_k, dim), (heads, dim_v), steps = q.shape, v.shape[-2:], q.shape[1] if q.ndim == 4 else 1
    if heads_k < 1 or heads % heads_k:
        raise ValueError(f"{op}: v has {heads} heads, expected a multiple of the {heads_k} heads of q and k")
    batch, of_keys = lead[0], (dim,) * (op == "kda_step")
    _check_shapes(op, dict(k=(*lead, heads_k, dim), v=(*lead, heads, dim_v), g=(*lead, heads, *of_keys),
                           beta=(*lead, heads), A_log=(heads,), dt_bias=(heads, *of_keys)),
                  k=k, v=v, g=g, beta=beta, A_log=a_log, dt_bias=dt_bias)
    last = heads, dim, dim_v
    _check_state(op, state, at, batch if at is not None or token_at is None else len(state), last)
    for name, t, wide in (("num_accepted_tokens", accepted, False), ("intermediate_indices", kept_at, False),
                          ("token_indices", token_at, True)):
        if t is not None and (t.ndim != 1 + wide or len(t) != batch or wide and t.shape[1] < steps
                              or t.dtype not in _INTEGERS):
            raise ValueError(f"{op}: {name} is of dtype {t.dtype} and shape {shape(t)}, expected integers "
                             + (f"[{batch}, {steps} or more]" if wide else f"[{batch}]"))
    if accepted is not None and (token_at is None or at is not None):
        raise ValueError(f"{op}: num_accepted_tokens is given, expected None without token_indices or with "
                         "state_indices")
    if kept is not None and token_at is not None:
        raise ValueError(f"{op}: token_indices is given, expected None where intermediate_states is given")
    if kept_at is not None and kept is None:
        raise ValueError(f"{op}: intermediate_indices is given, expected None without intermediate_states")
    if kept is not None and (kept.ndim != 5 or tuple(kept.shape[2:]) != last or kept.shape[1] < steps
                             or kept_at is None and len(kept) < batch):
        places = f"{batch} or more" if kept_at is None else "places"
        raise ValueError(f"{op}: intermediate_states has shape {shape(kept)}, expected [{places}, {steps} or more, "
                         f"{', '.join(map(str, last))}]")
    if kept is not None and kept.dtype != state.dtype:
        raise TypeError(f"{op}: intermediate_states has dtype {dtype_name(kept)}, "
                        f"expected {dtype_name(state)} (same as state)")


def _delta_by_torch(state, q, k, v, g, beta, a_log, dt_bias, at, token_at, accepted, kept, kept_at, scale, lower_bound,
                    beta_form, l2norm, still):
    with torch.no_grad():
        several, dtype, repeats = q.ndim == 4, v.dtype, v.shape[-2] // q.shape[-2]
        q, k, v = q.float(), k.float(), v.float()
        if l2norm:
            q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, k = (t.repeat_interleave(repeats, -2) for t in (q, k))
        if g is None:
            g = torch.zeros_like(beta)
        g = g if dt_bias is None else g + dt_bias
        rate = 1 if a_log is None else a_log.exp().view(-1, *[1] * (g.ndim - beta.ndim))
        if lower_bound:
            g = lower_bound * torch.sigmoid(rate * g)
        elif a_log is not None:
            g = -rate * torch.nn.functional.softplus(g)
        beta = beta_form * torch.sigmoid(beta) if beta_form else beta
        decay = (g if g.ndim == k.ndim else g[..., None]).exp()
        inputs = [t if several else t[:, None] for t in (q, k, v, decay, beta)]
        pool, batch = state, len(q)
        if at is not None:
            begin = at.long()
        elif token_at is not None:
            token = torch.zeros(batch, dtype=torch.long, device=q.device) if accepted is None else accepted.long() - 1
            known = (token >= 0) & (token < token_at.shape[1])
            begin = torch.where(known, token_at.gather(1, token.clamp(0, token_at.shape[1] - 1)[:, None])[:, 0], -1)
        else:
            begin = torch.arange(batch, device=q.device)
        there = (begin >= 0) & (begin < len(pool))
        now, outs = pool[begin.clamp(0, len(pool) - 1).long()].float(), []

        def keep(to, places):
            good = there & (places >= 0) & (places < len(to))
            to[places[good].long()] = now[good].to(to.dtype)

        every = torch.arange(batch, device=q.device)
        for t in range(inputs[0].shape[1]):
            q, k, v, decay, beta = (x[:, t] for x in inputs)
            now = decay[..., None] * now
            u = beta[..., None] * (v - (k[..., None] * now).sum(-2))
            now = now + k[..., None] * u[..., None, :]
            outs.append(scale * (q[..., None] * now).sum(-2))
            if token_at is not None:
                keep(pool, token_at[:, t])
            elif kept is not None:
                keep(kept[:, t], every if kept_at is None else kept_at)
        if token_at is None and not still:
            keep(pool, begin)
        out = torch.stack(outs, 1) if several else outs[0]
        return torch.where(there.view(-1, *[1] * (out.ndim - 1)), out, 0.0).to(dtype)


def _fake_ssd(state, x, *_):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_linear(state, q, k, v, *_):
    return torch.empty(v.shape, dtype=q.dtype, device=v.device)


def _fake_delta(op, *arguments):
    _check_delta(op, *arguments[:len(_DELTA)])
    return _fake_linear(*arguments)


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
for _op in ("gated_delta_rule_step", "kda_step"):
    _define(_op, "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? "
            "state_indices, Tensor? token_indices, Tensor? num_accepted_tokens, Tensor(b!)? intermediate_states, "
            "Tensor? intermediate_indices, float scale, float lower_bound, int beta_form, bool l2norm, bool still",
            functools.partial(_delta_step, _op), functools.partial(_fake_delta, _op))
