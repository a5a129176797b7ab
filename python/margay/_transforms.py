"""torch.func (grad, vmap, jacrev, ...) and forward-mode derivatives of the operators.

While a transform is active, a call of an operator is taken up before the dispatcher would hand it to the transform. A torch.autograd.Function does what the
innermost transform asks and calls the operator again for those around it. So operators are composed with transforms in any order, and the eager functions
know nothing of them. No forward-mode derivative is computed: what a kernel returns would have none, and that would be a derivative of 0.
"""

import torch
from torch.autograd import forward_ad

_functorch = torch._C._functorch
_AUTOCAST_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}     # excluded where autocast is off


def install(library, name, rule, gradient=None, save=None, autocast=None):
    """Transforms of the operator `name`. rule: of vmap, one of those below, or None: no transform is possible.
    gradient, save: as of torch.library.register_autograd. autocast: the operator's kernel under autocast, which comes first."""
    op = getattr(torch.ops.margay, name).default
    title = title_of(name)
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


def title_of(name):
    """The public function that an operator belongs to."""
    if name in ("attention_backward", "attention_fp8", "attention_features", "attention_features_backward"):
        return "attention"
    return name.removesuffix("_bwd")


def without_tangents(name, kernel):
    """The kernel of an operator, which refuses forward-mode derivatives that no transform brings (torch.autograd.forward_ad)."""
    title = title_of(name)

    def checked(*inputs):
        if forward_ad._current_level >= 0 and _any_tangent(inputs):
            _refuse_forward_mode(title)
        return kernel(*inputs)

    return checked


def _any_tangent(inputs):
    # Inside of an autograd.Function, and in compiled code, tangents are there, but do not show.
    with forward_ad._set_fwd_grad_enabled(True), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in inputs)


def _refuse_forward_mode(title):
    raise NotImplementedError(f"{title}: forward-mode derivatives (torch.func.jvp, jacfwd, torch.autograd.forward_ad) are not implemented; "
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
        raise NotImplementedError(f"{title}: an argument belongs to a transform of torch.func (vmap, grad, ...), which cannot follow what is written in place; "
                                  "call it outside")
    with pyfunctorch.retrieve_current_functorch_interpreter().lower():
        return op(*inputs)


# ---- rules of vmap: the operator's outputs and the place of the samples in each


def samples_in_batch(op, info, in_dims, inputs):
    """Every tensor begins with the batch: the samples become part of it."""
    folded = [_fold(t, dim, info.batch_size, 0) if isinstance(t, torch.Tensor) else t for t, dim in zip(inputs, in_dims)]
    return tuple(_unfold(t, info.batch_size, 0) for t in op(*folded)), 0


def samples_in_batch_of(op, info, in_dims, inputs, batched):
    """The tensors for which `batched` holds begin with the batch; the others are shared by all samples."""
    size = info.batch_size
    folded = [_fold(t, dim, size, 0) if has and isinstance(t, torch.Tensor) else t for t, dim, has in zip(inputs, in_dims, [*batched, *(False,) * len(inputs)])]
    outputs = op(*folded)
    return (_unfold(outputs, size, 0), 0) if isinstance(outputs, torch.Tensor) else (tuple(_unfold(t, size, 0) for t in outputs), 0)


def samples_in_batch_or_heads(op, info, in_dims, inputs):
    """Attention with features: a sink is shared by the batch, starts of packed sequences by the heads. What is dropped depends on batch and head, so
    with dropout, as with starts of their own, the samples are computed one by one."""
    names = [argument.name for argument in op._schema.arguments]
    given, dims = dict(zip(names, inputs)), dict(zip(names, in_dims))
    if given["dropout_p"] and given["seed"] is None and info.randomness != "different":
        if info.randomness == "error":
            raise RuntimeError("attention: dropout_seed is None, which torch.vmap(randomness='error') does not allow; expected a seed, or randomness "
                               "'different' or 'same'")
        given["seed"] = torch.randint(-2**63, 2**63 - 1, (1,)).item()
    if given["dropout_p"] or any(dims[name] is not None for name in ("cu_seqlens_q", "cu_seqlens_k", "seed")):
        return one_by_one(op, info, in_dims, given.values())
    size, batch = info.batch_size, _unbatched_shape(given["q"], dims["q"])[0]
    at = int(given["cu_seqlens_q"] is not None or dims["sink"] is not None)
    for name, t in given.items():
        if not isinstance(t, torch.Tensor) or name in ("cu_seqlens_q", "cu_seqlens_k", "seed"):
            continue
        if name == "sink":
            given[name] = _samples_first(t, dims[name], size).flatten().contiguous() if at else t
        elif name == "alibi_slopes" and not at:
            slopes = _samples_first(t, dims[name], size)
            given[name] = slopes.expand(size, batch, slopes.shape[2]).flatten(0, 1).contiguous()
        else:
            given[name] = _fold(t, dims[name], size, at)
    outputs = op(*given.values())
    return tuple(_unfold(t, size, at) if t.dim() > 1 else t for t in outputs), tuple(at if t.dim() > 1 else None for t in outputs)


def samples_in_rows(op, info, in_dims, inputs):
    """A product: samples of a are rows of it where b and bias are shared."""
    a, *others = inputs
    if any(dim is not None for dim in in_dims[1:]):
        return one_by_one(op, info, in_dims, inputs)
    return _unfold(op(_fold(a, in_dims[0], info.batch_size, 0), *others), info.batch_size, 0), 0


def one_by_one(op, info, in_dims, inputs):
    samples = [(t,) * info.batch_size if dim is None else _rows_kept(t, dim).unbind(dim) for t, dim in zip(inputs, in_dims)]
    results = [op(*sample) for sample in zip(*samples)]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results))), 0


def _rows_kept(t, dim):
    """t, or a copy if what is beside each other in memory are samples."""
    return t.movedim(dim, 0).contiguous().movedim(0, dim) if t.stride(dim) == 1 else t


def _samples_first(t, dim, size):
    return t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _fold(t, dim, size, at):
    """Samples as the outer part of dimension `at`. Of tensors with rows, kernels read any strides but that of the last dimension."""
    t = _samples_first(t, dim, size).movedim(0, at).flatten(at, at + 1)
    return t if t.dim() == 4 and t.stride(3) == 1 else t.contiguous()


def _unfold(t, size, at):
    return t.unflatten(at, (size, t.shape[at] // max(size, 1)))


def _unbatched_shape(t, dim):
    return t.shape if dim is None else (*t.shape[:dim], *t.shape[dim + 1:])
