"""A whole model on Margay: `margay.patch(model)` replaces what it can, `margay.unpatch(model)` undoes it.

PIECES says what there is. A piece is found by what a module computes, not by its name alone: a norm is replaced where
ours gives the same numbers on random input, with the weight that it has.
"""

import dataclasses
import weakref

import torch

from margay.families.norm import gated_rms_norm, layer_norm, rms_norm

__all__ = ["Piece", "patch", "unpatch"]

_patched = weakref.WeakKeyDictionary()        # model -> what undoes each replacement, and the pieces


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a model. replaced: whether Margay computes it now; how: by what, or why not."""
    name: str
    kind: str
    replaced: bool
    how: str

    def __str__(self):
        return f"{self.name or 'the model'}: {self.kind} {'->' if self.replaced else 'stays:'} {self.how}"


class _Stays(Exception):
    """Why a piece is not replaced."""


def patch(model):
    """Let `model`, a torch.nn.Module, compute its norms and, if it is transformers', its attention and delta rules or
    Mamba-2 scans with Margay, until `unpatch(model)`. Parameters, state dict and hooks stay.

    Returns the list of `Piece`s, those that stay with the reason; print(*pieces, sep="\\n"). A model that is patched is
    patched anew.

    A replaced norm computes in the kernel what has one dtype or a float32 weight and no type promotion; else, as under
    autocast of float32 weights, its own forward runs.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"patch: model is {type(model).__name__}, expected torch.nn.Module")
    unpatch(model)
    undo, pieces = [], []
    try:
        for kind, find in PIECES:
            for name, module, replace in find(model):
                try:
                    how, back = replace(module)
                    undo.append(back)
                    pieces.append(Piece(name, kind, True, how))
                except _Stays as reason:
                    pieces.append(Piece(name, kind, False, str(reason)))
    except BaseException:
        _undo(undo)
        raise
    _patched[model] = undo
    return pieces


def unpatch(model):
    """Undo `patch(model)`. Returns whether there was something to undo."""
    undo = _patched.pop(model, None)
    _undo(undo or [])
    return undo is not None


def _undo(undo):
    while undo:
        undo.pop()()


# ---- norms


def _class_has(*words):
    return lambda module: all(word in type(module).__name__.lower() for word in words)


def _modules(is_one, replace):
    return lambda model: [(name, module, replace) for name, module in model.named_modules() if is_one(module)]


def _eps(module):
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(getattr(module, name, None), float):
            return getattr(module, name)
    raise _Stays("has no eps that is known")


def _of_one_dtype(weight, *tensors):
    """What the module would return in the dtype of its input, too."""
    dtype = tensors[0].dtype
    return (all(isinstance(t, torch.Tensor) and t.dtype == dtype for t in tensors)
            and (weight is None or weight.dtype == dtype) and dtype in (torch.bfloat16, torch.float16, torch.float32)
            and not torch.is_autocast_enabled(tensors[0].device.type))


def _forward_of(module, compute):
    """Replaces the module's forward by `compute`, where that takes the call. Ours must agree on random input."""
    if "forward" in vars(module):
        raise _Stays("its forward is replaced already")
    theirs, weight = module.forward, getattr(module, "weight", None)
    if weight is not None and weight.is_meta:
        raise _Stays("its weights have no values yet")

    def forward(x, *others):
        return compute(module, x, *others) if _of_one_dtype(module.weight, x, *others) else theirs(x, *others)

    module.forward = forward
    return lambda: vars(module).pop("forward", None)


def _agrees(module, candidates, inputs):
    """The first of these functions that computes what the module does."""
    weight = getattr(module, "weight", None)
    if weight is not None and weight.is_meta:
        raise _Stays("its weights have no values yet")
    like = weight if weight is not None else torch.empty(0)
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(3, size, generator=g).to(like.device, like.dtype) for size in inputs]
    with torch.no_grad():
        try:
            expected = module(*given)
        except Exception as error:
            raise _Stays(f"its forward takes other arguments: {error}") from None
        if not isinstance(expected, torch.Tensor) or expected.dtype != like.dtype:
            raise _Stays("it returns another dtype than it is given, or no tensor")
        for how, compute in candidates.items():
            found = compute(module, *given)
            bound = 8 * torch.finfo(like.dtype).eps * (1 + expected.float().abs().max())
            if found.shape == expected.shape and (found.float() - expected.float()).abs().max() <= bound:
                return how, compute
    raise _Stays("it computes something else")


