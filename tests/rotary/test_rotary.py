"""rotary and its gradients against float64: layouts, tables, positions, memory, in place and not, every face."""

import random

import numpy as np
import pytest
import torch

import margay as mg
from cases import DEVICES, check_error
from margay import _C
from refusals import Wrapped, refused, run_python
from rotary_formula import dtypes_of, rows_of, turned

SIZES = ((128, 64), (64, 32), (64, 16), (80, 40), (96, 48), (256, 128), (128, 16), (192, 32), (7, 3), (2, 1), (33, 11),
         (65, 32), (40, 0), (300, 150), (512, 8), (1024, 512))


class Problem:
    def __init__(self, seed, device, dtypes, size=None, interleaved=None):
        r, g = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype = r.choice(dtypes)
        self.interleaved = r.random() < 0.5 if interleaved is None else interleaved
        d, a = size or r.choice(SIZES)
        b, t = r.choice((1, 2, 3)), r.choice((1, 2, 5, 13, 31, 64))
        heads, k_heads = r.choice((1, 2, 3, 7, 16, 33)), r.choice((None, 1, 2, 5, 16))
        memory = r.choice(("dense", "gaps", "fused", "heads first"))
        rows, of_samples = t + r.choice((0, 0, 3)), r.random() < 0.3

        def make(*shape, dtype=self.dtype):
            return torch.randn(*shape, generator=g).to(device, dtype)

        def rows_in_memory(heads):
            if memory == "gaps":
                return make(b, t, heads, d + 24)[..., 8:8 + d]
            return make(b, heads, t, d).transpose(1, 2) if memory == "heads first" else make(b, t, heads, d)
        if memory == "fused":
            self.q, self.k = make(b, t, heads + (k_heads or 0), d).split((heads, k_heads or 0), 2)
        else:
            self.q, self.k = rows_in_memory(heads), rows_in_memory(k_heads or 0)
        self.k = None if k_heads is None else self.k
        shape = (b, rows, a) if of_samples else (rows, a)
        angles, wide = make(*shape, dtype=torch.float32), r.choice((torch.float32, self.dtype))
        self.cos, self.sin = angles.cos().to(wide), angles.sin().to(wide)
        if r.random() < 0.3:                       # as transformers has them: both halves the same
            self.cos, self.sin = (torch.cat([t, t], -1)[..., :a] for t in (self.cos, self.sin))
        self.positions = self.offsets = None
        kind = r.choice(("none", "none", "one", "each", "beyond"))
        if kind != "none":
            low, high = (-2, rows + 3) if kind == "beyond" else (0, rows)
            size = (t,) if kind == "one" else (b, t)
            integers = r.choice((torch.int32, torch.int64))
            self.positions = torch.randint(low, high, size, generator=g).to(device, integers)
        if r.random() < 0.3:
            self.offsets = torch.randint(-1, 3, (b,), generator=g).to(device, torch.int32)
        elif r.random() < 0.3:
            self.offsets = r.randint(0, rows - t)
        self.grads = [make(*x.shape) for x in (self.q, self.k) if x is not None]
        self.label = (f"seed {seed}: {self.dtype} q {list(self.q.shape)} k heads {k_heads} angles {list(shape)} {wide} "
                      f"{memory} interleaved={self.interleaved} positions {kind} offsets {self.offsets}")

    def options(self):
        return dict(interleaved=self.interleaved, positions=self.positions, offsets=self.offsets)

    def ours(self, inplace=False):
        given = [x.detach().requires_grad_() for x in (self.q, self.k) if x is not None]
        inputs = [x.clone(memory_format=torch.preserve_format) for x in given] if inplace else given
        out = mg.rotary(*inputs, *[None] * (2 - len(inputs)), self.cos, self.sin, inplace=inplace, **self.options())
        out = out if isinstance(out, tuple) else (out,)
        assert not inplace or all(x is y for x, y in zip(out, inputs))
        return *(x.detach() for x in out), *torch.autograd.grad(out, given, self.grads)

    def in_dtype(self, dtype):
        to = lambda x: x if dtype is None else x.to(dtype)  # noqa: E731
        cos, sin = (rows_of(to(x), *self.q.shape[:2], self.positions, self.offsets) for x in (self.cos, self.sin))
        tensors = [to(x) for x in (self.q, self.k) if x is not None]
        return [turned(x, cos, s, self.interleaved) for s, those in
                ((sin, tensors), (-sin, [to(x) for x in self.grads])) for x in those]

    def check(self):
        print(self.label)
        ours, in_place = self.ours(), self.ours(inplace=True)
        for i, (found, plain, exact) in enumerate(zip(ours, self.in_dtype(None), self.in_dtype(torch.float64))):
            tiny = 4 * torch.finfo(torch.float32).eps * (1 + float(exact.abs().max()) if exact.numel() else 0)
            check_error(f"{self.label}: {i}", found, plain, exact, 2, (1e-6, tiny))
            assert found.dtype == self.dtype and torch.equal(found, in_place[i]), f"{self.label}: {i} in place"
            a = 2 * self.cos.shape[-1]
            source = [x for x in (self.q, self.k) if x is not None] + self.grads
            assert torch.equal(found[..., a:], source[i][..., a:]), f"{self.label}: {i} beside the pairs"


