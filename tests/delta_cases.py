"""What the tests of the delta rules' forwards share."""

import pytest
import torch

from cases import check_error
from delta_forms import recurrence, rounding


def skip(device, dtype):
    if device == "cuda" and dtype == "float32":
        pytest.skip("computed on the CPU only")


# Keys that are alike, with beta |k|^2 near 2: a state is reflected again and again, and no error in it fades. All keys have
# the same error of rounding, by chance a small one in the one form or in the other.
REFLECTED = ("equal keys, beta 2", "near keys, beta near 2")


def check(ours, plain, exact, dtype, g, other=None, factors=None):
    """other: exact results of keys that differ by half of an eps, of an input that makes much of such a difference.
    factors: the type of what is multiplied, where that is less precise than dtype: by chance, the plain form's errors then
    add up to less than a result's rounding."""
    factors = factors or dtype
    for i, (name, *three) in enumerate(zip(("out", "final_state"), ours, plain, exact)):
        relative, absolute = rounding(name, three[0], three[1] - three[2], dtype, g)
        if not three[0].numel():
            continue
        if three[0].numel() < 500:                 # the plain form's largest error is small by chance
            absolute += torch.finfo(factors).eps * float(three[2].abs().max())
        absolute = (absolute,) * 3
        if factors != dtype:
            rows = three[2].numel() // three[2].shape[-1]
            chance = torch.finfo(factors).eps / rows**0.5 * float(three[2].abs().mean())
            worst = torch.finfo(factors).eps / 8 * float(three[2].abs().max())
            absolute = (absolute[0] + worst, absolute[1], absolute[2] + chance)
        if other is not None:
            change = (other[i] - three[2]).abs()
            absolute = tuple(a + 2 * float(b) for a, b in zip(absolute, (change.max(), change.mean(), change.mean())))
        check_error(name, *three, rounding=(relative, absolute))


def with_other_keys(name, q, k, dtype, *others):
    if name in REFLECTED:
        return recurrence(q, k.double() * (1 + torch.finfo(dtype).eps / 2), *others)
