"""The warning of the drop-ins where PyTorch computes a call."""

import sys
import warnings

_warned = set()
_PASSED = ("fla", "margay", "torch", "transformers")       # packages whose lines are not the caller's


class FallbackWarning(UserWarning):
    """A drop-in computed a call with PyTorch. Issued once per op and reason."""


class Refused(Exception):
    """Why the library whose function this is computes a call."""


def fall_back(op, reason, by="PyTorch", of=None):
    """Say that `op` is computed by PyTorch, and why, at the line of the program that called; once for a reason, or for
    what it is said of."""
    if (op, of or reason) in _warned:
        return
    _warned.add((op, of or reason))
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _PASSED:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{op}: {reason}; computed by {by}", FallbackWarning, stacklevel=level)


fall_back._dynamo_marked_constant = True     # torch.compiler.assume_constant_result, without importing the compiler:
                                             # warns when code is traced
