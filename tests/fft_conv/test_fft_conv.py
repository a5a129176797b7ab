"""fft_conv, its gradients and its layers against float64, on all lengths, through every face."""
import random

import numpy as np
import pytest
import torch

import margay as mg
from cases import DEVICES
from conftest import SEED
from fft_forms import HALF, NAMES, Problem, check_errors, formula, random_problem

POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
GATES = ("skip", "pregate", "postgate")


@pytest.mark.parametrize("device", DEVICES)
def test_random_problems(device):
    for i in range(500 if device == "cuda" else 200):
        random_problem(SEED % 2**31 + i, device).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("length", POWERS)
def test_powers_of_two(length, causal, device):
    """So many heads that float16 takes one pass, too."""
    heads = 300 if length < 64 else 33 if length < 1024 else 3 if length < 4096 else 1
    for dtype in HALF:
        Problem(length, device, dtype, (2, heads, length), None, causal, GATES).check()


@pytest.mark.parametrize("device", DEVICES)
def test_few_numbers_of_float16(device):
    """Behind gates the largest of few numbers decide: in one pass their errors are up to 5.5 times those of rounding."""
    r = random.Random(SEED)
    for i in range(60):
        length = r.choice((1, 2, 3, 17, 64, 64, 100, 128, 256))
        shape = (r.randint(1, 3), r.choice((1, 2, 5, 70)), length)
        Problem(SEED % 2**31 + i, device, torch.float16, shape, r.randint(1, length), r.random() < 0.5, GATES).check()


