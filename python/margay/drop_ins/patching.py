"""What the pieces of `margay.patch` share: how one is described, how a module's forward is replaced."""

import dataclasses
import functools
import types

__all__ = ["Piece", "Stays", "forget", "forward_of"]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a model. replaced: whether Margay computes it now; how: by what, or why not."""
    name: str
    kind: str
    replaced: bool
    how: str

    def __str__(self):
        return f"{self.name or 'the model'}: {self.kind} {'->' if self.replaced else 'stays:'} {self.how}"


class Stays(Exception):
    """Why a piece is not replaced."""


def forward_of(module, compute):
    """The module's forward is compute(module, theirs, ...), theirs being its class's, until what this returns is
    called. A copy of the module computes what its class does."""
    if "forward" in vars(module):
        raise Stays("its forward is replaced already")
    theirs = type(module).forward

    @functools.wraps(theirs)
    def forward(self, *arguments, **options):
        if self is not module:
            return theirs(self, *arguments, **options)
        return compute(module, theirs, *arguments, **options)

    forward.margay_replaces = theirs
    module.forward = types.MethodType(forward, module)

    def back():
        if getattr(vars(module).get("forward"), "__func__", None) is forward:
            del module.forward
    return back


def forget(copied):
    """A copy of a patched model has the forwards of the model's modules in its own; what was pickled and loaded has
    those of its classes there. They are removed."""
    for module in copied.modules():
        function = getattr(vars(module).get("forward"), "__func__", None)
        if function is not None and (hasattr(function, "margay_replaces") or function is type(module).forward):
            del module.forward
