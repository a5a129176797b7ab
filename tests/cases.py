"""Problems for tests and benchmarks, their exact answers, and how far from exact a right answer may be.

An answer may have twice the error (gradients: three times) of the plain PyTorch formulation in the same precision,
measured against float64, plus rounding. The same holds for the mean error, and for the mean error towards or away from
zero, where truncation would show.
"""

import dataclasses
import math
import random
import re

import pytest
import torch

import reference
from margay import _C

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALF = (torch.bfloat16, torch.float16)
ROWS = (0, 1, 2, 3, 13, 31, 63, 64, 65, 97, 127, 128, 129, 191, 192, 193, 211, 257, 300)
DIMS = (1, 5, 8, 16, 32, 40, 63, 64, 65, 80, 96, 112, 127, 128, 160, 192, 200, 256)
LAYOUTS = ("heads first", "rows first", "fused", "gaps", "broadcast")


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    seed: int
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    rows: int = 64
    kv_rows: int = 64
    dim: int = 64
    dim_v: int = 64
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    layout: str = "heads first"
    scale: float | None = None

    def __str__(self):
        return (f"seed{self.seed}-b{self.batch}-h{self.heads}x{self.kv_heads}-n{self.rows}x{self.kv_rows}"
                f"-d{self.dim}x{self.dim_v}-{'causal' if self.causal else 'full'}"
                f"-{str(self.dtype)[6:]}-{self.layout.replace(' ', '_')}")


def attention_cases(count, seed):
    """`count` random problems; the seed of one is in its name. Sizes are drawn so that awkward ones are frequent."""
    return [random_attention_case(seed * 100_000 + i) for i in range(count)]


def random_attention_case(seed):
    r = random.Random(seed)
    kv_heads = r.choice((1, 1, 2, 3))
    heads = kv_heads * r.choice((1, 1, 2, 4, 7) if kv_heads == 1 else (1, 2))
    rows = r.choice(ROWS) if r.random() < 0.8 else r.randrange(400)
    kv_rows = rows if r.random() < 0.4 else r.choice(ROWS) if r.random() < 0.8 else r.randrange(400)
    dim = r.choice(DIMS) if r.random() < 0.8 else r.randrange(1, 257)
    dim_v = dim if r.random() < 0.7 else r.choice(DIMS)
    return AttentionCase(seed, r.choice((1, 1, 2, 3)), heads, kv_heads, rows,
                         kv_rows, dim, dim_v, r.random() < 0.5, r.choice(HALF), r.choice(LAYOUTS),
                         r.choice((None, None, None, 0.1, 1.0)))


def awkward_attention_cases():
    """One problem per awkward size, the rest of it ordinary."""
    sizes = [dict(rows=n, kv_rows=m, causal=c) for n in (0, 1, 65) for m in (0, 1, 65) for c in (False, True)]
    sizes += [dict(rows=n, kv_rows=n, causal=True) for n in (63, 64, 65, 127, 193, 509)]
    sizes += [dict(rows=n, kv_rows=m, causal=True) for n, m in ((127, 65), (64, 191), (300, 1), (1, 300), (193, 192))]
    sizes += [dict(dim=d, dim_v=d, causal=True) for d in (1, 40, 65, 80, 96, 112, 160, 192, 255, 256)]
    sizes += [dict(dim=192, dim_v=128), dict(dim=64, dim_v=256), dict(dim=33, dim_v=7),
              dict(batch=0), dict(heads=0, kv_heads=0)]
    sizes += [dict(heads=8, kv_heads=1), dict(heads=6, kv_heads=3, causal=True)]
    return [AttentionCase(i, **size) for i, size in enumerate(sizes)]


def attention_inputs(case, device="cpu"):
    """q, k, v and dout of a case. Memory beside the tensors is NaN."""
    g = torch.Generator().manual_seed(case.seed)
    shape_q, shape_k = ((case.batch, case.heads, case.rows, case.dim),
                        (case.batch, case.kv_heads, case.kv_rows, case.dim))
    shape_v, shape_o = (*shape_k[:3], case.dim_v), (*shape_q[:3], case.dim_v)
    values = [torch.randn(shape, generator=g).to(case.dtype) for shape in (shape_q, shape_k, shape_v, shape_o)]
    if case.layout == "broadcast" and case.batch > 1:
        values[1] = values[1][:1].expand(shape_k)
        return [t.to(device) for t in values]
    if case.layout == "fused" and case.rows == case.kv_rows and case.dim == case.dim_v:
        fused = torch.cat([t.transpose(1, 2) for t in values[:3]], 2).to(device).transpose(1, 2)
        return [*fused.split((case.heads, case.kv_heads, case.kv_heads), 1), values[3].to(device)]
    return [place(t, case.layout, device) for t in values]


def place(t, layout, device):
    """A copy of t in memory as `layout` says."""
    if layout == "rows first":
        return t.transpose(1, 2).contiguous().to(device).transpose(1, 2)
    if layout == "gaps":
        wide = torch.full((*t.shape[:3], t.shape[3] + 24), math.nan, dtype=t.dtype, device=device)
        wide[..., 8:8 + t.shape[3]] = t.to(device)
        return wide[..., 8:8 + t.shape[3]]
    return t.to(device)


# ---- rows


def row_taken(op, **problem):
    """The name of the row that takes a problem, as `explain` is asked of one."""
    return _C.explain(op, **problem)[0]


