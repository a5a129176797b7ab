"""cross_entropy on PyTorch tensors: chunks of rows, torch's products, our kernel between them."""

import torch

from margay import _C, _torch, _transforms
from margay._shared import dtype_name

MEAN, SUM, NONE = range(3)
CHUNK_BYTES = 1 << 29     # of logits, or as many as weight has where its gradient is wanted
ALL_ROWS = 1024           # that may be one chunk: each chunk reads weight and its gradient
PART_BYTES = 1 << 27      # of a product for the gradient of weight
ADDS_IN_FLOAT32 = torch.torch_version.TorchVersion(torch.__version__) >= (2, 11)     # addmm of 16 bits on the GPU
_OP = "cross_entropy"


def call(hidden, weight, targets, bias, numbers, reduction, chunk):
    tensors = hidden, weight, targets, bias
    _torch.check_kinds(_OP, ("bias",), hidden=hidden, weight=weight, targets=targets, bias=bias)
    if _torch.autocast_anywhere() and torch.is_autocast_enabled(hidden.device.type):
        hidden, weight, bias = _torch.autocast(hidden.device.type, hidden, weight, bias)
    _check(hidden, weight, targets, bias)
    rows, targets, shape = hidden[None].flatten(0, -2), targets.flatten(), targets.shape
    inputs = rows, weight, bias
    want = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs]
    if chunk is None:
        chunk = rows_of_chunk(rows.shape[0], weight, want[1])
    if torch.compiler.is_compiling() or not _torch.c_may_read(*tensors):
        scale = None if _late(rows, reduction) or not any(want) else _scale(targets, numbers[0], reduction)
        loss = torch.ops.margay.cross_entropy(rows, weight, targets, bias, scale, *numbers, reduction, chunk, want)[0]
    elif any(want):
        loss = _Loss.apply(*inputs, targets, numbers, reduction, chunk)
    else:
        loss = _loss(*inputs, targets, None, numbers, reduction, chunk, want)[0]
    return loss.reshape(shape) if reduction == NONE else loss


def _check(hidden, weight, targets, bias):
    if hidden.dtype not in _torch.DTYPES:
        raise TypeError(f"{_OP}: hidden has dtype {dtype_name(hidden)}, expected bfloat16, float16 or float32")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != hidden.dtype:
            raise TypeError(f"{_OP}: {name} has dtype {dtype_name(t)}, expected {dtype_name(hidden)} (same as hidden)")
    _torch.check_same_device(_OP, hidden=hidden, weight=weight, targets=targets, bias=bias)
    if hidden.dim() < 1:
        raise ValueError(f"{_OP}: hidden has shape [], expected [..., K]")
    columns = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != columns or weight.shape[0] < 1:
        raise ValueError(f"{_OP}: weight has shape {list(weight.shape)}, expected [V, {columns}] (V at least 1, K of "
                         "hidden)")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(f"{_OP}: targets has shape {list(targets.shape)}, expected {list(hidden.shape[:-1])} "
                         "(hidden's but for the last dimension)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{_OP}: bias has shape {list(bias.shape)}, expected [{weight.shape[0]}] (V of weight)")


