"""layer_norm and rms_norm in float8_e4m3fn, with a scale of each row and one that is given, against float64.

Rounding is exact: of y / descale, which is known up to the error of float32's y, the result is the nearest e4m3 of some
number within that error. Of rows' scales, y's largest is known as well."""

import random

import numpy as np
import pytest
import torch

import margay as mg
from cases import DEVICES
from margay import _C
from norm_cases import HALVES, WIDTHS, Problem, formula

E4M3, MOST, LEAST = torch.float8_e4m3fn, 448.0, 2.0**-126
FUNCTIONS = {"layer": mg.layer_norm, "rms": mg.rms_norm}
LARGEST = float(np.finfo(np.float32).max)


def to_e4m3(x):
    """Nearest, saturated, in float64; of what is a float32."""
    return x.float().clamp(-MOST, MOST).to(E4M3).double()


def check_rounded(label, out, scale, exact, error):
    """out is e4m3 of exact / scale, which may be off by error / scale and three roundings of float32. scale: as wide as
    exact."""
    assert out.dtype == E4M3 and out.shape == exact.shape
    v, found = exact / scale, out.double()
    slack = error / scale + 2.0**-21 * v.abs()
    low, high = to_e4m3(v - slack), to_e4m3(v + slack)
    wrong = ~((low <= found) & (found <= high))
    assert not wrong.any(), f"{label}: {int(wrong.sum())} of {wrong.numel()}: {found[wrong][:4]}, {v[wrong][:4]}"


class Quantised(Problem):
    """A problem of the norms, in e4m3. Beside what the row's kernel computes in float32, nothing is rounded twice."""

    def __init__(self, seed, device, shape=None, dtype=None, kind=None, given=None):
        super().__init__(seed, device, shape, dtype, kind or random.Random(seed).choice(("layer", "rms")))
        r = random.Random(seed + 1)
        self.given = r.random() < 0.5 if given is None else given
        self.scale = torch.tensor(r.choice((1.0, 0.02, 0.003, 1e3)), device=device)
        self.label += f" scale {float(self.scale):g}" * self.given

    def check(self):
        print(self.label)
        o, prenorm = self.options, self.options["prenorm"]
        given = {name: t.detach() for name, t in self.tensors.items()}
        of_scale = {"out_scale": self.scale.reshape([(), (1,), (1, 1)][len(self.label) % 3])} if self.given else {}
        with torch.no_grad():
            found = FUNCTIONS[self.kind](**given, **o, out_dtype=E4M3, **of_scale)
            plain = FUNCTIONS[self.kind](**given, **o)
        found = found if isinstance(found, tuple) else (found,)
        assert len(found) == 1 + (not self.given) + prenorm
        if prenorm:                                  # the same sum, bit by bit
            assert found[-1].dtype == plain[1].dtype and torch.equal(found[-1], plain[1])
        # u is rounded as the sum is
        u = plain[1] if prenorm else FUNCTIONS[self.kind](**given, **o | {"prenorm": True})[1].detach()
        wide = {name: given[name].double() for name in ("weight", "bias") if name in given}
        exact, _ = formula(u.double(), **wide, rms=self.kind == "rms", eps=o["eps"],
                           zero_centred=o.get("zero_centred", False))
        size = exact.abs().amax(-1, keepdim=True)
        error = 2.0**-20 * (1 + size) / o["eps"]**0.5 if self.kind == "layer" else 2.0**-18 * (1 + size)
        if self.given:
            scale = self.scale.double().expand_as(size)
        else:
            scale = found[1].double()[..., None]
            assert found[1].dtype == torch.float32 and found[1].shape == exact.shape[:-1]
            assert ((scale - (size / MOST).clamp(LEAST)).abs() <= error / MOST + 2.0**-22 * size).all(), self.label
        check_rounded(self.label, found[0], scale, exact, error)


