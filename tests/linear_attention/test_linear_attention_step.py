"""linear_attention_step against float64: random problems, several steps at once, states in a pool, memory in any
order."""

import random

import pytest
import torch

import margay as mg
from cases import DEVICES
from margay.families import steps as of_torch
from step_cases import Draw, compare, host


def expected(state, q, k, v, g, at, scale):
    """out in float64 with what its terms add up to, and the states afterwards."""
    batch, steps, heads, _ = q.shape
    after, out, size = state.double().clone(), v.double() * 0, v.double() * 0
    for i in range(batch):
        slot = i if at is None else int(at[i])
        if slot < 0:
            continue
        for t in range(steps):
            now = torch.zeros(heads).double() if g is None else (g if g.ndim == 1 else g[i, t]).double().clamp(min=-64)
            after[slot] = now.exp()[:, None, None] * after[slot]
            after[slot] += k[i, t].double()[..., None] * v[i, t].double()[:, None]
            terms = scale * q[i, t].double()[..., None] * after[slot]
            out[i, t], size[i, t] = terms.sum(1), terms.abs().sum(1)
    return out, size, after


@pytest.mark.parametrize("device", DEVICES)
def test_random_problems(device):
    first = random.randrange(1 << 30)
    for seed in range(first, first + (300 if device == "cuda" else 120)):
        p = Draw(seed, device)
        r, lead, heads = p.r, (p.batch, p.steps), p.r.choice((1, 2, 5))
        dim, dim_v = (r.choice((1, 3, 4, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 256)) for _ in range(2))
        q, k, v = p.new(*lead, heads, dim), p.new(*lead, heads, dim), p.new(*lead, heads, dim_v)
        form = (None, (heads,), (*lead, heads))[r.randrange(3)]
        g = None if form is None else p.new(*form, dtype=r.choice((torch.float32, p.dtype))).abs().neg()
        (places, at), scale = p.slots(), r.choice((None, 0.3))
        state = p.new(places, heads, dim, dim_v, dtype=p.state_dtype)
        label = f"{p.label} {heads}x{dim}x{dim_v} at={at} g={form} scale={scale}"
        exact, size, after = expected(*host(state, q, k, v, g, at), scale or dim ** -0.5)
        one = lambda t: t if p.several else t[:, 0]  # noqa: E731
        out = mg.linear_attention_step(state, one(q), one(k), one(v), g if form is None or len(form) == 1 else one(g),
                                       scale=scale, state_indices=at)
        compare(label, out if p.several else out[:, None], state, exact, size, after, p.dtype)


def inputs(batch=2, heads=3, dim=8, dim_v=16, dtype=torch.bfloat16, device="cpu"):
    g = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    tensors = (new(batch, heads, dim, dim_v), new(batch, heads, dim).to(dtype), new(batch, heads, dim).to(dtype),
               new(batch, heads, dim_v).to(dtype), -new(batch, heads).abs())
    return [t.to(device) for t in tensors]


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    state, *rest = inputs(device=device)
    other, at = state.clone(), torch.tensor([1, -1], device=device)
    plain = mg.linear_attention_step(state, *rest, state_indices=at)
    compiled = torch.compile(lambda s, *rest: mg.linear_attention_step(s, *rest, state_indices=at) + 1,
                             backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(other, *rest), plain + 1) and torch.equal(state, other)


def test_what_has_no_kernel():
    """Mixtures of types give what torch's operations give."""
    state, q, k, v, g = inputs()
    for kind, inner in ((torch.float64, torch.bfloat16), (torch.float16, torch.bfloat16),
                        (torch.float32, torch.float32)):
        mine, other = state.to(kind).clone(), state.to(kind).clone()
        found = mg.linear_attention_step(mine, q, k.to(inner), v, g)
        torch_ = of_torch._linear_attention_by_torch(other, q, k.to(inner), v, g, None, 8 ** -0.5)
        assert torch.equal(found, torch_) and torch.equal(mine, other)


def test_refused():
    state, q, k, v, g = inputs()
    for given, error, words in (
            (dict(q=q[0]), ValueError, "q has shape [3, 8], expected 3 dimensions"),
            (dict(k=k[:1]), ValueError, "k has shape [1, 3, 8], expected [2, 3, 8]"),
            (dict(state=state[:1]), ValueError, "state has shape [1, 3, 8, 16], expected [2, 3, 8, 16]"),
            (dict(state=state[:1].expand(2, 3, 8, 16)), BufferError, "its elements may share memory"),
            (dict(g=g[:, :2]), ValueError, "g has shape [2, 2], expected [3] or [2, 3]"),
            (dict(state_indices=torch.ones(2)), ValueError, "expected 2 integers"),
            (dict(scale=-1.0), ValueError, "scale is -1, expected a positive finite number"),
            (dict(q=q.float().numpy()), TypeError, "q is ndarray")):
        named = dict(state=state, q=q, k=k, v=v, g=g) | given
        with pytest.raises(error) as raised:
            mg.linear_attention_step(**named)
        assert words in str(raised.value)


@pytest.mark.gpu
def test_captured():
    state, *rest = inputs(device="cuda")
    other = state.clone()
    mg.linear_attention_step(other, *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mg.linear_attention_step(other, *rest)
    other.copy_(state)
    for _ in range(3):
        graph.replay()
        assert torch.equal(mg.linear_attention_step(state, *rest), out) and torch.equal(state, other)
