"""causal_conv1d, its gradients and its step against float64, on odd sizes and memory, through every face."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import margay as mg
from cases import DEVICES, check_error

LENGTHS = (1, 2, 3, 4, 13, 15, 16, 17, 63, 64, 65, 200, 333)
KINDS = ("plain", "states", "packed", "packed states", "seq_idx", "seq_idx states")


def one(x, past, weight, bias, silu):
    """A sequence [T, C] behind its past [W - 1, C]: out and the new past."""
    e = torch.cat([past.to(x.dtype), x])
    w = weight.shape[1]
    a = sum(e[k:k + x.shape[0]] * weight[:, k] for k in range(w))
    a = a if bias is None else a + bias
    return F.silu(a) if silu else a, e[e.shape[0] - w + 1:]


def formula(x, weight, bias=None, initial=None, cu_seqlens=None, seq_idx=None, silu=False):
    """out and final states, in the arguments' own precision, differentiable."""
    zeros, outs, finals = x.new_zeros(weight.shape[1] - 1, x.shape[2]), [], []
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        for i, (first, end) in enumerate(zip(starts, starts[1:])):
            out, final = one(x[0, first:end], zeros if initial is None else initial[i], weight, bias, silu)
            outs.append(out)
            finals.append(final)
        outs.append(x.new_zeros(x.shape[1] - starts[-1], x.shape[2]))
        return torch.cat(outs)[None], torch.stack(finals)
    for b, rows in enumerate(x):
        numbers = [0] * len(rows) if seq_idx is None else seq_idx[b].tolist()
        cuts = [t for t in range(1, len(rows)) if numbers[t] != numbers[t - 1]]
        parts, final = [], None
        for first, end in zip([0, *cuts], [*cuts, len(rows)]):
            past = initial[b] if initial is not None and first == 0 else zeros
            out, final = one(rows[first:end], past, weight, bias, silu)
            parts.append(out if numbers[first] >= 0 else out * 0)
        outs.append(torch.cat(parts))
        finals.append(final)
    return torch.stack(outs), torch.stack(finals)


