"""What the tests of the delta rules share: problems, the random ones too, and how far from exact a forward may be."""

import dataclasses
import random

import pytest
import torch

from cases import check_error
from conftest import SEED
from delta_forms import HARD, exactly, rounding
from margay import _op

DTYPES = ("bfloat16", "float16", "float32")
SHAPES = ((1, 1, 1, 1, 1), (2, 1, 3, 64, 64), (1, 2, 4, 128, 128), (2, 1, 1, 17, 128), (1, 1, 2, 128, 40),
          (1, 3, 3, 72, 65))                      # batches, heads of k and of v, columns of k and of v
AROUND = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)    # steps around a block and whole chunks
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state", "da_log", "ddt_bias")
# Keys that are equal or nearly, with beta |k|^2 = 2 or nearly: a state is reflected again and again, and no error in it
# fades. All steps have the same error of rounding, by chance a small one in the one form or in the other.
REFLECTED = ("equal keys, beta 2", "near keys, beta near 2")


def with_and_without(op, tensors, numbers, grads):
    """What the forward keeps for the backward. Gradients are the same, bit by bit, with it and without, and with some
    of it; it is not written."""
    _op.for_torch(op)
    forward, backward = (getattr(torch.ops.margay, op + end) for end in ("", "_bwd"))
    kept = forward(*tensors, *numbers)[2:]
    numbers = numbers[:len(_op.Row(op + "_bwd").numbers)]
    found, before = backward(*grads, *tensors, *kept, *numbers), [t.clone() for t in kept]
    norms, matrices = kept[:-2], kept[-2:]
    for some in ((None,) * len(kept), (*norms, None, None), (*(None for _ in norms), *matrices)):
        made = backward(*grads, *tensors, *some, *numbers)
        for i, (a, b) in enumerate(zip(found, made)):
            assert torch.equal(a, b), (i, [t is not None for t in some])
    for a, b in zip(kept, before):                 # of packed rows, places without a chunk may be anything
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return kept


def skip(device, dtype):
    if device == "cuda" and dtype == "float32":
        pytest.skip("computed on the CPU only")


@dataclasses.dataclass
class Problem:
    seed: int
    r: random.Random                              # for what else is drawn
    device: str
    dtype: torch.dtype
    name: str
    scale: float | None
    sizes: tuple                                  # B, T, H, HV, K, V
    starts: tuple | None
    norms: bool
    v_first: bool
    with_state: bool
    also: str = ""                                # what else was drawn

    def __str__(self):
        b, steps, h, hv, d, dv = self.sizes
        return (f"seed {self.seed}: {self.name}, {self.also}{b}x{steps}x{h}/{hv}x{d}/{dv}, {self.dtype}, "
                f"starts {self.starts}, norms {self.norms}")

    @property
    def options(self):
        """Of hard(name, seed, *sizes, **options)."""
        rows = self.sizes[0] if self.starts is None else len(self.starts) - 1
        return dict(dtype=self.dtype, rows=rows, device=self.device)


def draw(seed, device, steps, without):
    r, gpu = random.Random(seed), device == "cuda"
    steps, h = r.choice(steps), r.choice((1, 1, 2, 3))
    hv, b, packed = h * r.choice((1, 2, 3, *(16,) * gpu)), r.choice((1, 1, 2)), r.random() < 0.3
    d, dv = r.choice(((64, 64), (128, 128), (128, 64), (64, 128), (r.randrange(1, 129), r.randrange(1, 129))))
    dtype = r.choice((torch.bfloat16, torch.bfloat16, torch.float16, *(torch.float32,) * (not gpu)))
    name, scale = r.choice([name for name in HARD if name not in without(dtype)]), r.choice((None, None, 0.3, 1.0))
    b = 1 if packed else b
    if b * steps * hv > 2**17:                    # much memory for the exact answers
        b, hv = 1, min(hv, 3 * h)
    starts = (0, *sorted(r.randrange(steps + 1) for _ in range(r.randrange(4))), steps) if packed else None
    norms, v_first, with_state = r.random() < 0.3, r.random() < 0.3, r.random() < 0.5
    return Problem(seed, r, device, dtype, name, scale, (b, steps, h, hv, d, dv), starts, norms, v_first, with_state)


def random_tests(check, on_cpu, on_gpu, without=lambda dtype: ()):
    """Two tests for the file that calls this: check() of 200 random problems on the CPU, and of 500 on a GPU. on_cpu,
    on_gpu: numbers of steps to choose from. without: names of HARD that are left out where a type is drawn."""
    def tests(device, count, steps):
        @pytest.mark.parametrize("group", range(10))
        def test_random(group):
            for i in range(group * count // 10, (group + 1) * count // 10):
                problem = draw(SEED * 1000 + i, device, steps, without)
                try:
                    check(problem)
                except AssertionError as error:
                    raise AssertionError(f"{problem}: {error}") from error
        return test_random
    return tests("cpu", 200, on_cpu), pytest.mark.gpu(tests("cuda", 500, on_gpu))


def check(ours, plain, exact, dtype, g, other=None, factors=None, size=0.0, remainder=0.0):
    """other: exact results of keys that differ by half of an eps, of an input that makes much of such a difference.
    factors: the type of what is multiplied, where the plain form rounds less than that. size: of a product of rows of
    q and k with one of v, at most. remainder: of remainder_rounding()."""
    for i, (name, *three) in enumerate(zip(("out", "final_state"), ours, plain, exact)):
        relative, absolute = rounding(name, three[0], three[1] - three[2], dtype, g)
        absolute += 2.0**-120 + i * remainder      # subnormals may become 0
        if not three[0].numel():
            continue
        # Elements of a row share the errors of its weights: where rows are few, the plain form's are small by chance.
        rows, eps = three[0].numel() // three[0].shape[-1], torch.finfo(factors or dtype).eps
        few = rows < 64 or factors is not None
        largest, mean = eps / 2 * float(three[2].abs().max()), 2 * eps / rows**0.5 * float(three[2].abs().mean())
        absolute = [absolute + few * (x + eps / 16 / rows**0.5 * size) for x in (largest, largest / 32, mean)]
        # Nor has a result in float32 a rounding of its own, and its largest number may be one product of two factors,
        # of which the plain form's rounding is small by chance.
        if not few and name == "final_state":
            absolute[0] += largest
        # A weight is a sum over K of products of two such factors: a quarter of eps of each. The plain form, whose
        # weights are rounded too, does not show it where K is 1 and a product of two of them is 1 again.
        if factors is not None:
            absolute[1] += eps / 4 / g.shape[-1]**0.5 * float(three[2].abs().mean())
        if other is not None:
            change = (other[i] - three[2]).abs()
            absolute = list(a + 2 * float(b) for a, b in zip(absolute, (change.max(), change.mean(), change.mean())))
        check_error(name, *three, rounding=(relative, tuple(absolute)))


def with_other_keys(name, q, k, dtype, *others):
    if name in REFLECTED:
        return exactly(q, k.double() * (1 + torch.finfo(dtype).eps / 2), *others)


def check_alike(found, right):
    """To the rounding of 16-bit operands, as two kernels of one op are."""
    for i, (x, y) in enumerate(zip(found, right, strict=True)):
        error, size = (x.double() - y.double()).norm(), y.double().norm()
        assert error <= 2.0**-8 * size, f"result {i}: {error / size:.3g}"
