"""causal_conv1d_step against float64, its state against copies, and a sequence step by step."""

import random

import pytest
import torch

import margay as mg
from cases import DEVICES


def expected(x, state, weight, bias, used, slots, silu):
    """out in float64, and the state afterwards."""
    (b, t, c), w, length = x.shape, weight.shape[1], state.shape[1]
    after, out = state.clone(), torch.zeros(b, t, c, dtype=torch.float64)
    for i in range(b):
        slot, n = i if slots is None else int(slots[i]), 0 if used is None else int(used[i])
        if slot < 0:
            continue
        past = [state[slot, (n - w + 1 + k) % length if used is not None else length - w + 1 + k] for k in range(w - 1)]
        e = torch.stack([*past, *x[i]]).double()
        a = sum(e[k:k + t] * weight[:, k].double() for k in range(w)) + (0 if bias is None else bias.double())
        out[i] = a * torch.sigmoid(a) if silu else a
        if used is None:
            after[slot] = torch.cat([state[slot], x[i]])[-length:]
        else:
            for k in range(t):
                after[slot, (n + k) % length] = x[i, k]
    return out, after


@pytest.mark.parametrize("device", DEVICES)
def test_random_steps(device):
    first = random.randrange(1 << 30)
    for seed in range(first, first + (500 if device == "cuda" else 200)):
        r, g = random.Random(seed), torch.Generator().manual_seed(seed)
        dtype, w = r.choice((torch.bfloat16, torch.float16) + (torch.float32,) * (device == "cpu")), r.choice((2, 3, 4))
        b, t, c = r.choice((1, 2, 5)), r.choice((1, 1, 1, 2, 3, 4, 5, 8, 20)), r.choice((1, 7, 64, 255, 257, 600))
        length, places, turned = w - 1 + r.choice((0, 1, 2, 9, 12)), b + r.choice((0, 3)), r.random() < 0.5
        make = lambda *size, dtype=dtype: torch.randn(*size, generator=g).to(dtype)  # noqa: E731
        x, wide = make(b, t, c), r.choice((torch.float32, dtype))
        state = make(places, c, length).transpose(1, 2) if turned else make(places, length, c)
        weight, bias, silu = make(c, w, dtype=wide), make(c, dtype=wide) if r.random() < 0.5 else None, r.random() < 0.5
        used = torch.randint(0, 100, (b,), generator=g, dtype=torch.int32) if r.random() < 0.4 else None
        slots = [i if r.random() < 0.8 else -1 for i in torch.randperm(places, generator=g)[:b].tolist()]
        slots = torch.tensor(slots, dtype=torch.int32) if r.random() < 0.6 else None
        label = (f"seed {seed}: {dtype} {[b, t, c]} W={w} L={length} turned={turned} ring={used is not None} "
                 f"slots={slots}")
        exact, after = expected(x, state, weight, bias, used, slots, silu)
        there = [None if a is None else a.to(device) for a in (x, state, weight, bias, used, slots)]
        assert there[1].stride() == state.stride()
        out = mg.causal_conv1d_step(*there[:4], activation="silu" if silu else None,
                                    cache_seqlens=there[4], slots=there[5])
        error = (out.double().cpu() - exact).abs()
        assert (error <= torch.finfo(dtype).eps * exact.abs() + 1e-5).all(), f"{label}: {float(error.max())}"
        assert torch.equal(there[1].cpu(), after), label


@pytest.mark.parametrize("device", DEVICES)
def test_a_thousand_steps_are_one_call(device):
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(2, 1000, 24, generator=g).to(device, torch.bfloat16),
                 torch.randn(24, 4, generator=g).to(device))
    out, final = mg.causal_conv1d(x, weight, activation="silu", return_final_states=True)
    state = torch.zeros(2, 3, 24, dtype=x.dtype, device=device)
    ring = torch.zeros(2, 24, 5, dtype=x.dtype, device=device).transpose(1, 2)
    for t in range(1000):
        used = torch.full((2,), t, dtype=torch.int32, device=device)
        assert torch.equal(mg.causal_conv1d_step(x[:, t:t + 1], state, weight, activation="silu"), out[:, t:t + 1])
        now = mg.causal_conv1d_step(x[:, t:t + 1], ring, weight, activation="silu", cache_seqlens=used)
        assert torch.equal(now, out[:, t:t + 1])
    assert torch.equal(state, final)


def test_compiled_and_refused():
    x, state, weight = torch.randn(2, 1, 8), torch.randn(2, 3, 8), torch.randn(8, 4)
    other = state.clone()
    plain = mg.causal_conv1d_step(x, state, weight)
    compiled = torch.compile(lambda x, s: mg.causal_conv1d_step(x, s, weight) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, other), plain + 1) and torch.equal(state, other)
    for call, error, words in (
            (lambda: mg.causal_conv1d_step(x, state[:, :2], weight), ValueError,
             "expected a state of at least W - 1 steps"),
            (lambda: mg.causal_conv1d_step(x, state[:1], weight), ValueError, "expected a state of at least B places"),
            (lambda: mg.causal_conv1d_step(x, state.half(), weight), TypeError,
             "state has dtype float16, expected float32"),
            (lambda: mg.causal_conv1d_step(x, state, weight.requires_grad_()),
             NotImplementedError, "requires a gradient")):
        with pytest.raises(error) as raised:
            call()
        assert words in str(raised.value)
