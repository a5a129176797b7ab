"""The loss of transformers' causal language models with their last projection, by `margay.cross_entropy`.

In training, with labels, the last projection of a patched model returns `Logits`, which compute themselves only where
something reads them. The model's loss function reads none: it gives what the projection got to `cross_entropy`.
"""

import operator
import threading

import torch

from margay.drop_ins.patching import Stays, forward_of
from margay.families.cross_entropy import cross_entropy

_local = threading.local()       # .waiting: heads whose next logits may stay uncomputed
_DTYPES = torch.bfloat16, torch.float16, torch.float32
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def find(model):
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return []
    return [(name, module, _replace) for name, module in model.named_modules()
            if isinstance(module, PreTrainedModel) and "loss_function" in _code(module).co_names]


def _code(module):
    import inspect

    return inspect.unwrap(type(module).forward).__code__


def _replace(model):
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = model.get_output_embeddings()
    if model.loss_function is not ForCausalLMLoss:
        raise Stays(f"it is {getattr(model.loss_function, '__name__', model.loss_function)}, expected ForCausalLMLoss")
    if not any(getattr(model, name, None) is head for name in _code(model).co_names) or head is None:
        raise Stays("its forward does not call the model's output embeddings")
    if type(head) is not torch.nn.Linear:
        raise Stays(f"the last projection is {type(head).__name__}, expected torch.nn.Linear")
    if head._forward_hooks or head._forward_pre_hooks:
        raise Stays("the last projection has hooks")
    undo = []
    try:
        undo.append(forward_of(head, _project))
        undo.append(forward_of(model, _forward))
    except BaseException:
        for back in undo:
            back()
        raise
    had = "_loss_function" in vars(model)
    model._loss_function = _loss

    return "margay.cross_entropy, with the last projection, in training", _undone(model, had, undo)


def _undone(model, had, undo):
    def back():
        if vars(model).get("_loss_function") is _loss:
            if had:
                from transformers.loss.loss_utils import ForCausalLMLoss

                model._loss_function = ForCausalLMLoss
            else:
                del model._loss_function
        for one in undo:
            one()
    back.of_copy = _undone, (had, ())
    return back


def _forward(model, theirs, *arguments, **options):
    labels = options.get("labels")
    if labels is None and arguments:
        names = _code(model).co_varnames[1:]
        labels = dict(zip(names, arguments)).get("labels")
    if labels is None or not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return theirs(model, *arguments, **options)
    before = getattr(_local, "waiting", None)
    _local.waiting = model.get_output_embeddings()
    try:
        return theirs(model, *arguments, **options)
    finally:
        _local.waiting = before


def _project(head, theirs, hidden):
    if torch.compiler.is_compiling() or getattr(_local, "waiting", None) is not head:
        return theirs(head, hidden)
    weight, bias = head.weight, head.bias
    autocast = torch.is_autocast_enabled(hidden.device.type)
    if (type(hidden) not in _PLAIN or type(weight) not in _PLAIN or hidden.device != weight.device or
            weight.dtype not in _DTYPES or not (hidden.dtype == weight.dtype or autocast and hidden.dtype in _DTYPES)):
        return theirs(head, hidden)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else weight.dtype
    return Logits(lambda: theirs(head, hidden), hidden, weight, bias, dtype)


def _loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **options):
    """transformers' ForCausalLMLoss."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    known = (isinstance(logits, Logits) and logits.made is None and logits.weight.shape[0] == vocab_size
             and (logits.inner is None or logits.softcap is not None))
    if known:
        if shift_labels is None:
            targets = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        else:
            targets = shift_labels
        hidden = logits.hidden.flatten(0, -2)
        targets = targets.reshape(-1).to(hidden.device)
        known = targets.shape[0] == hidden.shape[0]
    if not known:
        return ForCausalLMLoss(read(logits), labels, vocab_size, num_items_in_batch, ignore_index, shift_labels,
                               **options)
    if logits.scale != 1:
        hidden = hidden * logits.scale
    loss = cross_entropy(hidden, logits.weight, targets, bias=logits.bias, ignore_index=ignore_index,
                         softcap=logits.softcap, reduction="mean" if num_items_in_batch is None else "sum")
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


# ---- logits that are not computed yet


class Logits:
    """scale (hidden weight^T + bias), or softcap tanh(that / softcap): a tensor to whatever reads it, which is when it
    is computed. No torch.Tensor: one would have memory."""

    def __init__(self, make, hidden, weight, bias, dtype, scale=1.0, softcap=None, inner=None):
        self.make, self.made, self.dtype = make, None, dtype
        self.hidden, self.weight, self.bias, self.scale, self.softcap = hidden, weight, bias, scale, softcap
        self.inner = inner                # behind a tanh: what its argument was scaled with

    @property
    def shape(self):
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def device(self):
        return self.hidden.device

    @property
    def requires_grad(self):
        return self.hidden.requires_grad or self.weight.requires_grad

    def tensor(self):
        if self.made is None:
            self.made = self.make()
        return self.made

    def _then(self, step, **changes):
        kept = {name: getattr(self, name) for name in ("hidden", "weight", "bias", "dtype", "scale", "softcap",
                                                       "inner")}
        return Logits(lambda: step(self.tensor()), **kept | changes)

    def float(self):
        return self._then(lambda x: x.float(), dtype=torch.float32)

    def tanh(self):
        """The softcap is what a number multiplies it with next."""
        if self.bias is not None or self.inner is not None or self.softcap is not None:
            return self.tensor().tanh()
        return self._then(lambda x: x.tanh(), inner=self.scale)

    def _times(self, factor, step):
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor > 0
        if self.made is not None or not number or self.bias is not None or self.softcap is not None:
            return step(self.tensor())
        if self.inner is not None:
            return self._then(step, scale=self.inner * factor, softcap=float(factor))
        return self._then(step, scale=self.scale * factor)

    def __mul__(self, factor):
        return self._times(factor, lambda x: x * factor)

    def __rmul__(self, factor):
        return self._times(factor, lambda x: factor * x)

    def __truediv__(self, divisor):
        if not isinstance(divisor, (int, float)) or not divisor > 0:
            return self.tensor() / read(divisor)
        return self._times(1 / divisor, lambda x: x / divisor)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __len__(self):
        return self.shape[0]

    def __repr__(self):
        return repr(self.tensor())

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function is torch.tanh and len(arguments) == 1 and not options:
            return arguments[0].tanh()
        return function(*read(arguments), **read(options or {}))


def _reads(name):
    function = getattr(operator, name)
    return lambda self, *others: function(self.tensor(), *read(others))


for _name in ("__getitem__", "__setitem__", "__neg__", "__abs__", "__pow__", "__matmul__", "__add__", "__sub__",
              "__floordiv__", "__mod__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Logits, _name, _reads(_name))
Logits.__hash__ = object.__hash__
Logits.__radd__ = lambda self, other: other + self.tensor()
Logits.__rsub__ = lambda self, other: other - self.tensor()
Logits.__rpow__ = lambda self, other: other ** self.tensor()
Logits.__rfloordiv__ = lambda self, other: other // self.tensor()
Logits.__rmod__ = lambda self, other: other % self.tensor()
Logits.__rtruediv__ = lambda self, other: other / self.tensor()
Logits.__iter__ = lambda self: iter(self.tensor())


def read(x):
    """Tensors in place of `Logits`."""
    if isinstance(x, Logits):
        return x.tensor()
    if isinstance(x, (list, tuple)):
        return type(x)(read(one) for one in x)
    return {name: read(one) for name, one in x.items()} if isinstance(x, dict) else x
