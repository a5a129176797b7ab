"""PyTorch tensors, of whatever family.

Two ways to the same kernels. Plain tensors in eager mode call `_C` directly, through an autograd.Function where a
gradient is asked. Everything that wants to see the call (torch.compile, export, tracers, modes, transforms, subclasses,
the meta device) gets an operator of `torch.ops.margay`.
"""

import inspect
import os

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from margay import _C, _shared, _transforms

_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
autocast_anywhere = torch._C._is_any_autocast_enabled
_function_modes = torch._C._is_torch_function_mode_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms_active = torch._C._are_functorch_transforms_active
_tracing = torch._C._is_tracing
compiling = torch.compiler.is_compiling
grad_enabled = torch.is_grad_enabled
has_storage = torch._C._has_storage
library = torch.library.Library("margay", "FRAGMENT")
_threads = 0


def as_float32(op, name, t):
    if not isinstance(t, torch.Tensor) or t.dtype not in (*DTYPES, torch.float64):
        raise TypeError(f"{op}: {name} is {kind(t)}, expected a float32 tensor")
    check_kinds(op, **{name: t})
    return t.to(torch.float32).contiguous()


def wants_gradient(*tensors):
    """Whether a backward may follow, for what a call keeps for it or not: a backward does without, too."""
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def kind(t):
    return f"a tensor of dtype {_shared.dtype_name(t)}" if isinstance(t, torch.Tensor) else type(t).__name__


# ---- what explain() asks


without_gradients = torch.no_grad


def empty(shape, dtype, like):
    return torch.empty(shape, dtype=like.dtype if dtype is None else getattr(torch, dtype), device=like.device)


def why_dense(t):
    """Why a tensor that C reads as a whole is copied, or None."""
    return None if t.is_contiguous() else "it has gaps or another order in memory"


def why_copied(t, matrix=False, mapped=True):
    """Why kernels cannot read t where it is, or None. mapped: by TMA, on CUDA."""
    t = t.mT if matrix and t.stride(-1) != 1 and t.stride(-2) == 1 else t
    if has_gaps(t):
        return "neither of its last two dimensions is contiguous" if matrix else "its last dimension is not contiguous"
    return None if not mapped or _readable(t) else "its address or strides are not multiples of 16 bytes"


# ---- tensors


def c_may_be_asked(q, k, v):
    """As much of `c_may_read` as a call of C is not refused for. No complex type is made of bfloat16, whose negative
    bit is therefore never set."""
    return (type(q) in _PLAIN_TYPES and type(k) in _PLAIN_TYPES and type(v) in _PLAIN_TYPES and
            not (_function_modes() or _dispatch_modes() or _transforms_active() or _tracing()
                 or forward_ad._current_level >= 0) and
            (q.dtype is torch.bfloat16 or not (q.is_neg() or k.is_neg() or v.is_neg())))


def c_may_read(*tensors):
    """May C read these tensors now, with nothing in torch that would have to see the call? Sparse tensors and those of
    a transform have no storage."""
    for t in tensors:
        if t is None:
            continue
        if type(t) not in _PLAIN_TYPES or not has_storage(t) or t.is_neg() or not (t.is_cpu or t.is_cuda):
            return False
    return not (_function_modes() or _dispatch_modes() or _transforms_active() or _tracing()
                or forward_ad._current_level >= 0)


def check_kinds(op, optional=(), /, **tensors):
    """`optional`: names of tensors that may be None."""
    for name, t in tensors.items():
        if t is None and name in optional:
            continue
        if not isinstance(t, torch.Tensor):
            first = next(iter(tensors))
            raise TypeError(f"{op}: {name} is {type(t).__name__}, expected torch.Tensor (same as {first})")
        if t.layout is not torch.strided:
            raise TypeError(f"{op}: {name} has layout {t.layout}, expected torch.strided")


def check_devices(op, **tensors):
    """One device, one that has kernels, and a dtype that it has kernels for."""
    first, like = check_same_device(op, **tensors)
    if has_kernels(like.dtype, like.is_cuda):
        return
    if like.dtype is torch.float32:
        raise NotImplementedError(f"{op}: {first} has dtype float32, which has kernels on the CPU only; on CUDA "
                                  "expected bfloat16 or float16")
    raise TypeError(f"{op}: {first} has dtype {_shared.dtype_name(like)}, expected bfloat16, float16 or, on the CPU, "
                    "float32")


def has_kernels(dtype, is_cuda):
    """The one place in Python that says which dtypes have kernels where; of float8_e4m3fn, attention_fp8 says more."""
    return dtype in DTYPES and not (is_cuda and dtype is torch.float32)


def check_same_device(op, **tensors):
    (first, like), *others = tensors.items()
    for name, t in others:
        if t is not None and t.device != like.device:
            raise ValueError(f"{op}: {name} is on {t.device}, expected {like.device} (same as {first})")
    if like.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{op}: {first} is on {like.device}, expected cpu or cuda")
    return first, like


def autocast(device, *tensors):
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t is not None and t.dtype in DTYPES else t for t in tensors]


def as_the_first(_, first, *others):
    """In place of `autocast`, of ops that keep their first tensor's dtype."""
    return [first, *(t.to(first.dtype) if t is not None and t.dtype in DTYPES else t for t in others)]


