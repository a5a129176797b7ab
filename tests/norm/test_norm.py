"""layer_norm, rms_norm and gated_rms_norm, their gradients and dropout against float64, on odd sizes and memory."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import margay as mg
from cases import DEVICES
from margay import _C
from mocked import Fake
from norm_cases import DTYPES, WIDTHS, Problem, formula


@pytest.mark.parametrize("device", DEVICES)
def test_random_problems(device):
    first = random.randrange(1 << 30)
    for seed in range(first, first + (500 if device == "cuda" else 200)):
        Problem(seed, device).check()


@pytest.mark.parametrize("kind", ("layer", "rms", "gated"))
@pytest.mark.parametrize("device", DEVICES)
def test_widths(device, kind):
    for width in (*WIDTHS, 16384, 20001, 40000, 65535, 65536):
        Problem(width, device, (3, width), torch.bfloat16, kind).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(20000, 24), (3001, 136), (700, 2048)])
def test_many_rows(device, shape):
    """More than the blocks have lines at a time."""
    for kind in ("layer", "rms", "gated"):
        Problem(1, device, shape, torch.float32, kind).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ("layer", "rms"))
def test_whole_lines(device, dtype, kind):
    """Streams of 16 bits only, with dropout and without, plain and with a sum: few lines, more than the blocks
    have at a time, rows that are not neighbours in memory."""
    for seed, (rows, width) in enumerate(((1, 2056), (5, 3000), (1700, 4096), (13, 4096), (2000, 2304), (1200, 8192))):
        rows = rows // 4 if device == "cpu" and rows > 100 else rows
        problem = Problem(seed, device, (rows, width), dtype, kind)
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(*problem.lead, width + 8 * (seed % 2), generator=g).to(device, dtype)[..., :width]
        problem.tensors["x"] = x.requires_grad_()
        problem.tensors.pop("residual", None)
        if seed != 3:
            residual = torch.randn(*problem.lead, width, generator=g).to(device, dtype)
            problem.tensors["residual"] = residual.requires_grad_()
        problem.options["prenorm"] = seed % 3 != 1
        problem.options.pop("dropout_p", None)
        problem.options.pop("seed", None)
        if seed % 2 == 0:
            problem.options |= {"dropout_p": 0.25, "seed": seed}
        problem.p = problem.options.get("dropout_p", 0)
        problem.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("width", (520, 1000, 1024, 1032, 2048, 2056, 4096, 4104, 8192))
def test_what_is_added_is_all_there_is_to_do(device, dtype, width):
    """Before a root mean square norm, with a weight of 16 bits. The sum is that of float, rounded once. Also of numbers
    whose squares float cannot hold, or that are nothing to it, and of a row of zeros."""
    g = torch.Generator().manual_seed(width)
    for rows, size, eps in ((1, 1.0, 1e-6), (67, 1.0, 1e-6), (1031, 1.0, 0.0), (5, 1e30, 1e-5), (5, 1e-22, 0.0),
                            (5, 1e-25, 1e-30)):
        if dtype == torch.float16 and size != 1:
            continue
        x = (torch.randn(rows, width + 8, generator=g) * size).to(device, dtype)[:, :width]
        residual = (torch.randn(rows, width, generator=g) * size).to(device, dtype)
        weight = torch.randn(width, generator=g).to(device, dtype)
        if eps > 0:
            x[0] = -residual[0]
        with torch.no_grad():
            out, total = mg.rms_norm(x, weight, residual=residual, prenorm=True, eps=eps)
            assert torch.equal(out, mg.rms_norm(x, weight, residual=residual, eps=eps))
        assert torch.equal(total, (x.float() + residual.float()).to(dtype))
        exact, _ = formula(total.double(), weight.double(), rms=True, eps=eps)
        close = torch.finfo(dtype).eps * exact.abs() + 1e-6
        assert ((out.double() - exact).abs() <= close).all(), (rows, size, eps)


@pytest.mark.parametrize("row", ("norm_fwd_bf16_any", "norm_fwd_fp16_any", "norm_bwd_bf16_any", "norm_bwd_fp16_any"))
def test_kernels_that_take_everything(row):
    """Short lines too, which on the CPU others compute. Memory that nobody wrote is NaN."""
    dtype = torch.bfloat16 if "bf16" in row else torch.float16
    torch.use_deterministic_algorithms(True)
    _C.prefer(row)
    try:
        assert torch.empty(9).isnan().all()
        for width in (1, 2, 64, 65, 127, 130, 257, 513, 1000, 1025, 2049, 4097):
            for lead, kind in ((3, "layer"), (3, "gated"), (70, "rms"), (70, "gated")):
                Problem(width, "cpu", (lead, width), dtype, kind).check()
    finally:
        _C.prefer(None)
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (1, 100, 1000, 4096, 9000))
def test_constant_rows(device, dtype, width):
    """Of a constant row nothing is left but the bias, and no gradient, whatever the constant."""
    values = torch.tensor([0.0, 1.0, -3.3, 1e4, 1e-4, 7777.7, 1e18, 1e-18], device=device).to(dtype)
    values = values[values.isfinite()]
    x = values[:, None].repeat(1, width).requires_grad_()
    bias = torch.randn(width, device=device)
    out = mg.layer_norm(x, torch.randn(width, device=device), bias)
    assert torch.equal(out, bias.to(dtype).expand_as(out))
    with torch.no_grad():
        assert mg.layer_norm(x).abs().max() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", (8, 1000, 4096, 20000))
def test_huge_and_tiny_values(device, width):
    """Squares that float cannot hold, or that are nothing to it, where eps is nothing too."""
    g = torch.Generator().manual_seed(width)
    x = torch.randn(5, width, generator=g).to(device)
    for size, eps in ((1e18, 1e-5), (3e18, 1e-5), (1e30, 1e-5), (1e37, 0.0), (1e-22, 0.0), (1e-25, 1e-30),
                      (1e-30, 1e-24), (1e-20, 1e-5)):
        for dtype in (torch.bfloat16, torch.float32):
            for rms, function in ((False, mg.layer_norm), (True, mg.rms_norm)):
                t = (x * size).to(dtype).requires_grad_()
                out = function(t, eps=eps)
                exact, _ = formula(t.detach().double(), rms=rms, eps=eps)
                assert out.isfinite().all(), (size, eps, dtype, rms)
                close = torch.finfo(dtype).eps * 2 + 1e-6
                bound = close * (exact.abs() + exact.abs().mean())
                assert ((out.double() - exact).abs() <= bound).all(), (size, eps, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_stays_in_its_row(device):
    x = torch.randn(9, 300, device=device)
    x[2, 5], x[6, 7] = float("nan"), float("inf")
    for function in (mg.layer_norm, mg.rms_norm, lambda x: mg.gated_rms_norm(x, torch.ones_like(x))):
        out = function(x)
        rows = out.isnan().any(1).nonzero().flatten().tolist()
        assert rows == [2, 6] and out[2].isnan().all()
    assert mg.rms_norm(x)[6].nan_to_num(0).abs().max() == 0            # what is finite beside an infinity


@pytest.mark.parametrize("device", DEVICES)
def test_dropout(device):
    """How many are kept, mean and variance; the same from the same seed, another from another; rows and columns
    alike."""
    x = torch.ones(400, 1024, device=device)
    for p in (0.1, 0.5, 0.9):
        kept = lambda seed: mg.layer_norm(x, dropout_p=p, seed=seed, prenorm=True)[1]  # noqa: E731, B023
        u = kept(3)
        part, n = float((u != 0).float().mean()), u.numel()
        assert abs(part - (1 - p)) < 5 * (p * (1 - p) / n)**0.5 + 2**-17
        assert torch.allclose(u[u != 0], torch.tensor(1 / (1 - p), device=device), rtol=1e-4)
        assert abs(float(u.mean()) - 1) < 5 * (p / (1 - p) / n)**0.5 + 1e-4
        for dim, length in ((0, 400), (1, 1024)):
            means = (u != 0).float().mean(dim)
            assert (means - (1 - p)).abs().max() < 6 * (p * (1 - p) / length)**0.5
        flat = (u != 0).float().flatten() - (1 - p)
        for shift in (1, 2, 4, 8, 16, 1024):
            assert abs(float((flat[shift:] * flat[:-shift]).mean())) < 6 * p * (1 - p) / n**0.5
        assert torch.equal(u, kept(3)) and not torch.equal(u, kept(4)) and not torch.equal(u, kept(3 + 2**32))
        assert torch.equal(u[:7], mg.rms_norm(x[:7], dropout_p=p, seed=3, prenorm=True)[1])


def test_draws():
    """Philox 4x32-10 itself, in numbers of the paper's own test vectors where the counter allows it, else computed."""
    def philox(counter, key):
        a, b, c, d = counter
        for _ in range(10):
            x, y = a * 0xD2511F53, c * 0xCD9E8D57
            a, b, c, d = (y >> 32) ^ b ^ key[0], y % 2**32, (x >> 32) ^ d ^ key[1], x % 2**32
            key = (key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32
        return a, b, c, d
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)  # kat_vectors
    seed, p = 0x123456789ABCDEF0, 0.3
    kept = mg.rms_norm(torch.ones(3, 24), dropout_p=p, seed=seed, prenorm=True)[1] != 0
    for row in range(3):
        for eight in range(3):
            words = philox((row, 0, eight, 0), (seed % 2**32, seed >> 32))
            draws = [word >> shift & 0xFFFF for word in words for shift in (0, 16)]
            assert kept[row, 8 * eight:8 * eight + 8].tolist() == [n >= round(p * 65536) for n in draws]


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_of_all_and_of_nothing(device):
    x, residual = (torch.randn(9, 96, device=device) for _ in range(2))
    x.requires_grad_()
    out, u = mg.layer_norm(x, residual=residual, dropout_p=1.0, prenorm=True)
    assert torch.equal(u, residual) and torch.equal(out, mg.layer_norm(residual))
    assert not torch.autograd.grad(out.square().sum(), x)[0].any()
    assert torch.equal(mg.layer_norm(x, residual=residual, dropout_p=0.0, seed=5), mg.layer_norm(x, residual=residual))
    alone = mg.layer_norm(x, dropout_p=1.0, prenorm=True)
    assert not alone[0].any() and not alone[1].any()


