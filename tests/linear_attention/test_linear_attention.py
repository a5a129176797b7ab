"""linear_attention and its gradients against the recurrence in float64, on odd sizes and memory, through every face."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

import margay as mg
from cases import DEVICES, check_error
from linear_forms import by_chunks, plain, recurrence, rounding, through_chunks
from margay import _C, _op

SHAPES = (((1, 1, 1, 1, 1), (2, 63, 3, 64, 64), (1, 65, 2, 17, 40), (2, 200, 2, 128, 96), (1, 130, 1, 72, 128),
           (3, 256, 1, 33, 7), (1, 100, 2, 256, 256), (2, 129, 1, 200, 136), (1, 70, 2, 64, 257)))


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
    exact = run(lambda: recurrence(q, k, v, scale, state))
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
                                   (1, 321, 3, 33, 128), (1, 150, 2, 256, 256), (2, 80, 1, 40, 200)))
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
    exact = run(lambda: recurrence(q, k, v, scale, state, g))
    torchs = run(lambda: by_chunks(q, k, v, scale, state, g))
    through = through_chunks(q, k, v, scale, state, g, None, dout, dlast)
    products = max(float((t.detach() * d).abs().sum(3).max()) for t, d in zip((q, k), exact[2:]))
    for name, *three in zip(names, ours, torchs, exact):
        allowed = rounding(name, three[0], three[1] - three[2], dtype, scale, g, through, products)
        check_error(name, *three, factor=3 if name[0] == "d" else 2, rounding=allowed)


@pytest.mark.parametrize("form", ("none", "head", "step"))
@pytest.mark.parametrize("device", DEVICES)
def test_packed(device, form):
    """As the sequences by themselves, empty ones too; what stands behind a sequence does not reach it."""
    starts = (0, 70, 70, 134, 135, 300)
    q, k, v, _, dout, _ = problem((1, 300, 14, 64, 80), torch.bfloat16, device, 9, False)
    r = torch.Generator().manual_seed(10)
    g = {"none": None, "head": -torch.rand(14, generator=r), "step": -torch.rand(1, 300, 14, generator=r)}[form]
    g = g if g is None else g.to(device).requires_grad_()
    state = torch.randn(5, 14, 64, 80, generator=r).to(device).requires_grad_()
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


@pytest.mark.parametrize("wanted", (False, True), ids=("", "its gradient"))
@pytest.mark.parametrize("heads", (2, 70))                   # general kernels, sweeps
@pytest.mark.parametrize("device", DEVICES)
def test_behind_the_last_sequence(device, heads, wanted):
    """Steps that are in no sequence, which Python refuses where it sees them, have no result and no gradient."""
    _op.for_torch("linear_attention")
    q, k, v, _, dout, _ = problem((1, 400, heads, 40, 24), torch.bfloat16, device, 14, False)
    g = -torch.rand(1, 400, heads, generator=torch.Generator().manual_seed(15))
    g = g.to(device).requires_grad_(wanted)
    starts = torch.tensor((0, 170, 300), dtype=torch.int32, device=device)
    with torch.no_grad():
        for t in (q, k, v, dout):
            t[:, 300:] = torch.nan

    def run(steps):
        tensors = [t[:, :steps].detach().requires_grad_(t.requires_grad) for t in (q, k, v, g)]
        out, _ = torch.ops.margay.linear_attention(*tensors, None, None, starts, 0.5)
        return out, *torch.autograd.grad(out, [t for t in tensors if t.requires_grad], dout[:, :steps])
    for found, want in zip(run(400), run(300)):
        torch.testing.assert_close(found[:, :300], want, rtol=1e-4, atol=1e-4)
        assert (found[:, 300:] == 0).all()


@pytest.mark.parametrize("form", ("none", "head", "step"))
@pytest.mark.parametrize("columns", (24, 64, 100, 128, 135))   # a column of ones has room in the last tile, or not
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("device", DEVICES)
def test_normalized(device, dtype, columns, form):
    """out / (scale q.z + 1e-10) and all gradients, as the same quotient of the plain form's has them."""
    if device == "cuda" and dtype == "float32":
        pytest.skip("computed on the CPU only")
    dtype, d = getattr(torch, dtype), 32
    q, k, v, state, dout, dlast = problem((2, 150, 2, d, columns), dtype, device, 11, True)
    q, k = (t.detach().abs().requires_grad_() for t in (q, k))
    r = torch.Generator().manual_seed(12)
    z, dz = (torch.rand(2, 2, d, generator=r).to(device).requires_grad_() for _ in range(2))
    g = {"none": None, "head": -0.1 * torch.rand(2, generator=r),
         "step": -0.1 * torch.rand(2, 150, 2, generator=r)}[form]
    g = g if g is None else g.to(device)
    inputs, scale = (q, k, v, state, z), d ** -0.5

    def divided(form, *tensors):
        q, k, v, state, z = tensors
        out, last = form(q, k, v, scale, state, g)
        sums, end = form(q, k, torch.ones_like(v[..., :1]), scale, z[..., None], g)
        return (out.to(sums.dtype) / (sums + 1e-10)).to(out.dtype), last, end[..., 0]

    def run(results):
        given = (dout.to(results[0].dtype), dlast.to(results[1].dtype), dz.detach().to(results[2].dtype))
        return (*(t.detach() for t in results), *torch.autograd.grad(results, inputs, given))
    out, (last, end) = mg.linear_attention(q, k, v, g, normalize=True, initial_state=(state, z),
                                           output_final_state=True)
    ours = run((out, last, end))
    exact = run(divided(recurrence, *(t.double() for t in inputs)))
    torchs = run(divided(by_chunks, *inputs))
    for name, *three in zip(("out", "state", "z", "dq", "dk", "dv", "dstate", "dz"), ours, torchs, exact):
        allowed = rounding(name, three[0], three[1] - three[2], dtype, scale, g)
        check_error(name, *three, factor=3 if name[0] == "d" else 2, rounding=allowed)
    with torch.no_grad():
        first, states = mg.linear_attention(q[:, :64], k[:, :64], v[:, :64], None, normalize=True,
                                            output_final_state=True)
        second = mg.linear_attention(q[:, 64:], k[:, 64:], v[:, 64:], None, normalize=True, initial_state=states)
        assert torch.equal(torch.cat((first, second), 1), mg.linear_attention(q, k, v, None, normalize=True))