def dtype_in_autocast(t):
    """Of t in an operator, which autocast may change."""
    device = t.device.type
    cast = t.dtype in DTYPES and device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if cast else t.dtype


def reals_like(first, *tensors):
    """What may be float32 or as the first tensor, which autocast may have changed."""
    return [t.float() if t is not None and t.dtype in DTYPES and t.dtype != first.dtype else t for t in tensors]


def without_autocast_keys():
    key, keys = torch._C.DispatchKey, torch._C.DispatchKeySet
    keys = keys(key.AutocastCPU) | keys(key.AutocastCUDA)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def like_but_last(t, last, dtype=None):
    """Dense empty tensor of t's shape but for the last dimension, the others in t's order in memory."""
    shape = *t.shape[:-1], last
    if t.is_contiguous():
        return t.new_empty(shape, dtype=dtype)
    order = _shared.memory_order(t.stride())
    dense = t.new_empty([shape[i] for i in order] + [shape[-1]], dtype=dtype)
    return dense.permute([order.index(i) for i in range(len(order))] + [len(order)])


def has_gaps(t):
    """Is the last dimension not contiguous? That of a tensor without elements is."""
    return t.stride(-1) != 1 and t.shape[-1] > 1 and t.numel() > 0


def dense_like(t, dtype=None):
    """torch.empty_like, but with a contiguous last dimension. Of windows that overlap (Tensor.unfold), torch's has none
    even where t has one."""
    made = None if has_gaps(t) else torch.empty_like(t, dtype=dtype)
    return like_but_last(t, t.shape[-1], dtype) if made is None or has_gaps(made) else made


def rows_contiguous(t):
    return t if t.stride(-1) == 1 else t.contiguous()


# TMA reads and writes a tensor whose address and strides are multiples of 16 bytes. Others go through copies in padded
# rows. A copy may be freed before the kernel ran: torch hands its memory out again in the order of the stream that the
# kernel is on.


def _aligned(t):
    bits = t.data_ptr()
    for size, stride in zip(t.shape[:-1], t.stride()):
        if size != 1:
            bits |= stride * t.element_size()
    return bits & 15 == 0


def _readable(t):
    return not has_gaps(t) and (not t.is_cuda or _aligned(t))


def all_mappable(*tensors):
    return all(map(_readable, tensors))


def mappable(t):
    """t if kernels can read it where it is, else a copy that they can."""
    return t if _readable(t) else _padded_empty(t).copy_(t)


def rows_of_matrix(t):
    """A matrix or its transpose: whose rows are contiguous, if any are."""
    return t.t() if t.stride(-1) != 1 and t.stride(0) == 1 else t


def mappable_matrix(t):
    rows = rows_of_matrix(t)
    return mappable(t) if rows is t else mappable(rows).t()


def mappable_empty(out):
    """out if kernels can write it and nothing beside it, else an empty tensor to write instead and to copy back. One
    that `_C` refuses to write, with gaps in its last dimension, stays as it is."""
    whole = not out.is_cuda or has_gaps(out) or _aligned(out) and out.shape[-1] * out.element_size() % 16 == 0
    return out if whole else _padded_empty(out)


def _padded_empty(t):
    unit = 16 // t.element_size()
    columns = t.shape[-1]
    return t.new_empty((*t.shape[:-1], -(-columns // unit) * unit))[..., :columns]


def copy_back(out, target):
    if target is not out:
        out.copy_(target)


def use_torch_threads():
    global _threads
    threads = torch.get_num_threads()
    if threads != _threads:
        _C.set_num_threads(threads)
        _threads = threads


def _find_increment():
    """increment_version, of several tensors, of which inference mode's keep no count: torch's own, but for releases
    where it takes one and refuses those."""
    with torch.inference_mode():
        sample = torch.empty(0)
    try:
        increment_version((sample,))
    except (RuntimeError, TypeError):
        return lambda tensors: [increment_version(t) for t in tensors if not t.is_inference()]
    return increment_version


# tells autograd what C wrote, as torch's own operators in place do: a backward that needs what was there raises
written = _find_increment()


# ---- operators

# Where a fake kernel is registered, torch asks inspect for the module of that line. Not knowing the file, it would look
# at all modules: 20 ms of a first call.
getattr(inspect, "modulesbyfile", {}).setdefault(os.path.normcase(os.path.abspath(__file__)), __name__)


def gradient_of_the_first(gradient):
    """A backward formula of an operator: what `gradient` computes is of its first arguments; the others have none."""
    def padded(ctx, *grads):
        found = gradient(ctx, *grads)
        return *found, *(None,) * (len(ctx.needs_input_grad) - len(found))
    return padded


def register(title, schema, kernel, fake, rule, gradient, save=None, autocast=None, tags=()):
    """The operator of a schema. title: the public function that it belongs to, for messages; the rest as
    _transforms.install has it."""
    name = schema[:schema.index("(")]
    library.define(schema, tags=(*_TAGS, *tags))
    for device in ("CPU", "CUDA"):
        library.impl(name, _transforms.without_tangents(title, kernel), device)
        if autocast is not None:
            library.impl(name, autocast, "Autocast" + device)
    torch.library.register_fake(f"margay::{name}", fake, lib=library)
    torch.library.register_autograd(f"margay::{name}", gradient, setup_context=save, lib=library)
    _transforms.install(library, name, title, rule, gradient, save, autocast)
