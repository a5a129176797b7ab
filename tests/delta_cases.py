"""What the tests of the delta rules' forwards share."""

import pytest
import torch

from cases import check_error
from delta_forms import exactly, rounding


def skip(device, dtype):
    if device == "cuda" and dtype == "float32":
        pytest.skip("computed on the CPU only")


# Keys that are alike, with beta |k|^2 near 2: a state is reflected again and again, and no error in it fades. All keys
# have the same error of rounding, by chance a small one in the one form or in the other.
REFLECTED = ("equal keys, beta 2", "near keys, beta near 2")


def check(ours, plain, exact, dtype, g, other=None, factors=None, size=0.0):
    """other: exact results of keys that differ by half of an eps, of an input that makes much of such a difference.
    factors: the type of what is multiplied, where that is less precise than dtype. size: of a product of rows of q and
    k with one of v, at most."""
    factors = factors or dtype
    for i, (name, *three) in enumerate(zip(("out", "final_state"), ours, plain, exact)):
        relative, absolute = rounding(name, three[0], three[1] - three[2], dtype, g)
        absolute += 2.0**-120                      # subnormals may become 0
        if not three[0].numel():
            continue
        # Elements of a row share the errors of its weights: where rows are few, the plain form's are small by chance.
        rows, eps = three[0].numel() // three[0].shape[-1], torch.finfo(factors).eps
        few = rows < 64 or factors != dtype
        largest, mean = eps / 2 * float(three[2].abs().max()), 2 * eps / rows**0.5 * float(three[2].abs().mean())
        absolute = [absolute + few * (x + eps / 16 / rows**0.5 * size) for x in (largest, largest / 32, mean)]
        # A weight is a sum over K of products of two such factors: a quarter of eps of each. The plain form, whose
        # weights are rounded too, does not show it where K is 1 and a product of two of them is 1 again.
        if factors != dtype:
            absolute[1] += eps / 4 / g.shape[-1]**0.5 * float(three[2].abs().mean())
        if other is not None:
            change = (other[i] - three[2]).abs()
            absolute = list(a + 2 * float(b) for a, b in zip(absolute, (change.max(), change.mean(), change.mean())))
        check_error(name, *three, rounding=(relative, tuple(absolute)))


def with_other_keys(name, q, k, dtype, *others):
    if name in REFLECTED or (name.startswith("equal keys") and dtype == torch.float32):
        return exactly(q, k.double() * (1 + torch.finfo(dtype).eps / 2), *others)
