"""Attention forward and backward against float64."""

import dataclasses
import math
import re

import pytest
import torch

import margay as mg
import reference
from cases import (DEVICES, AttentionCase, Guarded, attention_cases, attention_inputs, awkward_attention_cases,
                   check_error, check_lse, exact_attention, float32_rounding, plain_gradients, row_taken)
from margay import _C

RANDOM = attention_cases(200, seed=2)
AWKWARD = awkward_attention_cases()


def check_attention(case, device, deterministic=False):
    q, k, v, dout = attention_inputs(case, device)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = mg.attention(*leaves, causal=case.causal, scale=case.scale, return_lse=True, deterministic=deterministic)
    check_results(case, (q, k, v, dout), out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout))


def check_results(case, inputs, out, lse, dq, dk, dv):
    q, k, v, dout = inputs
    exact_out, exact_lse, exact_dq, exact_dk, exact_dv = exact_attention(case, *inputs)
    plain_out, plain_dq, plain_dk, plain_dv = plain_gradients(case, *inputs)
    rounding = float32_rounding(case, q, k, v, dout)
    check_error("out", out, plain_out, exact_out, 2, (rounding[0], 0.0))
    check_lse(lse, exact_lse, q, k, case.scale)
    check_error("dq", dq, plain_dq, exact_dq, 3, rounding)
    check_error("dk", dk, plain_dk, exact_dk, 3, rounding)
    check_error("dv", dv, plain_dv, exact_dv, 3, (rounding[0], 0.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", RANDOM, ids=str)
def test_random(case, device, request):
    if case.seed % 2:
        request.getfixturevalue("poison")
    check_attention(case, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", AWKWARD, ids=str)
def test_awkward(case, device, poison):
    check_attention(case, device)


@pytest.mark.parametrize("case", [dataclasses.replace(case, dtype=torch.float32)
                                  for case in RANDOM[:24] + AWKWARD[:24]], ids=str)
def test_float32(case, poison):
    check_attention(case, "cpu")


# ---- the raw functions write every element of their outputs and nothing else


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [case for case in RANDOM[::3] if case.dim % 8 == 0 and case.dim_v % 8 == 0], ids=str)
def test_raw_writes_outputs_only(case, device):
    inputs = q, k, v, dout = attention_inputs(case, device)
    scale = case.dim**-0.5 if case.scale is None else case.scale
    out, *grads = (Guarded(t.shape, t.dtype, device, case.seed % 2) for t in (dout, q, k, v))
    lse = Guarded(q.shape[:3], torch.float32, device)
    _C.attention_fwd(out.view, lse.view, q, k, v, scale, case.causal)
    read, numbers = (dout, q, k, v, out.view, lse.view, None), (scale, case.causal, False)
    size = _C.attention_bwd_workspace(*read, *numbers)
    workspace = torch.full((size + 512,), 255, dtype=torch.uint8, device=device)
    start = -workspace.data_ptr() % 256
    _C.attention_bwd(*(g.view for g in grads), *read, workspace[start:start + size], *numbers)
    assert ((workspace[:start] == 255).all()
            and (workspace[start + size:] == 255).all()), "memory beside the workspace was written"
    for name, result in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)):
        result.check(name)
    check_results(case, inputs, out.view, lse.view, *(g.view for g in grads))


