"""Windows, softcap, sinks, ALiBi, dropout and packed sequences, forward and backward, against float64."""

import dataclasses
import itertools
import math
import random
import re

import pytest
import torch

import margay as mg
import reference
from cases import DEVICES, DIMS, HALF, check_error, largest_score, row_taken
from margay import _C, flash_attn_interface
from margay.families.attention import attention_torch
from margay.drop_ins import torch_attention

CASES = 100


@dataclasses.dataclass(frozen=True)
class Case:
    seed: int
    heads: int
    kv_heads: int
    lengths: tuple          # (rows, keys) of each sequence; packed, or one batch of equal ones
    packed: bool
    dim: int
    dim_v: int
    dtype: torch.dtype
    causal: bool
    window: tuple
    softcap: float
    sink: bool
    slopes: str             # "", "heads" or "batch"
    dropout: float
    dlse: bool
    deterministic: bool

    def __str__(self):
        parts = [f"seed{self.seed}", f"h{self.heads}x{self.kv_heads}",
                 "n" + "+".join(f"{a}x{b}" for a, b in self.lengths), f"d{self.dim}x{self.dim_v}",
                 str(self.dtype)[6:]]
        parts += [name for name in ("packed", "causal", "sink", "dlse", "deterministic") if getattr(self, name)]
        parts += ([f"window{self.window[0]},{self.window[1]}"] * (self.window != (-1, -1)) +
                  [f"cap{self.softcap:g}"] * (self.softcap > 0))
        parts += [f"alibi_{self.slopes}"] * bool(self.slopes) + [f"drop{self.dropout:g}"] * (self.dropout > 0)
        return "-".join(parts)


def draw(seed, dtypes=HALF):
    r = random.Random(seed)
    kv_heads = r.choice((1, 1, 2, 3))
    heads = kv_heads * r.choice((1, 2, 4))
    size = lambda: r.choice((0, 1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 200, 257, 300, 411))
    packed = r.random() < 0.5
    if packed:
        lengths = tuple((n, n if r.random() < 0.5 else size()) for n in (size() for _ in range(r.choice((1, 2, 3, 5)))))
    else:
        n = size()
        lengths = ((n, n if r.random() < 0.5 else size()),) * r.choice((1, 2))
    bound = lambda: r.choice((-1, -1, 0, 1, 5, 64, 100, 200, 1000))
    some = lambda chance: r.random() < chance
    dim = r.choice(DIMS)
    return Case(seed, heads, kv_heads, lengths, packed, dim, dim if some(0.7) else r.choice(DIMS), r.choice(dtypes),
                some(0.5), (bound(), bound()) if some(0.5) else (-1, -1),
                r.choice((1.0, 5.0, 30.0)) if some(0.3) else 0.0, some(0.3),
                r.choice(("heads", "batch")) if some(0.3) else "", r.choice((0.1, 0.5)) if some(0.25) else 0.0,
                some(0.3), some(0.3))


def inputs_of(case, device):
    g = torch.Generator().manual_seed(case.seed)
    rows, keys = (sum(n for n, _ in case.lengths), sum(m for _, m in case.lengths))
    make = lambda *shape: torch.randn(shape, generator=g).to(case.dtype)
    q, k, v, dout = (make(rows, case.heads, case.dim), make(keys, case.kv_heads, case.dim),
                     make(keys, case.kv_heads, case.dim_v), make(rows, case.heads, case.dim_v))
    sink = torch.randn(case.heads, generator=g) if case.sink else None
    slopes = None
    if case.slopes:
        slopes = torch.rand(len(case.lengths), case.heads, generator=g) * 0.1
        slopes = slopes[0] if case.slopes == "heads" else slopes
    dlse = torch.randn(case.heads, rows, generator=g) if case.dlse else None
    return [None if t is None else t.to(device) for t in (q, k, v, dout, sink, slopes, dlse)]


