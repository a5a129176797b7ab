"""matmul against float64: every layout, activation and kernel, sizes around the tiles' edges, what it refuses."""

import dataclasses
import math
import random
import re

import numpy
import pytest
import torch

import margay as mg
from cases import DEVICES, HALF, check_error
from margay import _C

SIZES = (0, 1, 2, 7, 8, 31, 63, 64, 65, 100, 127, 128, 129, 191, 255, 256, 257, 300)
LAYOUTS = ("nn", "nt", "tn", "tt")
ACTIVATIONS = {
    None: lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
CODES = dict(zip(ACTIVATIONS, range(5)))          # mg_activation in margay.h


@dataclasses.dataclass(frozen=True)
class Case:
    seed: int
    m: int = 64
    n: int = 64
    k: int = 64
    layouts: str = "nn"                            # of a and b; n: as it is, t: stored transposed
    bias: bool = False
    activation: str | None = None
    dtype: torch.dtype = torch.bfloat16
    gaps: bool = False                             # rows lie apart, NaN between them

    def __str__(self):
        return (f"seed{self.seed}-{self.m}x{self.n}x{self.k}-{self.layouts}"
                f"-{'bias-' * self.bias}{self.activation or 'none'}-{str(self.dtype)[6:]}{'-gaps' * self.gaps}")


def random_case(seed):
    r = random.Random(seed)
    m, n, k = (r.choice(SIZES) if r.random() < 0.8 else r.randrange(1, 600) for _ in range(3))
    return Case(seed, m, n, k, r.choice(LAYOUTS), r.random() < 0.5, r.choice(list(ACTIVATIONS)), r.choice(HALF),
                r.random() < 0.3)


RANDOM = [random_case(seed) for seed in range(200)]
SHAPES = [(0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0), (1, 1, 1), (1, 300, 65), (300, 1, 65), (127, 509, 1),
          (257, 131, 1021)]
AWKWARD = [Case(i, *shape, layouts, bias) for i, shape in enumerate(SHAPES) for layouts in LAYOUTS
           for bias in (False, True)]


def matrix(case, rows, columns, layout, generator, device):
    stored = torch.randn((columns, rows) if layout == "t" else (rows, columns), generator=generator).to(case.dtype)
    if case.gaps:
        wide = torch.full((stored.shape[0], stored.shape[1] + 24), math.nan, dtype=case.dtype)
        wide[:, 8:-16] = stored
        stored = wide.to(device)[:, 8:-16]
    stored = stored.to(device)
    return stored.t() if layout == "t" else stored


def inputs(case, device="cpu"):
    g = torch.Generator().manual_seed(case.seed)
    a, b = (matrix(case, case.m, case.k, case.layouts[0], g, device),
            matrix(case, case.k, case.n, case.layouts[1], g, device))
    return a, b, torch.randn(case.n, generator=g).to(case.dtype).to(device) if case.bias else None


def formula(case, a, b, bias):
    product = a @ b
    return ACTIVATIONS[case.activation](product if bias is None else product + bias)


def check(case, found, a, b, bias):
    exact = formula(case, a.double(), b.double(), None if bias is None else bias.double())
    # Sums in float32 differ in their order. An activation's slope is at most 1.13, that of gelu.
    rounding = (2**-22 * float(a.double().norm(dim=1).max() * b.double().norm(dim=0).max()) if exact.numel() and case.k
                else 0.0)
    # some CPUs' bf16 product in PyTorch reads the NaN between rows
    plain = formula(case, *(t.contiguous() if t.is_cpu else t for t in (a, b)), bias)
    check_error("out", found, plain, exact, rounding=(0.0, rounding))


def guarded(case, device="cpu"):
    """An output of NaN inside a larger matrix of NaN."""
    around = torch.full((case.m + 2, case.n + 24), math.nan, dtype=case.dtype, device=device)
    return around, around[1:case.m + 1, 8:case.n + 8]


def check_guards(case, around):
    around[1:case.m + 1, 8:case.n + 8] = math.nan
    assert around.isnan().all(), "memory beside out was written"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", RANDOM + AWKWARD, ids=str)
def test_result(case, device):
    a, b, bias = inputs(case, device)
    around, out = guarded(case, device)
    assert mg.matmul(a, b, bias=bias, activation=case.activation, out=out) is out
    check(case, out, a, b, bias)
    check_guards(case, around)
    check(case, mg.matmul(a, b, bias=bias, activation=case.activation), a, b, bias)


@pytest.mark.parametrize("case", [dataclasses.replace(case, dtype=torch.float32) for case in RANDOM[:40] + AWKWARD],
                         ids=str)
def test_float32(case):
    a, b, bias = inputs(case)
    check(case, mg.matmul(a, b, bias=bias, activation=case.activation), a, b, bias)


# ---- every kernel


def kernel_names(where):
    return [row["name"] for row in _C.kernels() if row["op"] == "matmul" and row["where"] in ("any", where)]


@pytest.fixture
def prefer():
    yield _C.prefer
    _C.prefer(None)


def check_kernel(name, prefer, device):
    """All sizes of tiles that a kernel can get, odd and even numbers of them and of steps; more tasks than blocks."""
    dtype, layouts = re.match("matmul_(bf16|fp16|fp32)_([nt]{2})", name).groups()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    sizes = [(200, 300, 130), (129, 1, 64), (256, 256, 320), (500, 65, 1), (193, 520, 0), (200, 512, 500)]
    if device == "cuda":
        sizes += [(8192, 4000, 200), (4200, 8200, 1100)]
    checked = 0
    for seed, (m, n, k) in enumerate(sizes):
        case = Case(seed, m, n, k, layouts, seed % 2 == 0, list(ACTIVATIONS)[seed % 5], dtype)
        a, b, bias = inputs(case, device)
        around = torch.full((m + 2, n + 8 - n % 8), math.nan, dtype=dtype, device=device)
        out = around[1:-1, :n]
        prefer(name)
        problem = dict(dtype=str(dtype)[6:], gpu=device == "cuda", m=m, n=n, k=k, trans_a=layouts[0] == "t",
                       trans_b=layouts[1] == "t")
        if _C.explain("matmul", **problem)[0] != name:
            continue
        _C.matmul(out, *(padded(t) for t in (a, b)), bias, CODES[case.activation])
        check(case, out, a, b, bias)
        out.fill_(math.nan)
        if device == "cuda":                           # rows are written in units of 16 bytes there, see margay.h
            around[1:-1, n:n + -n % 8] = math.nan
        assert around.isnan().all(), "memory beside out was written"
        checked += 1
    assert checked >= 2


def padded(t):
    """A copy whose rows are multiples of 16 bytes apart, as the GPU's maps want them."""
    if t.stride(-1) != 1 and t.shape[-1] > 1:
        return padded(t.t()).t()
    wide = torch.full((t.shape[0], t.shape[1] + -t.shape[1] % 8), math.nan, dtype=t.dtype, device=t.device)
    wide[:, :t.shape[1]] = t
    return wide[:, :t.shape[1]]


@pytest.mark.parametrize("name", kernel_names("cpu"))
def test_kernel_on_cpu(name, prefer):
    check_kernel(name, prefer, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", kernel_names("gpu"))
def test_kernel_on_gpu(name, prefer):
    check_kernel(name, prefer, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", kernel_names("gpu"))
def test_repeats_bitwise(name, prefer):
    """A missing synchronisation shows as an answer that changes."""
    dtype, layouts = re.match("matmul_(bf16|fp16)_([nt]{2})", name).groups()
    size = 2048 if "256" in name else 1024         # the small tiles' rows take problems of one wave
    case = Case(0, size, size, 520, layouts, True, "silu", {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    a, b, bias = inputs(case, "cuda")
    prefer(name)
    first = torch.empty(case.m, case.n, dtype=case.dtype, device="cuda")
    _C.matmul(first, a, b, bias, CODES[case.activation])
    for _ in range(50):
        out = torch.full_like(first, math.nan)
        _C.matmul(out, a, b, bias, CODES[case.activation])
        assert torch.equal(out, first)


def test_prefer():
    with pytest.raises(ValueError, match="there is no kernel nonsense"):
        _C.prefer("nonsense")
    with pytest.raises(TypeError):
        _C.prefer(1)


# ---- arguments


def test_numpy():
    g = numpy.random.default_rng(0)
    a, b, bias = (g.standard_normal((3, 70, 33), "float32"), g.standard_normal((90, 33), "float32").T,
                  g.standard_normal(90, "float32"))
    out = mg.matmul(a, b, bias=bias, activation="relu")
    assert isinstance(out, numpy.ndarray)
    exact = numpy.maximum(a.astype("float64") @ b + bias, 0)
    assert numpy.abs(out - exact).max() < 1e-5
    half = mg.matmul(a[0].astype("float16"), b.astype("float16"))
    assert half.dtype == numpy.float16 and numpy.abs(half - a[0].astype("float64") @ b).max() < 0.05


def test_nan_and_infinity_stay_in_their_rows():
    a, b = torch.randn(70, 65), torch.randn(65, 80)
    a[3, 64], a[69, 0] = math.nan, math.inf
    out = mg.matmul(a.bfloat16(), b.bfloat16())
    assert out[3].isnan().all() and not out[69].isfinite().any()
    assert out[[i for i in range(70) if i not in (3, 69)]].isfinite().all()


@pytest.mark.parametrize("wrong, message", [
    (dict(b=(5, 4)), "matmul: b has size 5 in dimension 0, expected 3 (K of a)"),
    (dict(out=(2, 5)), "matmul: out has size 5 in dimension 1, expected 4 (N of b)"),
    (dict(bias=(5,)), "matmul: bias has size 5 in dimension 0, expected 4 (N of b)"),
    (dict(activation=5), "matmul: activation is 5, expected activation >= 0 && activation <= 4"),
    (dict(activation=-1), "matmul: activation is -1, expected activation >= 0 && activation <= 4"),
])
def test_refused(wrong, message):
    shapes = dict(out=(2, 4), a=(2, 3), b=(3, 4), bias=(4,)) | {k: v for k, v in wrong.items() if k != "activation"}
    with pytest.raises(ValueError, match=re.escape(message)):
        _C.matmul(*(torch.zeros(shape) for shape in shapes.values()), wrong.get("activation", 0))


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["out", "a", "b"])
def test_unaligned_rows_are_named(argument):
    tensors = {name: torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda") for name in ("out", "a", "b")}
    tensors[argument] = torch.zeros(64, 65, dtype=torch.bfloat16, device="cuda")[:, :64]
    with pytest.raises(ValueError,
                       match=f"matmul: {argument} has a row stride of 65 elements of 2 bytes, expected a multiple of "
                             "16 bytes"):
        _C.matmul(*tensors.values(), None, 0)
