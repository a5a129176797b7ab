"""Attention forward of float8_e4m3fn against float64 of the dequantised inputs.

An answer may have twice the error of the same computation in PyTorch with probabilities rounded to e4m3, plus rounding:
see `check_error`. Where few keys are visible that error is one of few roundings, and may happen to be none: a quarter
of the largest that rounding can do is allowed besides."""

import math
import random

import pytest
import torch

import margay as mg
import reference
from cases import DEVICES, LAYOUTS, ROWS, check_error, largest_score, place
from margay import _C, flash_attn_interface

E4M3 = torch.float8_e4m3fn
ROUNDING = 2**-4       # of e4m3, relative, at most
RANGE = 256            # the largest probability is this in the product with v


class Case:
    def __init__(self, seed, **given):
        r = random.Random(seed)
        self.seed, self.kv_heads = seed, r.choice((1, 2, 3))
        self.heads = self.kv_heads * r.choice((1, 1, 2, 4))
        self.batch, self.causal = r.choice((1, 2)), r.random() < 0.5
        self.rows = r.choice(ROWS) if r.random() < 0.8 else r.randrange(500)
        self.kv_rows = self.rows if r.random() < 0.3 else r.choice(ROWS) if r.random() < 0.7 else r.randrange(700)
        self.dim = r.choice((16, 48, 64, 64, 80, 96, 128, 128, 192, 256, 1, 40, 63, 200))
        self.dim_v = self.dim if r.random() < 0.7 else r.choice((16, 64, 72, 128, 256))
        self.scale, self.layout = (r.choice((None, None, 0.1, 1.0)),
                                   r.choice([name for name in LAYOUTS if name not in ("fused", "broadcast")]))
        self.descales = [r.random() < 0.7 for _ in range(3)]
        self.__dict__ |= given

    def __str__(self):
        return (f"seed{self.seed}-b{self.batch}-h{self.heads}x{self.kv_heads}-n{self.rows}x{self.kv_rows}"
                f"-d{self.dim}x{self.dim_v}-{'causal' if self.causal else 'full'}-{self.layout.replace(' ', '_')}")

    def inputs(self, device):
        """q, k, v and their factors or None. Memory beside the tensors is NaN."""
        g = torch.Generator().manual_seed(self.seed)
        shapes = ((self.batch, self.heads, self.rows, self.dim), (self.batch, self.kv_heads, self.kv_rows, self.dim),
                  (self.batch, self.kv_heads, self.kv_rows, self.dim_v))
        tensors = [place(torch.randn(shape, generator=g).to(E4M3), self.layout, device) for shape in shapes]
        factors = [0.5 + torch.rand(self.batch, self.kv_heads, generator=g) for _ in range(3)]
        return tensors, [f.to(device) if given else None for f, given in zip(factors, self.descales)]


def dequantised(t, factor, heads_k):
    t = t.double()
    return t if factor is None else t * factor.double().repeat_interleave(t.shape[1] // max(heads_k, 1),
                                                                          1)[:, :, None, None]


def rounded_attention(q, k, v, scale, causal):
    """The formula in float32 with probabilities rounded as the kernel rounds them."""
    scores = reference.attention_scores(q.float(), k.float(), scale=scale, causal=causal)
    largest = scores.amax(3, keepdim=True)
    weights = torch.exp(scores - largest.masked_fill(largest == -math.inf, 0.0))
    total = weights.sum(3, keepdim=True)
    v = v.float().repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
    return ((weights * RANGE).to(E4M3).float() @ v / RANGE / total).masked_fill(total == 0, 0.0)


def check_results(q, k, v, factors, scale, causal, out, lse):
    heads = k.shape[1]
    q, k, v = (dequantised(t, f, heads) for t, f in zip((q, k, v), factors))
    exact, exact_lse = reference.attention(q, k, v, scale=scale, causal=causal)
    assert out.dtype == torch.bfloat16
    if k.shape[2]:
        plain = rounded_attention(q, k, v, scale, causal)
        few = reference.attention(q, k, v.abs(), scale=scale, causal=causal)[0].amax() if out.numel() else 0.0
        relative = 2**-23 * (8 + largest_score(q, k, scale) / 2) + (2**-9 if out.is_cuda else 0.0)
        visible = max(1, (k.shape[2] - q.shape[2] + 1) if causal else k.shape[2])
        check_error("out", out, plain, exact, 2, (relative, float(few) * ROUNDING / 4 / visible**0.5))
    else:
        assert (out == 0).all()
    check_lse(lse, exact_lse, q, k, scale)


