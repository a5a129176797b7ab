"""NumPy arrays in, NumPy arrays out, without torch."""

import subprocess
import sys

import numpy
import pytest

import margay as mg


def arrays(*shapes, dtype="float32"):
    g = numpy.random.default_rng(0)
    return [g.standard_normal(shape).astype(dtype) for shape in shapes]


def exact_attention(q, k, v, **options):
    torch = pytest.importorskip("torch")
    import reference
    inputs = [torch.from_numpy(a.astype("float64")) for a in (q, k, v)]
    return [t.numpy() for t in reference.attention(*inputs, **options)]


@pytest.mark.parametrize("dtype, tolerance", (("float32", 2e-6), ("float16", 2e-3)))
@pytest.mark.parametrize("causal", (False, True))
def test_attention(dtype, tolerance, causal):
    q, k, v = arrays((2, 4, 70, 64), (2, 2, 90, 64), (2, 2, 90, 48), dtype=dtype)
    out, lse = mg.attention(q, k, v, causal=causal, return_lse=True)
    exact, exact_lse = exact_attention(q, k, v, causal=causal)
    assert type(out) is numpy.ndarray and out.dtype == dtype and lse.dtype == "float32" and out.shape == (2, 4, 70, 48)
    assert abs(out - exact).max() < tolerance and abs(lse - exact_lse).max() < 1e-5


def test_layout():
    """Slices go in as they are; the output has the layout of q."""
    (fused,) = arrays((2, 33, 3 * 4, 40))
    q, k, v = (fused[:, :, i * 4:i * 4 + 4].swapaxes(1, 2) for i in range(3))
    out = mg.attention(q, k, v, scale=0.3)
    assert out.swapaxes(1, 2).flags.c_contiguous
    assert abs(out - exact_attention(q, k, v, scale=0.3)[0]).max() < 2e-6


def test_matmul():
    a, b, bias = arrays((2, 3, 40), (50, 40), (50,))
    out = mg.matmul(a, b.T, bias=bias, activation="relu")
    assert type(out) is numpy.ndarray and abs(out - numpy.maximum(a.astype("float64") @ b.T + bias, 0)).max() < 2e-5
    given = numpy.empty((2, 3, 50), "float32")
    assert mg.matmul(a, b.T, bias=bias, activation="relu", out=given) is given and numpy.array_equal(given, out)


def test_explain():
    q, k, v = arrays((2, 4, 70, 64), (2, 2, 90, 64), (2, 2, 90, 48))
    text = mg.explain(mg.attention, q, k, v, causal=True)
    assert "attention: q [2, 4, 70, 64] float32" in text and "attention_fwd_fp32_d64 takes it" in text
    assert "matmul_fp32_nt takes it" in mg.explain("matmul", q[0, 0], k[0, 0].T)
    assert "needs" in mg.explain("attention_fwd", dtype="bfloat16", d=200)


@pytest.mark.parametrize("names", (("attention", "matmul", "explain", "info", "nn", "__version__"),))
def test_without_torch(names):
    """All of it in a process where torch cannot be imported."""
    program = f"""
import sys
sys.modules["torch"] = None
import numpy, margay as mg
a = numpy.ones((1, 2, 3, 8), "float16")
assert (mg.attention(a, a, a, causal=True) == 1).all() and (mg.matmul(a, a[0, 0].T) == 8).all()
assert mg.info()["kernels"] and set({names!r}) <= set(dir(mg))
assert "float16" in mg.explain(mg.attention, a, a, a)
try: mg.nn
except ImportError: pass
else: raise AssertionError("mg.nn without torch")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