@pytest.mark.parametrize("device", DEVICES)
def test_random_problems(device):
    first = random.randrange(1 << 30)
    for seed in range(first, first + (400 if device == "cuda" else 150)):
        Quantised(seed, device).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", (False, True))
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_widths(device, kind, given):
    for width in (*WIDTHS, 16384, 20001, 40000, 65536):
        Quantised(width, device, (3, width), HALVES[width % 2], kind, given).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_whole_lines_and_many_rows(device, kind):
    """Streams of 16 bits only, more lines than the blocks have at a time; rows that are not neighbours in memory;
    more short ones than the blocks have at a time."""
    for seed, (rows, width) in enumerate(((1, 2056), (5, 3000), (1700, 4096), (13, 4096), (2000, 2304), (1200, 8192),
                                          (20000, 24), (3001, 136))):
        rows = rows // 4 if device == "cpu" and rows > 100 else rows
        problem = Quantised(seed, device, (rows, width), HALVES[seed % 2], kind, seed % 3 == 0)
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, width + 8 * (seed % 2), generator=g).to(device, problem.dtype)[..., :width]
        problem.tensors["x"] = x
        problem.tensors.pop("residual", None)
        if seed % 4 != 3:
            problem.tensors["residual"] = torch.randn(rows, width, generator=g).to(device, problem.dtype)
        problem.check()


@pytest.mark.parametrize("row", ("norm_fp8_bf16_any", "norm_fp8_fp16_any"))
def test_kernels_that_take_everything(row):
    """Short lines too, which on the CPU others compute."""
    dtype = torch.bfloat16 if "bf16" in row else torch.float16
    _C.prefer(row)
    try:
        for width in (1, 2, 64, 65, 127, 130, 257, 513, 1000, 1025, 2049, 4097):
            for lead, kind, given in ((3, "layer", False), (70, "rms", False), (9, "layer", True)):
                Quantised(width, "cpu", (lead, width), dtype, kind, given).check()
    finally:
        _C.prefer(None)


def both(function, x, *vectors, **options):
    """In e4m3 with rows' scales, and their product."""
    out, descale = function(x, *vectors, out_dtype=E4M3, **options)
    return out, descale, out.double() * descale.double()[..., None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32))
@pytest.mark.parametrize("width", (1, 100, 1000, 4096, 9000))
def test_constant_rows(device, dtype, width):
    """Of a constant row nothing is left but the bias, whose rounding is exact; without one there is nothing: 0, of a
    descale that can be divided by."""
    values = torch.tensor([0.0, 1.0, -3.3, 1e4, 1e-4, 7777.7, 1e18, 1e-18], device=device).to(dtype)
    x = values[values.isfinite()][:, None].repeat(1, width)
    bias = torch.randn(width, device=device)
    out, descale, _ = both(mg.layer_norm, x, None, bias)
    # Not `/ MOST`: a division by a number is a product with its rounded reciprocal, on the GPU.
    assert (descale == bias.abs().max() / torch.full((), MOST, device=device)).all()
    check_rounded("bias", out, descale.double()[:, None], bias.double().expand_as(out), 0.0)
    for function, x in ((mg.layer_norm, x), (mg.rms_norm, torch.zeros_like(x))):
        out, descale, _ = both(function, x)
        assert (out.view(torch.uint8) & 0x7F == 0).all() and (descale == LEAST).all() and (1 / descale).isfinite().all()
        assert not function(x, out_dtype=E4M3, out_scale=torch.tensor(3.0, device=device)).float().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", (8, 1000, 4096, 20000))
