"""What tests of bad input share."""

import math
import re
import subprocess
import sys

import pytest
import torch


def tensors(*shapes, dtype=torch.bfloat16, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]


def refused(error, message, function, *arguments, **options):
    """Refused with this message, and with nothing else: one exception, not one during the handling of another."""
    with pytest.raises(error, match=re.escape(message)) as raised:
        function(*arguments, **options)
    if error is not Exception:                                # which dynamo makes of what a fake kernel raises
        assert_alone(raised.value)


def assert_alone(error):
    assert (error.__cause__ is None and (error.__context__ is None
                                         or error.__suppress_context__)), repr(error.__context__)


def run_python(program, *options):
    return subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True)


def probe_sizes(ops, sizes):
    """explain of sizes that no problem has: an answer or an error. In a process of its own: a division may kill it."""
    result = run_python(f"""
from margay import _C
for op in {tuple(ops)}:
    for name in {tuple(sizes)}:
        for absurd in (-2**63, -1, 0, 2**31, 2**63 - 1):
            for gpu in (False, True):
                try: _C.explain(op, dtype="bfloat16", gpu=gpu, **{{name: absurd}})
                except (ValueError, OverflowError, TypeError, NotImplementedError): continue
print("alive")
""")
    assert result.returncode == 0 and result.stdout == "alive\n", result.stderr


class Wrapped(torch.Tensor):
    """A subclass that sees every call on it."""

    seen = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


# ---- the same numbers elsewhere in memory


def between(t, dim):
    """The same numbers with NaN between them."""
    return torch.stack((t, torch.full_like(t, math.nan)), dim + 1).flatten(dim, dim + 1)[(slice(None),) * dim +
                                                                                        (slice(None, None, 2),)]


def beside(t):
    """The same numbers 3 elements behind an aligned address."""
    return torch.nn.functional.pad(t, (3, 2), value=math.nan)[..., 3:-2]


SPREADS = {
    "last dimension": lambda t: between(t, t.ndim - 1),
    "rows apart": lambda t: between(t, 0),
    "expanded": lambda t: t[..., :1].expand(t.shape),
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
    "unaligned": beside,
}