def by_formula(case, dtype, q, k, v, dout, sink, slopes, dlse):
    """out [rows, Hq, Dv], lse [Hq, rows], dq, dk, dv, dsink in `dtype`."""
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (q, k, v))
    sink = None if sink is None else sink.detach().to(torch.float64 if dtype == torch.float64
                                                      else torch.float32).requires_grad_()
    drawn = round(case.dropout * 65536) / 65536
    kept = [mg.dropout_mask(case.dropout, case.seed, len(case.lengths), case.heads, n, m)[i:i + 1].to(q.device)
            for i, (n, m) in enumerate(case.lengths)] if case.dropout else None
    out, lse = reference.packed(q, k, v, *([pair[i] for pair in case.lengths] for i in (0, 1)), slopes, kept, sink=sink,
                                dropout=drawn, causal=case.causal, window=case.window, softcap=case.softcap)
    leaves = [q, k, v] + ([sink] if sink is not None else [])
    results, sent = [out], [dout.to(dtype)]
    if dlse is not None and lse.requires_grad:
        results.append(lse.masked_fill(~lse.isfinite(), 0))
        sent.append(dlse.to(lse.dtype).masked_fill(~lse.isfinite(), 0))
    grads = torch.autograd.grad(results, leaves, sent, allow_unused=True)
    grads = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(leaves, grads)]
    return out.detach(), lse.detach(), *grads[:3], grads[3] if sink is not None else None


def by_margay(case, q, k, v, dout, sink, slopes, dlse):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)] + ([sink.detach().requires_grad_()] if sink is not None
                                                                 else [])
    options = dict(causal=case.causal, window=case.window, softcap=case.softcap,
                   sink=leaves[3] if sink is not None else None, alibi_slopes=slopes,
                   dropout_p=case.dropout, dropout_seed=case.seed, deterministic=case.deterministic, return_lse=True)
    if case.packed:
        starts = [torch.tensor([0, *torch.tensor([pair[i] for pair in case.lengths]).cumsum(0).tolist()],
                               dtype=torch.int32, device=q.device) for i in (0, 1)]
        out, lse = mg.attention_varlen(*leaves[:3], *starts, max(n for n, _ in case.lengths),
                                       max(m for _, m in case.lengths), **options)
        sent = dlse
    else:
        batch = len(case.lengths)
        dense = lambda t: t.unflatten(0, (batch, -1) if t.shape[0] else (batch, 0)).transpose(1, 2)
        out, lse = mg.attention(*map(dense, leaves[:3]), **options)
        out, lse = out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
        sent = dlse
    if sent is None:
        grads = torch.autograd.grad(out, leaves, dout)
    else:
        grads = torch.autograd.grad((out, lse), leaves, (dout, sent.masked_fill(~lse.isfinite(), 0)))
    return out.detach(), lse.detach(), *grads[:3], grads[3] if sink is not None else None


def check(case, device):
    inputs = inputs_of(case, device)
    found, plain, exact = (by_margay(case, *inputs), by_formula(case, case.dtype, *inputs),
                           by_formula(case, torch.float64, *inputs))
    q, k, v, dout = inputs[:4]
    relative = 2**-23 * (8 + largest_score(q[None].transpose(1, 2), k[None].transpose(1, 2), None) / 2 +
                         (41.1 if case.slopes else 0))
    norm = lambda t: float(t.double().norm(dim=2).max()) if t.numel() else 0.0
    largest = float(max(q.abs().max(), k.abs().max())) * q.shape[2]**-0.5 if q.numel() and k.numel() else 0.0
    absolute = 2**-22 * norm(dout) * norm(v) * largest
    # delta comes from the rounded out; else this cancels where one key has all the weight
    if case.dropout or case.sink:
        absolute = (absolute / (1 - case.dropout) +
                    torch.finfo(case.dtype).eps / 2 * norm(dout) * norm(found[0]) * largest)
    check_error("out", found[0], plain[0], exact[0], 2, (relative, 0.0))
    for name, i in (("dq", 2), ("dk", 3), ("dv", 4)):
        # rows that add to a key
        summed = max(1.0, max(n for n, _ in case.lengths) * case.heads / case.kv_heads)**0.5 if name == "dk" else 1.0
        check_error(name, found[i], plain[i], exact[i], 3, (relative, summed * absolute))
    finite = exact[1].isfinite()
    assert torch.equal(found[1].isfinite(), finite), "lse is not -inf exactly where a row has no keys"
    assert not finite.any() or float((found[1].double() - exact[1])[finite].abs().max()) <= 4 * relative * 2 + 1e-6
    if case.sink and q.numel():
        # of out, in delta
        rounding = (torch.finfo(case.dtype).eps / 2 *
                    float((found[0].double() * dout.double()).abs().sum(2).norm(dim=0).max()))
        assert (float((found[5].double() - exact[5]).abs().max()) <=
                3 * float((plain[5].double() - exact[5]).abs().max()) + rounding + 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [draw(i) for i in range(CASES)], ids=str)