def test_huge_and_tiny_values(device, width):
    """Of rows, whose norm is what it is; and of weights, whose norm reaches the ends of float32."""
    g = torch.Generator().manual_seed(width)
    x = torch.randn(5, width, generator=g).to(device)
    for size, eps in ((3e18, 1e-5), (1e30, 1e-5), (1e37, 0.0), (1e-25, 1e-30), (1e-20, 1e-5)):
        for rms, function in ((False, mg.layer_norm), (True, mg.rms_norm)):
            exact, _ = formula((x * size).double(), rms=rms, eps=eps)
            out, descale, _ = both(function, x * size, eps=eps)
            close = 2.0**-18 * (exact.abs() + exact.abs().mean())
            assert torch.allclose(descale.double(), (exact.abs().amax(-1) / MOST).clamp(LEAST), rtol=2.0**-17, atol=0)
            check_rounded(f"{size} {eps}", out, descale.double()[:, None], exact, close)
    for size in (1e-44, 1e-40, 1e-36, 1e30, 1e37):
        weight = torch.full((width,), size, device=device)
        out, descale, found = both(mg.rms_norm, x, weight)
        exact = formula(x.double(), weight.double(), rms=True, eps=1e-6)[0]
        assert (1 / descale).isfinite().all() and descale.isfinite().all()
        limit = exact.abs() * (2.0**-4 + 2.0**-17) + 2.0**-10 * descale.double()[:, None] + 2.0**-149
        assert ((found - exact).abs() <= limit).all(), size


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", (72, 300, 4096, 9000))
def test_what_is_not_finite(device, width):
    """NaN stays where it is, and an infinity is as large as can be. Neither reaches the scale of its row, and no other
    row."""
    x = torch.randn(9, width, device=device)
    exact, _ = formula(x.double(), rms=True, eps=1e-6)
    x[2, 5], x[6, 7] = float("nan"), float("inf")
    for options in ({}, {"out_scale": torch.tensor(0.02, device=device)}):
        for function in FUNCTIONS.values():
            found = function(x, out_dtype=E4M3, **options)
            out = (found if options else found[0]).float()
            assert out.isnan().any(1).nonzero().flatten().tolist() == [2, 6] and out[2].isnan().all()
            if not options:
                assert found[1].isfinite().all() and (found[1] >= LEAST).all()
    out, descale, _ = both(mg.rms_norm, x)
    for row in (0, 1, 3, 4, 5, 7, 8):
        size = float(exact[row].abs().max())
        assert abs(float(descale[row]) * MOST - size) <= 2.0**-18 * (1 + size)
        check_rounded(f"row {row}", out[row], descale[row].double(), exact[row], 2.0**-18 * (1 + size))
    weight = torch.ones(width, device=device)
    weight[3] = float("nan")
    out, descale, _ = both(mg.rms_norm, x[3:6], weight)
    assert out.float().isnan().nonzero()[:, 1].tolist() == [3, 3, 3] and descale.isfinite().all()
    weight[3] = float("inf")
    out, descale, found = both(mg.rms_norm, x[3:6], weight)
    assert (out[:, 3].float() == MOST * x[3:6, 3].sign()).all() and not out.float().isnan().any()
    assert torch.allclose(descale.double(), torch.tensor(LARGEST / MOST, dtype=torch.float64, device=device), atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_saturates(device):
    """Beyond what a given scale reaches; and what lies at the ends, between the largest two, and at ties."""
    bias = torch.tensor([448.0, 449, 464, 1e6, -447, -480, 432, 431.9, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-11,
                         1.0625, 1.1875, -1.0625, 0.0], device=device)
    out = mg.layer_norm(torch.ones(3, 16, device=device), None, bias, out_dtype=E4M3,
                        out_scale=torch.ones((), device=device))
    expected = torch.tensor([448.0, 448, 448, 448, -448, -448, 448, 416, 2.0**-9, 0, 2.0**-8, 0, 1, 1.25, -1, 0])
    assert torch.equal(out.float().cpu(), expected.expand(3, 16))


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_and_repeats(device):
    """The same elements are dropped as without e4m3, and every call gives the same bits."""
    x, residual = (torch.randn(300, 2304, device=device).to(torch.bfloat16) for _ in range(2))
    options = dict(residual=residual, dropout_p=0.3, seed=5, prenorm=True)
    out, descale, u = mg.layer_norm(x, out_dtype=E4M3, **options)
    assert torch.equal(u, mg.layer_norm(x, **options)[1])
    again = mg.layer_norm(u, out_dtype=E4M3)
    assert torch.equal(out.float(), again[0].float()) and torch.equal(descale, again[1])
    for _ in range(3):
        repeated = mg.layer_norm(x, out_dtype=E4M3, **options)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip((out, descale, u), repeated))


def test_shapes_and_residual_in_float32():
    x = torch.randn(3, 4, 40).to(torch.bfloat16)
    out, descale, u = mg.rms_norm(x, prenorm=True, out_dtype=E4M3)
    assert u is x and out.shape == x.shape and descale.shape == (3, 4)
    out, descale, u = mg.rms_norm(x, prenorm=True, residual_in_fp32=True, out_dtype=E4M3)
    assert u.dtype == torch.float32 and torch.equal(u, x.float())
    out, descale = mg.rms_norm(x[0, 0], out_dtype=E4M3)
    assert out.shape == (40,) and descale.shape == ()
    out, descale = mg.layer_norm(torch.zeros(0, 8), out_dtype=E4M3)
    assert out.shape == (0, 8) and descale.shape == (0,)
    assert mg.layer_norm(torch.zeros(0, 8), out_dtype=E4M3, out_scale=torch.ones(1)).shape == (0, 8)