def rows_of_chunk(count, weight, gradient):
    """As many as CHUNK_BYTES hold. Where weight has a gradient, which takes as much once more when it is scaled or
    rounded: as many as that holds. Chunks are of one size, but for the last, and more than ALL_ROWS are never one."""
    row = weight.shape[0] * weight.element_size()
    most = max(1, max(CHUNK_BYTES, weight.numel() * weight.element_size() if gradient else 0) // row)
    most = most // 128 * 128 or most
    chunks = max(-(-count // most), 2 if count > ALL_ROWS else 1)
    even = -(-count // chunks)
    return min(most, max(128, -(-even // 128) * 128))


def _scale(targets, ignored, reduction):
    """What a row's gradient is multiplied with, as float32 [1]."""
    if reduction == MEAN:
        return 1 / (targets != ignored).sum().to(torch.float32)[None]
    return torch.ones(1, dtype=torch.float32, device=targets.device)


def _late(rows, reduction):
    """Whether the backward computes the gradients. Those of float16 it has to: a number of a softmax over the number of
    rows is less than float16 holds, and a large dloss, as of a GradScaler, is what keeps it."""
    return reduction == NONE or rows.dtype is torch.float16


def _scale_of(dloss, targets, ignored, reduction):
    return (dloss if reduction == NONE else _scale(targets, ignored, reduction) * dloss).contiguous()


def _loss(rows, weight, bias, targets, scale, numbers, reduction, chunk, want):
    """The loss, and the gradients that are wanted where there is a scale; None for the others. Those of weight and bias
    may be float32: who scales them rounds them."""
    count, columns = rows.shape[0], weight.shape[0]
    losses, lse = (torch.empty(count, dtype=torch.float32, device=rows.device) for _ in range(2))
    on_float = rows.is_cuda and rows.dtype is torch.float32
    kernel = _C.cross_entropy_float_rows if on_float else _C.cross_entropy_rows
    if not rows.is_cuda:
        _torch.use_torch_threads()
    want = [scale is not None and one for one in want]
    drows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) if want[0] else None
    dweight = _WeightGradient(weight, -(-count // chunk)) if want[1] else None
    dbias = torch.zeros(columns, dtype=torch.float32, device=rows.device) if want[2] else None
    # Rows of the kernel begin at multiples of 16 bytes; those of float32 lie one after the other. What is between rows
    # is zeros: torch's products of bfloat16 on the CPU multiply it with zeros.
    logits = rows.new_empty(min(chunk, count), columns if on_float else -(-columns // 8) * 8)
    logits[:, columns:] = 0
    logits = logits[:, :columns]
    for first in range(0, count, chunk):
        part = slice(first, min(first + chunk, count))
        some = rows[part]
        x = logits[:some.shape[0]]
        if bias is None:
            torch.mm(some, weight.t(), out=x)
        else:
            torch.addmm(bias, some, weight.t(), out=x)
        kernel(losses[part], lse[part], x, targets[part],
               scale if scale is None or scale.shape[0] == 1 else scale[part], *numbers)
        if want[0]:
            torch.mm(x, weight, out=drows[part])
        if want[1]:
            dweight.add(x, some)
        if want[2]:
            dbias += x.sum(0, dtype=torch.float32)
    if reduction == MEAN:
        loss = losses.sum() / (targets != numbers[0]).sum()
    else:
        loss = losses if reduction == NONE else losses.sum()
    return loss, drows, dweight and dweight.result(), dbias


class _WeightGradient:
    """sum over chunks of x^T rows. It is one of float32, rounded once like a product of all rows, but for one chunk and
    for two of bfloat16 on the GPU: the first one's sum is rounded once more, and weight's size is saved. The GPU's
    products add to it; elsewhere each is rounded first, and added in parts."""

    def __init__(self, weight, chunks):
        self.dtype, self.empty = weight.dtype, True
        narrow = chunks < 2 or chunks == 2 and weight.is_cuda and weight.dtype is torch.bfloat16
        self.sum = torch.empty(weight.shape, dtype=weight.dtype if narrow else torch.float32, device=weight.device)

    def add(self, x, rows):
        if self.sum.dtype == x.dtype:
            self.sum = torch.mm(x.t(), rows, out=self.sum) if self.empty else self.sum.addmm_(x.t(), rows)
        elif x.is_cuda and ADDS_IN_FLOAT32:
            if self.empty:
                torch.mm(x.t(), rows, out_dtype=torch.float32, out=self.sum)
            else:
                torch.addmm(self.sum, x.t(), rows, out_dtype=torch.float32, out=self.sum)
        else:
            step = max(1, PART_BYTES // max(1, rows.shape[1] * rows.element_size()))
            for first in range(0, x.shape[1], step):
                part, product = self.sum[first:first + step], torch.mm(x[:, first:first + step].t(), rows)
                part.copy_(product) if self.empty else part.add_(product)
        self.empty = False

    def result(self):
        return self.sum.zero_() if self.empty else self.sum


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, bias, targets, numbers, reduction, chunk):
        ctx.options, want = (numbers, reduction, chunk), ctx.needs_input_grad[:3]
        late = _late(rows, reduction)
        scale = None if late else _scale(targets, numbers[0], reduction)
        loss, *made = _loss(rows, weight, bias, targets, scale, *ctx.options, want)
        ctx.save_for_backward(rows, weight, bias, targets)
        ctx.made = None if late else made
        return loss

    @staticmethod
    def backward(ctx, dloss):
        with torch.no_grad():
            made = _Loss.gradients(ctx, dloss)
        if torch.is_grad_enabled():
            made = _First.apply(made, dloss, *ctx.saved_tensors[:3])
        return *made, None, None, None, None

    @staticmethod
    def gradients(ctx, dloss):
        rows, weight, bias, targets = ctx.saved_tensors
        made, ctx.made = ctx.made, None
        if made is None:
            numbers, reduction, chunk = ctx.options
            scale = _scale_of(dloss, targets, numbers[0], reduction)
            return _rounded(_loss(rows, weight, bias, targets, scale, numbers, reduction, chunk,
                                  ctx.needs_input_grad[:3])[1:], weight.dtype)
        return [t if t is None else _scaled(t, dloss, like.dtype) for t, like in zip(made, (rows, weight, bias))]


def _scaled(t, dloss, dtype):
    """dloss t, rounded. torch multiplies numbers of 16 bits with one of float32 at a third of the memory's rate."""
    if dtype is torch.float32 or t.dim() < 2:
        return t.mul_(dloss).to(dtype)
    out, sums = (t, None) if t.dtype == dtype else (torch.empty(t.shape, dtype=dtype, device=t.device), t)
    _C.cross_entropy_scaled(out, sums, dloss.reshape(1))
    return out


class _First(torch.autograd.Function):
    """Gradients of a graph (create_graph=True). torch's once_differentiable would take them for constants where dloss
    is one, and what is made of them would lose its gradient without a word."""
    @staticmethod
    def forward(ctx, made, *inputs):
        return tuple(made)

    @staticmethod
    def backward(ctx, *_):
        _no_second()


def _no_second():
    raise NotImplementedError(f"{_OP}: gradients of gradients (create_graph=True) are not implemented")


# ---- the operator, for whatever wants to see the call


def _kernel(rows, weight, targets, bias, scale, *options):
    *numbers, reduction, chunk, want = options
    loss, *made = _loss(rows, weight, bias, targets, scale, numbers, reduction, chunk, want)
    return loss, *(rows.new_empty(0) if t is None else t for t in _rounded(made, weight.dtype))


def _rounded(gradients, dtype):
    return [t if t is None else t.to(dtype) for t in gradients]


def _fake(rows, weight, targets, bias, scale, *options):
    *_, reduction, _, want = options
    loss = rows.new_empty(targets.shape if reduction == NONE else (), dtype=torch.float32)
    return loss, *(torch.empty(t.shape, dtype=t.dtype, device=t.device) if one and scale is not None
                   else rows.new_empty(0) for t, one in zip((rows, weight, bias), want))


def _save(ctx, inputs, output):
    rows, weight, targets, bias, scale, *ctx.options = inputs
    ctx.save_for_backward(rows, weight, targets, bias, *output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx, dloss, *others):
    if any(t is not None for t in others):
        _no_second()
    rows, weight, targets, bias, *made = ctx.saved_tensors
    *numbers, reduction, chunk, want = ctx.options
    if dloss is None:
        return (None,) * 12
    if _late(rows, reduction):
        scale = _scale_of(dloss, targets, numbers[0], reduction)
        made = torch.ops.margay.cross_entropy(rows, weight, targets, bias, scale, *numbers, reduction, chunk, want)[1:]
    else:
        made = [t * dloss.to(torch.float32) for t in made]
    drows, dweight, dbias = (t.to(like.dtype) if one else None
                             for t, one, like in zip(made, want, (rows, weight, bias)))
    return drows, dweight, None, dbias, *(None,) * 8


def _samples(op, info, in_dims, inputs):
    """vmap. What is wanted is a list, each of whose members would have a dimension."""
    return _transforms.one_by_one(op, info, [*in_dims[:-1], None], inputs)


_torch.register(_OP, "cross_entropy(Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, Tensor? scale, "
                "int ignore_index, float label_smoothing, float softcap, float z_loss, int reduction, SymInt chunk, "
                "bool[] want) -> (Tensor, Tensor, Tensor, Tensor)", _kernel, _fake, _samples, _gradient, _save)
