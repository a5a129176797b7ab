"""linear_attention and its gradients against the recurrence in float64, on odd sizes and memory, through every face."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import margay as mg
from cases import DEVICES, check_error
from margay import _C, _op

SHAPES = (((1, 1, 1, 1, 1), (2, 63, 3, 64, 64), (1, 65, 2, 17, 40), (2, 200, 2, 128, 96), (1, 130, 1, 72, 128),
           (3, 256, 1, 33, 7)))


def reference(q, k, v, scale, state=None, g=None):
    """out and the last state of the recurrence, in float64, differentiable."""
    q, k, v = (t.double() for t in (q, k, v))
    b, steps, h, d = q.shape
    s = torch.zeros(b, h, d, v.shape[3], dtype=torch.float64, device=q.device) if state is None else state.double()
    rows = []
    for t in range(steps):
        if g is not None:
            s = s * (g if g.ndim == 1 else g[:, t]).double().clamp(min=-64)[..., None, None].exp()
        s = s + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append(scale * (q[:, t, :, None, :] @ s)[:, :, 0])
    return torch.stack(rows, 1), s


def plain(q, k, v, scale, state=None):
    """The same in the inputs' own precision, as PyTorch would: one masked product and one with the state."""
    x = torch.einsum("bihd,bjhd->bhij", q, k).tril()
    out = torch.einsum("bhij,bjhd->bihd", x, v)
    s = torch.einsum("bthk,bthv->bhkv", k.float(), v.float())
    if state is not None:
        out = out + torch.einsum("bthk,bhkv->bthv", q, state.to(q.dtype))
        s = s + state
    return (out * scale).to(q.dtype), s


def by_chunks(q, k, v, scale, state, g, size=64):
    """With decay: by chunks, products in the inputs' own precision, the state in float32."""
    dtype, (b, steps, h, d) = q.dtype, q.shape
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    g = g.expand(b, steps, h).clamp(min=-64).transpose(1, 2)
    s = torch.zeros(b, h, d, v.shape[3], device=q.device) if state is None else state
    out = []
    for i in range(0, steps, size):
        x, y, z, l = q[:, :, i:i + size], k[:, :, i:i + size], v[:, :, i:i + size], g[:, :, i:i + size].cumsum(2)
        n = l.shape[2]
        later = torch.ones(n, n, dtype=torch.bool, device=l.device).tril()
        weights = (l[..., :, None] - l[..., None, :]).masked_fill(~later, -torch.inf).exp()
        scores = ((x @ y.mT).float() * weights).to(dtype)
        out.append(scale * ((scores @ z).float() + l.exp()[..., None] * (x @ s.to(dtype)).float()))
        taken = (z.float() * (l[..., -1:] - l).exp()[..., None]).to(dtype)
        s = s * l[..., -1, None, None].exp() + (y.mT @ taken).float()
    return torch.cat(out, 2).transpose(1, 2).to(dtype), s


def problem(shape, dtype, device, seed, with_state):
    b, steps, h, d, dv = shape
    g = torch.Generator().manual_seed(seed)
    make = lambda *size, dtype=dtype: torch.randn(size, generator=g).to(device, dtype).requires_grad_()  # noqa: E731
    q, k, v = make(b, steps, h, d), make(b, steps, h, d), make(b, steps, h, dv)
    state = make(b, h, d, dv, dtype=torch.float32) if with_state else None
    return q, k, v, state, make(b, steps, h, dv), make(b, h, d, dv, dtype=torch.float32)


