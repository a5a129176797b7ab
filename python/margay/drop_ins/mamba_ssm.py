"""The packages mamba_ssm and causal_conv1d, and models of transformers that look for them, on Margay's functions."""

import functools

import torch

from margay import mamba
from margay.drop_ins import causal_conv1d, kernel_or_torch, models
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
    from transformers import integrations
    from transformers.integrations import hub_kernels

    user = models.bind(_FUNCTIONS)
    factory = getattr(hub_kernels, models.FACTORY)
    stand_ins = install_as_mamba_ssm()

    def decorated(*names, **options):
        """What a model's module finds is what was there, which this module falls back to."""
        def decorator(function):
            with stand_ins.lifted():
                return factory(*names, **options)(function)
        return decorator

    for module in (hub_kernels, integrations):
        setattr(module, models.FACTORY, decorated)

    def undo():
        for module in (hub_kernels, integrations):
            setattr(module, models.FACTORY, factory)
        models.release(user)
        stand_ins.disable()

    return Switch(undo)


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


# What plans a call of the functions of models' modules, by name
CONVOLUTIONS = {"causal_conv1d_fn": models.plan_of(_conv1d, _no_conv1d),
                "causal_conv1d_update": models.plan_of(causal_conv1d.causal_conv1d_update, _no_update)}
_FUNCTIONS = CONVOLUTIONS | {
    "mamba2_chunk_scan": models.plan_of(mamba.mamba_chunk_scan_combined, _no_scan),
    "mamba2_selective_state_update": models.plan_of(mamba.selective_state_update, _no_step),
    "mamba2_split_conv1d_scan_combined": models.plan_of(_no_fused, _no_fused)}

__all__ = ["install_as_mamba_ssm", "register", "unregister"]
