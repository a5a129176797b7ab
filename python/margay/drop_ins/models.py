"""Functions of the modules of transformers' models.

A model of transformers calls functions of its own module (`causal_conv1d_fn`, `mamba2_chunk_scan`,
`torch_chunk_gated_delta_rule`, ...), of which transformers decided when the module was imported what they run: those of
mamba_ssm or FLA where these are installed, else PyTorch's. Here these names of the module are bound to functions that
call Margay, or what was there where no kernel computes a call. So models that exist already change too. Modules that
are imported later are reached when the first of their models is made.
"""

import functools
import inspect
import sys

import torch

from margay.drop_ins.fallback import Refused, fall_back

FACTORY = "use_kernel_func_from_hub_with_fallback"

_users: dict = {}            # of each who wants functions: {name: what plans a call of it}
_bound: list = []            # (module, name, what was there)
_made: list = []             # PreTrainedModel.__init__, where it is replaced


def plan_of(function, unsupported):
    """What plans a call of `function`. unsupported(..): why no kernel computes the call, or None."""
    taken = frozenset(inspect.signature(function).parameters)

    def plan(*arguments, **options):
        reason = unsupported(*arguments, **options)
        if reason is not None:
            raise Refused(reason)
        options = {name: value for name, value in options.items() if name in taken}
        return lambda: function(*arguments, **options)
    return plan


def bind(plans):
    """Bind names of models' modules, until `release` of what this returns. plans: {name: a function with the arguments
    of that of the name, which returns one that computes the call, or raises Refused}."""
    import transformers

    if not hasattr(transformers.integrations.hub_kernels, FACTORY):
        raise RuntimeError(f"register: transformers {transformers.__version__} has no integrations.hub_kernels."
                           f"{FACTORY}, expected release 5.17 or a newer one; "
                           "install_as_mamba_ssm() serves programs that import mamba_ssm themselves")
    user = object()
    _users[user] = plans
    if not _made:
        init = transformers.PreTrainedModel.__init__

        @functools.wraps(init)
        def initialised(model, *arguments, **options):
            for cls in type(model).__mro__:
                _bind(cls.__module__)
            return init(model, *arguments, **options)

        _made.append(init)
        transformers.PreTrainedModel.__init__ = initialised
    for module in list(sys.modules):
        _bind(module)
    return user


def release(user):
    import transformers

    _users.pop(user)
    kept = []
    for module, name, before in _bound:
        if any(name in plans for plans in _users.values()):
            kept.append((module, name, before))
        else:
            setattr(module, name, before)
    _bound[:] = kept
    if not _users:
        transformers.PreTrainedModel.__init__ = _made.pop()


def _bind(module_name):
    """Bind the names of a model's module, if there is one of that name and it has any."""
    module = sys.modules.get(module_name)
    if module is None or not module_name.startswith("transformers.models."):
        return
    for plans in _users.values():
        for name, plan in plans.items():
            before = module.__dict__.get(name)
            if callable(before) and not hasattr(before, "margay_replaces"):
                setattr(module, name, _switched(name, plan, before))
                _bound.append((module, name, before))


def _switched(name, plan, before):
    def call(*arguments, **options):
        if _exporting():
            return before(*arguments, **options)
        try:
            compute = plan(*arguments, **options)
        except Refused as refused:
            fall_back(name, str(refused), "what transformers had")
            return before(*arguments, **options)
        return compute()

    call.__name__ = call.__qualname__ = name
    call.margay_replaces = before
    return call


def _exporting():
    return getattr(torch.compiler, "is_exporting", bool)()
