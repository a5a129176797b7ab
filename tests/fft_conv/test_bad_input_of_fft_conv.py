"""Bad input at fft_conv, one test per row of docs/bad_inputs.md that it has something to say about."""
import math

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import margay as mg
from cases import DEVICES
from margay import _C
from refusals import SPREADS, Wrapped, probe_sizes, refused, run_python, tensors

HALVES = "bfloat16, float16 or float32"


def problem(device="cpu", dtype=torch.bfloat16, b=2, h=3, n=128, taps=100):
    u, pregate, k = tensors((b, h, n), (b, h, n), (h, taps), dtype=dtype, device=device)
    return dict(u=u, k=k.float(), pregate=pregate)


def run(inputs, **options):
    return mg.fft_conv(**inputs, **options)


def gradients(inputs, **options):
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    out = run(leaves, **options)
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves.values())


@pytest.mark.parametrize("compiled", (False, True))
def test_bad_01_dtype(compiled):
    call = torch.compile(run, fullgraph=True, backend="eager") if compiled else run
    error, inputs = Exception if compiled else TypeError, problem()
    doubles = {n: t.double() for n, t in inputs.items()}
    refused(error, f"fft_conv: u has dtype float64, expected {HALVES}", call, doubles)
    refused(error, "fft_conv: k has dtype float16, expected float32 or bfloat16 (as u)", call,
            inputs | {"k": inputs["k"].half()})
    refused(error, "fft_conv: pregate has dtype float16, expected bfloat16 (same as u)", call,
            inputs | {"pregate": inputs["pregate"].half()})
    refused(TypeError, "fft_conv_filter: k has dtype float64, expected float32 or bfloat16 (as like)",
            mg.fft_conv_filter, inputs["u"], inputs["k"].double())


def test_bad_01_float32_on_the_gpu():
    """It is computed there too."""
    with FakeTensorMode():
        u, k = torch.empty(2, 3, 100, device="cuda"), torch.empty(3, 100, device="cuda")
        assert mg.fft_conv(u, k).dtype == torch.float32


@pytest.mark.parametrize("change, message", [
    (dict(k=(4, 100)), "fft_conv: k has size 4 in dimension 0, expected 3 (H of u)"),
    (dict(k=(3, 129)), "expected filters of 1 to L elements"), (dict(k=(3, 0)), "expected filters of 1 to L elements"),
    (dict(u=(3, 128)), "fft_conv: u has 2 dimensions, expected 3"),
    (dict(pregate=(2, 3, 127)), "fft_conv: pregate has size 127 in dimension 2, expected 128 (L of u)")])
def test_bad_02_shape(change, message):
    inputs = problem() | {name: torch.randn(shape).to(problem()[name].dtype) for name, shape in change.items()}
    refused(ValueError, message, run, inputs)
    refused(ValueError, message, run, {name: t.float().numpy() for name, t in inputs.items()})


def test_bad_02_missing():
    inputs = problem()
    refused(TypeError, "fft_conv: k is NoneType, expected torch.Tensor (same as u)", run, inputs | {"k": None})
    arrays = {name: t.float().numpy() for name, t in inputs.items()}
    refused(TypeError, "fft_conv: k is a masked array, whose mask would be ignored", run,
            arrays | {"k": numpy.ma.masked_array(arrays["k"], False)})


def test_bad_02_another_filter():
    """A spectrum goes with the rows that it was made for."""
    inputs = problem()
    made = mg.fft_conv_filter(inputs["u"], inputs["k"])
    u = inputs["u"]
    refused(ValueError, "fft_conv: u has 64 elements in a row and dtype bfloat16, expected 128 and bfloat16",
            mg.fft_conv, u[..., :64], made)
    refused(ValueError, "and dtype float16, expected 128 and bfloat16", mg.fft_conv, u.half(), made)
    words = "fft_conv: {} is {}, expected {}, as of the filter"
    refused(ValueError, words.format("causal", False, True), mg.fft_conv, u, made, causal=False)
    refused(ValueError, words.format("precise", True, False), mg.fft_conv, u, made, precise=True)
    refused(ValueError, "fft_conv: skip is given, expected None beside a filter", mg.fft_conv, u, made,
            skip=torch.zeros(3))
    refused(ValueError, "fft_conv_filter: u has 2 dimensions, expected 3", mg.fft_conv_filter, u[0], inputs["k"])


def test_bad_03_04_device():
    inputs = problem()
    refused(ValueError, "fft_conv: k is on meta, expected cpu (same as u)", run, inputs | {"k": inputs["k"].to("meta")})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spread", SPREADS)
def test_bad_06_07_08_memory(spread, device, one_thread):
    inputs = problem(device)
    for which in (*inputs, None):
        given = {name: SPREADS[spread](t) if which in (None, name) else t for name, t in inputs.items()}
        dense = {name: t.contiguous() for name, t in given.items()}
        for found, expected in zip(gradients(given), gradients(dense), strict=True):
            assert found.shape == expected.shape and found.isfinite().all()
            assert (found.double() - expected.double()).abs().max() <= 2**-6 * expected.double().abs().max(), which


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", (100, 128))
def test_bad_10_empty(n, device):
    """No batch: the filter's gradient is zero. No heads."""
    out, du, dk, _ = gradients(problem(device, b=0, n=n))
    assert out.shape == du.shape == (0, 3, n) and dk.shape == (3, 100) and (dk == 0).all()
    assert gradients(problem(device, h=0, n=n))[2].shape == (0, 100)