@pytest.mark.parametrize("device", DEVICES)
def test_random_problems(device):
    first = random.randrange(1 << 30)
    for seed in range(first, first + (500 if device == "cuda" else 200)):
        Problem(seed, device, dtypes_of(device)).check()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("device", DEVICES)
def test_sizes(device, interleaved, size):
    for seed in range(3):
        Problem(seed, device, dtypes_of(device)[-1:], size, interleaved).check()


@pytest.mark.parametrize("device", DEVICES)
def test_one_launch_or_two(device):
    """q and k together are what each is alone, and sample by sample; integers and tensors say the same offset."""
    q, k = (torch.randn(3, 9, h, 80, device=device).to(torch.bfloat16) for h in (12, 5))
    angles = torch.randn(20, 40, device=device)
    cos, sin = angles.cos(), angles.sin()
    both = mg.rotary(q, k, cos, sin, offsets=4)
    assert torch.equal(both[0], mg.rotary(q, None, cos, sin, offsets=4))
    assert torch.equal(both[1], mg.rotary(k, None, cos[4:], sin[4:]))
    fours = torch.full((3,), 4, device=device)
    assert all(map(torch.equal, both, mg.rotary(q, k, cos, sin, offsets=fours)))
    steps = torch.arange(4, 13, device=device)
    assert all(map(torch.equal, both, mg.rotary(q, k, cos, sin, positions=steps)))
    for i in range(3):
        assert torch.equal(both[0][i], mg.rotary(q[i:i + 1], None, cos, sin, positions=steps[None])[0])
    back = mg.rotary(*both, cos, -sin, offsets=4)
    assert torch.allclose(back[0].float(), q.float(), atol=0.06)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_are_not_wanted(device):
    q, k = (torch.randn(2, 5, 3, 64, device=device).to(torch.bfloat16) for _ in range(2))
    cos = torch.randn(5, 32, device=device)
    for wanted in (q, k):
        q.requires_grad_(wanted is q), k.requires_grad_(wanted is k)
        out = mg.rotary(q, k, cos, cos)
        (grad,) = torch.autograd.grad(out[wanted is k].float().sum(), wanted)
        expected = turned(torch.ones_like(grad), cos[None], -cos[None], False)
        assert torch.allclose(grad.float(), expected.float(), rtol=1e-2, atol=1e-2)
    q.requires_grad_()
    out = mg.rotary(q, k, cos, cos)                # nothing depends on q's result
    assert not torch.autograd.grad(out[1].sum(), q)[0].any()
    (first,) = torch.autograd.grad(mg.rotary(q, None, cos, cos).sum(), q, create_graph=True)
    assert not first.requires_grad or refused(NotImplementedError, "gradients of gradients", torch.autograd.grad,
                                              first.sum(), q) is None