def test_random(case, device):
    check(case, device)


@pytest.mark.parametrize("case", [draw(10_000 + i, (torch.float32,)) for i in range(20)], ids=str)
def test_float32(case):
    check(case, "cpu")


@pytest.mark.gpu
def test_many_on_gpu():
    """1000 random problems; the seed of one that fails is in the message."""
    for seed in range(20_000, 21_000):
        case = draw(seed)
        try:
            check(case, "cuda")
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_keeps_the_share_that_it_says(device):
    q = torch.zeros(2, 3, 200, 64, dtype=torch.bfloat16, device=device)
    v = torch.ones_like(q)
    out = mg.attention(q, q, v, dropout_p=0.3, dropout_seed=5)
    kept = mg.dropout_mask(0.3, 5, 2, 3, 200, 200)
    assert abs(float(kept.double().mean()) - 0.7) < 4 * math.sqrt(0.21 / kept.numel())
    assert torch.allclose(out.float()[..., 0].cpu(), kept.float().mean(3) / 0.7, atol=2e-2)
    halves = kept[:, :, :192].view(2, 3, 12, 2, 8, 200)     # rows 8 apart share 32 random bits
    assert abs(float((halves[:, :, :, 0] == halves[:, :, :, 1]).double().mean()) - 0.58) < 0.01
    for other in (4, 6, 5 + (1 << 32), 5 + (1 << 63)):
        agree = float((mg.dropout_mask(0.3, other, 2, 3, 200, 200) == kept).double().mean())
        assert abs(agree - 0.58) < 0.01, f"seed {other}: {agree}"


