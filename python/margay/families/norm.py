"""Norms of the last dimension: layer norm and root mean square norm behind dropout and a residual, and gated ones."""

from margay import _shared
from margay._shared import functions, is_torch, number

_shared.own_dtype |= {"gated_rms_norm"} | {name + end for name in ("layer_norm", "rms_norm")
                                           for end in ("", "_residual", "_fp8")}


def layer_norm(x, weight=None, bias=None, *, residual=None, dropout_p=0.0, eps=1e-5, prenorm=False,
               residual_in_fp32=False, seed=None, generator=None, out_dtype=None, out_scale=None):
    """out = (u - mean) / sqrt(variance + eps) weight + bias, of each row u of drop(x) + residual (Ba, Kiros & Hinton
    2016). Statistics are float32.

    x, residual, out [..., D], 1 <= D <= 65536; weight, bias [D]. bfloat16, float16 or float32; residual, weight and
    bias are float32 or as x. PyTorch tensors are differentiable; NumPy arrays give NumPy arrays. Autocast leaves x and
    out in x's dtype.

    residual: added to x; nothing if None.
    dropout_p: probability of each element of x to become 0 before the addition, rounded to a multiple of 1 / 65536, 0
        to 1; the others grow by 1 / (1 - dropout_p). 1 leaves the residual alone.
    eps: at least 0.
    prenorm: return (out, u). u has residual's dtype, or without one x's.
    residual_in_fp32: u is float32 whatever there is.
    seed: 64-bit integer that, with row and column, decides what is dropped; or an int32 tensor of two words of it on
        x's device. Drawn from torch's generator (generator, if given) if None, on x's device: nothing synchronises, and
        a CUDA graph drops other elements at each replay.
    out_dtype: torch.float8_e4m3fn, for a product or attention of 8 bits: return (out, descale), with prenorm (out,
        descale, u). descale, float32 [...], is the largest magnitude of each row / 448, at least 2^-126; out
        descale[..., None] is the norm. With out_scale: out, or (out, u). PyTorch only, and there is no gradient.
    out_scale: float32 tensor of one positive number on x's device, which takes descale's place: what out is to be
        multiplied by. Where that does not reach, out is 448 or -448; NaN stays.
    """
    return _normed("layer_norm", x, weight, bias, residual, dropout_p, eps, prenorm, residual_in_fp32, seed, generator,
                   out_dtype, out_scale, ())


def rms_norm(x, weight=None, bias=None, *, residual=None, dropout_p=0.0, eps=1e-6, prenorm=False,
             residual_in_fp32=False, zero_centred=False, seed=None, generator=None, out_dtype=None, out_scale=None):
    """out = u / sqrt(mean of u^2 + eps) weight + bias, of each row u of drop(x) + residual (Zhang & Sennrich 2019).
    Statistics are float32.

    zero_centred: weight + 1 takes the place of weight, as in Gemma and Qwen3-Next.
    The other arguments, dtypes and results are those of `layer_norm`.
    """
    return _normed("rms_norm", x, weight, bias, residual, dropout_p, eps, prenorm, residual_in_fp32, seed, generator,
                   out_dtype, out_scale, (bool(zero_centred),))


