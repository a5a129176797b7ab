"""cross_entropy and its gradients against float64 and against torch's of all logits, on odd sizes, in chunks."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

import margay as mg
from cases import DEVICES, check_error
from margay import _C
from margay.families import cross_entropy_torch
from refusals import Wrapped, refused

VOCABULARIES = (1, 2, 7, 8, 50, 127, 128, 1000, 2047, 2048, 2049, 4096, 5003, 9000)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def formula(hidden, weight, bias, targets, smoothing=0.0, cap=0.0, z_loss=0.0, reduction="mean", ignored=-100):
    """Logits in the arguments' precision, softmax in float32 or better."""
    z = F.linear(hidden, weight, bias)
    return loss_of(z if z.dtype == torch.float64 else z.float(), targets, smoothing, cap, z_loss, reduction, ignored)


def loss_of(z, targets, smoothing, cap, z_loss, reduction, ignored):
    z = cap * torch.tanh(z / cap) if cap else z
    rows = F.cross_entropy(z, targets, ignore_index=ignored, label_smoothing=smoothing, reduction="none")
    counts = targets != ignored
    rows = rows + z_loss * torch.where(counts, z.logsumexp(-1), 0).square()
    return rows if reduction == "none" else rows.sum() / (counts.sum() if reduction == "mean" else 1)