# ---- lse, scale, layout, determinism


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", (False, True))
def test_lse_gradient(device, causal):
    case = AttentionCase(11, 2, 4, 2, 97, 70, 64, 64, causal)
    q, k, v, dout = attention_inputs(case, device)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = mg.attention(*leaves, causal=causal, return_lse=True)
    visible = lse.isfinite()                                # rows 0 to 26 of the causal problem have no keys
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(1)).to(device) * visible
    exact = exact_attention(case, q, k, v, dout, dlse)
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    plain = plain_gradients(case, q, k, v, dout)            # of dout alone: the error that is allowed, not the value
    without = exact_attention(case, q, k, v, dout)
    for name, a, b, c, d in zip(("dq", "dk", "dv"), found, plain[1:], exact[2:], without[2:]):
        check_error(name, a, b.double() - d + c, c, 3, float32_rounding(case, q, k, v, dout))
    only = torch.autograd.grad(mg.attention(*leaves, causal=causal, return_lse=True)[1], leaves, dlse)
    exact = exact_attention(case, q, k, v, torch.zeros_like(dout), dlse)
    for name, a, c in zip(("dq", "dk", "dv"), only, exact[2:]):
        assert (a.double() - c).abs().max() <= 2**-7 * c.abs().max(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("scale", (1e-30, 1e-3, 3.0))
def test_scale(device, dtype, scale):
    check_attention(AttentionCase(5, 2, 2, 2, 70, 90, 64, 64, True, dtype, "heads first", scale), device)


@pytest.mark.parametrize("device", DEVICES)
def test_large_scores(device):
    """Scores in the thousands: exp must not overflow."""
    q, k, v, _ = attention_inputs(AttentionCase(6, rows=65, kv_rows=130), device)
    out, lse = mg.attention(q * 30, k * 30, v, return_lse=True)
    exact, exact_lse = reference.attention(*(t.double() for t in (q * 30, k * 30, v)))
    check_error("out", out, reference.attention(q * 30, k * 30, v)[0], exact)
    check_lse(lse, exact_lse, q * 30, k * 30, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("step", (-2.0, -0.05, -0.01, 0.01, 0.05, 2.0))
def test_scores_that_grow(dim, dtype, step, device):
    """From key to key by `step`, up or down: the forward must notice that its scale for the probabilities no longer
    fits, in any block and any row."""
    for causal in (False, True):
        case = AttentionCase(7, rows=500, kv_rows=700, dim=dim, dim_v=dim, causal=causal, dtype=dtype, scale=0.125)
        q, k, v, dout = attention_inputs(case, device)
        # so that scores have one product, which is exact
        q[..., 1:] = 0
        q[..., 0] = 8 * torch.linspace(0, 1, 500, device=device).to(dtype)       # the first rows see it less
        k[..., 0] = (step * torch.arange(700, device=device)).to(dtype)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out, lse = mg.attention(*leaves, causal=causal, scale=case.scale, return_lse=True)
        check_results(case, (q, k, v, dout), out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout))


@pytest.mark.parametrize("device", DEVICES)
def test_output_layout(device):
    """out and the gradients have the layout of the inputs."""
    q = torch.randn(2, 65, 4, 64, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    kv = torch.randn(2, 4, 33, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = mg.attention(q, kv, kv[..., :48])
    assert out.stride() == (65 * 4 * 48, 48, 4 * 48, 1)
    dq, dkv = torch.autograd.grad(out.sum(), (q, kv))
    assert dq.stride() == q.stride() and dkv.stride() == kv.stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", (64, 128))
def test_deterministic(device, dim):
    """Bitwise equal gradients, 50 times."""
    rows = 97 if device == "cpu" else 1111
    q, k, v, dout = attention_inputs(AttentionCase(7, 2, 4, 2, rows, rows, dim, dim, True), device)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]

    def gradients():
        return torch.autograd.grad(mg.attention(*leaves, causal=True, deterministic=True), leaves, dout)

    first = gradients()
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients()))


# Enough queries and keys for the backward's pairs of blocks of 128 keys; odd numbers of blocks, of the pair's second
# one too. The GPU takes them later.
PAIRS = [AttentionCase(9, 1, 2, 1, 512, 513, 128, 128), AttentionCase(10, 1, 1, 1, 577, 895, 65, 65),
         AttentionCase(11, 1, 2, 2, 700, 700, 96, 128, True),
         AttentionCase(12, 1, 2, 1, 520, 900, 128, 128, True, torch.float16),
         AttentionCase(13, 1, 1, 1, 800, 530, 128, 72, True)]
LONG_PAIRS = [AttentionCase(19, 1, 2, 1, 1100, 1537, 128, 128), AttentionCase(20, 1, 2, 2, 577, 1300, 65, 96),
              AttentionCase(21, 1, 4, 2, 4100, 4470, 128, 128, True),
              AttentionCase(22, 1, 1, 1, 8200, 8333, 128, 100, True, torch.float16)]


@pytest.mark.parametrize("case, device", [(case, "cpu") for case in PAIRS] +
                         [pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in LONG_PAIRS], ids=str)
@pytest.mark.parametrize("deterministic", (False, True))
def test_pairs_of_blocks(case, deterministic, device, request):
    if deterministic:
        request.getfixturevalue("poison")
    check_attention(case, device, deterministic)