def test_normalized_numpy():
    q, k, v, *_ = problem((2, 70, 2, 32, 40), torch.float32, "cpu", 4, False)
    q, k, v = (t.detach().abs() for t in (q, k, v))
    for columns in (slice(40), slice(0, 1)):
        out, (last, z) = mg.linear_attention(q.numpy(), k.numpy(), v[..., columns].numpy(), normalize=True,
                                             output_final_state=True)
        again = mg.linear_attention(q.numpy(), k.numpy(), v[..., columns].numpy(), normalize=True,
                                    initial_state=(last, z))
        assert np.isfinite(again).all()
        assert np.array_equal(out, mg.linear_attention(q, k, v[..., columns], normalize=True))


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


@pytest.mark.parametrize("form", ("none", "head", "step"))
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("shape", ((2, 0, 3), (0, 70, 3), (1, 70, 0), (0, 0, 2), (1, 0, 2)))
@pytest.mark.parametrize("device", DEVICES)
def test_nothing(device, shape, packed, form):
    """No steps, no batch, no heads: states go through, and gradients of what is shared are 0."""
    b, steps, h = shape
    if packed and (b != 1 or steps):
        pytest.skip("packed rows have batch 1, and their steps are somebody's")
    rows = 3 if packed else b
    for d, dv in ((16, 24), (144, 200)):
        q, k, v, _, dout, _ = problem((b, steps, h, d, dv), torch.bfloat16, device, 3, False)
        starts = torch.zeros(4, dtype=torch.int32, device=device) if packed else None
        state = torch.randn(rows, h, d, dv, device=device, requires_grad=True)
        g = {"none": None, "head": torch.full((h,), -0.5), "step": torch.full((b, steps, h), -0.5)}[form]
        for with_state, with_last, wanted in itertools.product((False, True), (False, True), (False, True)):
            g = g if g is None else g.detach().to(device).requires_grad_(wanted)
            s = state if with_state else None
            out, last = mg.linear_attention(q, k, v, g, initial_state=s, output_final_state=True, cu_seqlens=starts)
            assert out.shape == v.shape and last.shape == state.shape
            if not steps or not state.numel():
                assert torch.equal(last, state if with_state else torch.zeros_like(state))
            inputs = [t for t in (q, k, v, s, g) if t is not None and t.requires_grad]
            results = (out, last) if with_last else (out,)
            dlast = torch.randn_like(last)
            grads = torch.autograd.grad(results, inputs, (dout, dlast)[:len(results)])
            for t, grad in zip(inputs, grads):
                want = dlast if t is s and with_last else torch.zeros_like(t)
                torch.testing.assert_close(grad, want, rtol=1e-6, atol=0)      # divided by scale, and multiplied


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
    with pytest.raises(NotImplementedError, match="linear_attention: q has head dim 300, kernels exist up to 256"):
        mg.linear_attention(*(torch.zeros(1, 1, 1, 300) for _ in range(3)))
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
