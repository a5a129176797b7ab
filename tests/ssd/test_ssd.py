"""The Mamba-2 scan against its recurrence in float64.

An answer may have twice the error of the same scan in PyTorch, by chunks, with the operands of its products rounded
to 16 bits, plus rounding: see `check_error`."""

import dataclasses
import math
import random

import pytest
import torch

from cases import DEVICES, Guarded, check_error
from margay import _C

CHUNK = 64
STEPS = (0, 1, 2, 13, 63, 64, 65, 127, 128, 129, 192, 200, 300, 411)
LAYOUTS = ("dense", "fused", "gaps")


@dataclasses.dataclass(frozen=True)
class Case:
    seed: int
    steps: int = 130
    batch: int = 1
    heads: int = 4
    groups: int = 1
    dim: int = 64
    state: int = 64
    layout: str = "dense"        # "fused": x, b, c are columns of one tensor; "gaps": NaN between their rows

    def __str__(self):
        return (f"seed{self.seed}-t{self.steps}-b{self.batch}-h{self.heads}x{self.groups}-p{self.dim}-n{self.state}"
                f"-{self.layout}")


def random_case(seed):
    """Sizes that the GPU's tensor copies can address in every layout."""
    r = random.Random(seed)
    groups = r.choice((1, 1, 2, 4))
    heads = math.lcm(groups, 4) * r.choice((1, 1, 2, 3))
    steps = r.choice(STEPS) if r.random() < 0.8 else r.randrange(500)
    dim, state = 8 * r.randint(1, 8), 8 * r.randint(1, 16)
    return Case(seed, steps, r.choice((1, 1, 2, 3)), heads, groups, dim, state, r.choice(LAYOUTS))


AWKWARD = [Case(i, **change) for i, change in enumerate(
    [dict(steps=t, state=n, groups=g, batch=2) for t in (0, 1, 64, 65, 300, 1000) for n in (64, 128) for g in (1, 2)]
    + [dict(heads=8, state=128), dict(heads=8, groups=2, dim=40, state=96), dict(steps=70, groups=4, state=128),
       dict(steps=200, dim=16, state=24), dict(batch=0), dict(heads=0), dict(dim=8, state=8),
       dict(heads=12, groups=3, dim=8, state=120, layout="gaps")])]
# Rows of "gaps" begin at multiples of 16 bytes whatever they hold: sizes that are multiples of nothing.
ODD = [Case(100 + i, layout="gaps", **change) for i, change in enumerate(
    [dict(dim=1, state=1), dict(dim=5, state=7, heads=3), dict(dim=63, state=65, heads=6, groups=2, batch=2),
     dict(dim=33, state=127, heads=1), dict(dim=64, state=127, heads=8, steps=129),
     dict(dim=7, state=3, heads=5, groups=5, steps=65)])]


def inputs_of(case, device="cpu"):
    """x, dt, b, c, a, d. Memory beside them is NaN."""
    g = torch.Generator().manual_seed(case.seed)
    shapes = (case.heads, case.dim), (case.groups, case.state), (case.groups, case.state)
    x, b, c = (torch.randn(case.batch, case.steps, *shape, generator=g).bfloat16() for shape in shapes)
    dt = torch.nn.functional.softplus(torch.randn(case.batch, case.steps, case.heads, generator=g) - 2.5)
    a, d = -torch.exp(torch.rand(case.heads, generator=g) * 2.77), torch.randn(case.heads, generator=g)
    a[1:2] = -200.0                                # a head that forgets at once: e^(-l) would overflow
    if case.layout == "fused":
        fused = torch.cat([t.flatten(2) for t in (x, b, c)], 2).to(device)
        x, b, c = (t.unflatten(2, shape) for t, shape in zip(fused.split([h * size for h, size in shapes], 2), shapes))
    if case.layout == "gaps":
        x, b, c = (widened(t, device) for t in (x, b, c))
    return [t.to(device) for t in (x, dt, b, c, a, d)]


