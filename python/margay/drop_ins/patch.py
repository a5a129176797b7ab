"""A whole model on Margay: `margay.patch(model)` replaces what it can, `margay.unpatch(model)` undoes it.

PIECES says what there is. A piece is found by what a module computes, not by its name alone: a norm is replaced where
ours gives the same numbers on random input, with the weight that it has.
"""

import torch

from margay.drop_ins import patch_loss, patch_rotary
from margay.drop_ins.patching import Piece, Stays, forget, forward_of
from margay.families.norm import gated_rms_norm, layer_norm, rms_norm

__all__ = ["Piece", "patch", "unpatch"]

_KEPT = "_margay_patched"         # in a patched model: what undoes each replacement


class _Undo(list):
    """What undoes each replacement of model. A function of it may have of_copy = (make, arguments): make(copy,
    *arguments) is the copy's own."""

    def __init__(self, model, functions):
        super().__init__(functions)
        self.model = model

    def of_copies(self):
        return [back.of_copy for back in self if hasattr(back, "of_copy")]

    def __deepcopy__(self, memo):
        copied = memo.get(id(self.model))
        return None if copied is None else _undo_of_copy(copied, self.of_copies())

    def __reduce_ex__(self, _):
        return _undo_of_copy, (self.model, self.of_copies())


def _undo_of_copy(copied, own):
    """Modules of a copy, and of what is loaded, compute what their classes do. What a model knows by name comes with
    it."""
    return _Undo(copied, [lambda: forget(copied), *(make(copied, *arguments) for make, arguments in own)])


def patch(model):
    """Let `model`, a torch.nn.Module, compute its norms and, if it is transformers', its rotary embedding, attention,
    delta rules or Mamba-2 scans and its loss with Margay, until `unpatch(model)`. Parameters, state dict and hooks
    stay.

    Returns the list of `Piece`s, those that stay with the reason; print(*pieces, sep="\\n"). A model that is patched is
    patched anew. `ValueError` for one that is compiled: what is patched may be compiled, not the other way round.

    Norms, rotary embedding and loss compute in the kernels what has one dtype; else, as norms under autocast of float32
    weights, the module's own code runs. In training with labels, logits of the output are computed only where something
    reads them: they are `margay.drop_ins.patch_loss.Logits`, no tensor.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"patch: model is {type(model).__name__}, expected torch.nn.Module")
    if hasattr(model, "_orig_mod") or any(getattr(m, "_compiled_call_impl", None) for m in model.modules()):
        raise ValueError("patch: model is compiled, expected one that is not: compile it when it is patched")
    unpatch(model)
    undo, pieces = [], []
    try:
        for kind, find in PIECES:
            for name, module, replace in find(model):
                try:
                    how, back = replace(module)
                    undo.append(back)
                    pieces.append(Piece(name, kind, True, how))
                except Stays as reason:
                    pieces.append(Piece(name, kind, False, str(reason)))
    except BaseException:
        _undo(undo)
        raise
    vars(model)[_KEPT] = _Undo(model, undo)
    return pieces


def unpatch(model):
    """Undo `patch(model)`. Returns whether there was something to undo."""
    undo = vars(model).pop(_KEPT, None)
    done = bool(undo)
    _undo(undo or [])
    return done


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
        value = getattr(module, name, None)
        if isinstance(value, (float, int)) and not isinstance(value, bool):
            return float(value)
    raise Stays("has no eps that is known")


def _of_one_dtype(weight, *tensors):
    """What the module would return in the dtype of its input, too."""
    dtype = tensors[0].dtype
    return (all(isinstance(t, torch.Tensor) and t.dtype == dtype for t in tensors)
            and (weight is None or weight.dtype == dtype) and dtype in (torch.bfloat16, torch.float16, torch.float32)
            and not torch.is_autocast_enabled(tensors[0].device.type))


def _norm_forward(module, compute, gated=False):
    """Replaces the module's forward by `compute`, where that takes the call."""
    weight = getattr(module, "weight", None)
    if weight is not None and weight.is_meta:
        raise Stays("its weights have no values yet")

    def forward(module, theirs, x, *others, **options):
        given = (x, *others, options["gate"]) if gated and options.keys() == {"gate"} else (x, *others)
        if len(given) != 1 + gated or len(given) != 1 + len(others) + len(options) or not _of_one_dtype(
                module.weight, *given):
            return theirs(module, x, *others, **options)
        return compute(module, *given)

    return forward_of(module, forward)


def _agrees(module, candidates, inputs):
    """The first of these functions that computes what the module does."""
    weight = getattr(module, "weight", None)
    if weight is not None and weight.is_meta:
        raise Stays("its weights have no values yet")
    like = weight if weight is not None else torch.empty(0)
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 3, size, generator=g).to(like.device, like.dtype) for size in inputs]
    with torch.no_grad():
        try:
            expected = module(*given)
        except Exception as error:
            raise Stays(f"its forward takes other arguments: {error}") from None
        if not isinstance(expected, torch.Tensor) or expected.dtype != like.dtype:
            raise Stays("it returns another dtype than it is given, or no tensor")
        for how, compute in candidates.items():
            found = compute(module, *given)
            bound = 8 * torch.finfo(like.dtype).eps * (1 + expected.float().abs().max())
            if found.shape == expected.shape and (found.float() - expected.float()).abs().max() <= bound:
                return how, compute
    raise Stays("it computes something else")