# ---- outputs


GUARD = 64


class Guarded:
    """An uninitialised output, NaN all through, in the middle of a NaN-filled buffer; `transposed`: its rows outside
    its heads."""

    def __init__(self, shape, dtype, device, transposed=False):
        count = math.prod(shape)
        self.buffer = torch.full((count + 2 * GUARD,), math.nan, dtype=dtype, device=device)
        self.view = self.buffer[GUARD:GUARD + count].view((shape[0], shape[2],
                                                           shape[1], shape[3]) if transposed else shape)
        if transposed:
            self.view = self.view.transpose(1, 2)

    def check(self, name):
        for guard in (self.buffer[:GUARD], self.buffer[-GUARD:]):
            assert guard.isnan().all(), f"{name}: memory beside the output was written"


# ---- exact answers


def exact_attention(case, q, k, v, dout, dlse=None):
    """out, lse, dq, dk, dv in float64."""
    inputs = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = reference.attention(*inputs, scale=case.scale, causal=case.causal)
    dlse = torch.zeros_like(lse) if dlse is None else dlse.double()
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), inputs, (dout.double(), dlse))


def plain_gradients(case, q, k, v, dout):
    """out, dq, dk, dv of the plain formulation."""
    inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out, _ = reference.attention(*inputs, scale=case.scale, causal=case.causal)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


# ---- how far from exact


def effective_count(sizes):
    """How many independent errors of such sizes there are: fewer than numbers where few are large, and 1 at least."""
    return max(1.0, float(sizes.sum()) ** 2 / max(float(sizes.square().sum()), 1e-300))


def check_error(name, found, plain, exact, factor=2, rounding=(0.0, 0.0), independent=None):
    """Fail where `found` is further from `exact` than `factor` times the plain formulation. `rounding`: allowed besides
    the rounding of the result itself, relative and absolute, as `float32_rounding` gives it. The absolute one may be
    three numbers: of the worst error, of its mean and of its mean away from zero. independent: how many of the errors
    are, if not all."""
    assert found.shape == exact.shape, f"{name}: shape {list(found.shape)}, expected {list(exact.shape)}"
    if not exact.numel():
        return
    assert not found.isnan().any(), f"{name}: {int(found.isnan().sum())} of {found.numel()} elements are NaN"
    eps = torch.finfo(found.dtype).eps
    relative, absolute = rounding
    absolute, absolute_mean, absolute_bias = absolute if isinstance(absolute, tuple) else (absolute,) * 3
    # Where the plain form overflows, it allows nothing.
    error, allowed = found.double() - exact, torch.where(plain.isfinite(), plain.double() - exact, 0.0)
    worst = float(error.abs().max())
    limit = factor * float(allowed.abs().max()) + (eps + relative) * float(exact.abs().max()) + absolute
    assert worst <= limit, f"{name}: error {worst:.3g}, allowed {limit:.3g}"
    size = float(exact.abs().mean())
    mean = float(error.abs().mean())
    limit = factor * float(allowed.abs().mean()) + (eps / 2 + relative) * size + absolute_mean
    assert mean <= limit, f"{name}: mean error {mean:.3g}, allowed {limit:.3g}"
    # Elements of one row share the rounding of its weights. Rows count as they are large: dropout next to 1 leaves few.
    rows = effective_count(exact.abs().sum(-1))
    bias, limit = (abs(float((e * exact.sign()).mean())) for e in (error, allowed))
    # of few, the plain one's may be 0 by luck
    limit = max(limit, float(allowed.abs().mean()) / (independent or exact.numel())**0.5)
    limit = factor * limit + (eps * (0.1 + 2 / rows**0.5) + relative) * size + absolute_bias
    assert bias <= limit, f"{name}: mean error away from zero {bias:.3g}, allowed {limit:.3g}"


def largest_score(q, k, scale):
    """A bound of |scale q k^T|."""
    scale = abs(q.shape[3] ** -0.5 if scale is None else scale)
    return (scale * float(q.double().norm(dim=3).max() * k.double().norm(dim=3).max())
            if q.numel() and k.numel() else 0.0)


def float32_rounding(case, q, k, v, dout):
    """What rounding of float32 intermediate results leaves: relative, of the weights, whose relative error is the
    absolute error of a score; absolute, in dq and dk, of delta = sum(out dout) and of dout v^T, which cancel in the
    gradient of the scores."""
    relative = 2**-23 * (8 + largest_score(q, k, case.scale) / 2)
    if not (q.numel() and k.numel()):
        return relative, 0.0
    scale = abs(case.dim**-0.5 if case.scale is None else case.scale)
    products = float(dout.double().norm(dim=3).max() * v.double().norm(dim=3).max())
    return relative, 2**-22 * scale * products * float(max(q.abs().max(), k.abs().max()))


def check_lse(found, exact, q, k, scale):
    """lse is exact to float32 rounding of the scores."""
    assert found.dtype == torch.float32 and found.shape == exact.shape
    finite = exact.isfinite()
    assert torch.equal(found.isfinite(), finite) and (found[~finite] == -math.inf).all(), \
        "lse: not -inf exactly where a row has no keys"
    if finite.any():
        worst = float((found.double() - exact)[finite].abs().max())
        limit = 2**-22 * (4 + largest_score(q, k, scale))
        assert worst <= limit, f"lse: error {worst:.3g}, allowed {limit:.3g}"