# the last two round to 65535 / 65536, the most there is
NEAR_1 = (0.999, 0.99999, 1 - 2**-16, math.nextafter(1 - 2**-17, 0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("p", NEAR_1)
def test_dropout_near_1_keeps_the_mean(p, device):
    """What is kept grows by what the drawn probability says, not the one asked for: equal probabilities of values 1 add
    up to 1 in the mean."""
    drawn, dtype = round(p * 65536) / 65536, torch.bfloat16 if device == "cuda" else torch.float32
    rounding = torch.finfo(dtype).eps
    q, k, v = (torch.full((1, 2, n, 8), float(n == 701), dtype=dtype, device=device) for n in (300, 700, 701))
    share = mg.dropout_mask(p, 5, 1, 2, 300, 700).double().mean(3) / (1 - drawn)
    for module in (mg, torch_attention):
        out = module.attention(q, k, v[:, :, :700], dropout_p=p, dropout_seed=5)
        if module is mg:
            assert torch.allclose(out.double()[..., 0].cpu(), share, rtol=rounding)
        else:                                                # draws otherwise: multiples of what one kept key gives
            kept = out.double() * 700 * (1 - drawn)
            assert float((kept - kept.round()).abs().max()) <= rounding * float(kept.max()) * 700
    q, v = (torch.full((1, 4, 2560, 8), float(x), dtype=dtype, device=device) for x in (0, 1))
    sigma = math.sqrt(drawn / (1 - drawn) / (4 * 2560**2))    # of a mean of so many, each 1 / (1 - drawn) or 0
    mean = float(mg.attention(q, q, v, dropout_p=p, dropout_seed=7).double()[..., 0].mean())
    assert abs(mean - 1) <= 5 * sigma + rounding / 2, f"mean {mean}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("p", (0.999, 0.99999))
def test_dropout_near_1_gradient(p, device, seed):
    """The backward drops and scales as the forward: out is linear in v, so sum(dout out) = sum(dv v); and all gradients
    against the formula."""
    print("seed", seed)
    g = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(1, 4, 700, 40, generator=g).to(device,
                                                                torch.bfloat16 if device == "cuda" else torch.float32)
                     for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = mg.attention(*leaves, dropout_p=p, dropout_seed=3)
    _, _, dv = torch.autograd.grad(out, leaves, dout)
    products = (out.double() * dout.double()).detach(), (dv.double() * v.double()).detach()
    assert float(products[0].abs().max()) > 0
    rounding = torch.finfo(q.dtype).eps * float(sum(t.abs().sum() for t in products))
    assert abs(float(products[0].sum() - products[1].sum())) <= rounding
    for case in (draw(seed, (torch.bfloat16,)), draw(seed + 1, (torch.float32,))):      # 65536 is no number of float16
        if device == "cpu" or case.dtype is not torch.float32:
            check(dataclasses.replace(case, dropout=p), device)


@pytest.mark.parametrize("device", DEVICES)
def test_seed_is_drawn_from_torch(device):
    q = torch.randn(1, 2, 70, 64, device=device, dtype=torch.bfloat16)
    torch.manual_seed(1)
    a, b = (mg.attention(q, q, q, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(a, mg.attention(q, q, q, dropout_p=0.5)) and not torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic(device):
    case = dataclasses.replace(draw(3), lengths=((300, 300), (129, 411)), packed=True, window=(100, 0), dim=64,
                               dim_v=64, deterministic=True, slopes="", softcap=0.0,
                               dropout=0.0, sink=False, heads=4, kv_heads=2)
    inputs = inputs_of(case, device)
    first = by_margay(case, *inputs)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first[:5], by_margay(case, *inputs)[:5]))


def test_compiled():
    def f(q, k, v, starts):
        return mg.attention_varlen(q, k, v, starts, starts, 100, 100, causal=True, window=(30, 0),
                                   softcap=10.0).square().sum()

    q, k, v = (torch.randn(150, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    starts = torch.tensor([0, 50, 150], dtype=torch.int32)
    want = torch.autograd.grad(f(q, k, v, starts), (q, k, v))
    got = torch.autograd.grad(torch.compile(f, fullgraph=True)(q, k, v, starts), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(want, got))


def test_numpy():
    import numpy as np

    q, k, v = (np.random.default_rng(i).standard_normal((90, 2, 32), np.float32) for i in range(3))
    starts = np.array([0, 30, 90], np.int64)
    out, lse = mg.attention_varlen(q, k, v, starts, starts, 60, 60, causal=True, return_lse=True)
    want, want_lse = mg.attention_varlen(*map(torch.from_numpy, (q, k, v, starts, starts)), 60, 60, causal=True,
                                         return_lse=True)
    assert np.array_equal(out, want.numpy()) and np.array_equal(lse, want_lse.numpy())


BAD = [
    (dict(sink=torch.zeros(3)), ValueError, r"sink has size 3 in dimension 0, expected 2 \(H of q\)"),
    (dict(alibi_slopes=torch.zeros(3)), ValueError, r"alibi_slopes has size 3 in dimension 1, expected 2 \(H of q\)"),
    (dict(alibi_slopes=torch.zeros(4, 2)), ValueError,
     r"SLOPES = 4 \(dimension 0 of alibi_slopes\), .*expected alibi_slopes of shape \[1, H\] or \[B, H\]"),
    (dict(softcap=-1.0), ValueError, "softcap is -1, expected 0"),
    (dict(softcap=math.nan), ValueError, "softcap is nan"),
    (dict(dropout_p=1.0), ValueError, "dropout_p is 1, expected 0 to less than 1"),
    (dict(dropout_p=-0.1), ValueError, "dropout_p is -0.1"),
    (dict(dropout_p=1 - 1e-8), ValueError,
     "dropout_p is 0.99999999, which is rounded to a multiple of 1 / 65536 and becomes 1, expected at most 65535 / "
     "65536 = 0.99998"),
    (dict(dropout_p=1 - 2**-17), ValueError,
     "dropout_p is 0.99999.*, which is rounded to a multiple of 1 / 65536 and becomes 1"),
]


@pytest.mark.parametrize("options, error, message", BAD, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_bad_options(options, error, message):
    q = torch.randn(1, 2, 10, 16, dtype=torch.bfloat16)
    with pytest.raises(error, match="attention: " + message):
        mg.attention(q, q, q, **options)


def test_bad_starts():
    q = torch.randn(10, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="attention: cu_seqlens_k is None"):
        mg.attention_varlen(q, q, q, torch.tensor([0, 10]), None, 10, 10)
    with pytest.raises(ValueError,
                       match=r"cu_seqlens_k has size 3 in dimension 0, expected 2 \(STARTS of cu_seqlens_q\)"):
        mg.attention_varlen(q, q, q, torch.tensor([0, 10]), torch.tensor([0, 5, 10]), 10, 10)
    with pytest.raises(ValueError, match="max_seqlen_q is -1"):
        mg.attention_varlen(q, q, q, torch.tensor([0, 10]), torch.tensor([0, 10]), -1, 10)
    with pytest.raises(ValueError, match="q has shape .* expected 3 dimensions"):
        mg.attention_varlen(q[None], q, q, torch.tensor([0, 10]), torch.tensor([0, 10]), 10, 10)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_the_backward_kernels_agree_on_the_head_dim(dtype):
    """The accumulator of dq is laid out by the first, filled by the second and read by the third kernel."""
    constants = {row["name"]: row["constants"] for row in _C.kernels()}
    head_dim = lambda row: re.search(r"\bD=(\d+)", constants[row]).group(1)
    places = {False, dtype != "float32" and bool(_C.info()["cuda_built"])}
    dims = [(d, dv) for d in (1, 64, 65, 128, 129, 192, 193, 256) for dv in {d, 1, 128, 129}]
    kinds = itertools.product(places, dims, range(5), (False, True), (100, 700, 9000))
    for gpu, (d, dv), features, deterministic, n in kinds:
        problem = dict(dtype=dtype, gpu=gpu, d=d, dv=dv, nq=n, nk=n, features=features, deterministic=deterministic)
        rows = [row_taken(op, **problem) for op in ("attention_bwd_pre", "attention_bwd", "attention_bwd_post")]
        assert len(set(map(head_dim, rows))) == 1, (rows, problem)


@pytest.mark.parametrize("main, dim", (("d256_full", 256), ("d128", 128), ("d128_x2", 128)))
def test_the_backward_kernels_go_with_a_preferred_one(main, dim):
    """Whatever head dim the problem would have got: the preferred kernel's condition holds for it too."""
    problem = dict(dtype="bfloat16", d=64 if main == "d256_full" else 100, dv=50, nq=600, nk=600)
    try:
        _C.prefer(f"attention_bwd_bf16_{main}")
        rows = [row_taken(op, **problem) for op in ("attention_bwd_pre", "attention_bwd", "attention_bwd_post")]
    finally:
        _C.prefer(None)
    assert rows == [f"attention_bwd_pre_bf16_d{dim}", f"attention_bwd_bf16_{main}", f"attention_bwd_post_bf16_d{dim}"]


# ---- what packed sequences must not see of each other. The library is called with outputs that hold NaN, so that what
# it does not write shows.

LENGTHS = ((100, 100), (33, 150), (0, 40), (129, 65), (64, 128), (7, 0), (70, 200), (257, 3))   # rows, keys
# the others' results may not depend on these; the third has no rows: nobody sees its keys
POISONED = (1, 4, 7)
BEHIND = (21, 135)              # rows of q and of k and v behind the last sequence
KINDS = {
    "plain": dict(),
    "causal": dict(causal=True),
    "window": dict(causal=True, left=50),
    "scores": dict(softcap=20.0, slopes=True, sink=True),
    "dropout": dict(causal=True, dropout=0.3),
}


def packed_places(lengths=LENGTHS, behind=BEHIND):
    """Of rows and of keys: the starts, and how many there are in memory."""
    starts = [[0, *torch.tensor([pair[i] for pair in lengths], dtype=torch.int64).cumsum(0).tolist()] for i in (0, 1)]
    return starts, [start[-1] + more for start, more in zip(starts, behind)]


def run_packed(tensors, lengths, device, causal=False, left=-1, softcap=0.0, slopes=False, sink=False, dropout=0.0):
    """out, lse, dq, dk, dv of [1, heads, rows, dim] tensors q, k, v, dout and dlse [1, heads, rows]."""
    q, k, v, dout, dlse = tensors
    starts, _ = packed_places(lengths)
    heads = q.shape[1]
    sinks, slope = (torch.linspace(-1, 1, heads, device=device), torch.full((1, heads), 0.01, device=device))
    features = attention_torch._features_of(sinks if sink else None, slope if slopes else None,
                                            *(torch.tensor(start, dtype=torch.int32, device=device)
                                              for start in starts), left,
                                     -1, softcap, dropout,
                                            *(max((pair[i] for pair in lengths), default=0) for i in (0, 1)), 11)
    nans = lambda t, *shape: torch.full(shape or t.shape, math.nan, dtype=t.dtype, device=device)
    out, lse, grads = nans(v, *q.shape[:3], v.shape[3]), nans(dlse), [nans(t) for t in (q, k, v)]
    attention_torch._call_attention_fwd(out, lse, q, k, v, 0.0, causal, features)
    read = dout, q, k, v, out, lse, dlse.masked_fill(lse == -math.inf, 0)
    attention_torch._call_attention_bwd(grads, read, 0.0, causal, True, features)
    return out, lse, *grads


def draw_packed(seed, dim, dtype, device, lengths=LENGTHS, heads=4, kv_heads=2, dim_v=0):
    g = torch.Generator().manual_seed(seed)
    _, (rows, keys) = packed_places(lengths)
    dim_v = dim_v or dim
    shapes = (heads, rows, dim), (kv_heads, keys, dim), (kv_heads, keys, dim_v), (heads, rows, dim_v)
    return [torch.randn(1, *shape, generator=g).to(device, dtype)
            for shape in shapes] + [torch.randn(1, heads, rows, generator=g).to(device)]


def dtypes_of(device):
    return HALF if device == "cuda" else (*HALF, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim, dim_v", ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256)))
def test_neighbours_may_hold_nan(dim, dim_v, kind, device):
    starts, totals = packed_places()
    # the last pair: behind all
    row, key = [[(a, b) for a, b in zip(start, [*start[1:], total])] for start, total in zip(starts, totals)]
    clean = [i for i in range(len(LENGTHS)) if i not in POISONED]
    for seed, dtype in enumerate(dtypes_of(device)):
        tensors = draw_packed(seed, dim, dtype, device, dim_v=dim_v)
        want = run_packed(tensors, LENGTHS, device, **KINDS[kind])
        single = ((math.nan, (0,)), (-math.inf, (1,)), (math.nan, (2,)), (math.nan, (3,))) if seed == 0 else ()
        for value, which in ((math.nan, range(5)), (math.inf, range(5)), *single):
            poisoned = [t.clone() for t in tensors]
            for i in which:
                for a, b in ([key, row][i in (0, 3, 4)][n] for n in (*POISONED, 2, len(LENGTHS))):
                    poisoned[i][:, :, a:b] = value
            found = run_packed(poisoned, LENGTHS, device, **KINDS[kind])
            for i, name in enumerate(("out", "lse", "dq", "dk", "dv")):
                for n in clean:
                    a, b = (key if name in ("dk", "dv") else row)[n]
                    x, y = found[i][:, :, a:b], want[i][:, :, a:b]
                    assert not y.isnan().any(), f"seed {seed}, {dtype}: {name} of sequence {n} is NaN"
                    assert torch.equal(x, y), (f"seed {seed}, {dtype}: {name} of sequence {n} differs where {value} is "
                                               f"in {list(which)} of others")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", (LENGTHS, ((64, 128), (192, 256)), ((0, 0),), ((0, 5), (9, 0)), ((3, 0),), ()),
                         ids=str)
@pytest.mark.parametrize("kind", ("causal", "scores"))
def test_rows_behind_the_last_sequence(kind, lengths, device):
    (row, key), (rows, keys) = packed_places(lengths)
    for dim in (40, 128, 200):
        tensors = draw_packed(dim, dim, torch.bfloat16, device, lengths)
        for t, end in zip(tensors, (row[-1], key[-1], key[-1], row[-1], row[-1])):
            t[:, :, end:] = math.nan
        out, lse, dq, dk, dv = run_packed(tensors, lengths, device, **KINDS[kind])
        assert (all((t[:, :, row[-1]:] == 0).all() for t in (out, dq))
                and all((t[:, :, key[-1]:] == 0).all() for t in (dk, dv)))
        assert (lse[:, :, row[-1]:] == -math.inf).all()
        assert not any(t.isnan().any() for t in (out, lse, dq, dk, dv)), "a sequence's own rows"


@pytest.mark.parametrize("device", DEVICES)
def test_gaps_between_keys_may_hold_nan(device):
    """A gap is a sequence without rows."""
    used, allocated = (50, 1, 128, 77), (64, 64, 130, 100)
    lengths = tuple(pair for n, m in zip(used, allocated) for pair in ((n, n), (0, m - n)))
    (_, key), _ = packed_places(lengths)
    q, k, v, dout, _ = (t[0].transpose(0, 1) if t.dim() == 4 else t
                        for t in draw_packed(3, 64, torch.bfloat16, device, lengths))
    gap = torch.ones(k.shape[0], dtype=torch.bool, device=device)
    for a, b in zip(key[0::2], key[1::2]):
        gap[a:b] = False
    starts = [torch.tensor(start, dtype=torch.int32, device=device) for start in packed_places(lengths)[0]]

    def run(k, v):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = flash_attn_interface.flash_attn_varlen_func(*leaves, *starts, 128, 128, causal=True, deterministic=True)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    want, found = run(k, v), run(*(t.masked_fill(gap[:, None, None], math.nan) for t in (k, v)))
    assert all(torch.equal(a, b) for a, b in zip(want, found)) and not any(t.isnan().any() for t in found)
    assert (found[2][gap] == 0).all() and (found[3][gap] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALF)
def test_sink_without_keys_in_c(dtype, device):
    """As its row says: the sink is part of lse, also where it is all there is. q may hold anything."""
    sink = torch.tensor([0.5, -1.0, 30.0, -math.inf, 0.0, 1e-3], device=device)
    near = sink.abs()[:, None] * 2**-22                       # lse is turned into units of log 2 and back
    for rows, dim in ((1, 8), (130, 64), (70, 256)):
        q, k = (torch.full((2, 6, rows, dim), math.nan, dtype=dtype, device=device),
                torch.zeros(2, 3, 0, dim, dtype=dtype, device=device))
        out, lse = torch.full_like(q, math.nan), torch.full((2, 6, rows), math.nan, device=device)
        for number in (0.0, 3.0):                             # rows of sinks, and of all features
            features = -1, -1, number, 0.0, 0, sink, None, None, None, 0, 0
            for causal in (False, True):
                _C.attention_fwd(out.fill_(math.nan), lse.fill_(math.nan), q, k, k, 0.125, causal, None, *features)
                assert ((out == 0).all() and torch.equal(lse.isfinite(),
                                                         sink.isfinite()[:, None].expand(6, rows).expand_as(lse)))
                assert (((lse - sink[:, None]).nan_to_num(0.0).abs() <= near.nan_to_num(0.0)).all()
                        and (lse[:, 3] == -math.inf).all())
        starts = [torch.tensor(t, dtype=torch.int32, device=device)
                  for t in ([0, rows // 2, rows // 2, rows - 1], [0, 0, 0, 0])]
        features = -1, -1, 0.0, 0.0, 0, sink, None, *starts, rows, 0
        _C.attention_fwd(out[:1].fill_(math.nan), lse[:1].fill_(math.nan), q[:1], k[:1], k[:1], 0.125, False, None,
                         *features)
        assert (out[:1] == 0).all() and (lse[0, :, rows - 1:] == -math.inf).all()
        assert ((lse[0, :, :rows - 1] - sink[:, None]).nan_to_num(0.0).abs() <= near.nan_to_num(0.0)).all()


def test_sink_without_keys_and_rows_behind():
    q, k = torch.randn(10, 2, 16), torch.randn(0, 2, 16)
    sink, starts = torch.tensor([0.5, -1.0]), [torch.tensor(t) for t in ([0, 3, 7], [0, 0, 0])]
    for convert in (lambda t: t, lambda t: t.numpy()):
        out, lse = mg.attention_varlen(*map(convert, (q, k, k, *starts)), 4, 0, sink=convert(sink), return_lse=True)
        out, lse = torch.as_tensor(out), torch.as_tensor(lse)
        assert ((out == 0).all() and torch.allclose(lse[:, :7], sink[:, None].expand(2, 7), rtol=2**-22)
                and (lse[:, 7:] == -math.inf).all())