@pytest.mark.parametrize("device", DEVICES)
def test_seeds_come_from_torch(device):
    x = torch.ones(50, 64, device=device)
    drop = lambda **options: mg.rms_norm(x, dropout_p=0.5, prenorm=True, **options)[1]  # noqa: E731
    torch.manual_seed(1)
    first, second = drop(), drop()
    torch.manual_seed(1)
    assert torch.equal(drop(), first) and torch.equal(drop(), second) and not torch.equal(first, second)
    g = torch.Generator().manual_seed(7)
    third = drop(generator=g)
    assert torch.equal(third, drop(generator=g.manual_seed(7)))
    words = torch.tensor([5, -1], dtype=torch.int32, device=device)
    assert torch.equal(drop(seed=words), drop(seed=5 + (2**32 - 1 << 32)))


@pytest.mark.parametrize("device", DEVICES)
def test_repeats_bit_by_bit(device):
    for kind, shape in (("layer", (3000, 200)), ("rms", (600, 4096)), ("gated", (300, 9000))):
        p = Problem(11, device, shape, torch.bfloat16, kind)
        first = p.ours()
        for _ in range(3):
            assert all(torch.equal(t, first[name]) for name, t in p.ours().items())


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_does_not_depend_on_who_asks(device):
    """With prenorm and without, and with gradients off, out is the same, and the norm of the sum."""
    x, residual = (torch.randn(40, 200, device=device).to(torch.bfloat16).requires_grad_() for _ in range(2))
    options = dict(residual=residual, dropout_p=0.2, seed=9)
    out, u = mg.layer_norm(x, prenorm=True, **options)
    assert torch.equal(out, mg.layer_norm(x, **options)) and torch.equal(out, mg.layer_norm(u))
    with torch.no_grad():
        assert torch.equal(out, mg.layer_norm(x, **options))


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_of_one_result(device):
    """Of the sum alone; and one gradient for x and residual where nothing lies between them."""
    x, residual = (torch.randn(4, 72, device=device).to(torch.float16).requires_grad_() for _ in range(2))
    out, u = mg.rms_norm(x, residual=residual, prenorm=True)
    dx, dresidual = torch.autograd.grad(u.sum(), (x, residual), retain_graph=True)
    assert (dx == 1).all() and (dresidual == 1).all()
    dx, dresidual = torch.autograd.grad(out.square().sum(), (x, residual))
    assert dx.data_ptr() == dresidual.data_ptr() and dx.any()          # as of an addition of PyTorch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((5, 64), (64,), (2, 3, 64)))
