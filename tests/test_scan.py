"""The Mamba-2 scan against its recurrence in float64."""

import math

import pytest
import torch

from cases import DEVICES
from margay import _C

# steps, batch, heads, groups, head dim, state
SIZES = [(t, 2, 4, g, 64, n) for t in (0, 1, 64, 65, 300, 1000) for n in (64, 128) for g in (1, 2)]
SIZES += [(130, 1, 8, 1, 64, 128), (130, 1, 8, 2, 40, 96), (70, 1, 4, 4, 64, 128), (200, 1, 4, 1, 16, 24)]
SIZES += [(65, 0, 4, 1, 64, 64), (65, 1, 0, 1, 64, 64)]


def problem(steps, batch, heads, groups, dim, n, device):
    g = torch.Generator().manual_seed(steps + n + heads)
    x, b, c = (torch.randn(batch, steps, h, d, generator=g).bfloat16() for h, d in ((heads, dim), (groups, n), (groups, n)))
    dt = torch.nn.functional.softplus(torch.randn(batch, steps, heads, generator=g) - 2.5)
    a, d = -torch.exp(torch.rand(heads, generator=g) * 2.77), torch.randn(heads, generator=g)
    a[1:2] = -200.0                                # a head that forgets at once: e^(-l) would overflow
    return [t.to(device) for t in (x, dt, b, c, a, d)]


def recurrence(x, dt, b, c, a, d):
    x, dt, b, c, a, d = (t.double() for t in (x, dt, b, c, a, d))
    batch, steps, heads, dim = x.shape
    b, c = (t.repeat_interleave(heads // max(t.shape[2], 1), 2) for t in (b, c))
    state, y = x.new_zeros(batch, heads, dim, b.shape[3]), torch.empty_like(x)
    for t in range(steps):
        state = state * torch.exp(dt[:, t] * a)[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :]
        y[:, t] = (state @ c[:, t, ..., None])[..., 0] + d[:, None] * x[:, t]
    return y, state


def run(inputs, dim, n):
    x = inputs[0]
    batch, _, heads, _ = x.shape
    y = torch.full_like(x, math.nan)
    state = torch.full((batch, heads, dim, n), math.nan, device=x.device)
    _C.ssd_fwd(y, state, *inputs)
    return y, state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_ssd(size, device):
    steps, batch, heads, groups, dim, n = size
    inputs = problem(*size, device)
    y, state = run(inputs, dim, n)
    exact_y, exact_state = recurrence(*inputs)
    # Independent 16-bit roundings of the weighted inputs and of the state's copy: relative to the whole, about one of bfloat16.
    for found, exact in ((y, exact_y), (state, exact_state)):
        assert not found.isnan().any()
        assert (found.double() - exact).norm() <= 2**-8 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 128])
def test_repeats_bitwise(n):
    inputs = problem(1000, 2, 8, 1, 64, n, "cuda")
    first = run(inputs, 64, n)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(run(inputs, 64, n), first))


@pytest.mark.parametrize("wrong, message", [
    (dict(groups=3), "ssd_fwd: x has 4 heads, expected a multiple of the 3 groups of b"),
    (dict(n=0), r"ssd_fwd: b has a last dimension \(the state's\) of 0, expected at least 1"),
])
def test_refused(wrong, message):
    size = dict(steps=5, batch=1, heads=4, groups=1, dim=8, n=16) | wrong
    with pytest.raises(ValueError, match=message):
        run(problem(**size, device="cpu"), size["dim"], size["n"])


def test_no_kernel():
    with pytest.raises(NotImplementedError, match="(?s)ssd_fwd: no kernel for bfloat16.*ssd_fwd_bf16_n128 needs d <= 64 && n <= 128"):
        run(problem(5, 1, 4, 1, 8, 129, "cpu"), 8, 129)