def _layer_norm(module):
    if type(module).forward is not torch.nn.LayerNorm.forward:
        raise _Stays("a subclass with a forward of its own")
    if module.weight is not None and module.weight.is_meta:
        raise _Stays("its weights have no values yet")
    dims = len(module.normalized_shape)

    def compute(module, x):
        weight, bias = (t if t is None else t.flatten() for t in (module.weight, module.bias))
        return layer_norm(x.flatten(-dims) if dims > 1 else x, weight, bias, eps=module.eps).view(x.shape)
    return "margay.layer_norm", _forward_of(module, compute)


def _rms_norm(module):
    weight, eps = getattr(module, "weight", None), _eps(module)
    if weight is None or weight.ndim != 1:
        raise _Stays("has no weight of one dimension")

    def of(centred):
        return lambda module, x: rms_norm(x, module.weight, eps=eps, zero_centred=centred)
    candidates = {"margay.rms_norm": of(False), "margay.rms_norm, zero_centred": of(True)}
    how, compute = _agrees(module, candidates, (weight.shape[0],))
    return how, _forward_of(module, compute)


def _gated_norm(module):
    weight, eps, size = getattr(module, "weight", None), _eps(module), getattr(module, "group_size", None)
    if weight is None or weight.ndim != 1:
        raise _Stays("has no weight of one dimension")

    def of(before):
        return lambda module, x, gate: gated_rms_norm(x, gate, module.weight, eps=eps, group_size=size,
                                                      norm_before_gate=before)
    candidates = {"margay.gated_rms_norm": of(True), "margay.gated_rms_norm, gate first": of(False)}
    how, compute = _agrees(module, candidates, (weight.shape[0],) * 2)
    return how, _forward_of(module, compute)


# ---- what transformers' models choose by name


def _attention(model):
    if not hasattr(model, "set_attn_implementation"):
        return [("", model, _stays("no model of transformers that chooses its attention by name"))]
    return [("", model, _replace_attention)]


def _replace_attention(model):
    from margay.drop_ins import hf

    before = model.config._attn_implementation
    switch = hf.register()
    try:
        model.set_attn_implementation("margay")
    except (ValueError, NotImplementedError) as error:
        switch.disable()
        raise _Stays(str(error).splitlines()[0]) from None

    def back():
        model.set_attn_implementation(before)
        switch.disable()
    return "attn_implementation='margay'", back


def _scans(words, register, how):
    def find(model):
        some = [name for name, module in model.named_modules() if any(w in type(module).__name__ for w in words)]
        return [(", ".join(some), model, replace)] if some else []

    def replace(_):
        try:
            switch = register().register()
        except RuntimeError as error:
            raise _Stays(str(error)) from None
        return how, switch.disable
    return find


def _delta():
    from margay.drop_ins import delta_models

    return delta_models


def _mamba():
    from margay.drop_ins import mamba_ssm

    return mamba_ssm


# ---- what has no kernel here yet


def _stays(reason):
    def replace(_):
        raise _Stays(reason)
    return replace


_is_gated = _class_has("norm", "gated")
_is_rms = _class_has("rmsnorm")
PIECES = (
    ("layer norm", _modules(lambda m: isinstance(m, torch.nn.LayerNorm), _layer_norm)),
    ("gated root mean square norm", _modules(_is_gated, _gated_norm)),
    ("root mean square norm", _modules(lambda m: _is_rms(m) and not _is_gated(m), _rms_norm)),
    ("attention", _attention),
    ("delta rules", _scans(("GatedDelta", "KimiDelta"), _delta, "margay.integrations.delta")),
    ("scan of Mamba-2", _scans(("Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "NemotronHMamba2Mixer"), _mamba,
                               "margay.integrations.mamba")),
    ("rotary embedding", _modules(_class_has("rotary"), _stays("patch has no kernel for it"))),
    ("feed-forward", _modules(lambda m: type(m).__name__.endswith(("MLP", "SwiGLU")),
                              _stays("patch has no kernel for it"))),
)
