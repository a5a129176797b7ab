"""The rotary embedding of transformers' attention modules, and the norms of q and k in front of it, by one kernel.

These modules call a function of their file, `apply_rotary_pos_emb`. An instance that is patched gets a forward with the
same code, in which this name means a function of ours: other models of the same file see nothing of it. What the
function of the file computes is found out by giving it numbers. That nothing is between the norms and the rotation is
found out by running the module up to there.
"""

import functools
import inspect
import types

import torch

from margay import _torch
from margay.drop_ins.patching import Stays, forward_of
from margay.families.qk_norm_rotary import qk_norm_rotary
from margay.families.rotary import rotary

HALVES, INTERLEAVED, REPEATED = range(3)     # pairs i, i + A; pairs 2i, 2i + 1 of tables [f, f]; of tables f0 f0 f1 f1
_MOST_COLUMNS, _MOST_NORMED = 1024, 256


def find(model, norm_of):
    """Modules whose forward turns q and k. norm_of(module): (eps, zero_centred) of a root mean square norm, or raises
    Stays."""
    tables = functools.cache(lambda: _tables(model))
    return [(name, module, lambda module: _replace(module, tables, norm_of))
            for name, module in model.named_modules() if _names(module)]


def _names(module):
    """Names of functions for rotations in the code of the module's forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return [name for name in getattr(code, "co_names", ()) if "rotary_pos_emb" in name and not hasattr(module, name)]


def _replace(module, tables, norm_of):
    forward = type(module).forward
    name, *others = _names(module)
    if others:
        raise Stays(f"its forward has several functions for it: {', '.join((name, *others))}")
    theirs = getattr(forward, "__globals__", {}).get(name)
    if hasattr(forward, "__wrapped__") or not isinstance(theirs, types.FunctionType):
        raise Stays(f"its forward finds {name} in a way that is not known")
    layout = _layout(theirs)
    if layout is None:
        raise Stays(f"{name} of {theirs.__module__} computes something else")
    if tables() not in (layout == REPEATED, None):
        raise Stays("the tables of cosines and sines are laid out in another way")
    if tables() is None:
        raise Stays("no module of the model gives tables of cosines and sines that are known")

    norms, why = _norms(module, forward, name, norm_of), None
    if isinstance(norms, str):
        norms, why = None, norms
    turn = functools.partial(_turn, theirs, layout) if norms is None else functools.partial(
        _normed_and_turned, theirs, layout, norms)
    rebuilt, undo = _rebuilt(forward, name, turn), []
    try:
        for norm in (norms or {}).values():
            back = forward_of(norm.module, lambda norm, theirs, x: x)
            norm.module.forward.__func__.margay_how = "margay.qk_norm_rotary"
            undo.append(back)
        undo.append(forward_of(module, lambda module, theirs, *given, **options: rebuilt(module, *given, **options)))
    except BaseException:
        _back(undo)
        raise
    how = "margay.rotary" + (f" (norms of q and k stay apart: {why})" if why else "")
    return ("margay.qk_norm_rotary" if norms else how), functools.partial(_back, undo)


def _back(undo):
    while undo:
        undo.pop()()


def _rebuilt(forward, name, turn):
    """The same code, in which `name` is `turn`. Without the name of a module: torch.compile would look there."""
    known = {key: value for key, value in forward.__globals__.items() if key != "__name__"}
    function = types.FunctionType(forward.__code__, known | {name: turn}, forward.__name__, forward.__defaults__,
                                  forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    return function


# ---- what a function computes, and from which tables


@functools.cache
def _layout(function):
    """Which pairs it turns, from which tables; None: something else."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 8, generator=g) for heads in (3, 1))
    for layout in (HALVES, INTERLEAVED, REPEATED):
        for columns in (8, 4):
            f = torch.randn(2, 5, columns // 2, generator=g)
            wide = f.repeat_interleave(2, -1) if layout == REPEATED else torch.cat((f, f), -1)
            cos, sin = wide.cos(), wide.sin()
            try:
                with torch.no_grad():
                    found = function(q, k, cos, sin)
                expected = _by_kernel(layout, q, k, cos, sin, 1)
                if all(a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, atol=1e-5)
                       for a, b in zip(found, expected, strict=True)):
                    return layout
            except Exception:               # of tables that are narrower than rows, or another signature
                continue
    return None


def _tables(model):
    """Whether the model's modules give tables f0 f0 f1 f1 ... and not [f, f]. None: neither, or there are none."""
    found = set()
    for module in model.modules():
        if "rotary" not in type(module).__name__.lower() or not getattr(module, "_buffers", None):
            continue
        found.add(_table_of(module))
    return found.pop() if len(found) == 1 else None


def _table_of(module):
    buffer = next((b for b in module.buffers() if b is not None), None)
    if buffer is None or buffer.is_meta:
        return None
    x, steps = buffer.new_zeros((1, 3, 1), dtype=torch.float32), torch.tensor([[0, 1, 5]], device=buffer.device)
    kinds = [(kind,) for kind in dict.fromkeys(getattr(module, "layer_types", None) or ())]
    for given in ((x, steps), (x, steps.expand(3, 1, 3)), *((x, steps, *kind) for kind in kinds)):
        try:
            with torch.no_grad():
                cos, sin = module(*given)
            for table, other in ((cos, sin), (sin, cos)):
                if table.dim() not in (2, 3) or table.shape != other.shape or table.shape[-1] % 2:
                    return None
            half = cos.shape[-1] // 2
        except Exception:
            continue
        if all(torch.equal(t[..., :half], t[..., half:]) for t in (cos, sin)):
            return False
        return True if all(torch.equal(t[..., ::2], t[..., 1::2]) for t in (cos, sin)) else None
    return None


# ---- the norms in front of it


