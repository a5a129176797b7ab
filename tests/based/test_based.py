"""based and its gradients against the definition in float64, on odd sizes and memory, through every face."""

import random

import numpy as np
import pytest
import torch

import margay as mg
from cases import DEVICES, check_error
from conftest import SEED
from margay import _op

# batch, steps, heads, columns of q and k, of v
SHAPES = ((1, 1, 1, 1, 1), (2, 63, 3, 16, 64), (1, 64, 1, 16, 128), (1, 65, 2, 9, 40), (2, 200, 2, 16, 112),
          (1, 130, 1, 32, 64), (1, 321, 1, 16, 64), (1, 129, 2, 24, 72), (3, 256, 1, 8, 7))
DTYPES = ("bfloat16", "float16", "float32")


def features(x, of_q=None):
    """The upper triangle of (1, x) (1, x)^T, with its weights where x is q and `of_q` the scale."""
    d = x.shape[-1]
    i, j = torch.triu_indices(d + 1, d + 1, device=x.device)
    x = torch.cat((torch.ones_like(x[..., :1]), x), -1)
    x = x[..., i] * x[..., j]
    if of_q is None:
        return x
    return x * torch.where(j == 0, 1.0, torch.where(i == 0, of_q, torch.where(i == j, of_q ** 2 / 2, of_q ** 2))).to(x)


def reference(q, k, v, scale, state=None, normalize=True, starts=None, eps=1e-6):
    """out and the last state, in float64, differentiable. Packed rows one after the other."""
    if starts is not None:
        rows = [reference(*(t[:, i:j] for t in (q, k, v)), scale, None if state is None else state[n:n + 1], normalize,
                          eps=eps) for n, (i, j) in enumerate(zip(starts, starts[1:]))]
        return tuple(torch.cat(parts, dim) for parts, dim in zip(zip(*rows), (1, 0)))
    q, k, v = (t.double() for t in (q, k, v))
    v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    out = torch.einsum("bhij,bjhv->bihv", (1 + s + s * s / 2).tril(), v)
    last = torch.einsum("bthf,bthv->bhfv", features(k), v)
    if state is not None:
        out = out + torch.einsum("bthf,bhfv->bthv", features(q, scale), state.double())
        last = last + state.double()
    return out[..., :-1] / (out[..., -1:] + eps) if normalize else out[..., :-1], last