class Problem:
    def __init__(self, seed, device, dtypes, shape=None, kind=None, silu=None):
        r, g = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype, w = r.choice(dtypes), r.choice((2, 3, 4))
        kind, self.silu = kind or r.choice(KINDS), r.random() < 0.6 if silu is None else silu
        b, t, c = shape or (r.choice((1, 2, 3)), r.choice(LENGTHS), r.choice((1, 7, 8, 64, 250, 256, 264, 520)))
        b = 1 if "packed" in kind else b
        gap = r.choice((0, 0, 16))                 # x is a slice of a wider tensor
        wide = r.choice((torch.float32, self.dtype))

        def make(*size, dtype=self.dtype, gap=0):
            t = torch.randn(*size[:-1], size[-1] + gap, generator=g).to(device, dtype)
            return t[..., gap // 2:gap // 2 + size[-1]].detach().requires_grad_()
        self.tensors = {"x": make(b, t, c, gap=gap), "weight": make(c, w, dtype=wide)}
        if r.random() < 0.6:
            self.tensors["bias"] = make(c, dtype=wide)
        self.cu_seqlens = self.seq_idx = None
        places = b
        if "packed" in kind:
            ends = sorted(r.randint(0, t) for _ in range(r.choice((1, 2, 5, 20))))
            ends[-1] = t if r.random() < 0.6 else ends[-1]
            self.cu_seqlens, places = torch.tensor([0, *ends], dtype=torch.int32, device=device), len(ends)
        if "seq_idx" in kind:
            steps = torch.rand(b, t, generator=g) < r.choice((0.02, 0.3))
            self.seq_idx = (steps.cumsum(1) - r.choice((0, 1))).to(device, torch.int32)
        if "states" in kind:
            self.tensors["initial_states"] = make(places, w - 1, c, gap=gap)
        self.dout, self.dfinal = make(b, t, c).detach(), make(places, w - 1, c).detach()
        self.label = (f"seed {seed}: {kind} {self.dtype} {[b, t, c]} W={w} silu={self.silu} weight {wide} gap {gap} "
                      f"bias {'bias' in self.tensors}")

    def results(self, function, cast=lambda t: t):
        """out, final states and all gradients, by name."""
        given = {name: cast(t.detach()).requires_grad_() for name, t in self.tensors.items()}
        out, final = function(given)
        grads = torch.autograd.grad((out, final), list(given.values()),
                                    (self.dout.to(out.dtype), self.dfinal.to(final.dtype)),
                                    allow_unused=True)
        found = {"out": out.detach(), "final_states": final.detach()}
        return found | {"d" + name: torch.zeros_like(t) if grad is None else grad
                        for (name, t), grad in zip(given.items(), grads)}

    def ours(self):
        return self.results(lambda g: mg.causal_conv1d(**g, activation="silu" if self.silu else None,
                                                       return_final_states=True,
                                                       cu_seqlens=self.cu_seqlens, seq_idx=self.seq_idx))

    def in_dtype(self, dtype):
        call = lambda g: formula(g["x"], g["weight"], g.get("bias"), g.get("initial_states"),  # noqa: E731
                                 self.cu_seqlens, self.seq_idx, self.silu)
        return self.results(call, lambda t: t.to(dtype))

    def check(self):
        print(self.label)
        ours, plain, exact = self.ours(), self.in_dtype(self.dtype), self.in_dtype(torch.float64)
        for name, found in ours.items():
            if name == "final_states":
                assert torch.equal(found, exact[name].to(found.dtype)), self.label
                continue
            tiny = 8 * torch.finfo(found.dtype).eps * (1 + float(exact[name].abs().max()) if exact[name].numel() else 0)
            check_error(f"{self.label}: {name}", found, plain[name], exact[name],
                        3 if name[0] == "d" else 2, (1e-5, tiny))
            assert found.dtype == (self.tensors[name[1:]].dtype if name[0] == "d" else self.dtype)


def dtypes_of(device):
    return (torch.bfloat16, torch.float16) if device == "cuda" else (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_random_problems(device):
    first = random.randrange(1 << 30)
    for seed in range(first, first + (500 if device == "cuda" else 200)):
        Problem(seed, device, dtypes_of(device)).check()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_lengths(device, kind, length):
    Problem(length, device, dtypes_of(device)[-1:], (2, length, 264), kind).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 5000, 40), (3, 1111, 600)])
def test_many_segments(device, shape):
    """Sequences that are cut into segments, whose first tile is that of another."""
    Problem(3, device, dtypes_of(device)[:1], shape, "plain", True).check()


@pytest.mark.parametrize("device", DEVICES)
def test_parts_follow_each_other(device):
    """States carried across calls give one long call; packed sequences give the separate ones; a step is a short
    call."""
    p = Problem(5, device, dtypes_of(device)[:1], (2, 150, 72), "plain", True)
    x, weight = p.tensors["x"].detach(), p.tensors["weight"].detach()
    out, final = mg.causal_conv1d(x, weight, activation="silu", return_final_states=True)
    states, parts = None, []
    for part in x.split([1, 2, 60, 16, 71], 1):
        y, states = mg.causal_conv1d(part, weight, activation="silu", initial_states=states, return_final_states=True)
        parts.append(y)
    assert torch.equal(torch.cat(parts, 1), out) and torch.equal(states, final)
    starts = torch.tensor([0, 150, 300], dtype=torch.int32, device=device)
    packed = mg.causal_conv1d(x.reshape(1, 300, 72), weight, activation="silu", cu_seqlens=starts)
    assert torch.equal(packed.view_as(out), out)


@pytest.mark.parametrize("device", DEVICES)
def test_repeats_bit_by_bit(device):
    p = Problem(6, device, dtypes_of(device)[:1], (2, 700, 264), "plain", True)
    first = p.ours()
    for _ in range(3):
        assert all(torch.equal(a, first[name]) for name, a in p.ours().items())