def gated_rms_norm(x, z, weight=None, *, eps=1e-6, group_size=None, norm_before_gate=True):
    """out = norm(x) silu(z) with norm(x) = x / sqrt(mean of x^2 + eps) weight, silu(z) = z / (1 + e^-z), as in gated
    delta nets; or norm(x silu(z)), as in Mamba-2. Statistics are float32.

    x, z, out [..., D]; weight [D]. bfloat16, float16 or float32; weight is float32 or as x. PyTorch tensors are
    differentiable; NumPy arrays give NumPy arrays. Autocast leaves x and out in x's dtype.

    group_size: the mean is that of each group of as many columns, of which D is a multiple; D if None. At most 65536.
    norm_before_gate: False for norm(x silu(z)).
    """
    op = "gated_rms_norm"
    is_torch(op, "x", x)
    width = _width(op, x)
    for name, t in (("z", z), ("weight", weight)):
        if t is None and name == "weight":
            continue
        expected = list(x.shape) if name == "z" else [width]
        if not hasattr(t, "shape"):
            raise TypeError(f"{op}: {name} is {type(t).__name__}, expected {type(x).__name__}")
        if list(t.shape) != expected:
            raise ValueError(f"{op}: {name} has shape {list(t.shape)}, expected {expected}")
    size = width if group_size is None else _shared.integer(op, "group_size", group_size)
    if size < 1 or width % size:
        raise ValueError(f"{op}: group_size is {size}, expected a positive integer that divides {width}, the size of "
                         "x's last dimension")
    groups = lambda t: t.reshape(-1, width // size, size)  # noqa: E731
    weight = None if weight is None else weight.reshape(width // size, size)
    call = functions.get(op) or _shared.of_row(op)
    return call(groups(x), groups(z), weight, number(op, "eps", eps), not norm_before_gate).reshape(x.shape)


def _width(op, x):
    if x.ndim < 1:
        raise ValueError(f"{op}: x has 0 dimensions, expected [..., D]")
    return x.shape[-1]


def _normed(op, x, weight, bias, residual, p, eps, prenorm, residual_in_fp32, seed, generator, out_dtype, out_scale,
            more):
    torch_ = is_torch(op, "x", x)
    width, eps, p = _width(op, x), number(op, "eps", eps), number(op, "dropout_p", p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: dropout_p is {p:g}, expected 0 to 1")
    p = round(p * 65536) / 65536
    if residual is not None:
        if not hasattr(residual, "shape"):
            raise TypeError(f"{op}: residual is {type(residual).__name__}, expected {type(x).__name__}")
        if residual.shape != x.shape:
            raise ValueError(f"{op}: residual has shape {list(residual.shape)}, expected {list(x.shape)}")
    in_fp8 = _is_fp8(op, torch_, out_dtype, out_scale, x=x, weight=weight, bias=bias, residual=residual)
    if residual_in_fp32:
        residual = _in_float32(x, residual, p, prenorm, torch_)
    if residual is not None and torch_ and x.ndim != 2 and width and _are_leaves(x, residual):
        from margay.families.norm_torch import rows_of_both

        rows, others = rows_of_both(x, residual)
    else:
        rows, others = _rows(x, width), residual if residual is None else _rows(residual, width)
    if residual is None and not p and not in_fp8:
        call = functions.get(op) or _shared.of_row(op)
        out = call(rows, weight, bias, eps, *more).reshape(x.shape)
        return (out, x) if prenorm else out
    seed = _seed_of(op, seed, generator, x, torch_) if p else None
    if in_fp8:
        name, added = op + "_fp8", bool(prenorm and (p or residual is not None))
        call = functions.get(name) or _shared.of_row(name)
        out, descale, u = call(rows, others, weight, bias, seed, _one_number(op, out_scale), eps, p, *more,
                               (out_scale is None, added))
        results = (out.reshape(x.shape), *(() if out_scale is not None else (descale.reshape(x.shape[:-1]),)),
                   *(() if not prenorm else (u.reshape(x.shape) if added else x,)))
        return results if len(results) > 1 else results[0]
    name = op + "_residual"
    call = functions.get(name) or _of_residual(name)
    # without gradients the sum is written for prenorm only
    out, u = call(rows, others, weight, bias, seed, eps, p, *more, (bool(prenorm) or _records(torch_),))
    out = out.reshape(x.shape)
    return (out, u.reshape(x.shape)) if prenorm else out


def _rows(t, width):
    """[B, width]. What is so already stays itself: of one gradient of x and residual, two views would be two to torch,
    each of which it adds the next to in place."""
    return t if t.ndim == 2 else t.reshape(-1, width) if width else t.reshape(0, 0)


def _are_leaves(x, residual):
    return x.is_leaf and x.requires_grad and residual.is_leaf and residual.requires_grad


def _is_fp8(op, torch_, out_dtype, out_scale, **inputs):
    """Is the result to be float8_e4m3fn?"""
    if out_dtype is None and out_scale is None:
        return False
    if not torch_:
        raise TypeError(f"{op}: {'out_scale' if out_dtype is None else 'out_dtype'} is given with NumPy arrays, which "
                        "have no 8-bit floats; expected torch tensors")
    import torch

    if out_dtype is not torch.float8_e4m3fn:
        found = "out_scale is given, but " if out_dtype is None else ""
        raise TypeError(f"{op}: {found}out_dtype is {out_dtype}, expected torch.float8_e4m3fn" +
                        ("" if out_scale is not None else " or None"))
    for name, t in inputs.items():
        if torch.is_grad_enabled() and isinstance(t, torch.Tensor) and t.requires_grad:
            raise NotImplementedError(f"{op}: {name} requires a gradient, which results in float8_e4m3fn do not have; "
                                      "expected a call under torch.no_grad()")
    return True


def _one_number(op, scale):
    import torch

    if scale is None:
        return None
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{op}: out_scale is {type(scale).__name__}, expected a float32 tensor of one number")
    if scale.numel() != 1:
        raise ValueError(f"{op}: out_scale has shape {list(scale.shape)}, expected one number")
    return scale.reshape(1)


def _in_float32(x, residual, p, prenorm, torch_):
    """What makes the sum float32: without anything to add only where it is asked for."""
    if residual is not None:
        return residual.float() if torch_ else residual.astype("float32")
    if not (p or prenorm):
        return None
    if torch_:
        import torch

        return torch.zeros_like(x, dtype=torch.float32)
    import numpy as np

    return np.zeros(x.shape, np.float32)


def _records(torch_):
    if not torch_:
        return False
    import torch

    return torch.is_grad_enabled()


def _one_gradient(known, half):
    """Of x and of residual."""
    return known["dropout_p"] == 0 and known["new_residual"].dtype == half


def _of_residual(name):
    from margay import _op

    return functions.setdefault(name, _op.function(name, same=("x", "residual", _one_gradient)))


def _seed_of(op, seed, generator, x, torch_):
    """Two words, on x's device."""
    if not torch_:
        import numpy as np

        if seed is None:
            return np.random.randint(-2**31, 2**31, 2).astype(np.int32)
        return np.array([_shared.integer(op, "seed", seed) & 2**64 - 1], np.uint64).view(np.int32)
    import torch

    if seed is None:
        device = x.device if generator is None else generator.device
        return torch.randint(-2**31, 2**31, (2,), dtype=torch.int32, device=device, generator=generator).to(x.device)
    if isinstance(seed, torch.Tensor):
        if seed.dtype is not torch.int32 or tuple(seed.shape) != (2,):
            raise TypeError(f"{op}: seed has dtype {_shared.dtype_name(seed)} and shape {list(seed.shape)}, expected "
                            "an integer or an int32 tensor [2]")
        return seed
    seed = _shared.integer(op, "seed", seed)
    low, high = (((seed >> shift & 2**32 - 1) ^ 2**31) - 2**31 for shift in (0, 32))
    return torch.cat([torch.full((1,), word, dtype=torch.int32, device=x.device) for word in (low, high)])


# ---- explain

def _explained(op, library, named, given):
    from margay import _explain

    x = given["x"]
    named |= {name: given[name] for name in ("residual", "weight", "bias", "out_scale") if given.get(name) is not None}
    if op == "gated_rms_norm":
        size = given.get("group_size") or x.shape[-1]
        parts, row = [-1, x.shape[-1] // size, size], op
    else:
        drops = given.get("dropout_p", 0) > 0
        added = drops or given.get("residual") is not None
        parts, row = [-1, x.shape[-1]], op + ("_fp8" if given.get("out_dtype") else "_residual" * added)
        given = given | {"seed": library.empty([2], "int32", x) if drops else None}
    shaped = {name: given[name].reshape(parts) for name in ("x", "z", "residual") if given.get(name) is not None}
    if op == "gated_rms_norm" and given.get("weight") is not None:
        shaped["weight"] = given["weight"].reshape(parts[1:])
    return _explain.explain_row(row, library, dict(named), given | shaped)


EXPLAINED = dict.fromkeys(("layer_norm", "rms_norm", "gated_rms_norm"), _explained)