@pytest.mark.parametrize("device", DEVICES)
def test_modules(device):
    x = torch.randn(2, 3, 4, 8, device=device)
    layer, rms = mg.nn.LayerNorm((4, 8), device=device), mg.nn.RMSNorm(8, device=device)
    with torch.no_grad():
        out, descale = layer(x, out_dtype=E4M3)
        assert out.shape == x.shape and descale.shape == (2, 3)
        exact = torch.nn.functional.layer_norm(x, (4, 8)).double()
        assert ((out.double() * descale.double()[..., None, None] - exact).abs()
                <= exact.abs() * 2.0**-4 + descale[..., None, None] * 2.0**-10 + 1e-5).all()
        out, descale, u = rms(x, residual=x, prenorm=True, out_dtype=E4M3)
        assert out.shape == u.shape == x.shape and descale.shape == (2, 3, 4)
        assert rms(x, out_dtype=E4M3, out_scale=torch.ones(1, device=device)).shape == x.shape


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_behind_it(device):
    """A scale goes on as it is: rows' ones as scale_a of a product of PyTorch, a given one as q_descale."""
    x, w = torch.randn(48, 128, device=device), torch.randn(128, 64, device=device)
    out, descale = mg.rms_norm(x, out_dtype=E4M3)
    w8 = (w.t().contiguous() / 0.01).to(E4M3)
    if device == "cuda":
        ones = torch.full((1, 64), 0.01, device=device)
        found = torch._scaled_mm(out, w8.t(), scale_a=descale[:, None], scale_b=ones, out_dtype=torch.bfloat16)
        exact = out.double() * descale.double()[:, None] @ (w8.double().t() * 0.01)
        assert ((found.double() - exact).abs() <= 2.0**-7 * exact.abs().max()).all()
    q, scale = torch.randn(2, 4, 100, 64, device=device), torch.tensor(0.01, device=device)
    q8 = mg.rms_norm(q, out_dtype=E4M3, out_scale=scale)
    of_heads = scale.expand(2, 4)
    found = mg.attention(q8, q8, q8, q_descale=of_heads, k_descale=of_heads, v_descale=of_heads)
    exact = q8.double() * 0.01
    exact = torch.nn.functional.scaled_dot_product_attention(exact, exact, exact)
    assert ((found.double() - exact).abs() <= 0.07 * exact.abs().max()).all()


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_and_vmapped(device):
    x, residual = (torch.randn(6, 40, device=device) for _ in range(2))
    w, scale = torch.randn(40, device=device), torch.tensor(0.03, device=device)

    def call(x, residual, w, scale):
        out, descale, u = mg.layer_norm(x, w, residual=residual, prenorm=True, out_dtype=E4M3)
        return out.float() * descale[:, None], u, mg.rms_norm(u, w, out_dtype=E4M3, out_scale=scale).float()
    plain = call(x, residual, w, scale)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(x, residual, w, scale)
    assert all(map(torch.equal, plain, compiled))
    both = torch.vmap(lambda x: call(x, residual, w, scale))(torch.stack([x, 2 * x]))
    for i, factor in enumerate((1, 2)):
        assert all(torch.equal(a[i], b) for a, b in zip(both, call(factor * x, residual, w, scale)))
    with torch.autocast(device, torch.bfloat16):
        out, descale = mg.layer_norm(x, w, out_dtype=E4M3)
    expected = mg.layer_norm(x, w, out_dtype=E4M3)             # autocast leaves norms in x's dtype
    assert torch.equal(out.float(), expected[0].float()) and torch.equal(descale, expected[1])


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    x, z = (torch.randn(6, 40, device=device) for _ in range(2))
    w, scale = torch.randn(40, device=device), torch.ones(1, device=device)
    seed = torch.tensor([1, 2], dtype=torch.int32, device=device)
    for function in FUNCTIONS.values():
        function(x, out_dtype=E4M3)
    ops, tests = torch.ops.margay, ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ops.layer_norm_fp8.default, (x, z, w, w, seed, None, 1e-5, 0.25), test_utils=tests)
    torch.library.opcheck(ops.rms_norm_fp8.default, (x, None, w, None, None, scale, 1e-5, 0.0, True), test_utils=tests)
    # what no caller leaves out: of a given scale, rows' are that
    out, descale, u = ops.rms_norm_fp8(x, None, w, None, None, scale * 0.5)
    assert (descale == 0.5).all() and torch.equal(u, x)