@pytest.mark.parametrize("with_state", (False, True))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("device", DEVICES)
def test_against_the_recurrence(device, dtype, shape, with_state):
    if device == "cuda" and dtype == "float32":
        pytest.skip("computed on the CPU only")
    dtype = getattr(torch, dtype)
    q, k, v, state, dout, dlast = problem(shape, dtype, device, 1, with_state)
    inputs = [t for t in (q, k, v, state) if t is not None]
    scale, names = shape[3] ** -0.5, ("out", "final_state", "dq", "dk", "dv", "dinitial_state")

    def run(function):
        out, last = function()
        return (out.detach(), last.detach(), *torch.autograd.grad((out, last), inputs,
                                                                  (dout.to(out.dtype), dlast.to(last.dtype))))
    ours = run(lambda: mg.linear_attention(q, k, v, initial_state=state, output_final_state=True))
    exact = run(lambda: reference(q, k, v, scale, state))
    torchs = run(lambda: plain(q, k, v, scale, state))
    # float32: the chunks' sums are added one after the other; tensor cores make a chunk's of four, and cut off what
    # float32 does not hold. A single element: PyTorch's error may be 0 by chance.
    parts = -(-shape[1] // 64) * (4 if device == "cuda" else 1)
    absolute = 0.0 if ours[0].numel() > 1 else 4 * torch.finfo(dtype).eps
    for name, *three in zip(names, ours, torchs, exact):
        relative = parts * torch.finfo(torch.float32).eps if three[0].dtype is torch.float32 else 0.0
        check_error(name, *three, factor=3 if name[0] == "d" else 2, rounding=(relative, absolute))
    out, last, *grads = ours
    assert out.dtype == dtype and last.dtype == torch.float32 and all(g.dtype == t.dtype for g, t in zip(grads, inputs))


GATES = {"head": lambda r, b, t, h: -0.1 * r(h).abs(), "step": lambda r, b, t, h: -0.1 * r(b, t, h).abs(),
         "strong": lambda r, b, t, h: -20 * r(b, t, h).abs(), "zero": lambda r, b, t, h: 0 * r(b, t, h),
         "some forget all": lambda r, b, t, h: torch.where(r(b, t, h) > 1.5, -torch.inf, -0.01)}


@pytest.mark.parametrize("wanted", (False, True), ids=("", "its gradient"))
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("shape", ((1, 1, 1, 16, 16), (2, 63, 3, 64, 64), (1, 65, 2, 17, 40), (2, 200, 2, 128, 96),
                                   (1, 321, 3, 33, 128)))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("device", DEVICES)
def test_decay(device, dtype, shape, kind, wanted):
    if device == "cuda" and dtype == "float32":
        pytest.skip("computed on the CPU only")
    dtype, (b, steps, h, d, dv) = getattr(torch, dtype), shape
    q, k, v, state, dout, dlast = problem(shape, dtype, device, 7, True)
    r = torch.Generator().manual_seed(8)
    g = GATES[kind](lambda *size: torch.randn(size, generator=r), b, steps, h).to(device).requires_grad_(wanted)
    inputs = [q, k, v, state] + [g] * wanted
    scale, names = d ** -0.5, ("out", "final_state", "dq", "dk", "dv", "dinitial_state", "dg")

    def run(function):
        out, last = function()
        grads = torch.autograd.grad((out, last), inputs, (dout.to(out.dtype), dlast.to(last.dtype)))
        return (out.detach(), last.detach(), *grads)
    ours = run(lambda: mg.linear_attention(q, k, v, g, initial_state=state, output_final_state=True))
    assert all(map(torch.equal, ours, run(lambda: mg.linear_attention(q, k, v, g, initial_state=state,
                                                                      output_final_state=True))))
    exact = run(lambda: reference(q, k, v, scale, state, g))
    torchs = run(lambda: by_chunks(q, k, v, scale, state, g))
    # The exponent of a weight is the difference of sums of g over a chunk. Weighted operands of a state's products are
    # rounded: the mean of errors that add up in float32 is not 0 where elements are few.
    longest = min(float(-g.detach().clamp(min=-64).min()) * 64, 64 * 64)
    relative = 2.0**-23 * (16 + longest)
    for name, *three in zip(names, ours, torchs, exact):
        size = three[2].double().abs().max().item()
        absolute = size * relative + (4 * torch.finfo(dtype).eps * size if name == "dg" or steps < 3 else 0)
        few = torch.finfo(dtype).eps / 32 if three[0].dtype == torch.float32 != dtype else 0
        check_error(name, *three, factor=3 if name[0] == "d" else 2, rounding=(relative + few, absolute))


@pytest.mark.parametrize("form", ("none", "head", "step"))
@pytest.mark.parametrize("device", DEVICES)
def test_packed(device, form):
    """As the sequences by themselves, empty ones too; what stands behind a sequence does not reach it."""
    starts = (0, 70, 70, 134, 135, 300)
    q, k, v, _, dout, _ = problem((1, 300, 2, 64, 80), torch.bfloat16, device, 9, False)
    r = torch.Generator().manual_seed(10)
    g = {"none": None, "head": -torch.rand(2, generator=r), "step": -torch.rand(1, 300, 2, generator=r)}[form]
    g = g if g is None else g.to(device).requires_grad_()
    state = torch.randn(5, 2, 64, 80, generator=r).to(device).requires_grad_()
    inputs = [t for t in (q, k, v, g, state) if t is not None]
    out, last = mg.linear_attention(q, k, v, g, initial_state=state, output_final_state=True,
                                    cu_seqlens=torch.tensor(starts, device=device))
    grads = torch.autograd.grad((out, last.sum()), inputs, (dout, None))
    outs, lasts = [], []
    for i, (first, end) in enumerate(zip(starts, starts[1:])):
        part = slice(first, end)
        x, y = mg.linear_attention(q[:, part], k[:, part], v[:, part], g if g is None or g.ndim == 1 else g[:, part],
                                   initial_state=state[i:i + 1], output_final_state=True)
        outs.append(x)
        lasts.append(y)
    assert torch.equal(torch.cat(outs, 1), out) and torch.equal(torch.cat(lasts), last)
    alone = torch.autograd.grad((torch.cat(outs, 1), torch.cat(lasts).sum()), inputs, (dout, None))
    for x, y in zip(grads, alone):
        if x.dtype == torch.float32 and x.ndim == 1:      # sums over all sequences
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-3)
        else:
            torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_normalized(device):
    q, k, v, *_ = problem((2, 150, 2, 32, 48), torch.float32 if device == "cpu" else torch.bfloat16, device, 11, False)
    q, k = q.detach().abs(), k.detach().abs()
    for g in (None, torch.tensor([-0.1, -0.01], device=device)):
        out, (state, z) = mg.linear_attention(q, k, v, g, normalize=True, output_final_state=True)
        ones = torch.ones_like(v[..., :1])
        sums, end = reference(q, k, ones, 32 ** -0.5, None, g)
        want = reference(q, k, v, 32 ** -0.5, None, g)[0] / (sums + 1e-10)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(z.double(), end[..., 0], rtol=1e-4, atol=1e-4)
        first, states = mg.linear_attention(q[:, :64], k[:, :64], v[:, :64], g, normalize=True, output_final_state=True)
        second = mg.linear_attention(q[:, 64:], k[:, 64:], v[:, 64:], g, normalize=True, initial_state=states)
        assert torch.equal(torch.cat((first, second), 1), out)