@pytest.mark.parametrize("compiled", (False, True))
def test_gradients_add_up(device, dtype, shape, compiled):
    """Those of x and residual, which may be one, over several backward passes: each has memory of its own then."""
    x, residual = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(2))
    for call in (lambda x, r: mg.rms_norm(x, residual=r), lambda x, r: mg.layer_norm(x, residual=r, prenorm=True)[1],
                 lambda x, r: mg.layer_norm(x, residual=r, dropout_p=0.5, seed=1)):
        x.grad = residual.grad = None
        once = torch.autograd.grad(call(x, residual).square().sum(), (x, residual))
        run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
        for _ in range(2):
            run(x, residual).square().sum().backward()
        torch.compiler.reset()
        for t, grad in zip((x, residual), once):
            assert torch.allclose(t.grad, 2 * grad, rtol=2e-2, atol=1e-3 * float(grad.abs().max()))
        x.grad.zero_()
        assert residual.grad.any()


def test_residual_in_float32():
    x = torch.randn(5, 40).to(torch.bfloat16).requires_grad_()
    out, u = mg.rms_norm(x, prenorm=True, residual_in_fp32=True)
    assert u.dtype == torch.float32 and torch.equal(u, x.float()) and out.dtype == torch.bfloat16
    out, u2 = mg.rms_norm(out, residual=u, prenorm=True)
    assert u2.dtype == torch.float32
    (out.float().sum() + u2.sum()).backward()
    assert x.grad.dtype == torch.bfloat16 and x.grad.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_overlap(device, dtype):
    """Windows of one sequence: what torch.empty_like makes of them has no contiguous last dimension."""
    x = torch.randn(100, device=device).to(dtype).unfold(0, 64, 1).requires_grad_()
    for call in (mg.layer_norm, mg.rms_norm, lambda x: mg.rms_norm(x, residual=x), lambda x: mg.gated_rms_norm(x, x)):
        found, expected = call(x), call(x.contiguous())
        assert torch.equal(found, expected)
        grads = [torch.autograd.grad(t.float().square().sum(), x)[0] for t in (found, expected)]
        assert torch.equal(*grads)
        assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(x), expected)
        torch.compiler.reset()


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    weight = torch.ones(8, device=device, requires_grad=True)
    x = torch.zeros(0, 8, device=device, requires_grad=True)
    for out in (mg.layer_norm(x, weight), mg.rms_norm(x, weight, residual=x), mg.gated_rms_norm(x, x, weight)):
        assert out.shape == (0, 8)
        assert not torch.autograd.grad(out.sum(), weight)[0].any()


