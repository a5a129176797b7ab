"""Inputs, scales and soft caps of any magnitude: what float64 has finite is finite, and as exact as anywhere else."""

import math
import random

import pytest
import torch

import margay as mg
import reference
from cases import DEVICES, check_error, largest_score, random_attention_case, place

SEEDS = 300
# of a score, scaled and not, of an output and of a gradient: float32 ends at 3.4e38
MOST = 1e37


def drawn(seed, dtype):
    """q, k, v, dout and options. Magnitudes are log-uniform, of fp16 within its range, and drawn again until no score
    passes MOST."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    case = random_attention_case(seed)
    least, most = (1e-4, 1e4) if dtype == torch.float16 else (1e-30, 1e30)
    while True:
        q_size, k_size, v_size = (10 ** r.uniform(math.log10(least), math.log10(most)) for _ in range(3))
        scale, softcap = (10 ** r.uniform(-30, 30) for _ in range(2))
        shapes = ((case.heads, case.rows, case.dim),
                  *((case.kv_heads, case.kv_rows, dim) for dim in (case.dim, case.dim_v)),
                  (case.heads, case.rows, case.dim_v))
        sizes = q_size, k_size, v_size, 1.0
        tensors = [(torch.randn(case.batch, *shape, generator=g, dtype=torch.float64) * size).to(dtype)
                   for shape, size in zip(shapes, sizes)]
        options = dict(scale=scale, causal=case.causal)
        if r.random() < 0.5:
            options["softcap"] = softcap
        if r.random() < 0.3:
            options["window"] = r.choice(((-1, 20), (40, -1), (7, 70)))
        if r.random() < 0.2:
            options["sink"] = torch.randn(case.heads, generator=g)
        q, k = (t.double() for t in tensors[:2])
        if max(largest_score(q, k, 1.0), largest_score(q, k, scale)) < MOST and all(t.isfinite().all()
                                                                                    for t in tensors):
            return tensors, options, case.layout


def gradients(function, inputs, dout):
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


def rounding(tensors, options, plain_is_finite):
    """Relative and absolute, of outputs and of gradients: what intermediate results of float32, and numbers too small
    for the dtype, leave.

    Where the plain formulation leaves the range of its dtype, as fp16's scores do, it says nothing of errors: then
    those of rounding probabilities and gradients of scores to the dtype take its place."""
    q, k, v, dout = tensors
    if not q.numel() or not k.numel():
        return (0.0, 0.0), (0.0, 0.0)
    info = torch.finfo(q.dtype)
    relative = 2**-23 * (8 + largest_score(q, k, options["scale"]) / 2) + (0 if plain_is_finite else 4 * info.eps)
    products = float(dout.double().norm(dim=3).max() * v.double().norm(dim=3).max())
    sizes = float(max(q.abs().max(), k.abs().max()))
    # products of bf16 take subnormals for 0 on some CPUs
    least = info.smallest_normal * (info.eps if q.dtype == torch.float16 else 1)
    # of gradients of scores, and of their products with q and k
    lost = least * (q.shape[2] + k.shape[2]) * max(options["scale"] / 1024, 1.0)
    of_scores = (2**-22 if plain_is_finite else info.eps) * options["scale"] * products * sizes
    return (relative, least), (relative, of_scores + lost * max(sizes, 1.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("part", range(10))
def test_any_magnitude(dtype, device, part, one_thread):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("fp32 is computed on the CPU only")
    compared = 0
    most = min(MOST, torch.finfo(dtype).max / 4)
    for seed in range(part, SEEDS, 10):
        tensors, options, layout = drawn(seed, dtype)
        *inputs, dout = tensors
        exact = gradients(lambda *t: reference.attention(*t, **options)[0], [t.double() for t in inputs], dout.double())
        plain = gradients(lambda *t: reference.attention(*t, **options)[0], inputs, dout)
        on_device = {name: x.to(device) if name == "sink" else x for name, x in options.items()}
        found = gradients(lambda *t: mg.attention(*t, **on_device), [place(t, layout, device) for t in inputs],
                          dout.to(device))
        for name, a, b, c in zip(("out", "dq", "dk", "dv"), found, plain, exact):
            if c.numel() and not c.abs().max() < most or name != "out" and not b.isfinite().all():
                # no answer of this dtype is right, or PyTorch's gradient has none
                continue
            try:
                assert a.isfinite().all(), (f"{name}: {int((~a.isfinite()).sum())} of {a.numel()} elements are not "
                                            "finite")
                of_output, of_gradient = rounding(tensors, options, bool(b.isfinite().all()))
                check_error(name, a.cpu(), b if b.isfinite().all() else c, c, 2 if name == "out" else 3,
                            of_gradient if name in ("dq", "dk") else of_output)
            except AssertionError as wrong:
                drawn_options = ", ".join(f"{key} {x}" for key, x in options.items() if key != "sink")
                raise AssertionError(f"seed {seed}: q {list(inputs[0].shape)}, k {list(inputs[1].shape)}, "
                                     f"{drawn_options}\n{wrong}") from None
            compared += 1
    assert compared > SEEDS / 10