@pytest.mark.parametrize("device", DEVICES)
def test_step(device):
    """As the sequence, step by step."""
    q, k, v, *_ = problem((2, 1000, 2, 32, 48), torch.bfloat16, device, 12, False)
    g = -torch.rand(2, 1000, 2, generator=torch.Generator().manual_seed(13)).to(device)
    with torch.no_grad():
        out, last = mg.linear_attention(q, k, v, g, output_final_state=True)
        state = torch.zeros_like(last)
        parts = (mg.linear_attention_step(state, q[:, t], k[:, t], v[:, t], g[:, t]) for t in range(1000))
        steps = torch.stack([*parts], 1)
        torch.testing.assert_close(state, last, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(steps, out, rtol=2e-2, atol=2e-2)
        pool = torch.zeros(5, 2, 32, 48, device=device)
        at = torch.tensor([3, -1], device=device)
        one = mg.linear_attention_step(pool, q[:, 0], k[:, 0], v[:, 0], g[0, 0], state_indices=at)
        assert (one[1] == 0).all() and (pool[:3] == 0).all() and (pool[4] == 0).all() and (pool[3] != 0).any()


@pytest.mark.parametrize("device", DEVICES)
def test_parts_follow_each_other(device):
    """The state of one call is the beginning of the next; memory in any order gives the same."""
    q, k, v, *_ = problem((2, 150, 3, 64, 48), torch.bfloat16, device, 2, False)
    with torch.no_grad():
        whole, last = mg.linear_attention(q, k, v, output_final_state=True)
        first, state = mg.linear_attention(q[:, :64], k[:, :64], v[:, :64], output_final_state=True)
        second, end = mg.linear_attention(q[:, 64:], k[:, 64:], v[:, 64:], initial_state=state, output_final_state=True)
        assert torch.equal(torch.cat((first, second), 1), whole)
        assert torch.equal(end, last)
        head_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        assert torch.equal(mg.linear_attention(*head_first), whole)
        gaps = [torch.stack((t, t), -1)[..., 0] for t in (q, k, v)]
        assert torch.equal(mg.linear_attention(*gaps), whole)


@pytest.mark.parametrize("device", DEVICES)
def test_no_steps(device):
    q, k, v, state, *_ = problem((2, 0, 3, 16, 24), torch.bfloat16, device, 3, True)
    out, last = mg.linear_attention(q, k, v, initial_state=state, output_final_state=True)
    assert out.shape == (2, 0, 3, 24) and torch.equal(last, state)
    assert torch.equal(torch.autograd.grad(last.sum(), state)[0], torch.ones_like(state))
    assert (mg.linear_attention(q, k, v, output_final_state=True)[1] == 0).all()


def test_numpy():
    q, k, v, *_ = problem((2, 70, 2, 32, 40), torch.float32, "cpu", 4, False)
    arrays = [t.detach().numpy() for t in (q, k, v)]
    assert np.array_equal(mg.linear_attention(*arrays, scale=0.3),
                          mg.linear_attention(q, k, v, scale=0.3).detach().numpy())
    turned = [np.asfortranarray(a) for a in arrays]
    assert np.array_equal(mg.linear_attention(*turned), mg.linear_attention(*arrays))


@pytest.mark.parametrize("device", DEVICES)
def test_operator(device):
    """As torch.compile and transforms see it."""
    q, k, v, state, dout, _ = problem((2, 100, 2, 32, 48), torch.bfloat16, device, 5, True)
    _op.for_torch("linear_attention")             # a first call would
    torch.library.opcheck(torch.ops.margay.linear_attention.default, (q, k, v, None, None, state, None, 0.5))
    call = lambda q, k, v: mg.linear_attention(q, k, v, initial_state=state.detach())  # noqa: E731
    want = torch.autograd.grad(call(q, k, v), (q, k, v), dout)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v), dout), want))
    grads = torch.func.grad(lambda *t: (call(*t) * dout).sum(), (0, 1, 2))(q.detach(), k.detach(), v.detach())
    for grad, t in zip(grads, want):
        assert torch.equal(grad, t)
    samples = [torch.stack((t, 2 * t)).detach() for t in (q, k, v)]
    outs = torch.func.vmap(lambda q, k, v: mg.linear_attention(q, k, v))(*samples)
    assert torch.equal(outs[1], mg.linear_attention(*(t[1] for t in samples)))
    with torch.autocast(device, torch.bfloat16):
        assert mg.linear_attention(q.float(), k.float(), v.float()).dtype == torch.bfloat16