def test_numpy():
    x, z, r = (np.random.default_rng(i).standard_normal((4, 5, 24)).astype(np.float32) for i in range(3))
    w = np.random.default_rng(3).standard_normal(24).astype(np.float32)
    double = lambda a: torch.tensor(a, dtype=torch.float64)  # noqa: E731
    for found, exact in (
            (mg.layer_norm(x, w, residual=r), formula(double(x), double(w), residual=double(r), rms=False, eps=1e-5)),
            (mg.rms_norm(x), formula(double(x), rms=True, eps=1e-6)),
            (mg.gated_rms_norm(x, z, w), formula(double(x), double(w), z=double(z), rms=True, eps=1e-6))):
        assert isinstance(found, np.ndarray) and np.allclose(found, exact[0].numpy(), atol=1e-5)
    out, u = mg.layer_norm(x, residual=r, dropout_p=0.5, seed=1, prenorm=True)
    assert np.array_equal(out, mg.layer_norm(u))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_vmapped_and_checkpointed(device):
    x, residual = (torch.randn(6, 40, device=device, requires_grad=True) for _ in range(2))
    w = torch.randn(40, device=device, requires_grad=True)

    def call(x, residual, w):
        out, u = mg.layer_norm(x, w, residual=residual, prenorm=True, dropout_p=0.25, seed=3)
        return mg.rms_norm(out, w) + mg.gated_rms_norm(u, out, w, group_size=8)
    plain = call(x, residual, w)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(x, residual, w)
    assert torch.equal(plain, compiled)
    grads, others = (torch.autograd.grad(t.square().sum(), (x, residual, w)) for t in (plain, compiled))
    assert all(torch.allclose(a, b) for a, b in zip(grads, others))
    drawn = torch.compile(lambda x: mg.rms_norm(x, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    first = drawn(x)
    assert not torch.equal(first, drawn(x))                            # a seed is drawn in every call
    both = torch.vmap(lambda x: mg.rms_norm(x, w))(torch.stack([x, 2 * x]))
    assert torch.equal(both[1], mg.rms_norm(2 * x, w))
    from torch.utils.checkpoint import checkpoint
    again = lambda x: mg.layer_norm(x, w, dropout_p=0.5).square()  # noqa: E731
    torch.manual_seed(5)
    kept = torch.autograd.grad(again(x).sum(), x)[0]
    torch.manual_seed(5)
    assert torch.equal(torch.autograd.grad(checkpoint(again, x, use_reentrant=False).sum(), x)[0], kept)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    x, z = (torch.randn(6, 40, device=device, requires_grad=True) for _ in range(2))
    w, b = (torch.randn(40, device=device, requires_grad=True) for _ in range(2))
    seed = torch.tensor([1, 2], dtype=torch.int32, device=device)
    for function in (mg.layer_norm, mg.rms_norm):
        function(x, residual=z)
        function(x)
    mg.gated_rms_norm(x, z)
    ops = torch.ops.margay
    torch.library.opcheck(ops.layer_norm.default, (x, w, b, 1e-5))
    torch.library.opcheck(ops.rms_norm.default, (x, w, None, 1e-5, True))
    torch.library.opcheck(ops.layer_norm_residual.default, (x, z, w, b, seed, 1e-5, 0.25))
    torch.library.opcheck(ops.rms_norm_residual.default, (x, None, w, None, seed, 1e-5, 0.25, False))
    torch.library.opcheck(ops.gated_rms_norm.default, (x[:, None], z[:, None], w[None], 1e-5, True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", (False, True))
def test_autocast(device, compiled):
    """A norm of float32 is one of float32, as torch's: rows whose mean is large would not survive 16 bits. What has
    another dtype follows x."""
    x = (100 + 0.1 * torch.randn(5, 64)).to(device).requires_grad_()
    w = torch.rand(64, device=device).add(0.5).to(torch.bfloat16).requires_grad_()
    z = torch.randn(5, 64, device=device).to(torch.bfloat16).requires_grad_()
    calls = (lambda x, w, z: mg.layer_norm(x, w), lambda x, w, z: mg.layer_norm(x, w, residual=z, prenorm=True),
             lambda x, w, z: mg.rms_norm(x, w, dropout_p=0.5, seed=3, prenorm=True),
             lambda x, w, z: mg.gated_rms_norm(x, z, w), lambda x, w, z: mg.rms_norm(z, w.float(), residual=x))
    for call in calls:
        run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
        alike = [t.detach().float().requires_grad_() for t in (x, w, z)]
        last = call is calls[-1]
        expected = call(*alike[:2], z if last else alike[2])
        with torch.autocast(device, torch.bfloat16):
            found = run(x, w, z)
        torch.compiler.reset()
        if not isinstance(found, tuple):
            found, expected = (found,), (expected,)
        for one, other in zip(found, expected):
            assert one.dtype == (torch.bfloat16 if last else torch.float32) and torch.equal(one, other)
        for t, like in zip((x, w, z), alike):
            sums = (sum(t.float().square().sum() for t in some) for some in (found, expected))
            ours, theirs = (torch.autograd.grad(s, of, retain_graph=True, allow_unused=True)[0]
                            for s, of in zip(sums, (t, z if last and t is z else like)))
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.dtype == t.dtype and torch.allclose(ours, theirs.to(t.dtype), rtol=2e-2, atol=1e-4)


def test_fp32_is_read_on_the_gpu_by_kernels_of_bf16():
    """On a machine without one, by explain."""
    with torch._subclasses.fake_tensor.FakeTensorMode():
        x = torch.empty(4, 64, device="cuda")
        assert mg.layer_norm(x).shape == (4, 64)
    assert mg.explain("norm_fwd", dtype="bfloat16", gpu=True, n=64).kernels == ["norm_fwd_bf16_any"]


BAD = [
    (lambda x, f: f(x.double()), TypeError, "x has dtype float64, expected bfloat16, float16 or float32"),
    (lambda x, f: f(x, torch.ones(7)), ValueError, "weight has size 7 in dimension 0, expected 16 (N of x)"),
    (lambda x, f: f(x, torch.ones(16).half()), TypeError,
     "weight has dtype float16, expected float32 or bfloat16 (as x)"),
    (lambda x, f: f(x, None, torch.ones(1, 16)), ValueError, "bias has 2 dimensions, expected 1"),
    (lambda x, f: f(x, residual=x[:2]), ValueError, "residual has shape [2, 16], expected [4, 16]"),
    (lambda x, f: f(x, residual=3), TypeError, "residual is int, expected Tensor"),
    (lambda x, f: f(x, residual=x.half()), TypeError,
     "residual has dtype float16, expected float32 or bfloat16 (as x)"),
    (lambda x, f: f(x, dropout_p=1.5), ValueError, "dropout_p is 1.5, expected 0 to 1"),
    (lambda x, f: f(x, dropout_p=float("nan")), ValueError, "dropout_p is nan, expected 0 to 1"),
    (lambda x, f: f(x, dropout_p="a"), TypeError, "dropout_p is 'a', expected a number"),
    (lambda x, f: f(x, dropout_p=0.5, seed=torch.zeros(3)), TypeError, "seed has dtype float32 and shape [3]"),
    (lambda x, f: f(x, dropout_p=0.5, seed=1.5), TypeError, "seed is 1.5, expected an integer"),
    (lambda x, f: f(x, eps=-1.0), ValueError, "eps is -1, expected eps >= 0"),
    (lambda x, f: f(x, eps=float("nan")), ValueError, "eps is nan"),
    (lambda x, f: f(x[:, :0]), ValueError, "expected 1 to 65536 columns"),
    (lambda x, f: f(torch.zeros(1, 65537)), ValueError, "expected 1 to 65536 columns"),
    (lambda x, f: f(torch.zeros(())), ValueError, "x has 0 dimensions, expected [..., D]"),
    (lambda x, f: f([1.0]), TypeError, "x is list, expected torch.Tensor or numpy.ndarray"),
    (lambda x, f: f(x.to("meta"), torch.ones(16)), ValueError, "weight is on cpu, expected meta (same as x)"),
]


@pytest.mark.parametrize("function", (mg.layer_norm, mg.rms_norm), ids=lambda f: f.__name__)
@pytest.mark.parametrize("call, error, words", BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_refusals(function, call, error, words):
    with pytest.raises(error) as raised:
        call(torch.zeros(4, 16, dtype=torch.bfloat16), function)
    assert words in str(raised.value) and str(raised.value).startswith(function.__name__ + ": ")


def test_refusals_of_gates():
    x = torch.zeros(4, 16, dtype=torch.bfloat16)
    for call, error, words in (
            (lambda: mg.gated_rms_norm(x, x[:2]), ValueError, "z has shape [2, 16], expected [4, 16]"),
            (lambda: mg.gated_rms_norm(x, None), TypeError, "z is NoneType, expected Tensor"),
            (lambda: mg.gated_rms_norm(x, x.half()), TypeError, "z has dtype float16, expected bfloat16 (same as x)"),
            (lambda: mg.gated_rms_norm(x, x, torch.ones(4)), ValueError, "weight has shape [4], expected [16]"),
            (lambda: mg.gated_rms_norm(x, x, group_size=5), ValueError, "group_size is 5, expected a positive integer"),
            (lambda: mg.gated_rms_norm(x, x, group_size=0), ValueError,
             "group_size is 0, expected a positive integer")):
        with pytest.raises(error) as raised:
            call()
        assert words in str(raised.value) and str(raised.value).startswith("gated_rms_norm: ")


def test_bad_13_rows_that_an_int_does_not_hold():
    """A block of the backward's ring has three lines, and lines behind the last row would have numbers from 2^31 on. A
    block of the forward has one line, and there would be too many blocks."""
    rows, columns = 2**31 - 1, 2056
    x, out, dout, dx = (Fake((rows, columns), device=(1, 0), data=i << 44) for i in range(1, 5))
    rstd = Fake((rows,), device=(1, 0), data=5 << 44, code=2, bits=32)
    partials = torch.empty(264, 2 * columns)
    for message, call in (("rms_norm: x has 2147483647 rows, expected at most 1073741824 (of 2056 columns)",
                           lambda: _C.rms_norm(out, rstd, x, None, None, 1e-6, False)),
                          ("rms_norm_bwd: x has 2147483647 rows, expected at most 2147483646 (of 2056 columns)",
                           lambda: _C.rms_norm_bwd(dx, None, None, partials, dout, x, None, None, rstd, False))):
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value) == message


def test_gradients_of_gradients_are_refused():
    x = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(mg.rms_norm(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rms_norm"):
        grad.sum().backward()


def test_memory_beside_the_result_stays():
    wide = torch.full((6, 40), float("nan"), dtype=torch.bfloat16)
    x = torch.randn(4, 21).to(torch.bfloat16)
    rstd = torch.full((4,), float("nan"))
    _C.rms_norm(wide[1:5, 3:24], rstd, x, None, None, 1e-6, False)
    assert wide[1:5, 3:24].isfinite().all() and rstd.isfinite().all()
    wide[1:5, 3:24] = float("nan")
    assert wide.isnan().all()


@pytest.mark.skipif(torch.torch_version.TorchVersion(torch.__version__) < (2, 10), reason="another eps in torch")
@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_that_is_not_given_is_torchs(dtype):
    """Of small numbers, beside which that of a 16-bit type would be large."""
    x = (0.003 * torch.randn(5, 64)).to(dtype)
    ours, theirs = (layer(64, dtype=dtype)(x).float() for layer in (mg.nn.RMSNorm, torch.nn.RMSNorm))
    assert torch.allclose(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


def test_layers_take_torchs_state_dicts():
    x, residual = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    for shape in (5, (4, 5)):
        theirs = torch.nn.LayerNorm(shape)
        torch.nn.init.normal_(theirs.weight)
        torch.nn.init.normal_(theirs.bias)
        ours = mg.nn.LayerNorm(shape)
        ours.load_state_dict(theirs.state_dict())
        assert torch.allclose(ours(x), theirs(x), atol=1e-5)
        out, u = ours(x, residual, prenorm=True)
        assert torch.equal(u, x + residual) and torch.allclose(out, theirs(u), atol=1e-5)
        rms = mg.nn.RMSNorm(shape)
        rms.load_state_dict({"weight": theirs.weight.detach()})
        dims = (-1,) if shape == 5 else (-2, -1)
        square = x.square().mean(dims, keepdim=True)
        assert torch.allclose(rms(x), x / (square + torch.finfo(x.dtype).eps).sqrt() * theirs.weight, atol=1e-5)
    assert mg.nn.LayerNorm(5, bias=False).bias is None and mg.nn.LayerNorm(5, elementwise_affine=False).weight is None
    centred = mg.nn.RMSNorm(5, 1e-6, zero_centred=True)
    assert not centred.weight.any() and torch.equal(centred(x), mg.rms_norm(x))
    gated = mg.nn.GatedRMSNorm(20, group_size=5)
    assert gated(x.flatten(1), x.flatten(1)).shape == (3, 20)
    with pytest.raises(ValueError, match="LayerNorm: x has shape .3, 4, 5., expected .*4."):
        mg.nn.LayerNorm(4)(x)