def check_lse(found, exact, q, k, scale):
    """To float32 rounding of the scores; a GPU adds products of 8-bit numbers with some 14 bits."""
    assert found.dtype == torch.float32 and found.shape == exact.shape
    finite = exact.isfinite()
    assert (torch.equal(found.isfinite(), finite)
            and (found[~finite] == -math.inf).all()), "lse: not -inf exactly where a row has no keys"
    if finite.any():
        worst, limit = (float((found.double() - exact)[finite].abs().max()),
                        (2**-10 if found.is_cuda else 2**-22) * (4 + largest_score(q, k, scale)))
        assert worst <= limit, f"lse: error {worst:.3g}, allowed {limit:.3g}"


def check_attention(case, device):
    (q, k, v), factors = case.inputs(device)
    out, lse = mg.attention(q, k, v, causal=case.causal, scale=case.scale, return_lse=True, q_descale=factors[0],
                            k_descale=factors[1], v_descale=factors[2])
    check_results(q, k, v, factors, case.scale, case.causal, out, lse)


SIZES = [dict(rows=n, kv_rows=m, causal=c) for n in (0, 1, 65) for m in (0, 1, 65) for c in (False, True)]
SIZES += [dict(rows=n, kv_rows=m, causal=True)
          for n, m in ((129, 65), (64, 191), (300, 1), (1, 300), (193, 192), (513, 513), (255, 1027))]