@pytest.mark.parametrize("device", DEVICES)
def test_lengths_at_random(device):
    """The forward, of 300 lengths."""
    r = random.Random(SEED)
    for i in range(300):
        p = Problem(i, device, r.choice(HALF), (1, 2, r.randrange(1, 5000)), None, r.random() < 0.5)
        found = mg.fft_conv(**p.tensors, causal=p.causal)
        plain, exact = (formula(**{n: t.to(d or t.dtype) for n, t in p.tensors.items()}, causal=p.causal)
                        for d in (None, torch.float64))
        check_errors(p.label, found, plain, exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", (64, 256, 1024, 4096, 200, 8192, 16384))
def test_every_head_has_its_filter(length, device):
    """More heads than multiprocessors, more than two batch entries: filters that delay by another number of steps."""
    b, h = (4, 150) if length < 8192 or device == "cuda" else (3, 3)
    u = torch.randn(b, h, length, device=device).bfloat16()
    delays = torch.arange(h, device=device) * 7 % length
    k = torch.nn.functional.one_hot(delays, length).float() * (1 + torch.arange(h, device=device))[:, None]
    for causal in (True, False):
        at = torch.arange(length, device=device) - delays[:, None]
        expected = u.gather(2, (at % length).expand(b, -1, -1)).double() * (1 + torch.arange(h, device=device))[:, None]
        expected[:, at < 0] *= 0 if causal else 1
        found = mg.fft_conv(u, k, causal=causal)
        assert ((found.double() - expected).abs().amax((0, 2)) <= 2**-6 * expected.abs().amax((0, 2))).all()


@pytest.mark.parametrize("device", DEVICES)
def test_neighbours_of_other_sizes(device):
    """Heads that share a tile do not share a scale; numbers beyond fp16, and sums beyond it."""
    u = torch.randn(2, 8, 128, device=device).bfloat16()
    k = torch.randn(8, 128, device=device) / 11
    sizes = torch.tensor([1e-12, 1e-6, 1e-3, 1, 1e3, 1e6, 1e12, 3e20], device=device)[:, None]
    expected = formula(u.double(), k.double())
    for scaled in (mg.fft_conv((u * sizes).bfloat16(), k), mg.fft_conv(u, k * sizes)):
        error = scaled.double() / sizes - expected
        assert (error.square().mean((0, 2)).sqrt() < 2**-6 * expected.square().mean((0, 2)).sqrt()).all()
    ones = torch.ones(1, 1, 4096, dtype=torch.bfloat16, device=device)
    assert torch.equal(mg.fft_conv(ones, ones[0], causal=False), 4096 * ones)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", (96, 256, 4096, 5000))
def test_precise(length, device):
    """As exact as the result's own rounding, whatever the dtype."""
    for dtype in (*HALF, torch.float32):
        p = Problem(length, device, dtype, (2, 2, length), length - 1, True, GATES)
        ours, exact = p.check(precise=True), p.results(formula, torch.float64)
        for name in ours:
            check_errors(f"{p.label}: {name}", ours[name], exact[name].to(ours[name].dtype), exact[name], 1.2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", (100, 256, 4096, 6000, 8192))
@pytest.mark.parametrize("causal", (True, False))
def test_filters_used_again(causal, length, device):
    p = Problem(3, device, torch.bfloat16, (4, 3, length), None, causal, ("skip",))
    u, k, skip = p.tensors["u"], p.tensors["k"].requires_grad_(), p.tensors["skip"].requires_grad_()
    made = mg.fft_conv_filter(u, k, causal=causal, skip=skip)
    once = mg.fft_conv(u, k, causal=causal, skip=skip)
    again = mg.fft_conv(u[:2].clone(), made)
    turned = u.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(once[:2], again) and torch.equal(mg.fft_conv(turned, made), once)
    for a, b in zip(torch.autograd.grad(once.float().sum(), (k, skip)),
                    torch.autograd.grad(mg.fft_conv(u, made).float().sum(), (k, skip))):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", (100, 128, 5000))
def test_filters_in_autocast(length, device):
    """A spectrum is of the dtype that is computed in, which autocast chooses; rows are padded by it too."""
    p = Problem(4, device, torch.float32, (2, 3, length), None, True, ("skip", "pregate"))
    u, k, skip, gate = p.tensors.values()
    outside = mg.fft_conv_filter(u, k, skip=skip)
    with torch.autocast(device, torch.bfloat16):
        expected = mg.fft_conv(u, k, skip=skip, pregate=gate)
        inside = mg.fft_conv_filter(u, k, skip=skip)
        assert torch.equal(mg.fft_conv(u, inside, pregate=gate), expected)
        with pytest.raises(ValueError, match=r"bfloat16 \(by autocast\), expected \d+ and float32, as the filter"):
            mg.fft_conv(u, outside)
    assert torch.equal(expected, mg.fft_conv(u.bfloat16(), k, skip=skip, pregate=gate.bfloat16()))
    assert torch.equal(mg.fft_conv(u.bfloat16(), inside, pregate=gate.bfloat16()), expected)
    with pytest.raises(ValueError, match="dtype float32, expected"):
        mg.fft_conv(u, inside)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", (256, 1000, 8192, 9000))
def test_repeats_bit_by_bit(length, device):
    """Also in another batch, and for another number of threads."""
    p = Problem(1, device, torch.bfloat16, (3, 5, length), None, True, GATES)
    first = p.results(mg.fft_conv)
    assert all(torch.equal(t, first[name]) for name, t in p.results(mg.fft_conv).items())
    alone = mg.fft_conv(**{n: t[1:2].contiguous() if t.ndim == 3 else t for n, t in p.tensors.items()})
    assert torch.equal(alone, first["out"][1:2])


@pytest.mark.parametrize("device", DEVICES)
def test_memory_of_any_order(device):
    p = Problem(2, device, torch.float16, (2, 4, 512), None, True, GATES)
    expected = p.results(mg.fft_conv)
    dense = p.tensors
    p.tensors = {n: t.transpose(0, 1).contiguous().transpose(0, 1) if t.ndim == 3 else t for n, t in dense.items()}
    check_errors("heads outside", mg.fft_conv(**p.tensors), expected["out"], formula(**{n: t.double() for n, t in
                                                                                       dense.items()}))
    p.tensors = {n: torch.stack((t, t), -1)[..., 0] if t.ndim == 3 else t for n, t in dense.items()}
    assert all(torch.equal(t, expected[n]) for n, t in p.results(mg.fft_conv).items())


def test_the_kernel_of_each_length():
    u = torch.zeros(1, 1, 16384, dtype=torch.bfloat16)
    for length, causal, precise, name in (
            (4096, True, False, "fft_conv_bf16_causal"), (64, True, False, "fft_conv_bf16_causal"),
            (8192, True, False, "fft_conv_bf16_r2"), (16384, True, False, "fft_conv_bf16_r4"),
            (4095, True, False, "fft_conv_bf16_causal"), (4095, False, False, "fft_conv_spectra_bf16_x1"),
            (4096, True, True, "fft_conv_spectra_bf16_x2")):
        x = u[..., :length].contiguous()
        assert mg.explain(mg.fft_conv, x, x[0].contiguous(), causal=causal, precise=precise).kernels[0] == name
    for shape, name in (((1, 64, 64), "fft_conv_spectra_bf16_x2"), ((1, 65, 64), "fft_conv_fp16_causal"),
                        ((2, 257, 2), "fft_conv_fp16_causal"), ((2, 256, 2), "fft_conv_spectra_bf16_x2")):
        x = torch.zeros(shape, dtype=torch.float16)
        assert mg.explain(mg.fft_conv, x, x[0]).kernels[0] == name, shape
    made = mg.fft_conv_filter(x, x[0])
    assert mg.explain(mg.fft_conv, x, made).kernels[0] == "fft_conv_fp16_causal"


def test_explain_of_padded_rows_and_of_filters():
    """The backward is that of the padded rows, and a filter is explained as what it was made of."""
    u, whole, k = torch.zeros(2, 3, 100).bfloat16(), torch.zeros(2, 3, 128).bfloat16(), torch.zeros(3, 80)
    found, of_power = mg.explain(mg.fft_conv, u, k, pregate=u), mg.explain(mg.fft_conv, whole, k)
    assert found.kernels == of_power.kernels == ["fft_conv_bf16_causal", "fft_conv_bwd_bf16"]
    assert "rows are copied first, to 128 elements" in found and "rows are copied" not in of_power
    made = mg.explain(mg.fft_conv, u, mg.fft_conv_filter(u, k, causal=False))
    assert made.kernels == mg.explain(mg.fft_conv, u, k, causal=False).kernels == 2 * ["fft_conv_spectra_bf16_x1"]
    assert "k [3, 80] float32" in made


def test_numpy():
    p = Problem(5, "cpu", torch.float32, (2, 3, 300), 200, False, GATES)
    arrays = {name: t.numpy() for name, t in p.tensors.items()}
    found = mg.fft_conv(**arrays, causal=False)
    assert isinstance(found, np.ndarray) and np.array_equal(found, mg.fft_conv(**p.tensors, causal=False).numpy())
    made = mg.fft_conv_filter(arrays["u"], arrays["k"], causal=False, skip=arrays["skip"])
    assert np.array_equal(mg.fft_conv(arrays["u"], made, pregate=arrays["pregate"], postgate=arrays["postgate"]), found)


def test_compile_vmap_and_gradients():
    u, k = torch.randn(2, 3, 70, dtype=torch.float32), torch.randn(3, 70)
    compiled = torch.compile(lambda u, k: mg.fft_conv(u, k), fullgraph=True, backend="eager")
    assert torch.equal(compiled(u, k), mg.fft_conv(u, k))
    assert torch.equal(torch.vmap(lambda x: mg.fft_conv(x, k))(torch.stack((u, 2 * u)))[0], mg.fft_conv(u, k))
    inputs = [t.double().float().requires_grad_() for t in (u[:1, :1, :9], k[:1, :9])]
    jacobian = torch.func.jacrev(lambda x: mg.fft_conv(x, inputs[1].detach()))(inputs[0].detach())
    expected = torch.func.jacrev(lambda x: formula(x, inputs[1].detach().double()))(inputs[0].detach().double())
    assert (jacobian.double() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_layer(device):
    torch.manual_seed(0)
    layer = mg.nn.LongConv(6, 128, device=device)
    x, gate = torch.randn(2, 2, 6, 128, device=device).bfloat16()
    assert torch.equal(layer(x, postgate=gate), mg.fft_conv(x, layer.kernel, skip=layer.skip, postgate=gate))
    layer(x).float().sum().backward()
    assert layer.kernel.grad.isfinite().all() and layer.skip.grad.shape == (6,)
    assert torch.equal(layer(x[..., :64].contiguous()), mg.fft_conv(x[..., :64], layer.kernel[:, :64], skip=layer.skip))
    made = mg.nn.LongConv(6, 128, filter=lambda: layer.kernel, skip=False)
    assert torch.equal(made(x), mg.fft_conv(x, layer.kernel)) and not list(made.parameters())
    with pytest.raises(ValueError, match="LongConv: channels is 0 and length 5"):
        mg.nn.LongConv(0, 5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length, taps, n", ((256, 256, 256), (128, 128, 256), (200, 256, 256), (129, 129, 256),
                                             (7, 9, 10)))
def test_flashfftconv(length, taps, n, device):
    """Its transform's definition, of period n."""
    from margay.flashfftconv import FlashFFTConv
    p = Problem(1, device, torch.float16, (2, 3, length), taps, False, ("pregate", "postgate"))
    t = p.tensors
    x = (t["u"].double() * t["pregate"].double())
    exact = torch.fft.ifft(torch.fft.fft(x, n) * torch.fft.fft(t["k"].double(), n)).real[..., :length]
    exact = exact * t["postgate"].double()
    found = FlashFFTConv(n, dtype=torch.float16)(t["u"], t["k"], t["pregate"], t["postgate"])
    check_errors(p.label, found, exact.to(torch.float16), exact)
    with pytest.raises(ValueError, match="FlashFFTConv: rows of"):
        FlashFFTConv(length - 1)(t["u"], t["k"])


def test_state_dicts_of_flashfftconv():
    """A model's state dict has the package's tables, which this module does without; other names stay wrong."""
    from margay.flashfftconv import FlashFFTConv
    tables = ("f_sqrt_N_fft", "f_32_ifft", "f_16_fft_real", "f_16_ifft_imag", "twiddle_factors_fft",
              "twiddle_factors_ifft_32_1K", "twiddle_factors_fft_real", "twid")
    model = torch.nn.Sequential(FlashFFTConv(1024), torch.nn.Linear(2, 2))
    state = {f"0.{name}": torch.zeros(2) for name in tables} | {"1.weight": torch.eye(2), "1.bias": torch.zeros(2)}
    model.load_state_dict(state)
    assert torch.equal(model[1].weight, torch.eye(2)) and len(state) == len(tables) + 2 and len(model.state_dict()) == 2
    with pytest.raises(RuntimeError, match="0.twist"):
        model.load_state_dict(state | {"0.twist": torch.zeros(2)})


def test_names():
    assert NAMES[0] == "u" and all(name in mg.fft_conv.__doc__ for name in NAMES)