class Problem:
    def __init__(self, seed, device, vocabulary=None, dtype=None, **options):
        r, g = random.Random(seed), torch.Generator().manual_seed(seed)
        dtype, v = dtype or r.choice(DTYPES), vocabulary or r.choice(VOCABULARIES)
        m, k = r.choice((1, 2, 5, 13, 40, 65)), r.choice((1, 8, 33, 64))
        self.options = dict(label_smoothing=r.choice((0.0, 0.0, 0.1, 1.0)), softcap=r.choice((None, None, 3.0, 30.0)),
                            z_loss=r.choice((0.0, 0.0, 1e-3)), reduction=r.choice(("mean", "sum", "none")),
                            ignore_index=r.choice((-100, 0, v + 7))) | options
        self.chunk = r.choice((None, 1, 4, 16, 1000))
        size = r.choice((0.1, 1.0, 5.0)) / k**0.5
        make = lambda *shape: torch.randn(*shape, generator=g).to(device, dtype)  # noqa: E731
        self.tensors = {"hidden": make(m, k), "weight": (make(v, k).float() * size).to(dtype)}
        if r.random() < 0.5:
            self.tensors["bias"] = make(v)
        self.targets = torch.randint(0, v, (m,), generator=g).to(device)
        self.targets[torch.rand(m, generator=g).to(device) < r.choice((0, 0.2))] = self.options["ignore_index"]
        if not (self.targets != self.options["ignore_index"]).any() and self.options["reduction"] == "mean":
            self.options["reduction"] = "sum"          # the mean of nothing is NaN
        self.dloss = (torch.rand(m if self.options["reduction"] == "none" else (), generator=g) + 0.5).to(device)
        self.label = (f"seed {seed}: {dtype} {m} x {k} x {v} bias {'bias' in self.tensors} chunk {self.chunk} "
                      f"{self.options}")

    def results(self, call, dtype=None):
        """The loss and all gradients, by name."""
        given = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in self.tensors.items()}
        loss = call(given)
        grads = torch.autograd.grad(loss, list(given.values()), self.dloss.to(loss.dtype))
        return {"loss": loss.detach()} | {"d" + name: grad for name, grad in zip(given, grads)}

    def ours(self, **others):
        return self.results(lambda t: mg.cross_entropy(t["hidden"], t["weight"], self.targets, bias=t.get("bias"),
                                                       **{"chunk": self.chunk, **self.options, **others}))

    def numbers(self):
        return [self.options[name] for name in ("label_smoothing", "softcap", "z_loss", "reduction", "ignore_index")]

    def in_dtype(self, dtype):
        return self.results(lambda t: formula(t["hidden"], t["weight"], t.get("bias"), self.targets, *self.numbers()),
                            dtype)

    def roundings(self):
        """The standard error, at most, that rounding the gradient of the logits once makes of each gradient, and that
        rounding the logits once makes of the loss."""
        h, w = (self.tensors[name].double() for name in ("hidden", "weight"))
        bias = self.tensors.get("bias")
        z = F.linear(h, w, None if bias is None else bias.double()).requires_grad_()
        loss = loss_of(z, self.targets, *self.numbers())
        half = torch.finfo(self.tensors["hidden"].dtype).eps / 2
        slopes = torch.autograd.grad(loss, z, torch.ones_like(loss), retain_graph=True)[0]
        of_rows = (slopes * z * half).detach().square().sum(1)
        d = torch.autograd.grad(loss, z, self.dloss.double())[0].square() * half**2
        return {name: float(t.max().sqrt())
                for name, t in (("loss", of_rows if loss.dim() else of_rows.sum()), ("dhidden", d @ w.square()),
                                ("dweight", d.t() @ h.square()), ("dbias", d.sum(0)))}

    def check(self):
        print(self.label)
        ours, plain, exact = self.ours(), self.in_dtype(None), self.in_dtype(torch.float64)
        # Beside that of the logits' gradient, roundings of float32 where p - 1 and p - s / n cancel, of sums of rows,
        # and of a gradient that is multiplied by dloss when it has been rounded.
        once, eps = self.roundings(), torch.finfo(torch.float32).eps
        largest = float(F.linear(*(self.tensors[name].double() for name in ("hidden", "weight"))).abs().max())
        for name, found in ours.items():
            terms = self.targets.numel() if self.options["reduction"] == "sum" or name == "dweight" else 1
            size = 1 if name == "loss" else max([1.0] + [float(t.abs().max()) for t in self.tensors.values()])
            small = 8 * eps * (1 + largest) * math.sqrt(terms) * size
            check_error(f"{self.label}: {name}", *(t.reshape(-1) if t.dim() < 2 else t for t in (
                        found, plain[name], exact[name])), 2 if name == "loss" else 3,
                        (8 * eps if name == "loss" else torch.finfo(found.dtype).eps,
                         (small + 4 * once[name], small + 2 * once[name], small + 2 * once[name])))
            assert found.dtype == (torch.float32 if name == "loss" else self.tensors[name[1:]].dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_random_problems(device):
    first = random.randrange(1 << 30)
    for seed in range(first, first + (500 if device == "cuda" else 200)):
        Problem(seed, device).check()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("device", DEVICES)
def test_vocabularies(device, vocabulary):
    for dtype in DTYPES:
        Problem(vocabulary, device, vocabulary, dtype).check()


@pytest.mark.parametrize("device", DEVICES)
def test_is_torchs(device):
    """Of options that torch's has, the same number."""
    p = Problem(3, device, 5003, torch.float32, z_loss=0.0, softcap=None, ignore_index=-100)
    h, w, o = p.tensors["hidden"], p.tensors["weight"], p.options
    expected = F.cross_entropy(F.linear(h, w, p.tensors.get("bias")), p.targets, label_smoothing=o["label_smoothing"],
                               reduction=o["reduction"])
    assert torch.allclose(p.ours()["loss"], expected, rtol=1e-5)
    x = h.view(1, -1, h.shape[1])
    shaped = mg.cross_entropy(x, w, p.targets[None], bias=p.tensors.get("bias"), reduction="none",
                              label_smoothing=o["label_smoothing"])
    assert shaped.shape == p.targets[None].shape and torch.equal(shaped.isnan(), torch.zeros_like(shaped).bool())


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_and_repeats_change_nothing(device):
    for dtype in DTYPES:
        p = Problem(4, device, 1000, dtype, reduction="mean", label_smoothing=0.1)
        first = p.ours(chunk=None)
        for _ in range(2):
            assert all(torch.equal(a, first[name]) for name, a in p.ours(chunk=None).items())
        one = p.ours(chunk=3)
        eps = torch.finfo(dtype).eps
        assert all(torch.allclose(a.float(), first[name].float(), rtol=4 * eps, atol=4 * eps * float(
            first[name].abs().max())) for name, a in one.items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", (False, True))
def test_a_scaled_loss_of_float16(device, compiled):
    """As of a GradScaler: what each word has of a mean over many rows is nothing in float16 without the factor."""
    scale, g = 2.0**16, torch.Generator().manual_seed(0)
    hidden = torch.randn(2048, 16, generator=g).to(device, torch.float16).requires_grad_()
    weight = (0.02 * torch.randn(9000, 16, generator=g) + 0.02).to(device, torch.float16).requires_grad_()
    targets = torch.randint(0, 9000, (2048,), generator=g).to(device)
    call = lambda h, w: mg.cross_entropy(h, w, targets, chunk=1024)  # noqa: E731
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    found = torch.autograd.grad(run(hidden, weight) * scale, (hidden, weight))
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = torch.autograd.grad(F.cross_entropy(wide[0] @ wide[1].t(), targets) * scale, wide)
    for ours, right in zip(found, exact):
        assert (ours.double() - right).norm() <= torch.finfo(torch.float16).eps * right.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_one_row_without_a_batch(device):
    """hidden [K], of a target without dimensions, as torch's."""
    h, w = (torch.randn(*shape, device=device).bfloat16().requires_grad_() for shape in ((24,), (50, 24)))
    for reduction in ("mean", "none"):
        found, many = (mg.cross_entropy(x, w, t, reduction=reduction)
                       for x, t in ((h, torch.tensor(7, device=device)), (h[None], torch.tensor([7], device=device))))
        assert found.shape == () and torch.equal(found, many.reshape(()))
        assert all(map(torch.equal, *(torch.autograd.grad(t.sum(), (h, w)) for t in (found, many))))


@pytest.mark.parametrize("device", DEVICES)
def test_large_and_small_logits(device):
    """A softmax that is 1 at one place, and logits that no sum of exponentials holds."""
    for dtype in DTYPES:
        hidden = torch.eye(4, device=device).to(dtype).requires_grad_()
        weight = torch.zeros(3000, 4, device=device, dtype=dtype)
        weight[5, 0], weight[7, 1], weight[8, 2] = 1000.0, -1000.0, 60000.0
        targets = torch.tensor([5, 7, 8, 9], device=device)
        loss = mg.cross_entropy(hidden, weight, targets, reduction="none")
        exact = formula(hidden.double(), weight.double(), None, targets, reduction="none")
        assert torch.allclose(loss.double(), exact, rtol=1e-6)
        assert torch.isfinite(torch.autograd.grad(loss.sum(), hidden)[0]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_words_that_cannot_be(device, dtype):
    """A bias of minus infinity, as of a vocabulary that is padded: loss and gradients are those without these words."""
    g, kept = torch.Generator().manual_seed(0), 90
    hidden, weight, bias = (torch.randn(*shape, generator=g).to(device, dtype)
                            for shape in ((5, 16), (100, 16), (100,)))
    bias[kept:] = float("-inf")
    targets = torch.arange(5, device=device)
    given = [t.requires_grad_() for t in (hidden, weight, bias)]
    loss = mg.cross_entropy(hidden, weight, targets, bias=bias)
    fewer = [t.detach()[:kept].requires_grad_() for t in given]
    other = mg.cross_entropy(fewer[0], fewer[1], targets, bias=fewer[2])
    assert torch.allclose(loss, other, rtol=1e-6)
    for found, expected in zip(torch.autograd.grad(loss, given), torch.autograd.grad(other, fewer)):
        assert torch.equal(found[kept:], torch.zeros_like(found[kept:]))
        assert torch.allclose(found[:kept].float(), expected.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_bad_20_what_is_not_finite_stays_in_its_row(device):
    hidden = torch.ones(3, 8, device=device).to(torch.bfloat16)
    hidden[1, 2] = float("nan")
    hidden.requires_grad_()
    weight, targets = torch.ones(50, 8, device=device).to(torch.bfloat16), torch.tensor([1, 2, 3], device=device)
    loss = mg.cross_entropy(hidden, weight, targets, reduction="none")
    assert loss.isnan().tolist() == [False, True, False]
    (grad,) = torch.autograd.grad(loss.sum(), hidden)
    assert grad.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("device", DEVICES)
def test_bad_06_07_memory(device):
    """Columns of all strides, and rows that are all the same."""
    h, w = torch.randn(8, 40, device=device).bfloat16(), torch.randn(40, 30, device=device).bfloat16().t()
    targets = torch.arange(16, device=device)[::2]
    expected = mg.cross_entropy(h, w.contiguous(), targets.contiguous(), reduction="none")
    assert torch.allclose(mg.cross_entropy(h.t().contiguous().t(), w, targets, reduction="none"), expected, rtol=1e-3)
    one = mg.cross_entropy(h[:1].expand(8, 40), w, targets, reduction="none")
    assert torch.allclose(one[0], expected[0], rtol=1e-3) and not torch.allclose(one[1], expected[1])


@pytest.mark.gpu
def test_bad_31_graph_capture():
    h, w = (torch.randn(n, 64, device="cuda").bfloat16().requires_grad_() for n in (70, 1000))
    targets = torch.randint(0, 1000, (70,), device="cuda")

    def step():
        loss = mg.cross_entropy(h, w, targets, chunk=32)
        return loss, *torch.autograd.grad(loss, (h, w))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        h.copy_(torch.randn_like(h))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step()))


@pytest.mark.parametrize("device", DEVICES)
def test_bad_21_targets_that_do_not_exist(device):
    """Refused on the CPU; on the GPU, where nobody waits for them, NaN, and no gradient."""
    hidden = torch.randn(4, 8, device=device).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(50, 8, device=device).to(torch.bfloat16)
    for wrong in (50, -1, -101, 2**31, -2**40, 2**62):
        targets = torch.tensor([1, -100, wrong, 3], device=device)
        if device == "cpu":
            refused(ValueError, "cross_entropy: targets[2] is ", mg.cross_entropy, hidden, weight, targets)
            continue
        loss = mg.cross_entropy(hidden, weight, targets, reduction="none")
        assert loss.isnan().tolist() == [False, False, True, False] and loss[1] == 0
        (grad,) = torch.autograd.grad(mg.cross_entropy(hidden, weight, targets, reduction="sum"), hidden)
        assert not grad[1:3].any() and torch.isfinite(grad).all()


@pytest.mark.parametrize("device", DEVICES)
def test_second_backward_and_partial_gradients(device):
    """The forward's gradients are used up by the first backward; the second computes them again."""
    p = Problem(8, device, 500, torch.float32, reduction="mean", label_smoothing=0.1, softcap=None)
    h, w = (p.tensors[name].clone().requires_grad_() for name in ("hidden", "weight"))
    loss = mg.cross_entropy(h, w, p.targets, ignore_index=p.options["ignore_index"], chunk=4)
    first = torch.autograd.grad(loss, (h, w), torch.tensor(3.0, device=device), retain_graph=True)
    second = torch.autograd.grad(loss, (h, w), torch.tensor(3.0, device=device))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(first, second))
    alone = mg.cross_entropy(h.detach(), w, p.targets, ignore_index=p.options["ignore_index"], chunk=4)
    found = torch.autograd.grad(alone, w, torch.tensor(3.0, device=device))[0]
    assert torch.allclose(found, first[1], rtol=1e-4, atol=1e-6)
    alone = mg.cross_entropy(h, w.detach(), p.targets, ignore_index=p.options["ignore_index"], chunk=4)
    found = torch.autograd.grad(alone, h, torch.tensor(3.0, device=device))[0]
    assert torch.allclose(found, first[0], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert not mg.cross_entropy(h, w, p.targets).requires_grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("made_forward", "made_backward"))
def test_bad_30_gradients_of_gradients(dtype, device):
    """Also where something beside them has a gradient: theirs would be missing."""
    h, w = (torch.randn(n, 8, dtype=dtype, device=device, requires_grad=True) for n in (6, 11))
    targets = torch.arange(6, device=device)
    call = lambda h, w: mg.cross_entropy(h, w, targets, reduction=reduction).sum()  # noqa: E731
    for reduction in ("mean", "none"):
        dh, dw = torch.autograd.grad(call(h, w), (h, w), create_graph=True)
        assert torch.equal(dh, torch.autograd.grad(call(h, w), h)[0])
        for again in (dh, dw):
            with pytest.raises(NotImplementedError, match=r"^cross_entropy: gradients of gradients "
                                                          r"\(create_graph=True\) are not implemented$"):
                torch.autograd.grad(again.float().square().sum() + h.float().sum(), (h, w), retain_graph=True)


@pytest.mark.parametrize("device", DEVICES)
def test_bad_10_empty(device):
    weight = torch.ones(9, 4, device=device, dtype=torch.bfloat16, requires_grad=True)
    for shape in ((0, 4), (2, 0, 4)):
        hidden = torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
        loss = mg.cross_entropy(hidden, weight, targets, reduction="sum")
        grads = torch.autograd.grad(loss, (hidden, weight))
        assert loss == 0 and grads[0].shape == shape and not grads[1].any()
        assert mg.cross_entropy(hidden, weight, targets).isnan()                   # as torch's mean of nothing
        assert mg.cross_entropy(hidden, weight, targets, reduction="none").shape == shape[:-1]
    hidden, ignored = torch.ones(3, 4, device=device, dtype=torch.bfloat16), torch.full((3,), -100, device=device)
    assert mg.cross_entropy(hidden, weight, ignored, reduction="none").tolist() == [0, 0, 0]


def test_logits_of_all_rows_never_exist(monkeypatch):
    """What is allocated, counted: no more than a chunk's logits, a part of a product, and what is returned."""
    made = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            made.extend(t.untyped_storage().nbytes() for t in (result if isinstance(result, tuple) else (result,))
                        if isinstance(t, torch.Tensor))
            return result
    m, k, v, chunk = 640, 16, 3000, 64
    hidden, weight = torch.randn(m, k).bfloat16(), torch.randn(v, k).bfloat16()
    targets = torch.randint(0, v, (m,)).int()
    monkeypatch.setattr(cross_entropy_torch, "PART_BYTES", 1000 * k * 2)
    with Count():
        cross_entropy_torch._loss(hidden, weight, None, targets, torch.ones(1), (-100, 0.0, 0.0, 0.0), 1, chunk,
                                  [True, True, False])
    assert max(made) <= max(chunk * v * 2, v * k * 4) < m * v * 2
    # 8192 rows of 4096 columns, 128256 words, bfloat16
    weight = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta")
    rows = cross_entropy_torch.rows_of_chunk(8192, weight, False)
    assert rows >= 1024 and rows * 128256 * 2 <= 537e6
    assert rows <= cross_entropy_torch.rows_of_chunk(8192, weight, True) <= 4096
    # As many chunks as have to be, of one size in steps of 128: 5248 rows would fit. More than 1024 rows are two.
    weight = torch.empty(50304, 2048, dtype=torch.bfloat16, device="meta")
    expected = {0: 128, 1: 128, 1000: 1024, 1024: 1024, 1025: 640, 4096: 2048, 5000: 2560, 8192: 4096, 8193: 4224,
                16000: 4096}
    assert {n: cross_entropy_torch.rows_of_chunk(n, weight, True) for n in expected} == expected
    assert [cross_entropy_torch.rows_of_chunk(n, torch.empty(1 << 24, 64, device="meta"), True)
            for n in (5, 5000)] == [64, 64]


@pytest.mark.gpu
def test_peak_of_a_training_step():
    """Less than the logits, beside what goes in and comes out; and of two chunks one gradient of weight."""
    rows, columns, words = 4096, 1024, 32000
    hidden, weight = (torch.randn(n, columns, device="cuda").bfloat16().requires_grad_() for n in (rows, words))
    targets = torch.randint(0, words, (rows,), device="cuda")
    torch.autograd.grad(mg.cross_entropy(hidden, weight, targets), (hidden, weight))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(mg.cross_entropy(hidden, weight, targets), (hidden, weight))
    used = torch.cuda.max_memory_allocated() - before - (hidden.nbytes + weight.nbytes)
    assert used < 0.6 * rows * words * 2, used


@pytest.mark.parametrize("device", DEVICES)
def test_scaled(device):
    """What the backward multiplies the forward's gradients with, in place or as it rounds float32; rows apart, too."""
    g = torch.Generator().manual_seed(random.randrange(1 << 30))
    for dtype in DTYPES[:2] if device == "cuda" else DTYPES:
        for m, n, between in ((1, 1, 0), (3, 5, 0), (3, 5, 3), (2, 2048, 8), (7, 4099, 0), (5, 4104, 24), (2, 20000, 0)):
            for scale in (1.0, 0.3):
                of = torch.tensor([scale], device=device)
                sums, x = (torch.randn(m, n, generator=g).to(device) for _ in range(2))
                room = torch.full((m, n + between), float("nan"), dtype=dtype, device=device)
                out = room[:, :n]
                _C.cross_entropy_scaled(out, sums, of)
                assert torch.equal(out, (sums * of).to(dtype)) and room[:, n:].isnan().all()
                out.copy_(x)
                expected = (out.float() * of).to(dtype)
                _C.cross_entropy_scaled(out, None, of)
                assert torch.equal(out, expected) and room[:, n:].isnan().all()


@pytest.mark.gpu
def test_peak_memory():
    """As promised: at most 537 MB beside inputs, gradients and the float32 gradient of weight."""
    m, k, v = 8192, 4096, 128256
    hidden = torch.randn(m, k, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(v, k, device="cuda") / 64).bfloat16().requires_grad_()
    targets = torch.randint(0, v, (m,), device="cuda")
    mg.cross_entropy(hidden[:128], weight, targets[:128]).backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mg.cross_entropy(hidden, weight, targets).backward()
    beside = torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes - 2 * weight.nbytes
    assert beside <= 537e6, beside


def test_compiled_and_transformed():
    p = Problem(11, "cpu", 300, torch.float32, reduction="mean", label_smoothing=0.1, ignore_index=-100)
    h, w = (p.tensors[name].clone().requires_grad_() for name in ("hidden", "weight"))
    for reduction in ("mean", "sum", "none"):
        call = lambda h, w: mg.cross_entropy(h, w, p.targets, reduction=reduction, softcap=5.0, chunk=4)  # noqa: E731
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        plain = call(h, w)
        found = compiled(h, w)
        d = torch.rand_like(plain)
        assert torch.equal(found, plain)
        for a, b in zip(torch.autograd.grad(found, (h, w), d), torch.autograd.grad(plain, (h, w), d)):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-7)
    plain = mg.cross_entropy(h, w, p.targets)
    assert torch.equal(mg.cross_entropy(h.detach().as_subclass(Wrapped), w, p.targets), plain)
    many = torch.vmap(lambda h: mg.cross_entropy(h, w, p.targets))(torch.stack([h, h * 2]))
    assert torch.allclose(many[0], plain)
    grad = torch.func.grad(lambda h: mg.cross_entropy(h, w, p.targets))(h)
    assert torch.allclose(grad, torch.autograd.grad(plain, h)[0], rtol=1e-5, atol=1e-8)
    arguments = (h, w, p.targets.int(), None, torch.ones(1), -100, 0.1, 0.0, 0.0, 1, 4, [True, True, False])
    torch.library.opcheck(torch.ops.margay.cross_entropy.default, arguments,
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = mg.cross_entropy(h, w, p.targets)
        assert torch.allclose(loss, mg.cross_entropy(h.bfloat16(), w.bfloat16(), p.targets))
        assert torch.autograd.grad(loss, w)[0].dtype == torch.float32


def test_compiled_for_all_sizes():
    """Rows of which the compiler knows no number, and numbers that it takes for symbols."""
    weight, g = torch.randn(300, 16), torch.Generator().manual_seed(0)

    def call(h, t, z_loss=0.0):
        return mg.cross_entropy(h, weight, t, softcap=5.0, z_loss=z_loss, label_smoothing=0.1)
    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows, more in ((3, ()), (7, ()), (20, ()), (20, (1e-4,)), (20, (1e-3,))):
        h, t = torch.randn(rows, 16, generator=g).requires_grad_(), torch.randint(0, 300, (rows,), generator=g)
        found, expected = compiled(h, t, *more), call(h, t, *more)
        assert torch.allclose(found, expected, rtol=1e-5)
        grads = [torch.autograd.grad(loss, h)[0] for loss in (found, expected)]
        assert torch.allclose(*grads, rtol=1e-4, atol=1e-7)


def test_bad_01_02_03_15_39_refusals():
    h, w, t = torch.zeros(6, 8), torch.zeros(20, 8), torch.zeros(6, dtype=torch.int64)
    for call, error, words in (
            (lambda: mg.cross_entropy(h.double(), w.double(), t), TypeError,
             "cross_entropy: hidden has dtype float64, expected bfloat16, float16 or float32"),
            (lambda: mg.cross_entropy(h, w.half(), t), TypeError,
             "cross_entropy: weight has dtype float16, expected float32 (same as hidden)"),
            (lambda: mg.cross_entropy(h, w, t, bias=torch.zeros(20).half()), TypeError,
             "cross_entropy: bias has dtype float16, expected float32 (same as hidden)"),
            (lambda: mg.cross_entropy(h, w, t.float()), TypeError,
             "cross_entropy: targets is a tensor of dtype float32, expected a tensor of int32"),
            (lambda: mg.cross_entropy(h, w, t[:5]), ValueError, "cross_entropy: targets has shape [5], expected [6]"),
            (lambda: mg.cross_entropy(h, w[:, :7], t), ValueError,
             "cross_entropy: weight has shape [20, 7], expected [V, 8]"),
            (lambda: mg.cross_entropy(h, w[:0], t), ValueError,
             "cross_entropy: weight has shape [0, 8], expected [V, 8]"),
            (lambda: mg.cross_entropy(h, w, t, bias=torch.zeros(21)), ValueError,
             "cross_entropy: bias has shape [21], expected [20] (V of weight)"),
            (lambda: mg.cross_entropy(h, w, t, label_smoothing=1.5), ValueError,
             "cross_entropy: label_smoothing is 1.5, expected 0 to 1"),
            (lambda: mg.cross_entropy(h, w, t, label_smoothing=math.nan), ValueError, "label_smoothing is nan"),
            (lambda: mg.cross_entropy(h, w, t, softcap=-1), ValueError,
             "cross_entropy: softcap is -1, expected 0 (none)"),
            (lambda: mg.cross_entropy(h, w, t, softcap=1e-45), ValueError, "cross_entropy: softcap is 1e-45"),
            (lambda: mg.cross_entropy(h, w, t, z_loss=math.inf), ValueError, "cross_entropy: z_loss is inf"),
            (lambda: mg.cross_entropy(h, w, t, z_loss=[1]), TypeError,
             "cross_entropy: z_loss is [1], expected a number"),
            (lambda: mg.cross_entropy(h, w, t, reduction="max"), ValueError,
             "cross_entropy: reduction is 'max', expected 'mean', 'sum' or 'none'"),
            (lambda: mg.cross_entropy(h, w, t, chunk=0), ValueError, "cross_entropy: chunk is 0, expected a positive"),
            (lambda: mg.cross_entropy(h, w, t, chunk=2.5), TypeError,
             "cross_entropy: chunk is 2.5, expected an integer"),
            (lambda: mg.cross_entropy(h, w, t, ignore_index=2**31), ValueError,
             "cross_entropy: ignore_index is 2147483648, expected an integer of 32 bits"),
            (lambda: mg.cross_entropy(h.numpy(), w, t), TypeError,
             "cross_entropy: hidden is ndarray, expected torch.Tensor"),
            (lambda: mg.cross_entropy(h, w, t.to("meta")), ValueError,
             "cross_entropy: targets is on meta, expected cpu")):
        refused(error, words, call)
    logits, loss = torch.zeros(6, 20), torch.zeros(6)
    refused(BufferError, "cross_entropy: loss is written, but shares memory with", _C.cross_entropy_rows, loss, loss,
            logits, t.int())
    refused(ValueError, "expected a scale, or one a row", _C.cross_entropy_rows, loss, loss.clone(), logits, t.int(),
            torch.ones(3))
    refused(ValueError, "expected a scale", _C.cross_entropy_scaled, logits, None, torch.ones(3))
