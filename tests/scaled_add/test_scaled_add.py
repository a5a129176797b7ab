"""scaled_add, the example kernel, on memory with surroundings."""

import math

import pytest
import torch

from cases import DEVICES, HALF
from margay import _C


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (64, 64), (65, 130), (300, 1000)])
def test_scaled_add(shape, dtype, device):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("float32 runs on the CPU only")
    m, n = shape
    wide = [torch.randn(m, n + -n % 8).to(device, dtype) for _ in range(2)]
    a, b = (t[:, :n] for t in wide)
    around = torch.full((m + 2, n + 8 + -n % 8), math.nan, dtype=dtype, device=device)
    out = around[1:-1, :n]
    _C.scaled_add(out, a, b, -0.75)
    exact = a.double() - 0.75 * b.double()
    assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs()).all()   # one rounding
    out.fill_(math.nan)
    if device == "cuda":                               # rows are written in units of 16 bytes there, see margay.h
        around[1:-1, n:n + -n % 8] = math.nan
    assert around.isnan().all(), "memory beside out was written"
