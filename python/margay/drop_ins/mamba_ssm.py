"""The packages mamba_ssm and causal_conv1d, and models of transformers that look for them, on Margay's functions.

A model of transformers calls functions of its own module (`causal_conv1d_fn`, `mamba2_chunk_scan`, ...), of which
transformers decided when the module was imported what they run: mamba_ssm's where that is installed, else PyTorch. Here
these names of the module are bound to functions that call Margay, or what was there where no kernel computes a call. So
models that exist already change too. Modules that are imported later are reached when the first of their models is
made.
"""

import functools
import inspect
import sys

import torch

from margay import mamba
from margay.drop_ins import causal_conv1d, kernel_or_torch
from margay.drop_ins.fallback import fall_back
from margay.drop_ins.mamba2 import Mamba2
from margay.drop_ins.stand_ins import StandIns, of_module, stand_in
from margay.drop_ins.switch import Switch

MAMBA_VERSION, CONV_VERSION = "2.3.2", "1.6.2"      # whose functions these are; programs ask for it
MAX_HEAD_DIM, MAX_STATE = 128, 256


def install_as_mamba_ssm():
    """Let `import mamba_ssm` and `import causal_conv1d` find these functions, until `.disable()` or the end of a `with`
    block.

    What a program has imported before keeps what it has. What Mamba-1 needs is not there: a program that imports it
    finds no such module. The packages' metadata is not imitated.
    """
    package = functools.partial(stand_in, contents={}, doc=__doc__, version=MAMBA_VERSION, is_package=True)
    norm = dict(RMSNorm=mamba.RMSNormGated, rmsnorm_fn=mamba.rmsnorm_fn)
    scan = {name: getattr(mamba, name) for name in ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined")}
    step = dict(selective_state_update=mamba.selective_state_update)
    leaf = lambda name, contents: stand_in("mamba_ssm." + name, contents, __doc__, MAMBA_VERSION)  # noqa: E731
    return StandIns(package("mamba_ssm", contents=dict(Mamba2=Mamba2)), package("mamba_ssm.modules"),
                    leaf("modules.mamba2", dict(Mamba2=Mamba2)), package("mamba_ssm.ops"),
                    package("mamba_ssm.ops.triton"), leaf("ops.triton.ssd_combined", scan),
                    leaf("ops.triton.selective_state_update", step), leaf("ops.triton.layernorm_gated", norm),
                    of_module("causal_conv1d", causal_conv1d, CONV_VERSION, is_package=True),
                    of_module("causal_conv1d.causal_conv1d_interface", causal_conv1d, CONV_VERSION),
                    of_module("causal_conv1d.causal_conv1d_varlen", causal_conv1d, CONV_VERSION))


# ---- transformers

_users: list = []            # one for each register() in effect
_installed: Switch           # what the first of them has changed


def register():
    """Let models of transformers compute Mamba-2 and short convolutions with Margay, and `import mamba_ssm` and `import
    causal_conv1d` find Margay's functions, until `.disable()`, the end of a `with` block or `unregister()`.

    What no kernel computes goes to what was there before, with a FallbackWarning for each reason.
    """
    global _installed
    if not _users:
        _installed = _install()
    user = object()
    _users.append(user)
    return Switch(lambda: _leave(user))


def unregister():
    """Undo every `register()`."""
    for user in list(_users):
        _leave(user)


def _leave(user):
    if user in _users:
        _users.remove(user)
        if not _users:
            _installed.disable()


def _install():
    import transformers
    from transformers import integrations
    from transformers.integrations import hub_kernels

    factory = getattr(hub_kernels, _FACTORY, None)
    if factory is None:
        raise RuntimeError(f"register: transformers {transformers.__version__} has no integrations.hub_kernels."
                           f"{_FACTORY}, expected release 5.17 or a newer one; install_as_mamba_ssm() serves programs "
                           "that import mamba_ssm themselves")
    stand_ins, bound = install_as_mamba_ssm(), []
    init = transformers.PreTrainedModel.__init__

    def decorated(*names, **options):
        """What a model's module finds is what was there, which this module falls back to."""
        def decorator(function):
            with stand_ins.lifted():
                return factory(*names, **options)(function)
        return decorator

    @functools.wraps(init)
    def initialised(model, *arguments, **options):
        for cls in type(model).__mro__:
            _bind(cls.__module__, bound)
        return init(model, *arguments, **options)

    for module in list(sys.modules):
        _bind(module, bound)
    for module in (hub_kernels, integrations):
        setattr(module, _FACTORY, decorated)
    transformers.PreTrainedModel.__init__ = initialised

    def undo():
        transformers.PreTrainedModel.__init__ = init
        for module in (hub_kernels, integrations):
            setattr(module, _FACTORY, factory)
        for module, name, before in bound:
            setattr(module, name, before)
        stand_ins.disable()

    return Switch(undo)


_FACTORY = "use_kernel_func_from_hub_with_fallback"


def _bind(module_name, bound):
    """Bind the names of a model's module, if there is one of that name and it has any; add what they were to
    `bound`."""
    module = sys.modules.get(module_name)
    if module is None or not module_name.startswith("transformers.models."):
        return
    for name, (function, unsupported) in _FUNCTIONS.items():
        before = module.__dict__.get(name)
        if callable(before) and not hasattr(before, "margay_replaces"):
            setattr(module, name, _switched(name, function, unsupported, before))
            bound.append((module, name, before))


def _switched(name, function, unsupported, before):
    taken = frozenset(inspect.signature(function).parameters)

    def call(*arguments, **options):
        if _exporting():
            return before(*arguments, **options)
        reason = unsupported(*arguments, **options)
        if reason is not None:
            fall_back(name, reason, "what transformers had")
            return before(*arguments, **options)
        return function(*arguments, **{name: value for name, value in options.items() if name in taken})

    call.__name__ = call.__qualname__ = name
    call.margay_replaces = before
    return call


def _exporting():
    return getattr(torch.compiler, "is_exporting", bool)()


def _no_convolution(x, weight, activation):
    if not 2 <= weight.shape[-1] <= 4:
        return f"a convolution of {weight.shape[-1]} steps"
    if activation not in (None, "silu", "swish"):
        return f"activation {activation!r}"
    return kernel_or_torch.no_kernels_for(x)


def _no_conv1d(x, weight, bias=None, seq_idx=None, activation=None, **__):
    return _no_convolution(x, weight, activation)


def _no_update(x, conv_state, weight, bias=None, activation=None, *_, **__):
    if conv_state.dtype != x.dtype:
        return f"a state of dtype {_name(conv_state)} with steps of {_name(x)}"
    return _gradient(x, weight, bias) or _no_convolution(x, weight, activation)


def _no_scan(x, dt, A, B, *_, **__):
    if x.shape[-1] > MAX_HEAD_DIM:
        return f"a head dim over {MAX_HEAD_DIM}"
    if B.shape[-1] > MAX_STATE:
        return f"a state of more than {MAX_STATE} columns"
    return kernel_or_torch.no_kernels_for(x)


def _no_step(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, *_, **__):
    several = mamba.several_for_a_head(x, dt, A, D, dt_bias)
    if several is not None:
        return "an x without heads" if several == "x" else f"a {several} of more than one value for a head"
    return _gradient(x, dt, A, B, C, D) or kernel_or_torch.no_kernels_for(x)


def _gradient(*tensors):
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return "a gradient through one step" if wanted else None


def _name(t):
    return str(t.dtype).removeprefix("torch.")


def _conv1d(x, weight, bias=None, seq_idx=None, activation=None):
    """The models look at the result with the channels last, however x is in memory."""
    return causal_conv1d.channels_last(x, weight, bias, seq_idx, None, activation)[0]


def _no_fused(*_, **__):
    """The models go on with a function for each part, and mask padding behind the convolution, which the function of
    all of it would not."""
    return None


# Their names in the modules of models, and why no kernel computes a call
_FUNCTIONS = {"causal_conv1d_fn": (_conv1d, _no_conv1d),
              "causal_conv1d_update": (causal_conv1d.causal_conv1d_update, _no_update),
              "mamba2_chunk_scan": (mamba.mamba_chunk_scan_combined, _no_scan),
              "mamba2_selective_state_update": (mamba.selective_state_update, _no_step),
              "mamba2_split_conv1d_scan_combined": (_no_fused, _no_fused)}

__all__ = ["install_as_mamba_ssm", "register", "unregister"]
