"""torch.func (grad, vmap, jacrev, ...) and forward-mode derivatives of the operators.

While a transform is active, a call of an operator is taken up before the dispatcher would hand it to the transform. A
torch.autograd.Function does what the innermost transform asks and calls the operator again for those around it. So
operators are composed with transforms in any order, and the eager functions know nothing of them. No forward-mode
derivative is computed: what a kernel returns would have none, and that would be a derivative of 0.
"""

import torch
from torch.autograd import forward_ad

_functorch = torch._C._functorch
# excluded where autocast is off
_AUTOCAST_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


def install(library, name, title, rule, gradient=None, save=None, autocast=None):
    """Transforms of the operator `name` of the public function `title`. rule: of vmap, as those below, or None: no
    transform is possible. gradient, save: as of torch.library.register_autograd. autocast: the operator's kernel under
    autocast, which comes first."""
    op = getattr(torch.ops.margay, name).default
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    defaults = [argument.default_value for argument in op._schema.arguments]

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*inputs):
            return op(*inputs)

        @staticmethod
        def setup_context(ctx, inputs, output):
            if save is not None:
                save(ctx, inputs, output)

        @staticmethod
        def backward(ctx, *grads):
            if gradient is None:
                raise NotImplementedError(f"{title}: gradients are not implemented")
            return gradient(ctx, *grads)

        @staticmethod
        def jvp(ctx, *tangents):
            _refuse_forward_mode(title)

        @staticmethod
        def vmap(info, in_dims, *inputs):
            return rule(op, info, in_dims, inputs)

    def transformed(*inputs):
        if _functorch.peek_interpreter_stack().key() == _functorch.TransformType.Functionalize:
            return _functionalized(op, inputs)
        if rule is None:
            return _outside(op, title, inputs)
        if autocast is not None and not excluded(_AUTOCAST_KEYS.get(inputs[0].device.type, _AUTOCAST_KEYS["cpu"])):
            return autocast(*inputs)
        return Transformed.apply(*inputs, *defaults[len(inputs):])

    library.impl(name, transformed, "FuncTorchDynamicLayerFrontMode")


def without_tangents(title, kernel):
    """The kernel of an operator, which refuses forward-mode derivatives that no transform brings
    (torch.autograd.forward_ad)."""
    def checked(*inputs):
        if forward_ad._current_level >= 0 and _any_tangent(inputs):
            _refuse_forward_mode(title)
        return kernel(*inputs)

    return checked


def _any_tangent(inputs):
    # Inside of an autograd.Function, and in compiled code, tangents are there, but do not show.
    key = torch._C.DispatchKey.ADInplaceOrView
    with forward_ad._set_fwd_grad_enabled(True), torch._C._SetExcludeDispatchKeyGuard(key, False):
        return any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in inputs)


def _refuse_forward_mode(title):
    raise NotImplementedError(f"{title}: forward-mode derivatives (torch.func.jvp, jacfwd, torch.autograd.forward_ad) "
                              "are not implemented; "
                              "expected reverse mode (torch.func.vjp, jacrev, backward)")


def _functionalized(op, inputs):
    from torch._functorch import pyfunctorch
    from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

    level = FunctorchFunctionalizeAPI(pyfunctorch.retrieve_current_functorch_interpreter())
    inputs = level.unwrap_tensors(inputs)
    with level.redispatch_to_next():
        return level.wrap_tensors(op(*inputs))


def _outside(op, title, inputs):
    """The operator on tensors that no transform has anything to do with."""
    from torch._functorch import pyfunctorch

    if any(isinstance(t, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(t) for t in inputs):
        raise NotImplementedError(f"{title}: an argument belongs to a transform of torch.func (vmap, grad, ...), which "
                                  "cannot follow what is written in place; "
                                  "call it outside")
    with pyfunctorch.retrieve_current_functorch_interpreter().lower():
        return op(*inputs)


# ---- rules of vmap: the operator's outputs and the place of the samples in each


def samples_in_batch(op, info, in_dims, inputs):
    """Every tensor begins with the batch: the samples become part of it."""
    folded = [fold(t, dim, info.batch_size, 0) if isinstance(t, torch.Tensor) else t for t, dim in zip(inputs, in_dims)]
    return tuple(unfold(t, info.batch_size, 0) for t in op(*folded)), 0


def samples_in_batch_of(op, info, in_dims, inputs, batched):
    """The tensors for which `batched` holds begin with the batch; the others are shared by all samples."""
    size = info.batch_size
    folded = [fold(t, dim, size, 0) if has and isinstance(t, torch.Tensor) else t
              for t, dim, has in zip(inputs, in_dims, [*batched, *(False,) * len(inputs)])]
    outputs = op(*folded)
    if isinstance(outputs, torch.Tensor):
        return unfold(outputs, size, 0), 0
    return tuple(unfold(t, size, 0) for t in outputs), 0


def one_by_one(op, info, in_dims, inputs):
    samples = [(t,) * info.batch_size if dim is None else _rows_kept(t, dim).unbind(dim)
               for t, dim in zip(inputs, in_dims)]
    results = [op(*sample) for sample in zip(*samples)]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results))), 0


def _rows_kept(t, dim):
    """t, or a copy if what is beside each other in memory are samples."""
    return t.movedim(dim, 0).contiguous().movedim(0, dim) if t.stride(dim) == 1 else t


def samples_first(t, dim, size):
    return t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def fold(t, dim, size, at):
    """Samples as the outer part of dimension `at`. Of tensors with rows, kernels read any strides but that of the last
    dimension."""
    t = samples_first(t, dim, size).movedim(0, at).flatten(at, at + 1)
    return t if t.dim() == 4 and t.stride(3) == 1 else t.contiguous()


def unfold(t, size, at):
    return t.unflatten(at, (size, t.shape[at] // max(size, 1)))


def unbatched_shape(t, dim):
    return t.shape if dim is None else (*t.shape[:dim], *t.shape[dim + 1:])