def _layer_norm(module):
    if type(module).forward is not torch.nn.LayerNorm.forward:
        raise Stays("a subclass with a forward of its own")
    if module.weight is not None and module.weight.is_meta:
        raise Stays("its weights have no values yet")
    dims = len(module.normalized_shape)

    def compute(module, x):
        weight, bias = (t if t is None else t.flatten() for t in (module.weight, module.bias))
        return layer_norm(x.flatten(-dims) if dims > 1 else x, weight, bias, eps=module.eps).view(x.shape)
    return "margay.layer_norm", _norm_forward(module, compute)


def _other_layer_norm(module):
    """Of a class that is only named so."""
    weight, eps = _weight(module), _eps(module)
    candidates = {"margay.layer_norm": lambda module, x: layer_norm(x, module.weight, getattr(module, "bias", None),
                                                                    eps=eps),
                  "margay.rms_norm": lambda module, x: rms_norm(x, module.weight, eps=eps)}
    how, compute = _agrees(module, candidates, (weight.shape[0],))
    return how, _norm_forward(module, compute)


def _weight(module):
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 1:
        raise Stays("has no weight of one dimension")
    return weight


def _rms_form(module):
    """(eps, zero_centred)"""
    return _eps(module), "zero_centred" in _agreed_rms_norm(module)[0]


def _rms_norm(module):
    already = getattr(getattr(vars(module).get("forward"), "__func__", None), "margay_how", None)
    if already:                                  # with the rotation behind it
        return already, lambda: None
    how, compute = _agreed_rms_norm(module)
    return how, _norm_forward(module, compute)


def _agreed_rms_norm(module):
    weight, eps = _weight(module), _eps(module)

    def of(centred):
        return lambda module, x: rms_norm(x, module.weight, eps=eps, zero_centred=centred)
    candidates = {"margay.rms_norm": of(False), "margay.rms_norm, zero_centred": of(True)}
    return _agrees(module, candidates, (weight.shape[0],))


def _gated_norm(module):
    weight, eps, size = _weight(module), _eps(module), getattr(module, "group_size", None)
    if size is None and getattr(module, "n_groups", None):
        size = weight.shape[0] // module.n_groups

    def of(before):
        return lambda module, x, gate: gated_rms_norm(x, gate, module.weight, eps=eps, group_size=size,
                                                      norm_before_gate=before)
    candidates = {"margay.gated_rms_norm": of(True), "margay.gated_rms_norm, gate first": of(False)}
    how, compute = _agrees(module, candidates, (weight.shape[0],) * 2)
    return how, _norm_forward(module, compute, gated=True)


# ---- what transformers' models choose by name


def _attention(model):
    if not hasattr(model, "set_attn_implementation"):
        return [("", model, _stays("no model of transformers that chooses its attention by name"))]
    attends = any("att" in type(module).__name__.lower() for module in model.modules())
    return [("", model, _replace_attention)] if attends else []


def _replace_attention(model):
    from margay.drop_ins import hf

    asked = [m for m in model.modules() if isinstance(m, hf.PreTrainedModel)]
    if asked and all(map(hf.own_attention, asked)):
        raise Stays("its modules have their own and never ask for an implementation")
    before = model.config._attn_implementation
    switch = hf.register()
    try:
        model.set_attn_implementation("margay")
    except (ValueError, NotImplementedError) as error:
        switch.disable()
        raise Stays(str(error).splitlines()[0]) from None
    return "attn_implementation='margay'", _attention_undone(model, before, switch)


def _attention_undone(model, before, switch):
    def back():
        model.set_attn_implementation(before)
        switch.disable()
    back.of_copy = _attention_of_copy, (before,)
    return back


def _attention_of_copy(copied, before):
    from margay.drop_ins import hf

    return _attention_undone(copied, before, hf.register())


def _scans(words, register, how):
    def find(model):
        some = [name for name, module in model.named_modules() if any(w in type(module).__name__ for w in words)]
        return [(", ".join(some), model, replace)] if some else []

    def replace(_):
        try:
            switch = register().register()
        except RuntimeError as error:
            raise Stays(str(error)) from None
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
        raise Stays(reason)
    return replace


_is_gated = _class_has("norm", "gated")
_is_rms = _class_has("rmsnorm")
PIECES = (
    ("rotary embedding", lambda model: patch_rotary.find(model, _rms_form)),     # before the norms that go with it
    ("layer norm", _modules(lambda m: isinstance(m, torch.nn.LayerNorm), _layer_norm)),
    ("gated root mean square norm", _modules(_is_gated, _gated_norm)),
    ("root mean square norm", _modules(lambda m: _is_rms(m) and not _is_gated(m), _rms_norm)),
    ("layer norm", _modules(lambda m: _class_has("layernorm")(m) and not isinstance(m, torch.nn.LayerNorm),
                            _other_layer_norm)),
    ("attention", _attention),
    ("delta rules", _scans(("GatedDelta", "KimiDelta"), _delta, "margay.integrations.delta")),
    ("scan of Mamba-2", _scans(("Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "NemotronHMamba2Mixer"), _mamba,
                               "margay.integrations.mamba")),
    ("loss", patch_loss.find),
    ("feed-forward", _modules(lambda m: type(m).__name__.endswith(("MLP", "SwiGLU")),
                              _stays("its activation joins when the products of matrices have such an ending"))),
)