def test_explain():
    x = torch.zeros(4, 4096, dtype=torch.bfloat16)
    said = mg.explain(mg.rms_norm, x, torch.ones(4096), out_dtype=E4M3, out_scale=torch.ones(1))
    assert said.kernels == ["norm_fp8_bf16_s4096"] and "out_scale [1] float32" in said
    assert mg.explain(mg.layer_norm, x, residual=x.float(), out_dtype=E4M3).kernels == ["norm_fp8_bf16_d4096"]
    assert mg.explain(mg.layer_norm, x.float(), out_dtype=E4M3).kernels == ["norm_fp8_fp32_any"]
    with torch._subclasses.fake_tensor.FakeTensorMode():
        out, descale = mg.layer_norm(torch.empty(4, 64, device="cuda"), out_dtype=E4M3)
        assert out.dtype == E4M3 and descale.shape == (4,)


BAD = [
    (dict(out_dtype=torch.float16), TypeError, "out_dtype is torch.float16, expected torch.float8_e4m3fn or None"),
    (dict(out_dtype=torch.float8_e5m2), TypeError,
     "out_dtype is torch.float8_e5m2, expected torch.float8_e4m3fn or None"),
    (dict(out_scale=torch.ones(1)), TypeError,
     "out_scale is given, but out_dtype is None, expected torch.float8_e4m3fn"),
    (dict(out_dtype=E4M3, out_scale=0.5), TypeError, "out_scale is float, expected a float32 tensor of one number"),
    (dict(out_dtype=E4M3, out_scale=torch.ones(4)), ValueError, "out_scale has shape [4], expected one number"),
    (dict(out_dtype=E4M3, out_scale=torch.ones(1).half()), TypeError, "out_scale has dtype float16, expected float32"),
    (dict(out_dtype=E4M3, out_scale=torch.ones(1, device="meta")), ValueError,
     "out_scale is on meta, expected cpu (same as x)"),
    *((dict(out_dtype=E4M3, out_scale=torch.tensor(x)), ValueError,
       f"out_scale is {words}, expected a finite number of at least 2^-126")
      for x, words in ((0.0, "0"), (-1.0, "-1"), (float("nan"), ""), (float("inf"), "inf"), (1e-39, "1e-39"))),
]


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=lambda f: f.__name__)
@pytest.mark.parametrize("options, error, words", BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_39_results_in_fp8(function, options, error, words):
    with pytest.raises(error) as raised:
        function(torch.zeros(4, 16, dtype=torch.bfloat16), **options)
    words, _, rest = words.partition(", expected a finite")
    assert words in str(raised.value) and rest in str(raised.value)
    assert str(raised.value).startswith(function.__name__ + ": ")


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=lambda f: f.__name__)
def test_bad_18_results_in_fp8_have_no_gradient(function):
    x, w = torch.zeros(4, 16), torch.ones(16)
    for name, call in (("x", lambda t: function(t(x), w, out_dtype=E4M3)),
                       ("weight", lambda t: function(x, t(w), out_dtype=E4M3)),
                       ("bias", lambda t: function(x, w, t(w), out_dtype=E4M3)),
                       ("residual", lambda t: function(x, w, residual=t(x), out_dtype=E4M3))):
        words = f"{function.__name__}: {name} requires a gradient, which results in float8_e4m3fn do not have"
        with pytest.raises(NotImplementedError, match=words):
            call(lambda t: t.clone().requires_grad_())
        with torch.no_grad():
            call(lambda t: t.clone().requires_grad_())
    words = f"{function.__name__}: x requires a gradient, which results in float8_e4m3fn do not have"
    with pytest.raises(NotImplementedError, match=words):
        torch.func.grad(lambda x: function(x, out_dtype=E4M3)[1].sum())(x)


def test_numpy_has_no_8_bit_floats():
    x = np.zeros((4, 16), np.float32)
    for options in ({"out_dtype": E4M3}, {"out_scale": np.ones(1, np.float32)}):
        with pytest.raises(TypeError, match="is given with NumPy arrays, which have no 8-bit floats"):
            mg.rms_norm(x, **options)