class _Norm:
    def __init__(self, module, eps, zero_centred):
        self.module, self.eps, self.zero_centred = module, eps, zero_centred

    @property
    def weight(self):
        return self.module.weight.float() + 1 if self.zero_centred else self.module.weight

    def theirs(self, x):
        return type(self.module).forward(self.module, x)


class _Found(Exception):
    """q and k, as they come to the rotation."""


def _norms(module, forward, name, norm_of):
    """{"q": .., "k": ..}; None where there are none; a string: why they stay apart."""
    parts = {key: getattr(module, f"{key}_norm", None) for key in "qk"}
    if not all(isinstance(part, torch.nn.Module) for part in parts.values()):
        return None
    try:
        norms = {key: _Norm(part, *norm_of(part)) for key, part in parts.items()}
    except Stays as reason:
        return str(reason)
    if norms["q"].eps != norms["k"].eps:
        return "each has another eps"
    size = getattr(module, "head_dim", None)
    if any(tuple(part.weight.shape) != (size,) for part in parts.values()):
        return "they are not of one head's columns"
    if size > _MOST_NORMED:
        return f"a head dimension over {_MOST_NORMED}"
    if any(part._forward_hooks or part._forward_pre_hooks for part in parts.values()):
        return "they have hooks"
    return norms if _nothing_between(module, forward, name, parts) else "something is between them and the rotation"


def _nothing_between(module, forward, name, parts):
    """Runs the module up to the rotation, where q and k have to be what the norms returned."""
    def found(q, k, *others, **options):
        raise _Found(q, k)

    made, undo, weight = [], [], parts["q"].weight
    x = torch.randn(1, 2, module.config.hidden_size, device=weight.device, dtype=weight.dtype)
    given = {"hidden_states": x, "position_embeddings": (x, x), "attention_mask": None}

    def kept(part, theirs, x):
        made.append(theirs(part, x))
        return made[-1]
    try:
        for part in parts.values():
            undo.append(forward_of(part, kept))
        with torch.no_grad():
            _rebuilt(forward, name, found)(module, **given)
    except _Found as stopped:
        return len(made) == 2 and all(a.data_ptr() == b.data_ptr() and a.transpose(1, 2).shape == b.shape
                                      and a.transpose(1, 2).stride() == b.stride()
                                      for a, b in zip(stopped.args, made))
    except Exception:                       # whatever this module wants besides
        return False
    finally:
        _back(undo)
    return False


# ---- in every call


def _turn(theirs, layout, q, k, cos, sin, *others, **options):
    dim = _dim(others, options)
    if dim is None or not _taken(q, k, cos, sin, dim, _MOST_COLUMNS):
        return theirs(q, k, cos, sin, *others, **options)
    return _by_kernel(layout, q, k, cos, sin, dim)


def _normed_and_turned(theirs, layout, norms, q, k, cos, sin, *others, **options):
    dim = _dim(others, options)
    weights = [norms[key].weight for key in "qk"]
    if (dim is None or not _taken(q, k, cos, sin, dim, _MOST_NORMED) or
            any(w.dtype not in (torch.float32, q.dtype) or w.device != q.device or type(w) not in _PLAIN
                for w in weights)):
        return theirs(norms["q"].theirs(q), norms["k"].theirs(k), cos, sin, *others, **options)
    return _by_kernel(layout, q, k, cos, sin, dim, functools.partial(_qk_norm_rotary, weights, norms["q"].eps))


def _qk_norm_rotary(weights, eps, q, k, cos, sin, interleaved):
    return qk_norm_rotary(q, k, *weights, cos, sin, eps=eps, interleaved=interleaved)


def _rotary(q, k, cos, sin, interleaved):
    return rotary(q, k, cos, sin, interleaved=interleaved)


def _by_kernel(layout, q, k, cos, sin, dim, compute=_rotary):
    if layout == REPEATED:
        cos, sin = (t[..., ::2].contiguous() for t in (cos, sin))
    else:
        cos, sin = (t[..., :t.shape[-1] // 2] for t in (cos, sin))
    if dim == 2:
        return compute(q, k, cos, sin, layout != HALVES)
    q, k = compute(q.transpose(1, 2), k.transpose(1, 2), cos, sin, layout != HALVES)
    return q.transpose(1, 2), k.transpose(1, 2)


def _dim(others, options):
    """The dimension that cos and sin have not, or None if more is asked."""
    dim = others[0] if len(others) == 1 and not options else options.get("unsqueeze_dim", 1)
    plain = not others and not options.keys() - {"unsqueeze_dim"} or len(others) == 1 and not options
    return dim if plain and dim in (1, 2) else None


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _taken(q, k, cos, sin, dim, most):
    """What the kernel takes, and what would have the dtype of q where the model computes it."""
    if not (q.dtype == k.dtype and q.dtype in _torch.DTYPES and q.dim() == k.dim() == 4 and q.shape[-1] <= most
            and k.shape[-1] == q.shape[-1] and q.device == k.device == cos.device == sin.device):
        return False
    if q.is_cuda and q.dtype == torch.float32 or q.stride(-1) != 1 or k.stride(-1) != 1:
        return False
    if not cos.dtype == sin.dtype or cos.requires_grad or sin.requires_grad:
        return False
    if cos.dtype != q.dtype and not (cos.dtype == torch.float32 and torch.is_autocast_enabled(q.device.type)):
        return False
    steps = q.shape[3 - dim]
    return (cos.dim() in (2, 3) and cos.shape == sin.shape and cos.shape[-2] == steps and cos.shape[-1] <= q.shape[-1]
            and (cos.dim() == 2 or cos.shape[0] in (1, q.shape[0])) and q.shape[0] == k.shape[0]
            and k.shape[3 - dim] == steps)