@pytest.mark.parametrize("device", DEVICES)
def test_in_place_is_a_write(device):
    x = torch.randn(2, 5, 3, 64, device=device).to(torch.bfloat16).requires_grad_()
    cos = torch.randn(5, 32, device=device)
    y = x * 1
    z = y.square()                                 # whose backward wants y
    mg.rotary(y, None, cos, cos, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        mg.rotary(x, None, cos, cos, inplace=True)
    both = torch.cat([x, x], 2)
    mg.rotary(both[:, :, :3], both[:, :, 3:], cos, cos, inplace=True)              # views of one tensor
    (grad,) = torch.autograd.grad(both.float().sum(), x)
    expected = 2 * turned(torch.ones_like(grad), cos[None], -cos[None], False).float()
    assert torch.allclose(grad.float(), expected, atol=0.1)
    with torch.no_grad():
        version = x._version
        assert mg.rotary(x, None, cos, cos, inplace=True) is x and x._version > version
    with pytest.raises(BufferError):
        mg.rotary(x.detach()[:, :1].expand(2, 5, 3, 64), None, cos, cos, inplace=True)
    with pytest.raises(ValueError, match="contiguous last dimension"):
        mg.rotary(x.detach().mT, None, cos[:, :1], cos[:, :1], inplace=True)


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("device", DEVICES)
def test_bad_20_what_is_not_finite_stays_where_it_is(device, interleaved):
    """In its pair, and without one in its column."""
    q = torch.ones(1, 4, 3, 40, device=device).to(torch.bfloat16)
    q[0, 2, 1, 5], q[0, 1, 0, 38], q[0, 1, 2, 36] = float("nan"), float("nan"), float("inf")
    cos = torch.ones(4, 16, device=device)
    out = mg.rotary(q, None, cos, cos, interleaved=interleaved)
    partner = 4 if interleaved else 21
    assert sorted(map(tuple, out.isnan().nonzero().tolist())) == sorted([(0, 2, 1, 5), (0, 2, 1, partner),
                                                                         (0, 1, 0, 38)])
    assert out[0, 1, 2, 36] == float("inf")


@pytest.mark.parametrize("device", DEVICES)
def test_bad_10_empty(device):
    cos = torch.ones(7, 4, device=device)
    for shape in ((0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)):
        q = torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        out = mg.rotary(q, q, cos, cos)
        assert out[0].shape == out[1].shape == shape
        assert torch.autograd.grad(out[0].sum() + out[1].sum(), q)[0].shape == shape
        assert mg.rotary(q.detach(), None, cos, cos, inplace=True).shape == shape
    q = torch.ones(1, 5, 2, 0, device=device, dtype=torch.bfloat16)
    assert mg.rotary(q, None, cos[:, :0], cos[:, :0]).shape == q.shape


def test_numpy():
    r = np.random.default_rng(0)
    q, k, angles = (r.standard_normal(s).astype(np.float32) for s in ((2, 7, 4, 24), (2, 7, 1, 24), (9, 10)))
    cos, sin = np.cos(angles), np.sin(angles)
    out = mg.rotary(q, k, cos, sin, positions=np.arange(1, 8), interleaved=True)
    exact = [turned(torch.tensor(x).double(), *(torch.tensor(t[None, 1:8]) for t in (cos, sin)), True) for x in (q, k)]
    assert all(isinstance(a, np.ndarray) and np.allclose(a, b.numpy(), atol=1e-6) for a, b in zip(out, exact))
    assert mg.rotary(q, k, cos, sin, offsets=1, inplace=True, interleaved=True)[0] is q and np.array_equal(q, out[0])


def test_compiled_and_transformed():
    q, k, angles = torch.randn(2, 6, 3, 16), torch.randn(2, 6, 1, 16), torch.randn(6, 8)
    cos, sin = angles.cos(), angles.sin()
    call = lambda q, k: mg.rotary(q, k, cos, sin, offsets=0)  # noqa: E731
    plain = call(q, k)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(q, k), plain))
    leaf = q.clone().requires_grad_()
    grads = [torch.autograd.grad(f(leaf, k)[0].square().sum(), leaf)[0] for f in (call, compiled)]
    assert torch.equal(*grads)

    def written(q, k):
        mg.rotary(q, k, cos, sin, inplace=True)
        return q + 1
    a, b = q.clone(), k.clone()
    found = torch.compile(written, backend="aot_eager", fullgraph=True)(a, b)
    assert torch.equal(a, plain[0]) and torch.equal(b, plain[1]) and torch.equal(found, plain[0] + 1)
    many = torch.vmap(lambda q, cos: mg.rotary(q, None, cos, cos))(torch.stack([q, q * 2]), torch.stack([cos, sin]))
    assert torch.equal(many[1], mg.rotary(q * 2, None, sin, sin))
    found = mg.rotary(q.as_subclass(Wrapped), k, cos, sin)
    assert torch.equal(found[0].as_subclass(torch.Tensor), plain[0])
    positions = torch.zeros(2, 6, dtype=torch.int32)
    given = q.requires_grad_(), k, cos[None], sin[None], positions, None
    torch.library.opcheck(torch.ops.margay.rotary.default, given,
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


def test_bad_01_02_03_09_39_refusals():
    q, cos = torch.zeros(2, 6, 3, 16, dtype=torch.bfloat16), torch.zeros(6, 8)
    ints = lambda *n: torch.zeros(*n, dtype=torch.int32)  # noqa: E731
    for call, error, words in (
            (lambda: mg.rotary(q.double(), None, cos, cos), TypeError,
             "rotary: q has dtype float64, expected bfloat16"),
            (lambda: mg.rotary(q, q.half(), cos, cos), TypeError,
             "rotary: k has dtype float16, expected bfloat16 (same as q)"),
            (lambda: mg.rotary(q, None, cos.half(), cos), TypeError,
             "rotary: cos has dtype float16, expected float32 or bfloat16 (as q)"),
            (lambda: mg.rotary(q, None, cos, cos.bfloat16()), TypeError,
             "rotary: sin has dtype bfloat16, expected float32 (same as cos)"),
            (lambda: mg.rotary(q[0], None, cos, cos), ValueError,
             "rotary: q has shape [6, 3, 16], expected 4 dimensions"),
            (lambda: mg.rotary(q, q[..., :8], cos, cos), ValueError,
             "rotary: k has size 8 in dimension 3, expected 16 (K of q)"),
            (lambda: mg.rotary(q, None, cos[0], cos), ValueError, "rotary: cos has 1 dimensions, expected 2 [T', A]"),
            (lambda: mg.rotary(q, None, cos, cos[:, :7]), ValueError,
             "rotary: sin has size 7 in dimension 2, expected 8 (ANGLES of cos)"),
            (lambda: mg.rotary(q, None, torch.zeros(6, 9), torch.zeros(6, 9)), ValueError,
             "expected at most half as many angles as columns"),
            (lambda: mg.rotary(q, None, cos[:5], cos[:5]), ValueError, "expected a row of cos for each step"),
            (lambda: mg.rotary(q, None, cos, cos, offsets=1), ValueError, "expected a row of cos for each step"),
            (lambda: mg.rotary(q, None, cos, cos, offsets=-1), ValueError, "expected a row of cos for each step"),
            (lambda: mg.rotary(q, None, cos, cos, offsets=2**31), ValueError,
             "rotary: offsets is 2147483648, expected an integer of 32 bits"),
            (lambda: mg.rotary(q, None, cos, cos, offsets=1.5), TypeError,
             "rotary: offsets is 1.5, expected an integer"),
            (lambda: mg.rotary(q, None, cos, cos, offsets=ints(3)), ValueError,
             "rotary: offsets has size 3 in dimension 0, expected 2 (BQ of q)"),
            (lambda: mg.rotary(q, None, cos, cos, positions=ints(5)), ValueError, "rotary: positions has shape [5]"),
            (lambda: mg.rotary(q, None, cos, cos, positions=ints(2, 5)), ValueError,
             "rotary: positions has size 5 in dimension 1, expected 6 (T of q)"),
            (lambda: mg.rotary(q, None, cos, cos, positions=cos[:, 0]), TypeError,
             "rotary: positions is a tensor of dtype float32, expected a tensor of int32"),
            (lambda: mg.rotary(q, None, torch.zeros(3, 6, 8), torch.zeros(3, 6, 8)), ValueError,
             "expected cos and sin of one table, or of one for each sample"),
            (lambda: mg.rotary(torch.zeros(1, 6, 1, 1026), None, cos, cos), NotImplementedError,
             "expected a head dimension of at most 1024"),
            (lambda: mg.rotary([1], None, cos, cos), TypeError, "rotary: q is list, expected torch.Tensor"),
            (lambda: mg.rotary(q, None, cos.to("meta"), cos), ValueError, "rotary: cos is on meta, expected cpu")):
        refused(error, words, call)
    assert not q.any()


def test_bad_17_memory_that_may_not_be_written():
    result = run_python("""
import numpy, margay
q, cos = numpy.ones((1, 2, 1, 8), numpy.float32), numpy.ones((2, 4), numpy.float32)
q.flags.writeable = False
try: margay.rotary(q, None, cos, cos, inplace=True)
except BufferError as error: print(error)
assert (q == 1).all()
""")
    assert result.stdout.startswith("rotary: q is written, but its memory is read-only"), result.stdout + result.stderr


@pytest.mark.parametrize("device", DEVICES)
def test_bad_15_raw_memory(device):
    """`_C` refuses what overlaps, and leaves out gradients that are not wanted."""
    q = torch.ones(1, 4, 2, 16, device=device).to(torch.bfloat16)
    cos = torch.ones(1, 4, 8, device=device)
    refused(BufferError, "rotary: q_out is written, but shares memory with q", _C.rotary, q, torch.empty_like(q), q, q,
            cos, cos)
    dq = torch.empty_like(q)
    _C.rotary_bwd(dq, None, q, q, cos, -cos)
    assert torch.equal(dq, mg.rotary(q, None, cos[0], cos[0]))
    _C.rotary_bwd(None, None, q, q, cos, cos)