def by_chunks(q, k, v, scale, state=None, normalize=True, starts=None, size=64):
    """The same by chunks, products in the inputs' own precision, the state in float32."""
    if starts is not None:
        rows = [by_chunks(*(t[:, i:j] for t in (q, k, v)), scale, None if state is None else state[n:n + 1], normalize)
                for n, (i, j) in enumerate(zip(starts, starts[1:]))]
        return tuple(torch.cat(parts, dim) for parts, dim in zip(zip(*rows), (1, 0)))
    dtype = q.dtype
    b, steps, h, d = q.shape
    last = torch.zeros(b, h, (d + 1) * (d + 2) // 2, v.shape[3] + 1, device=q.device) if state is None else state
    out = []
    for i in range(0, steps, size):
        x, y, z = (t[:, i:i + size].transpose(1, 2) for t in (q, k, v))
        z = torch.cat((z, torch.ones_like(z[..., :1])), -1)
        s = (x @ y.mT).float() * scale
        own = (1 + s + s * s / 2).tril().to(dtype) @ z
        out.append((own.float() + (features(x, scale) @ last.to(dtype)).float()).transpose(1, 2))
        last = last + (features(y).mT @ z).float()
    out = torch.cat(out, 1) if out else v.new_zeros(b, 0, h, v.shape[3] + 1)
    return (out[..., :-1] / (out[..., -1:] + 1e-6) if normalize else out[..., :-1]).to(dtype), last


def problem(shape, dtype, device, seed, with_state, rows=None):
    """The state is that of 40 steps."""
    b, steps, h, d, dv = shape
    g = torch.Generator().manual_seed(seed)
    make = lambda *size, dtype=dtype: torch.randn(size, generator=g).to(device, dtype).requires_grad_()  # noqa: E731
    q, k, v = make(b, steps, h, d), make(b, steps, h, d), make(b, steps, h, dv)
    state = None
    if with_state:
        keys, values = make(rows or b, 40, h, d), make(rows or b, 40, h, dv)
        state = reference(keys, keys, values, 1.0)[1].detach().float().requires_grad_()
    count = (d + 1) * (d + 2) // 2
    dlast = make(rows or b, h, count, dv + 1, dtype=torch.float32)
    return q, k, v, state, make(b, steps, h, dv).detach(), dlast.detach()


NAMES = "out", "final_state", "dq", "dk", "dv", "dinitial_state"


def compare(device, q, k, v, state, dout, dlast, scale=None, normalize=True, starts=None):
    inputs = [t for t in (q, k, v, state) if t is not None]

    def run(function, *options):
        out, last = function(*options)
        return (out.detach(), last.detach(), *torch.autograd.grad((out, last), inputs,
                                                                  (dout.to(out.dtype), dlast.to(last.dtype))))
    packed = None if starts is None else torch.tensor(starts, device=device)
    ours = run(lambda: mg.based(q, k, v, scale=scale, normalize=normalize, initial_state=state, cu_seqlens=packed,
                                output_final_state=True))
    factor = q.shape[3] ** -0.5 if scale is None else scale
    exact = run(reference, q, k, v, factor, state, normalize, starts)
    torchs = run(by_chunks, q, k, v, factor, state, normalize, starts)
    # float32: chunks' sums are added one after the other; tensor cores make a chunk's of four, and cut off what float32
    # does not hold. A state's features are rounded as PyTorch's, whose errors may cancel by chance. Gradients cancel
    # where a row has few weights: what of dout's products does not, rounds.
    parts = (-(-q.shape[1] // 64) + 4) * (4 if device == "cuda" else 1)
    products = float(dout.double().norm(dim=3).max() * v.detach().double().norm(dim=3).max()) if dout.numel() else 0.0
    eps = torch.finfo(q.dtype).eps
    for name, *three in zip(NAMES, ours, torchs, exact):
        relative = parts * torch.finfo(torch.float32).eps if three[0].dtype is torch.float32 else 0.0
        relative += eps / 4 if "state" in name else 0.0
        few = name in ("dq", "dk") and 0 < q.shape[1] < 4
        absolute = 4 * eps * (factor * products * float(q.detach().double().abs().max()) if few else
                              three[0].numel() < 4)
        check_error(name, *three, factor=3 if name[0] == "d" else 2, rounding=(relative, absolute))
    assert ours[0].dtype == q.dtype and ours[1].dtype == torch.float32
    assert all(g.dtype == t.dtype for g, t in zip(ours[2:], inputs))


def skip_float32(device, dtype):
    if device == "cuda" and dtype == "float32":
        pytest.skip("computed on the CPU only")


@pytest.mark.parametrize("normalize", (True, False), ids=("", "plain"))
@pytest.mark.parametrize("with_state", (False, True), ids=("", "state"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_against_the_definition(device, dtype, shape, with_state, normalize):
    skip_float32(device, dtype)
    compare(device, *problem(shape, getattr(torch, dtype), device, 1, with_state), normalize=normalize)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_random(device, dtype):
    skip_float32(device, dtype)
    for i in range(250 if device == "cuda" else 70):     # of each dtype
        r = random.Random(f"{SEED} {dtype} {i}")
        shape = (r.randint(1, 2), r.choice((r.randint(1, 300), 64 * r.randint(1, 4))), r.randint(1, 2),
                 r.choice((8, 16, 16, r.randint(1, 16), r.randint(17, 32))), r.choice((64, 112, r.randint(1, 128))))
        compare(device, *problem(shape, getattr(torch, dtype), device, r.randint(0, 999), r.random() < 0.5),
                scale=r.choice((None, 0.1)), normalize=r.random() < 0.8)


@pytest.mark.parametrize("starts", ((0, 70), (0, 1, 65, 65, 200, 264), (0, 128, 192, 321)), ids=str)
@pytest.mark.parametrize("columns", ((16, 64), (16, 100), (20, 64)), ids=str)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("device", DEVICES)
def test_packed(device, dtype, columns, starts):
    """And no sequence sees NaN of another."""
    skip_float32(device, dtype)
    shape = (1, starts[-1], 2, *columns)
    given = problem(shape, getattr(torch, dtype), device, 3, True, len(starts) - 1)
    compare(device, *given, starts=starts)
    if len(starts) > 4:
        q, k, v = (t.detach().clone() for t in given[:3])
        packed = torch.tensor(starts, device=device)
        want = mg.based(q, k, v, cu_seqlens=packed)
        for t in (q, k, v):
            t[:, starts[3]:starts[4]] = torch.nan
        found = mg.based(q, k, v, cu_seqlens=packed)
        assert found[:, starts[3]:starts[4]].isnan().all()
        found[:, starts[3]:starts[4]] = want[:, starts[3]:starts[4]]
        assert torch.equal(found, want)
        inputs = [t.requires_grad_() for t in (q, k, v)]
        for t in torch.autograd.grad(mg.based(*inputs, cu_seqlens=packed).nan_to_num().sum(), inputs):
            assert not t[:, :starts[3]].isnan().any() and not t[:, starts[4]:].isnan().any()


@pytest.mark.parametrize("columns", ((16, 64), (24, 100)), ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_parts_follow_each_other(device, columns):
    """The state of one call is the beginning of the next; memory in any order gives the same."""
    q, k, v, *_ = problem((2, 150, 3, *columns), torch.bfloat16, device, 2, False)
    with torch.no_grad():
        whole, last = mg.based(q, k, v, output_final_state=True)
        first, state = mg.based(q[:, :64], k[:, :64], v[:, :64], output_final_state=True)
        second, end = mg.based(q[:, 64:], k[:, 64:], v[:, 64:], initial_state=state, output_final_state=True)
        assert torch.equal(torch.cat((first, second), 1), whole)
        assert torch.equal(end, last)
        head_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        assert torch.equal(mg.based(*head_first), whole)
        gaps = [torch.stack((t, t), -1)[..., 0] for t in (q, k, v)]
        assert torch.equal(mg.based(*gaps), whole)


@pytest.mark.parametrize("device", DEVICES)
def test_no_steps(device):
    q, k, v, state, *_ = problem((2, 0, 3, 16, 24), torch.bfloat16, device, 3, True)
    out, last = mg.based(q, k, v, initial_state=state, output_final_state=True)
    assert out.shape == (2, 0, 3, 24) and torch.equal(last, state)
    assert torch.equal(torch.autograd.grad(last.sum(), state)[0], torch.ones_like(state))
    assert (mg.based(q, k, v, output_final_state=True)[1] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_same_bits(device, poison):
    """Whatever the outputs held before, and again."""
    q, k, v, state, dout, dlast = problem((2, 130, 2, 16, 64), torch.bfloat16, device, 7, True)

    def run():
        results = mg.based(q, k, v, initial_state=state, output_final_state=True)
        return *results, *torch.autograd.grad(results, (q, k, v, state), (dout, dlast))
    for a, b in zip(run(), run()):
        assert torch.equal(a, b)


def test_numpy():
    q, k, v, state, *_ = problem((2, 70, 2, 18, 40), torch.float32, "cpu", 4, True)
    arrays = [t.detach().numpy() for t in (q, k, v)]
    found = mg.based(*arrays, scale=0.3, initial_state=state.detach().numpy(), output_final_state=True)
    want = mg.based(q, k, v, scale=0.3, initial_state=state, output_final_state=True)
    assert all(np.array_equal(a, b.detach().numpy()) for a, b in zip(found, want))
    turned = [np.asfortranarray(a) for a in arrays]
    assert np.array_equal(mg.based(*turned), mg.based(*arrays))


@pytest.mark.parametrize("device", DEVICES)
def test_operator(device):
    """As torch.compile and transforms see it."""
    q, k, v, state, dout, _ = problem((2, 100, 2, 16, 48), torch.bfloat16, device, 5, True)
    _op.for_torch("based")                        # a first call would
    torch.library.opcheck(torch.ops.margay.based.default, (q, k, v, None, None, None, 0.5, True, 1e-6))
    call = lambda q, k, v: mg.based(q, k, v, initial_state=state.detach())  # noqa: E731
    want = torch.autograd.grad(call(q, k, v), (q, k, v), dout)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v), dout), want))
    both = torch.compile(lambda *t: mg.based(*t, output_final_state=True), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(both(q, k, v), mg.based(q, k, v, output_final_state=True)))
    grads = torch.func.grad(lambda *t: (call(*t) * dout).sum(), (0, 1, 2))(q.detach(), k.detach(), v.detach())
    for grad, t in zip(grads, want):
        assert torch.equal(grad, t)
    samples = [torch.stack((t, 2 * t)).detach() for t in (q, k, v)]
    outs = torch.func.vmap(lambda q, k, v: mg.based(q, k, v))(*samples)
    assert torch.equal(outs[1], mg.based(*(t[1] for t in samples)))
    with torch.autocast(device, torch.bfloat16):
        assert mg.based(q.float(), k.float(), v.float()).dtype == torch.bfloat16


def test_refused():
    q, k, v, *_ = problem((2, 10, 2, 16, 48), torch.bfloat16, "cpu", 6, False)
    for error, words, arguments, options in (
            (ValueError, "based: k has size 9 in dimension 1, expected 10 (T of q)", (q, k[:, :9], v), {}),
            (TypeError, "based: v has dtype float16, expected bfloat16 (same as q)", (q, k, v.half()), {}),
            (ValueError, "based: initial_state has shape [2, 2, 153, 48], expected [2, 2, 153, 49]", (q, k, v),
             {"initial_state": torch.zeros(2, 2, 153, 48)}),
            (ValueError, "based: K = 0 (dimension 3 of q), V = 48 (dimension 3 of v), expected K > 0 && V > 0",
             (q[..., :0], k[..., :0], v), {}),
            (ValueError, "based: scale is -1, expected a positive finite number", (q, k, v), {"scale": -1}),
            (ValueError, "based: eps is -1, expected a finite number that is not negative", (q, k, v), {"eps": -1}),
            (TypeError, "based: cu_seqlens is list, expected a tensor of int32", (q[:1], k[:1], v[:1]),
             {"cu_seqlens": [0, 10]}),
            (ValueError, "based: cu_seqlens[1] is 9, expected 10 (the steps that there are)", (q[:1], k[:1], v[:1]),
             {"cu_seqlens": torch.tensor([0, 9])}),
            (ValueError, "based: cu_seqlens[0] is 1, expected 0", (q[:1], k[:1], v[:1]),
             {"cu_seqlens": torch.tensor([1, 10])}),
            (ValueError, "based: cu_seqlens[2] is 3, expected 4 (the one before) to 10 (the steps that there are)",
             (q[:1], k[:1], v[:1]), {"cu_seqlens": torch.tensor([0, 4, 3, 10])}),
            (TypeError, "based: q is list, expected torch.Tensor or numpy.ndarray", ([1], k, v), {})):
        with pytest.raises(error) as raised:
            mg.based(*arguments, **options)
        assert str(raised.value) == words and (raised.value.__context__ is None or raised.value.__suppress_context__)
    for shape in ((1, 1, 1, 33, 64), (1, 1, 1, 16, 129)):
        with pytest.raises(NotImplementedError, match="needs K <= 32 && V <= 128"):
            mg.based(torch.zeros(shape[:4]), torch.zeros(shape[:4]), torch.zeros(*shape[:3], shape[4]))