@pytest.mark.parametrize("w", (2, 3, 4))
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_stays_where_it_is(device, w):
    """A NaN is seen by W steps of its channel, in the sequence's order, and by nobody else; its gradient likewise."""
    x = torch.randn(1, 60, 16, device=device).to(torch.bfloat16)
    x[0, 30, 5] = float("nan")
    x.requires_grad_()
    out = mg.causal_conv1d(x, torch.ones(16, w, device=device), activation="silu")
    assert sorted(map(tuple, out[0].isnan().nonzero().tolist())) == [(t, 5) for t in range(30, 30 + w)]
    out.nan_to_num(0).sum().backward()
    assert sorted({c for _, c in x.grad[0].isnan().nonzero().tolist()}) in ([], [5])


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    weight = torch.ones(8, 4, device=device, requires_grad=True)
    for b, t in ((0, 5), (2, 0)):
        x = torch.zeros(b, t, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
        out, final = mg.causal_conv1d(x, weight, return_final_states=True)
        assert out.shape == (b, t, 8) and final.shape == (b, 3, 8) and not final.any()
        assert not torch.autograd.grad(out.sum(), weight)[0].any()


def test_numpy():
    x, weight, bias = (np.random.default_rng(0).standard_normal(s).astype(np.float32)
                       for s in ((2, 70, 24), (24, 3), (24,)))
    out, final = mg.causal_conv1d(x, weight, bias, activation="swish", return_final_states=True)
    exact, _ = formula(*(torch.tensor(a, dtype=torch.float64) for a in (x, weight, bias)), silu=True)
    assert isinstance(out, np.ndarray) and np.allclose(out, exact.numpy(), atol=1e-5) and (final == x[:, -2:]).all()


def test_compiled_and_vmapped():
    p = Problem(9, "cpu", (torch.float32,), (2, 40, 16), "states", True)
    t = {name: tensor.detach() for name, tensor in p.tensors.items()}
    call = lambda x, weight, initial: mg.causal_conv1d(x, weight, activation="silu",  # noqa: E731
                                                       initial_states=initial)
    plain = call(t["x"], t["weight"], t["initial_states"])
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(t["x"], t["weight"], t["initial_states"]), plain)
    x = torch.stack([t["x"], t["x"] * 2])
    both = torch.vmap(lambda x: mg.causal_conv1d(x, t["weight"]))(x)
    assert torch.equal(both[1], mg.causal_conv1d(x[1], t["weight"]))


def test_refusals():
    x, weight = torch.zeros(1, 9, 8, dtype=torch.bfloat16), torch.zeros(8, 4)
    starts = lambda *n: torch.tensor(n, dtype=torch.int32)  # noqa: E731
    for call, error, words in (
            (lambda: mg.causal_conv1d(x, weight, activation="relu"), ValueError, "causal_conv1d: activation is 'relu'"),
            (lambda: mg.causal_conv1d(x, torch.zeros(8, 5)), ValueError,
             "causal_conv1d: W = 5 (dimension 1 of weight), expected W >= 2 && W <= 4"),
            (lambda: mg.causal_conv1d(x, torch.zeros(7, 4)), ValueError,
             "causal_conv1d: weight has size 7 in dimension 0, expected 8 (C of x)"),
            (lambda: mg.causal_conv1d(x, weight.half()), TypeError,
             "causal_conv1d: weight has dtype float16, expected float32 or bfloat16 (as x)"),
            (lambda: mg.causal_conv1d(x, weight, initial_states=torch.zeros(1, 2, 8, dtype=x.dtype)),
             ValueError, "PAST = 2 (dimension 1 of initial_states), expected states of W - 1 steps"),
            (lambda: mg.causal_conv1d(x, weight, cu_seqlens=starts(0, 5, 10)),
             ValueError, "causal_conv1d: cu_seqlens[2] is 10, expected 5 to 9"),
            (lambda: mg.causal_conv1d(x, weight, cu_seqlens=starts(0, 5, 4)),
             ValueError, "causal_conv1d: cu_seqlens[2] is 4, expected 5 to 9"),
            (lambda: mg.causal_conv1d(x, weight, cu_seqlens=starts(1, 9)), ValueError,
             "causal_conv1d: cu_seqlens[0] is 1, expected 0 to 0"),
            (lambda: mg.causal_conv1d(x, weight, cu_seqlens=starts(0, 9), seq_idx=starts(*range(9))[None]),
             ValueError, "at most one of them"),
            (lambda: mg.causal_conv1d(torch.cat([x, x]), weight, cu_seqlens=starts(0, 9)),
             ValueError, "B = 2 (dimension 0 of x), expected B == 1")):
        with pytest.raises(error) as raised:
            call()
        assert words in str(raised.value)
