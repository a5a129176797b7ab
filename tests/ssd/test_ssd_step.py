"""ssd_step against float64: random problems, several steps at once, states in a pool, memory in any order."""

import random

import pytest
import torch

import margay as mg
from cases import DEVICES
from margay.families import steps as of_torch
from step_cases import Draw, compare, host

LOW, HIGH = 0.01, 2.0


def expected(state, x, dt, a, b, c, d, z, bias, at, softplus):
    """y in float64, the states afterwards, and what the magnitudes of the terms of both add up to."""
    batch, steps, heads, dim = x.shape
    after, large, y, size = state.double().clone(), state.double().abs(), x.double() * 0, x.double() * 0
    for i in range(batch):
        slot = i if at is None else int(at[i])
        if slot < 0:
            continue
        for t in range(steps):
            step = dt[i, t].double() + (0 if bias is None else bias.double())
            step = (torch.nn.functional.softplus(step) if softplus else step).clamp(LOW, HIGH)
            wide, n, m = x[i, t].double(), *(u[i, t].double().repeat_interleave(heads // u.shape[2], 0) for u in (b, c))
            decay, new = torch.exp(step * a.double())[:, None, None], (step[:, None] * wide)[..., None] * n[:, None]
            after[slot], large[slot] = decay * after[slot] + new, decay * large[slot] + new.abs()
            skip = 0 if d is None else wide * (d.double() if d.ndim == 2 else d.double()[:, None])
            gate = 1 if z is None else torch.nn.functional.silu(z[i, t].double())
            y[i, t] = ((after[slot] * m[:, None]).sum(-1) + skip) * gate
            size[i, t] = ((large[slot] * m[:, None].abs()).sum(-1) + abs(skip)) * abs(gate)
    return y, size, after, large


@pytest.mark.parametrize("device", DEVICES)
def test_random_problems(device):
    first = random.randrange(1 << 30)
    for seed in range(first, first + (500 if device == "cuda" else 200)):
        p = Draw(seed, device)
        r, wide = p.r, lambda: r.choice((torch.float32, p.dtype))  # noqa: E731
        heads, dim, n = p.groups * r.choice((1, 3)), r.choice((1, 7, 16, 63, 64, 65, 130)), r.choice(
            (1, 3, 4, 63, 64, 65, 100, 127, 128, 129, 255, 256))
        lead = (p.batch, p.steps)
        x, dt, a = p.new(*lead, heads, dim), p.new(*lead, heads, dtype=wide()), -torch.rand(heads, generator=p.g) * 4
        b, c, z = p.new(*lead, p.groups, n), p.new(*lead, p.groups, n), p.maybe(*lead, heads, dim)
        d = p.maybe(heads, dim, dtype=wide()) if p.yes(0.3) else p.maybe(heads, dtype=wide())
        bias, softplus, (places, at), a = p.maybe(heads, dtype=wide()), p.yes(), p.slots(), a.to(device)
        state = p.new(places, heads, dim, n, dtype=p.state_dtype)
        label = f"{p.label} {heads}x{dim}x{n} G={p.groups} at={at} soft={softplus}"
        exact = expected(*host(state, x, dt, a, b, c, d, z, bias, at), softplus)
        one = lambda t: t if t is None or p.several else t[:, 0]  # noqa: E731
        out = mg.ssd_step(state, one(x), one(dt), a, one(b), one(c), D=d, z=one(z), dt_bias=bias, dt_softplus=softplus,
                          dt_limit=(LOW, HIGH), state_indices=at)
        compare(label, out if p.several else out[:, None], state, *exact, p.dtype)


def inputs(batch=2, heads=4, dim=8, n=16, dtype=torch.bfloat16, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    tensors = (new(batch, heads, dim, n), new(batch, heads, dim).to(dtype), new(batch, heads),
               -new(heads).exp(), new(batch, 1, n).to(dtype), new(batch, 1, n).to(dtype))
    return [t.to(device) for t in tensors]


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    state, *rest = inputs(device=device)
    other, at = state.clone(), torch.tensor([1, -1], device=device)
    plain = mg.ssd_step(state, *rest, dt_softplus=True, state_indices=at)
    compiled = torch.compile(lambda s, *rest: mg.ssd_step(s, *rest, dt_softplus=True, state_indices=at) + 1,
                             backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(other, *rest), plain + 1) and torch.equal(state, other)


def test_what_has_no_kernel():
    """Mixtures of types give what torch's operations give."""
    state, x, dt, a, b, c = inputs()
    for kind, dtype, inner in ((torch.float64, torch.bfloat16, torch.bfloat16), (torch.float16, torch.bfloat16, None),
                               (torch.float32, torch.bfloat16, torch.float32)):
        mine, other = state.to(kind).clone(), state.to(kind).clone()
        given = x.to(dtype), dt, a, b.to(inner or dtype), c.to(inner or dtype)
        found = mg.ssd_step(mine, *given)
        torch_ = of_torch._ssd_by_torch(other, *given, None, None, None, None, False, 0.0, float("inf"))
        assert torch.equal(found, torch_) and torch.equal(mine, other)


def test_a_version_is_counted_and_parameters_are_taken():
    state, x, dt, a, b, c = inputs()
    version = state._version
    y = mg.ssd_step(state, x, dt, torch.nn.Parameter(a), b, c)
    assert state._version > version and not y.requires_grad


def test_of_no_memory():
    tensors = [t.to("meta") for t in inputs()]
    assert mg.ssd_step(*tensors).shape == mg.ssd_step(*inputs()).shape


def test_refused():
    state, x, dt, a, b, c = inputs()
    for given, error, words in (
            (dict(x=x[0]), ValueError, "x has shape [4, 8], expected 3 dimensions"),
            (dict(dt=dt[:1]), ValueError, "dt has shape [1, 4], expected [2, 4]"),
            (dict(state=state[:1]), ValueError, "state has shape [1, 4, 8, 16], expected [2, 4, 8, 16]"),
            (dict(B=torch.cat((b, b, b), 1)), ValueError, "B has 3 groups, expected a divisor of the 4 heads"),
            (dict(state=state[:1].expand(2, 4, 8, 16)), BufferError, "its elements may share memory"),
            (dict(state_indices=torch.ones(2)), ValueError, "expected 2 integers"),
            (dict(D=a[:3]), ValueError, "D has shape [3], expected [4]"),
            (dict(state_indices=a[:1].int()), ValueError, "expected 2 integers"),
            (dict(A=1.0), TypeError, "A is float, expected torch.Tensor"),
            (dict(x=x.numpy() if x.dtype == torch.float32 else x.float().numpy()), TypeError, "x is ndarray")):
        named = dict(state=state, x=x, dt=dt, A=a, B=b, C=c) | given
        with pytest.raises(error) as raised:
            mg.ssd_step(**named)
        assert words in str(raised.value)


@pytest.mark.gpu
def test_captured():
    state, *rest = inputs(device="cuda")
    other = state.clone()
    mg.ssd_step(other, *rest)
    other.copy_(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mg.ssd_step(other, *rest)
    other.copy_(state)
    for _ in range(3):
        graph.replay()
        assert torch.equal(mg.ssd_step(state, *rest), out) and torch.equal(state, other)