def widened(t, device):
    """A copy of t whose rows begin 16 bytes and more behind one another."""
    unit = 16 // t.element_size()
    columns = -(-t.shape[-1] // unit) * unit + 2 * unit
    wide = torch.full((*t.shape[:-1], columns), math.nan, dtype=t.dtype, device=device)
    view = wide[..., unit:unit + t.shape[-1]]
    return view.copy_(t)


def recurrence(x, dt, b, c, a, d):
    """y and the last state in float64: the definition."""
    x, dt, b, c, a, d = (t.double() for t in (x, dt, b, c, a, d))
    batch, steps, heads, dim = x.shape
    b, c = (t.repeat_interleave(heads // max(t.shape[2], 1), 2) for t in (b, c))
    state, y = x.new_zeros(batch, heads, dim, b.shape[3]), torch.empty_like(x)
    for t in range(steps):
        state = (state * torch.exp(dt[:, t] * a)[..., None, None] +
                 (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :])
        y[:, t] = (state @ c[:, t, ..., None])[..., 0] + d[:, None] * x[:, t]
    return y, state


def by_chunks(x, dt, b, c, a, d):
    """y and the last state by products of 16-bit numbers: what products read is rounded, sums are float32."""
    half, heads = x.dtype, x.shape[2]
    x, b, c = (t.float() for t in (x, b, c))
    b, c = (t.repeat_interleave(heads // max(t.shape[2], 1), 2).transpose(1, 2) for t in (b, c))        # [B, H, T, N]
    x, dt, rounded = x.transpose(1, 2), dt.transpose(1, 2), lambda t: t.to(half).float()
    state, ys = x.new_zeros(*x.shape[:2], x.shape[3], b.shape[3]), [x[:, :, :0]]
    for i in range(0, x.shape[2], CHUNK):
        xs, dts, bs, cs = (t[:, :, i:i + CHUNK] for t in (x, dt, b, c))
        l = (dts * a[:, None]).cumsum(2)
        decay = torch.exp(l[..., :, None] - l[..., None, :]).tril()        # beside the diagonal it may be infinite
        weights = cs @ bs.mT * decay * dts[..., None, :] + torch.diag_embed(d[:, None].expand_as(l))
        ys.append(torch.exp(l)[..., None] * (cs @ rounded(state).mT) + rounded(weights) @ xs)
        end = l[..., -1:]
        state = torch.exp(end)[..., None] * state + rounded(xs * (dts * torch.exp(end - l))[..., None]).mT @ bs
    return torch.cat(ys, 2).transpose(1, 2).to(half), state


def run(inputs, dim, n):
    x = inputs[0]
    batch, _, heads, _ = x.shape
    rows = *x.shape[:3], -(-dim // 8) * 8          # of whole 16 bytes
    y = torch.full(rows, math.nan, dtype=x.dtype, device=x.device)[..., :dim]
    state = torch.full((batch, heads, dim, n), math.nan, device=x.device)
    _C.ssd_fwd(y, state, *inputs)
    return y, state


def check_results(inputs, y, state):
    x, dt, _, _, a, _ = inputs
    relative = 0.0
    if x.numel():        # a weight's exponent is the difference of two sums of dt a over a chunk; e^-150 is nothing
        longest = (dt * -a).double().unfold(1, min(CHUNK, x.shape[1]), 1).sum(3).clamp(max=150).max()
        relative = 2**-23 * (16 + float(longest))
    for name, found, plain, exact in zip(("y", "state"), (y, state), by_chunks(*inputs), recurrence(*inputs)):
        check_error(name, found, plain, exact, 2, (relative, 0.0))


# The GPU copies dt by rows of 4 heads.
WHERE = [(case, "cpu") for case in AWKWARD + ODD]
WHERE += [pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in AWKWARD + ODD if case.heads % 4 == 0]


@pytest.mark.parametrize("case, device", WHERE, ids=str)
def test_awkward(case, device, one_thread):
    inputs = inputs_of(case, device)
    check_results(inputs, *run(inputs, case.dim, case.state))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [random_case(i) for i in range(60)], ids=str)
def test_random(case, device, one_thread):
    inputs = inputs_of(case, device)
    check_results(inputs, *run(inputs, case.dim, case.state))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [random_case(i) for i in range(100, 130)] + AWKWARD[:4] + AWKWARD[-4:], ids=str)
def test_writes_outputs_only(case, device, one_thread):
    inputs = inputs_of(case, device)
    y = Guarded((case.batch, case.steps, case.heads, case.dim), torch.bfloat16, device, case.seed % 2)
    state = Guarded((case.batch, case.heads, case.dim, case.state), torch.float32, device)
    before = [t.clone() for t in inputs]
    _C.ssd_fwd(y.view, state.view, *inputs)
    y.check("y")
    state.check("state")
    assert all(map(torch.equal, inputs, before)), "an input was written"
    check_results(inputs, y.view, state.view)


@pytest.mark.parametrize("device", DEVICES)
def test_y_with_gaps(device, one_thread):
    """What is between the rows of y stays as it was."""
    case = Case(7, steps=129, batch=2, heads=8, dim=40, state=72)
    inputs = inputs_of(case, device)
    wide = torch.full((2, 129, 8, 64), math.nan, dtype=torch.bfloat16, device=device)
    state = torch.full((2, 8, 40, 72), math.nan, device=device)
    _C.ssd_fwd(wide[..., 16:56], state, *inputs)
    check_results(inputs, wide[..., 16:56], state)
    assert wide[..., :16].isnan().all() and wide[..., 56:].isnan().all()


def test_nan_stays_in_its_head(one_thread):
    """NaN in x reaches its own head from its step on, and nothing else."""
    case = Case(8, steps=200, batch=2, heads=8, state=128)
    inputs = inputs_of(case)
    y, state = run(inputs, case.dim, case.state)
    inputs[0][1, 130, 5] = math.nan
    found_y, found_state = run(inputs, case.dim, case.state)
    assert found_y[1, 130:, 5].isnan().all() and found_state[1, 5].isnan().all()
    found_y[1, 128:, 5], found_state[1, 5] = y[1, 128:, 5], state[1, 5]        # a product is of a chunk: 0 times NaN
    assert torch.equal(found_y, y) and torch.equal(found_state, state)


def test_check_can_fail(one_thread):
    """An element off by one typical magnitude is found, a step left out, and a state that is not decayed once."""
    case = Case(9, steps=300, state=128)
    inputs = inputs_of(case)
    y, state = run(inputs, case.dim, case.state)
    check_results(inputs, y, state)
    off, without, late = y.clone(), y.clone(), state.clone()
    off[0, 100, 2, 7] += float(y.float().abs().mean())
    without[0, 64] = y[0, 63]
    late[:, 3] *= 1.01
    for wrong in ((off, state), (without, state), (y, late), (y * 1.01, state), (torch.nextafter(y, y * 0), state)):
        with pytest.raises(AssertionError):
            check_results(inputs, *wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 128])
def test_repeats_bitwise(n):
    inputs = inputs_of(Case(1, steps=1000, batch=2, heads=8, state=n), "cuda")
    first = run(inputs, 64, n)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(run(inputs, 64, n), first))


@pytest.mark.parametrize("wrong, message", [
    (dict(groups=3),
     r"ssd_fwd: H = 4 \(dimension 2 of x\), G = 3 \(dimension 2 of b\), expected H == 0 \|\| \(G > 0 && H % G == 0\)"),
    (dict(state=0), r"ssd_fwd: N = 0 \(dimension 3 of b\), expected N > 0"),
])
def test_refused(wrong, message):
    case = Case(0, **dict(steps=5, dim=8, state=16) | wrong)
    with pytest.raises(ValueError, match=message):
        run(inputs_of(case), case.dim, case.state)


def test_no_kernel():
    with pytest.raises(NotImplementedError,
                       match="(?s)ssd_fwd: no kernel for bfloat16.*ssd_fwd_bf16_n128 needs P <= 64 && N <= 128"):
        run(inputs_of(Case(0, steps=5, dim=8, state=129)), 8, 129)