SIZES += [dict(dim=d, dim_v=d, rows=200, kv_rows=450) for d in (16, 64, 80, 128, 192, 256, 1, 63, 65, 255)]
SIZES += [dict(dim=192, dim_v=128), dict(dim=64, dim_v=256), dict(batch=0), dict(heads=8, kv_heads=1),
          dict(heads=6, kv_heads=3, causal=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [Case(1000 + i) for i in range(100)], ids=str)
def test_random(case, device, poison, one_thread):
    check_attention(case, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [Case(i, **{"dim": 64, "dim_v": 64} | size) for i, size in enumerate(SIZES)], ids=str)
def test_awkward(case, device, poison, one_thread):
    check_attention(case, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", [row["name"] for row in _C.kernels() if row["op"] == "attention_fwd_fp8"])
@pytest.mark.parametrize("causal", (False, True))
def test_every_row(row, causal, device, poison, one_thread):
    """Each on a problem with many blocks of keys, more tasks than multiprocessors, and one kernel's keys behind the
    other's."""
    if device == "cpu" and {r["name"]: r["where"] for r in _C.kernels()}[row] == "gpu":
        row = None         # its source runs in the other rows
    d = 64 if row and "d64" in row else 256 if row and "d256" in row else 128
    case = Case(7, batch=1 if device == "cpu" else 8, heads=4, kv_heads=2, rows=700 if device == "cpu" else 2900,
                kv_rows=900 if device == "cpu" else 3000, dim=d, dim_v=d, causal=causal, scale=None,
                layout="heads first")
    _C.prefer(row)
    try:
        check_attention(case, device)
    finally:
        _C.prefer(None)


@pytest.mark.parametrize("device", DEVICES)
def test_peaked_rows(device, one_thread):
    """One key has nearly all of the weight: it is not rounded, so that the answer is v to the rounding of bfloat16."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 300, 64, generator=g).sign().to(E4M3)
    k, v = q.flip(2).clone(), torch.randn(1, 2, 300, 64, generator=g).to(E4M3)
    q, k, v = (t.to(device) for t in (q, k, v))
    out = mg.attention(q, k, v, scale=4.0)
    exact, _ = reference.attention(q.double(), k.double(), v.double(), scale=4.0)
    assert not out.isnan().any() and ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-14).all()


@pytest.mark.parametrize("device", DEVICES)
def test_repeats_bitwise(device):
    (q, k, v), factors = Case(3, batch=2, heads=8, kv_heads=4, rows=1000, kv_rows=1100, dim=128, dim_v=128, causal=True,
                              layout="rows first").inputs(device)
    options = dict(causal=True, return_lse=True, q_descale=factors[0], k_descale=factors[1], v_descale=factors[2])
    first = mg.attention(q, k, v, **options)
    for _ in range(3 if device == "cpu" else 50):
        assert all(map(torch.equal, first, mg.attention(q, k, v, **options)))


@pytest.mark.parametrize("device", DEVICES)
def test_nan_reaches_the_output(device):
    (q, k, v), _ = Case(4, batch=1, heads=2, kv_heads=2, rows=70, kv_rows=150, dim=64, dim_v=64).inputs("cpu")
    q, k, v = (t.float() for t in (q, k, v))
    q[0, 0, 5, 3] = v[0, 1, 100, 7] = math.nan
    out = mg.attention(*(t.to(E4M3).to(device) for t in (q, k, v)))
    want = torch.zeros_like(out, dtype=torch.bool)
    want[0, 0, 5] = want[0, 1, :, 7] = True
    assert torch.equal(out.isnan(), want)


@pytest.mark.parametrize("device", DEVICES)
def test_factors_of_zero_and_large_scores(device):
    (q, k, v), _ = Case(5, batch=1, heads=2, kv_heads=2, rows=70, kv_rows=300, dim=128, dim_v=128).inputs(device)
    zero, large = torch.zeros(1, 2, device=device), torch.full((1, 2), 1e3, device=device)
    for causal in (False, True):
        out, lse = mg.attention(q, k, v, causal=causal, return_lse=True, q_descale=zero)
        check_results(q, k, v, (zero, None, None), None, causal, out, lse)
        assert (mg.attention(q, k, v, causal=causal, v_descale=zero) == 0).all()
        out = mg.attention(q, k, v, causal=causal, q_descale=large, k_descale=large)
        assert not out.isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_raw_writes_outputs_only(device):
    (q, k, v), factors = Case(6, batch=2, heads=4, kv_heads=2, rows=97, kv_rows=211, dim=80, dim_v=48, causal=True,
                              layout="gaps", descales=[True] * 3).inputs(device)
    buffers = [torch.full((2 * 4 * 97 * 48 + 128,), math.nan, dtype=torch.bfloat16, device=device),
               torch.full((2 * 4 * 97 + 128,), math.nan, device=device)]
    out, lse = buffers[0][64:-64].view(2, 4, 97, 48), buffers[1][64:-64].view(2, 4, 97)
    aligned = [torch.empty_like(t, memory_format=torch.contiguous_format).copy_(t) for t in (q, k, v)]
    _C.attention_fwd_fp8(out, lse, *aligned, None, *factors, 0.0, True)
    assert all(b[part].isnan().all() for b in buffers
               for part in (slice(64), slice(-64, None))), "memory beside the outputs was written"
    check_results(q, k, v, factors, None, True, out, lse)


@pytest.mark.parametrize("device", DEVICES)
def test_flash_attention_3_interface(device):
    (q, k, v), factors = Case(8, batch=2, heads=4, kv_heads=2, rows=100, kv_rows=100, dim=64, dim_v=64,
                              descales=[True] * 3, layout="rows first").inputs(device)
    rows_first = [t.transpose(1, 2) for t in (q, k, v)]
    names = dict(zip(("q_descale", "k_descale", "v_descale"), factors))
    want, want_lse = mg.attention(q, k, v, causal=True, scale=0.2, return_lse=True, **names)
    out, lse = flash_attn_interface.flash_attn_func(*rows_first, softmax_scale=0.2, causal=True, return_attn_probs=True,
                                                    **names)
    assert torch.equal(out.transpose(1, 2), want) and torch.equal(lse, want_lse)
    packed = torch.cat(rows_first, 2)
    out = flash_attn_interface.flash_attn_qkvpacked_func(packed, softmax_scale=0.2, causal=True, num_heads_q=4,
                                                         **{n: f.expand(2, 2) for n, f in names.items()})
    assert torch.equal(out.transpose(1, 2), want)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    (q, k, v), factors = Case(9, batch=1, heads=2, kv_heads=1, rows=70, kv_rows=90, dim=64, dim_v=80).inputs(device)
    mg.attention(q, k, v)
    function = torch.compile(lambda *t: mg.attention(*t[:3], causal=True, v_descale=t[3], return_lse=True),
                             fullgraph=True, backend="eager")
    factor = torch.rand(1, 1, device=device)
    assert all(map(torch.equal, function(q, k, v, factor),
                   mg.attention(q, k, v, causal=True, v_descale=factor, return_lse=True)))
    # test_schema compares what PyTorch cannot
    torch.library.opcheck(torch.ops.margay.attention_fp8, (q, k, v, factor, None, factor, 0.1, True),
                          test_utils="test_faketensor")


def test_explain():
    q = torch.zeros(1, 2, 70, 64).to(E4M3)
    assert ("attention for float8_e4m3fn" in mg.explain(mg.attention, q, q, q)
            and "attention_fwd_e4m3_d64 takes it" in mg.explain(mg.attention, q, q, q))
    assert "attention_fwd_e4m3_d128" in mg.explain("attention", dtype="float8_e4m3fn", gpu=True, d=128)


Q, F = torch.zeros(1, 2, 7, 64).to(E4M3), torch.ones(1, 2)
CU = torch.tensor([0, 7], dtype=torch.int32)


@pytest.mark.parametrize("error, message, call", [
    (NotImplementedError, "attention: window is given, which exists for bfloat16 and float16",
     lambda: mg.attention(Q, Q, Q, window=(3, 0))),
    (NotImplementedError, "attention: softcap is given, which exists",
     lambda: mg.attention(Q, Q, Q, softcap=3.0, k_descale=F)),
    (NotImplementedError, "attention: sink is given, which exists", lambda: mg.attention(Q, Q, Q, sink=torch.zeros(2))),
    (NotImplementedError, "attention: alibi_slopes is given, which exists",
     lambda: mg.attention(Q, Q, Q, alibi_slopes=torch.zeros(2))),
    (NotImplementedError, "attention: dropout_p is given, which exists", lambda: mg.attention(Q, Q, Q, dropout_p=0.5)),
    (NotImplementedError, "attention: cu_seqlens_q is given, which exists",
     lambda: mg.attention_varlen(*[Q[0].transpose(0, 1)] * 3, CU, CU, 7, 7)),
    (NotImplementedError, "attention: q requires a gradient", lambda: mg.attention(Q.clone().requires_grad_(), Q, Q)),
    (NotImplementedError, "attention: v_descale requires a gradient",
     lambda: mg.attention(Q, Q, Q, v_descale=F.clone().requires_grad_())),
    (TypeError, "attention: q_descale is given, but q has dtype bfloat16, expected float8_e4m3fn",
     lambda: mg.attention(*[Q.bfloat16()] * 3, q_descale=F)),
    (TypeError, "attention: k has dtype bfloat16, expected float8_e4m3fn (same as q)",
     lambda: mg.attention(Q, Q.bfloat16(), Q)),
    (TypeError, "attention: q has dtype float8_e5m2, expected", lambda: mg.attention(*[Q.to(torch.float8_e5m2)] * 3)),
    (TypeError, "attention: k_descale is float, expected torch.Tensor", lambda: mg.attention(Q, Q, Q, k_descale=1.0)),
    (ValueError, "attention: q_descale has shape [2], expected [1, 2] (batch and heads of k)",
     lambda: mg.attention(Q, Q, Q, q_descale=F[0])),
    (TypeError, "attention: q has dtype float8_e4m3fn, expected bfloat16", lambda: torch.ops.margay.attention(Q, Q, Q)),
    (TypeError, "matmul: a has dtype float8_e4m3fn, expected bfloat16", lambda: mg.matmul(Q[0, 0], Q[0, 0].t())),
    (TypeError, "attention: q has dtype float8_e4m3fn, expected bfloat16",
     lambda: _C.attention_fwd(Q, None, Q, Q, Q, 0.0, False)),
    (TypeError, "attention_backward: dout has dtype float8_e4m3fn, expected bfloat16",
     lambda: _C.attention_bwd(*[Q] * 8, F, None, F, 0.0, False, False)),
    (TypeError, "attention: out has dtype float8_e4m3fn, expected bfloat16",
     lambda: _C.attention_fwd_fp8(Q, None, Q, Q, Q, None, None, None, None, 0.0, False)),
    (TypeError, "attention: q has dtype bfloat16, expected float8_e4m3fn",
     lambda: _C.attention_fwd_fp8(Q.bfloat16(), None, Q.bfloat16(), Q, Q, None, None, None, None, 0.0, False)),
    (ValueError, "attention: v_descale has size 2 in dimension 0, expected 1",
     lambda: _C.attention_fwd_fp8(torch.empty(1, 2, 7, 64, dtype=torch.bfloat16), None, Q, Q, Q, None, None, None,
                                  torch.ones(2, 2), 0.0, False)),
    (TypeError, "attention_decode: q has dtype float8_e4m3fn", lambda: mg.attention_decode(Q, Q, Q)),
    (NotImplementedError, "flash_attn_varlen_func: q has dtype float8_e4m3fn",
     lambda: mg.flash_attn.flash_attn_varlen_func(*[Q[0].transpose(0, 1)] * 3, CU, CU, 7, 7)),
    (NotImplementedError, "flash_attn_with_kvcache: q has dtype float8_e4m3fn",
     lambda: mg.flash_attn.flash_attn_with_kvcache(Q, Q, Q)),
    (NotImplementedError, "flash_attn_func: q has dtype float8_e4m3fn", lambda: mg.flash_attn.flash_attn_func(Q, Q, Q)),
])
def test_refuses(error, message, call):
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)