def test_bad_14_sizes():
    u = torch.zeros(1, 1, 64).bfloat16().expand(1 << 20, 1 << 20, 64)
    with pytest.raises((ValueError, RuntimeError, MemoryError)):
        mg.fft_conv(u, torch.zeros(1, 64).expand(1 << 20, 64))


def test_bad_15_16_17_outputs_of_the_raw_layer():
    u, k, made = torch.randn(1, 2, 64), torch.randn(2, 64), torch.empty(28672 + 2 * 8192)
    blocks = torch.empty(2 * 8192)
    call = lambda out, u=u: _C.fft_conv(out, made, blocks, u, k)  # noqa: E731
    refused(BufferError, "fft_conv: out is written, but shares memory with u", call, u)
    refused(BufferError, "its elements may share memory", call, torch.zeros(64).expand(1, 2, 64))
    locked = numpy.zeros((1, 2, 64), "float32")
    locked.flags.writeable = False
    with pytest.raises(BufferError, match="read-only|readonly|writable"):
        call(locked, u.numpy())
    out = torch.empty_like(u)
    call(out)
    assert torch.equal(out, mg.fft_conv(u, k))


def test_bad_18_30_derivatives():
    inputs = {name: t.float().requires_grad_() for name, t in problem().items()}
    with pytest.raises(NotImplementedError, match="fft_conv: gradients of gradients .* are not implemented"):
        torch.autograd.grad(run(inputs).sum(), inputs["u"], create_graph=True)[0].sum().backward()
    plain = tuple(t.detach() for t in inputs.values())[:2]
    refused(NotImplementedError, "fft_conv: forward-mode derivatives", torch.func.jvp, mg.fft_conv, plain, plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("n", (100, 128, 4096, 5000, 8192, 16384))
def test_bad_20_not_finite(n, value, device):
    """A value that is not finite reaches its row, of a filter its head, and nothing else."""
    inputs = problem(device, n=n)
    clean = gradients(inputs)
    for name, place, reached in (("u", (1, 2, n - 1), (1, 2)), ("k", (1, 7), (slice(None), 1))):
        given = inputs | {name: inputs[name].clone()}
        given[name][place] = value
        for options in ({}, {"precise": True}):
            out, expected = run(given, **options), run(inputs, **options)
            assert not out[reached][..., -1].isfinite().any()
            out[reached] = expected[reached]
            assert torch.equal(out, expected)
        out, du, dk, dpre = gradients(given)
        others = torch.arange(3, device=device) != (2 if name == "u" else 1)
        assert torch.equal(dk[others], clean[2][others]) and torch.equal(du[0, others], clean[1][0, others])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_bad_20_not_finite_beside_another_row(value, device):
    """Circular rows of two batch entries share a transform: the other one keeps its values, up to rounding."""
    inputs = problem(device, n=256)
    given = inputs | {"u": inputs["u"].clone()}
    given["u"][1, 2, 5] = value
    out, expected = run(given, causal=False), run(inputs, causal=False)
    assert not out[1, 2].isfinite().any()
    out[1, 2] = expected[1, 2]
    assert torch.allclose(out.float(), expected.float(), rtol=2**-6, atol=2**-6 * float(expected.abs().max()))


def test_bad_28_threads():
    result = run_python("""
import threading, torch, margay as mg
x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
results, barrier = [None] * 8, threading.Barrier(8)
def call(i):
    barrier.wait()
    for _ in range(3): results[i] = mg.fft_conv(x, x[0])
threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert all(torch.equal(r, results[0]) for r in results)
""")
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("n", (128, 5000))
def test_bad_29_31_streams_and_captures(n):
    inputs = problem("cuda", n=n)
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    gradients(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(leaves)
        grads = torch.autograd.grad(out, leaves.values(), torch.ones_like(out))
    with torch.no_grad():
        leaves["u"].mul_(-0.5)
    graph.replay()
    fresh = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    again = run(fresh)
    assert torch.equal(out, again)
    assert all(map(torch.equal, grads, torch.autograd.grad(again, fresh.values(), torch.ones_like(again))))


def test_bad_32_38_fakes_and_subclasses():
    inputs = problem()
    expected = run(inputs)
    with FakeTensorMode() as mode:
        fake = run({name: mode.from_tensor(t) for name, t in inputs.items()})
    assert fake.shape == expected.shape and fake.stride() == expected.stride() and fake.dtype == expected.dtype
    with torch.inference_mode():
        assert torch.equal(run(inputs), expected)
    assert run({name: t.to("meta") for name, t in inputs.items()}).device.type == "meta"
    out = run(inputs | {"u": inputs["u"].as_subclass(Wrapped)})
    assert isinstance(out, Wrapped) and torch.equal(out.as_subclass(torch.Tensor), expected)


def test_bad_39_sizes_for_explain():
    probe_sizes(("fft_conv", "fft_conv_bwd", "fft_conv_spectrum"), "B H L LK R RK UNITS GIVEN".split())
