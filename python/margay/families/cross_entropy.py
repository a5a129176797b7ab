"""The last projection of a model and its loss, without the logits of all rows."""

from margay._shared import as_int32, integer, number

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(hidden, weight, targets, *, bias=None, ignore_index=-100, label_smoothing=0.0, softcap=None,
                  z_loss=0.0, reduction="mean", chunk=None):
    """torch.nn.functional.cross_entropy(hidden @ weight.T + bias, targets), of a few rows' logits at a time.

    hidden [..., K], weight [V, K], bias [V] or None, all bfloat16, float16 or float32; targets [...], integers. PyTorch
    tensors only. Differentiable in hidden, weight and bias. Products are torch's, the loss and the gradient of the
    logits, which takes their place, are one kernel. Softmax and loss are float32, and so is the result: of no
    dimension, or targets' shape where reduction is "none".

    With z = softcap tanh(logits / softcap), lse = log sum e^z and s = label_smoothing, a row's loss is
        (1 - s) (lse - z[target]) + s (lse - mean z) + z_loss lse^2
    softcap: None or 0: z are the logits. z_loss: the weight of PaLM's term, usually 1e-4.
    reduction: "mean" over the rows that count, "sum", "none".
    ignore_index: rows with this target do not count: loss and gradients 0. Another target that is no row of weight:
        `ValueError` on the CPU; on CUDA, where nobody waits for the targets, a loss of NaN and gradients of 0.
    chunk: rows whose logits are in memory together; None: as many as take 512 MiB, or as weight does where it wants a
        gradient (that is K rows), in chunks of one size. More than 1,024 rows are two chunks at least.

    Where "mean" or "sum" want gradients, the forward computes them (Hsu et al., Liger Kernel, 2024): the backward only
    multiplies them. Another backward of the same graph, "none", and float16, whose range they would leave without what
    the loss is scaled with, compute the logits once more. Beside inputs and gradients there are then a chunk's logits
    and, of 16 bits, the gradient of weight in float32 where there are more than two chunks, in float16 or on the CPU
    more than one; before PyTorch 2.11, and on the CPU, also 128 MiB of a product.
    """
    from margay.families.cross_entropy_torch import call

    op = "cross_entropy"
    numbers = _in_range(op, ignore_index, label_smoothing, softcap, z_loss)
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}, expected 'mean', 'sum' or 'none'")
    if chunk is not None and integer(op, "chunk", chunk) < 1:
        raise ValueError(f"{op}: chunk is {chunk}, expected a positive number of rows")
    return call(hidden, weight, as_int32(op, "targets", targets), bias, numbers, REDUCTIONS.index(reduction), chunk)


def _in_range(op, ignore_index, label_smoothing, softcap, z_loss):
    ignore_index = integer(op, "ignore_index", ignore_index)
    if not -2**31 <= ignore_index < 2**31:
        raise ValueError(f"{op}: ignore_index is {ignore_index}, expected an integer of 32 bits")
    label_smoothing = number(op, "label_smoothing", label_smoothing)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing is {label_smoothing:g}, expected 0 to 1")
    softcap, z_loss = number(op, "softcap", softcap or 0), number(op, "z_loss", z_loss)
    for name, x in (("softcap", softcap), ("z_loss", z_loss)):
        if not (0 <= x < 2.0**127 and (x == 0 or x >= 2.0**-126)):
            raise ValueError(f"{op}: {name} is {x:g}, expected 0 (none) or a positive finite number")
    return ignore_index, label_smoothing, softcap, z_loss


EXPLAINED = {"cross_entropy": lambda op, library, named, given: ([], {}, [])}