# Head dims above 128 of q and k beside at most 128 of v have kernels of their own; the last two cases are those beside
# them.
NARROW_VALUES = [AttentionCase(30, 1, 4, 2, 300, 333, 192, 128),
                 AttentionCase(31, 2, 3, 1, 513, 513, 192, 128, True, torch.float16),
                 AttentionCase(32, 1, 2, 1, 129, 700, 192, 128, True),
                 AttentionCase(33, 1, 2, 2, 700, 129, 192, 128, True), AttentionCase(34, 2, 2, 1, 65, 1, 136, 72),
                 AttentionCase(35, 1, 8, 1, 200, 391, 129, 1, True, torch.float16, "gaps"),
                 AttentionCase(36, 3, 1, 1, 1, 450, 192, 100, False, layout="rows first"),
                 AttentionCase(37, 1, 2, 2, 257, 257, 192, 136, True),
                 AttentionCase(38, 1, 2, 2, 257, 257, 200, 128, True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("case", NARROW_VALUES, ids=str)
def test_values_narrower_than_keys(case, deterministic, device, request):
    if deterministic:
        request.getfixturevalue("poison")
    check_attention(case, device, deterministic)


def test_values_narrower_than_keys_have_their_rows():
    constants = {row["name"]: row["constants"] for row in _C.kernels()}
    for gpu in {False, bool(_C.info()["cuda_built"])}:
        for dtype in ("bfloat16", "float16"):
            for op in ("attention_fwd", "attention_bwd_pre", "attention_bwd", "attention_bwd_post"):
                for deterministic in (False, True):
                    row = lambda d, dv: row_taken(op, dtype=dtype, gpu=gpu, d=d, dv=dv, deterministic=deterministic)
                    columns = lambda d, dv: re.search(r"\bD=(\d+)", constants[row(d, dv)]).group(1)
                    assert [columns(d, dv) for d, dv in ((129, 1), (192, 128), (192, 129), (193, 128),
                                                         (129, 129))] == ["192", "192", "256", "256", "256"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", ((-1, -1), (40, 3)))
@pytest.mark.parametrize("dim", (64, 128, 160, 256))
def test_groups_in_parts(dim, window, device):
    """Few blocks of keys for many multiprocessors: several tasks share a group of query heads. Deterministic gradients
    come of one task a group."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(16)
        for dtype in (torch.bfloat16,) if device == "cuda" else (torch.bfloat16, torch.float32):
            q, k, v, dout = attention_inputs(AttentionCase(14, 1, 8, 2, 130, 150, dim, dim, dtype=dtype), device)
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            parts, whole = (torch.autograd.grad(mg.attention(*leaves, window=window, deterministic=d), leaves, dout)
                            for d in (False, True))
            for a, b in zip(parts, whole):   # sums of fp32, rounded once, in another order
                torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps,
                                           atol=1e-5 * b.abs().max().item() + 150 * torch.finfo(torch.float32).eps)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("device", DEVICES)
def test_threads_agree(device):
    """A result does not depend on the number of CPU threads."""
    q, k, v, _ = attention_inputs(AttentionCase(8, 2, 4, 4, 200, 200), device)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(mg.attention(q, k, v, causal=True))
            if device == "cpu":
                assert _C.num_threads() == n
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], r) for r in results[1:])


# ---- the reference itself


@pytest.mark.parametrize("causal", (False, True))
def test_reference(causal):
    """The reference is PyTorch's formula, and its gradient, lse's included, the derivative; rows without keys are 0."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=g, requires_grad=True)
               for shape in ((1, 4, 4, 3), (1, 2, 5, 3), (1, 2, 5, 2)))
    assert torch.autograd.gradcheck(lambda q, k, v: reference.attention(q, k, v, scale=0.7, causal=causal), (q, k, v))
    seen = torch.ones(4, 5, dtype=torch.bool).tril(1) if causal else None
    wide_k, wide_v = (t.repeat_interleave(2, 1) for t in (k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, wide_k, wide_v, seen, scale=0.7)
    assert torch.allclose(reference.attention(q, k, v, scale=0.7, causal=causal)[0], theirs, rtol=1e-12)
    leaves = [t.detach()[:, :, :n].requires_grad_() for t, n in ((q, 4), (k, 2), (v, 2))]
    out, lse = reference.attention(*leaves, causal=causal)
    hidden = 2 * causal
    assert (out[:, :, :hidden] == 0).all() and (lse[:, :, :hidden] == -math.inf).all()
    assert lse[:, :, hidden:].isfinite().all()
    gradients = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    assert not any(t.isnan().any() for t in gradients) and (gradients[0][:, :, :hidden] == 0).all()


def test_check_can_fail():
    """A small error anywhere is found."""
    case = AttentionCase(9, 2, 2, 2, 128, 128)
    q, k, v, dout = attention_inputs(case)
    exact, plain = exact_attention(case, q, k, v, dout)[0], reference.attention(q, k, v)[0]
    check_error("plain", plain, plain, exact)
    for wrong in (plain * 1.02, torch.nextafter(plain, plain * 0), plain.clone().index_fill_(2, torch.tensor(5), 0.0),
                  plain.clone()):
        if torch.equal(wrong, plain):
            wrong[0, 0, 0, 0] = math.nan
        with pytest.raises(AssertionError):
            check_error("wrong", wrong, plain, exact)