def test_refused():
    q, k, v, *_ = problem((2, 10, 2, 32, 48), torch.bfloat16, "cpu", 6, True)
    for error, words, arguments, options in (
            (ValueError, "linear_attention: k has size 9 in dimension 1, expected 10 (T of q)", (q, k[:, :9], v), {}),
            (TypeError, "linear_attention: v has dtype float16, expected bfloat16 (same as q)", (q, k, v.half()), {}),
            (ValueError, "linear_attention: initial_state has size 31 in dimension 2, expected 32 (K of q)", (q, k, v),
             {"initial_state": torch.zeros(2, 2, 31, 48)}),
            (ValueError,
             "linear_attention: K = 0 (dimension 3 of q), V = 48 (dimension 3 of v), expected K > 0 && V > 0",
             (q[..., :0], k[..., :0], v), {}),
            (ValueError, "linear_attention: scale is -1, expected a positive finite number", (q, k, v), {"scale": -1}),
            (TypeError, "linear_attention: q is list, expected torch.Tensor or numpy.ndarray", ([1], k, v), {})):
        with pytest.raises(error) as raised:
            mg.linear_attention(*arguments, **options)
        assert str(raised.value) == words and (raised.value.__context__ is None or raised.value.__suppress_context__)
    with pytest.raises(NotImplementedError, match="linear_attention: v has head dim 200, kernels exist up to 128"):
        mg.linear_attention(*(torch.zeros(1, 1, 1, 200) for _ in range(3)))
    with pytest.raises(ValueError, match="linear_attention: cuts has size 2 in dimension 1, expected 0"):
        _C.linear_attention(torch.empty_like(v), None, torch.empty(2, 2, 2, 48, 32), torch.empty(2, 0, 2), q.detach(),
                            k.detach(), v.detach())


def test_first_seen_by_the_compiler():
    """Operators are made when they are first wanted, and that may be while torch.compile traces."""
    program = """
import torch, margay as mg
a = torch.randn(3, 8, requires_grad=True)
both = lambda a: mg.scaled_add(a, a, 2.0) + mg.linear_attention(*(3 * [a[None, :, None]]))[0, :, 0]
out = torch.compile(both, fullgraph=True, backend="aot_eager")(a)
grad, = torch.autograd.grad(out.sum(), a)
assert torch.equal(out, both(a)) and torch.equal(grad, torch.autograd.grad(both(a).sum(), a)[0])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
