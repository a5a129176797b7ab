"""attention_decode and append_kv against float64."""

import dataclasses
import itertools
import math
import random
import re

import numpy
import pytest
import torch

import margay as mg
import reference
from cases import DEVICES, HALF, check_error, largest_score
from margay import _C

LENGTHS = (0, 1, 2, 13, 63, 64, 65, 127, 128, 129, 200, 333, 500)
DIMS = (1, 8, 40, 64, 72, 80, 128, 129, 192, 256)
PAGES = (16, 48, 64, 128, 256)
ODD_PAGES = (1, 2, 3, 4, 5, 8, 13, 24, 100)      # which kernels do not read in place


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    seed: int
    batch: int = 2
    queries: int = 1
    heads: int = 8
    k_heads: int = 2
    dim: int = 64
    rows: int = 300              # of the cache, for a sequence
    lengths: tuple | int | None = (300, 77)
    page: int = 0
    indexed: bool = False
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window: tuple = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    sink: bool = False
    slopes: int = 0              # 1: [Hq], 2: [B, Hq]
    splits: int = 0

    def __str__(self):
        lengths = "x".join(map(str, self.lengths)) if isinstance(self.lengths, tuple) else self.lengths
        options = [name for name in ("causal", "sink", "indexed")
                   if getattr(self, name)] + [f"{name}{getattr(self, name)}" for name in ("page", "slopes", "splits")
                                              if getattr(self, name)]
        options += (["window" + "x".join(map(str, self.window))] * (self.window != (-1, -1)) +
                    [f"cap{self.softcap}"] * bool(self.softcap))
        return (f"seed{self.seed}-b{self.batch}-q{self.queries}-h{self.heads}x{self.k_heads}-d{self.dim}"
                f"-n{lengths}of{self.rows}-{str(self.dtype)[6:]}-{'-'.join(options) or 'plain'}")


def random_case(seed):
    r = random.Random(seed)
    batch, k_heads, rows = r.choice((1, 2, 3)), r.choice((1, 1, 2, 3)), r.choice(LENGTHS[1:])
    lengths = tuple(r.choice((0, 1, rows, r.randint(0, rows), r.randint(0, rows))) for _ in range(batch))
    page = r.choice((0, r.choice(PAGES)))
    return DecodeCase(seed, batch, r.choice((1, 1, 1, 2, 5, 17, 70)), k_heads * r.choice((1, 2, 4, 7, 8)), k_heads,
                      r.choice(DIMS), rows, r.choice((lengths, lengths, lengths, None, lengths[0])), page,
                      not page and r.random() < 0.4, r.choice(HALF), r.random() < 0.4,
                      r.choice(((-1, -1), (-1, -1), (30, 0), (100, 5), (-1, 3), (0, 0))),
                      r.choice((0.0, 0.0, 5.0, 30.0)), r.choice((None, None, 0.3)),
                      r.random() < 0.3, r.choice((0, 0, 1, 2)), r.choice((0, 0, 1, 2, 3, 8)))


def paged_case(seed):
    """Pages of any size, and a table of which each sequence has the row that cache_batch_idx says."""
    r = random.Random(-seed)
    return dataclasses.replace(random_case(seed), page=r.choice(r.choice((PAGES, ODD_PAGES, ODD_PAGES))),
                               indexed=r.random() < 0.5)


AWKWARD = [DecodeCase(1000 + i, **change) for i, change in enumerate(
    [dict(rows=0, lengths=None), dict(batch=0, lengths=()), dict(queries=0), dict(heads=0, k_heads=0),
     dict(lengths=(0, 0)), dict(lengths=(0, 0), sink=True),
     dict(heads=64, k_heads=1), dict(heads=70, k_heads=1, queries=3, causal=True),
     dict(queries=200, rows=150, lengths=(150, 3), causal=True),
     dict(rows=2000, lengths=(2000, 1), splits=8, page=16), dict(rows=256, lengths=(256, 1000)),
     dict(rows=256, lengths=(-5, 100)), dict(rows=129, lengths=129, splits=128),
     dict(dim=256, heads=32, k_heads=4, lengths=(300, 299)), dict(window=(5, 0), lengths=(300, 4), splits=3)]
    + [dict(lengths=(n, n - 1)) for n in (64, 65, 128, 129)])]


def tensors(case, device="cpu"):
    """The call's arguments. The caches hold NaN wherever no sequence has a key."""
    g = torch.Generator().manual_seed(case.seed)
    normal = lambda *shape: torch.randn(shape, generator=g).to(case.dtype)  # noqa: E731
    q, lengths = normal(case.batch, case.queries, case.heads, case.dim), lengths_of(case)
    table = index = None
    if case.page:
        pages, tables = -(-case.rows // case.page), case.batch + 2 * case.indexed
        shape = (tables * pages + 2, case.page, case.k_heads, case.dim)
        table = torch.randperm(shape[0], generator=g)[:tables * pages].view(tables, pages).int()
        index = torch.randperm(tables, generator=g)[:case.batch].int() if case.indexed else None
    else:
        shape = (case.batch + 2 * case.indexed, case.rows, case.k_heads, case.dim)
        index = torch.randperm(shape[0], generator=g)[:case.batch].int() if case.indexed else None
    caches = [torch.full(shape, math.nan, dtype=case.dtype) for _ in range(2)]
    for cache, b in itertools.product(caches, range(case.batch)):
        for key in range(lengths[b]):
            row = b if index is None else index[b]
            place = (table[row, key // case.page], key % case.page) if case.page else (row, key)
            cache[place] = normal(case.k_heads, case.dim)
    seqlens = torch.tensor(case.lengths, dtype=torch.int32) if isinstance(case.lengths, tuple) else case.lengths
    sink = torch.randn(case.heads, generator=g) if case.sink else None
    slopes = torch.rand(*((case.heads,) if case.slopes == 1 else (case.batch, case.heads)),
                        generator=g) if case.slopes else None
    options = dict(cache_seqlens=seqlens, page_table=table, cache_batch_idx=index, causal=case.causal, scale=case.scale,
                   window=case.window, softcap=case.softcap, sink=sink, alibi_slopes=slopes, num_splits=case.splits)
    to = lambda t: t.to(device) if isinstance(t, torch.Tensor) else t  # noqa: E731
    return [to(q), *map(to, caches)], {name: to(value) for name, value in options.items()}


def lengths_of(case):
    most = -(-case.rows // case.page) * case.page if case.page else case.rows
    lengths = case.lengths if isinstance(case.lengths, tuple) else [most if case.lengths is None
                                                                    else case.lengths] * case.batch
    return [min(max(n, 0), most) for n in lengths]


def sequence(case, cache, options, b):
    """Keys or values of a sequence, [n, Hk, D]."""
    n = lengths_of(case)[b]
    row = b if options["cache_batch_idx"] is None else options["cache_batch_idx"][b].long()
    return cache[options["page_table"][row].long()].flatten(0, 1)[:n] if case.page else cache[row, :n]


def plain(case, q, k_cache, v_cache, options, dtype):
    """out and lse, the formula as one writes it in PyTorch, in the precision of dtype."""
    out, lse = (torch.zeros(q.shape, dtype=dtype, device=q.device),
                torch.full((case.batch, case.heads, case.queries), -math.inf, dtype=dtype, device=q.device))
    for b in range(case.batch):
        rows = q[b], *(sequence(case, cache, options, b) for cache in (k_cache, v_cache))
        slopes = options["alibi_slopes"][b] if case.slopes == 2 else options["alibi_slopes"]
        found = reference.rows_first(*(t[None].to(dtype) for t in rows), causal=case.causal, scale=case.scale,
                                     window=case.window, softcap=case.softcap, sink=options["sink"],
                                     alibi_slopes=slopes)
        out[b], lse[b] = (t[0] for t in found)
    return out, lse


def rounding_of(case, q, k_cache, options):
    """Largest score, and the relative rounding of float32 weights that comes with it."""
    largest = max([0.0] + [largest_score(q[b:b + 1], sequence(case, k_cache, options, b)[None], case.scale)
                           for b in range(case.batch)])
    if case.slopes:
        largest += float(options["alibi_slopes"].max()) * (case.rows + case.queries)
    largest += 4 * case.softcap + 4 * case.sink
    return largest, 2**-23 * (8 + largest)


def check(case, device):
    inputs, options = tensors(case, device)
    out, lse = mg.attention_decode(*inputs, **options, return_lse=True)
    exact, exact_lse = plain(case, *inputs, options, torch.float64)
    largest, relative = rounding_of(case, inputs[0], inputs[1], options)
    check_error("out", out, plain(case, *inputs, options, case.dtype)[0], exact, 2, (relative, 0.0))
    finite = exact_lse.isfinite()
    assert lse.shape == exact_lse.shape and torch.equal(lse.isfinite(), finite)
    if finite.any():
        worst = float((lse.double() - exact_lse)[finite].abs().max())
        assert worst <= 2**-22 * (4 + largest), f"lse: error {worst:.3g}"
    return out, lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [random_case(seed) for seed in range(150)], ids=str)
def test_random(case, device, poison):
    check(case, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [paged_case(seed) for seed in range(3000, 3080)], ids=str)
def test_pages(case, device, poison):
    check(case, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", AWKWARD, ids=str)
def test_awkward(case, device, poison):
    check(case, device)


@pytest.mark.parametrize("case", [dataclasses.replace(random_case(seed), dtype=torch.float32)
                                  for seed in range(200, 230)], ids=str)
def test_float32(case, poison):
    check(case, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", (0, 64))
def test_splits_agree(device, page):
    """Any number of splits gives the same result to rounding, and the same bits every time."""
    case = DecodeCase(7, 3, 2, 8, 2, 128, 900, (900, 450, 1), page, causal=True, sink=True)
    results = [check(dataclasses.replace(case, splits=n), device) for n in range(9)]
    for out, lse in results:
        assert (lse - results[1][1]).abs().max() <= 2**-18 and (out - results[1][0]).abs().max() <= 2**-7
    for n in (1, 5):
        inputs, options = tensors(dataclasses.replace(case, splits=n), device)
        for _ in range(20):
            assert torch.equal(mg.attention_decode(*inputs, **options), results[n][0])


@pytest.mark.parametrize("device", DEVICES)
def test_same_as_attention(device):
    """With one row of keys for all, the same as the forward op."""
    q, k, v = (torch.randn(2, n, 4, 64, generator=torch.Generator().manual_seed(n)).bfloat16().to(device)
               for n in (33, 190, 190))
    out, lse = mg.attention_decode(q, k, v, causal=True, return_lse=True)
    expected, expected_lse = mg.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True, return_lse=True)
    assert (out - expected.transpose(1, 2)).abs().max() <= 2**-7 and (lse - expected_lse).abs().max() <= 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    """Slices of one fused tensor, gaps behind rows, heads outside: no layout is special."""
    g = torch.Generator().manual_seed(3)
    fused = torch.randn(2, 100, 12, 72, generator=g).bfloat16().to(device)[..., :64]
    q, k, v = fused[:, :5, :8], fused[:, :, 8:10], fused[:, :, 10:]
    expected = mg.attention_decode(*(t.contiguous() for t in (q, k, v)))
    assert torch.equal(mg.attention_decode(q, k, v), expected)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(mg.attention_decode(*turned), expected)
    # on CUDA, caches that TMA cannot address
    odd = [torch.nn.functional.pad(t, (1, 2))[..., 1:65] for t in (q, k, v)]
    assert torch.equal(mg.attention_decode(*odd), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", (64, 4))
def test_wrong_pages_do_not_fault(device, page):
    """Pages, rows of a page table and caches that do not exist read as zeros."""
    case = DecodeCase(5, 2, 1, 4, 2, 64, 256, (256, 256), page)
    inputs, options = tensors(case, device)
    for wrong in (-1, 10**6, -2**31, 2**31 - 1):
        table = torch.full_like(options["page_table"], wrong)
        out, lse = mg.attention_decode(*inputs, **options | dict(page_table=table), return_lse=True)
        assert (out == 0).all() and torch.allclose(lse, torch.tensor(math.log(256.0), device=lse.device))
        before = [t.clone() for t in inputs[1:]]
        new = [torch.ones(2, 3, 2, 64, dtype=case.dtype, device=device) for _ in range(2)]
        mg.append_kv(*inputs[1:], *new, cache_seqlens=100, page_table=table)
        assert all(torch.equal(a, b) for a, b in zip(before, inputs[1:]) if not a.isnan().any())
    index = torch.tensor([2, -1], dtype=torch.int32, device=device)
    assert (mg.attention_decode(*inputs, **options | dict(cache_batch_idx=index)) == 0).all()
    before = [t.nan_to_num() for t in inputs[1:]]
    mg.append_kv(*inputs[1:], *new, cache_seqlens=100, page_table=options["page_table"], cache_batch_idx=index)
    assert all(torch.equal(a, b.nan_to_num()) for a, b in zip(before, inputs[1:]))
    case = DecodeCase(5, 2, 1, 4, 2, 64, 256, (256, 256), indexed=True)
    inputs, options = tensors(case, device)
    index = torch.tensor([-3, 99], dtype=torch.int32, device=device)
    assert (mg.attention_decode(*inputs, **options | dict(cache_batch_idx=index)) == 0).all()


# ---- append_kv


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (*HALF, torch.float32))
@pytest.mark.parametrize("page, dim, new, indexed",
                         ((0, 64, 1, True), (0, 5, 3, True), (16, 128, 40, False), (64, 72, 7, False),
                          (1, 64, 3, False), (4, 40, 7, True), (16, 64, 5, True)))
def test_append(device, dtype, page, dim, new, indexed):
    """Exactly the new rows change, and rows behind the cache's end are dropped."""
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("float32 has kernels on the CPU only")
    g = torch.Generator().manual_seed(new)
    lengths = [0, 17, 100, 127, 128, 2**31 - 1, -1]
    batch = len(lengths)
    pages, tables = 128 // page if page else 0, batch + indexed
    shape = (tables * pages + 1, page, 2, dim) if page else (batch + 1, 128, 2, dim)
    caches = [torch.randn(shape, generator=g).to(dtype) for _ in range(2)]
    k, v = (torch.randn(batch, new, 2, dim, generator=g).to(dtype) for _ in range(2))
    table = torch.randperm(shape[0], generator=g)[:tables * pages].view(tables, pages).int() if page else None
    index = torch.randperm(tables if page else shape[0], generator=g)[:batch].int() if indexed else None
    of = range(batch) if index is None else index
    expected = [t.clone() for t in caches]
    for b, row in itertools.product(range(batch), range(new)):
        key = lengths[b] + row
        if 0 <= lengths[b] and key < 128:
            place = (table[of[b], key // page], key % page) if page else (of[b], key)
            for cache, rows in zip(expected, (k, v)):
                cache[place] = rows[b, row]
    to = lambda t: None if t is None else t.to(device)  # noqa: E731
    caches = list(map(to, caches))
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    mg.append_kv(*caches, to(k), to(v), cache_seqlens=seqlens, page_table=to(table), cache_batch_idx=to(index))
    for found, want in zip(caches, expected):
        assert torch.equal(found.cpu(), want)


@pytest.mark.parametrize("device", DEVICES)
def test_generation(device):
    """Token by token through append_kv gives what one causal call gives."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 20, heads, 64, generator=g).bfloat16().to(device) for heads in (4, 2, 2))
    expected = mg.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True).transpose(1, 2)
    caches = [torch.full((2, 32, 2, 64), math.nan, dtype=q.dtype, device=device) for _ in range(2)]
    for i in range(20):
        mg.append_kv(*caches, k[:, i:i + 1], v[:, i:i + 1], cache_seqlens=i)
        out = mg.attention_decode(q[:, i:i + 1], *caches, cache_seqlens=i + 1)
        assert (out - expected[:, i:i + 1]).abs().max() <= 2**-6


@pytest.mark.gpu
@pytest.mark.parametrize("page", (0, 16, 1, 5))
def test_graph(page):
    """Captured once, replayed with other lengths and pages."""
    case = DecodeCase(9, 3, 1, 8, 2, 128, 2000, (1, 1, 1), page)
    q = torch.randn(3, 1, 8, 128, device="cuda").bfloat16()
    table = torch.arange(6000 // page, device="cuda", dtype=torch.int32).view(3, -1) if page else None
    caches = [torch.randn(*((6000 // page, page) if page else (3, 2000)), 2, 128, device="cuda").bfloat16()
              for _ in range(2)]
    new = [torch.randn(3, 1, 2, 128, device="cuda").bfloat16() for _ in range(2)]
    lengths = torch.zeros(3, dtype=torch.int32, device="cuda")

    def step():
        mg.append_kv(*caches, *new, cache_seqlens=lengths, page_table=table)
        return mg.attention_decode(q, *caches, cache_seqlens=lengths + 1, page_table=table)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for n in (0, 5, 1234):
        lengths.copy_(torch.tensor([n, n // 2, 1999]))
        if page:
            table.copy_(table.roll(1, 1).clone())
        graph.replay()
        assert torch.equal(out, step()), case


@pytest.mark.gpu
@pytest.mark.parametrize("batch, context, k_heads, page",
                         ((1, 300, 4, 0), (2, 2000, 4, 64), (8, 8192, 4, 0), (1, 8192, 32, 0), (3, 80, 8, 16)))
def test_layers_in_a_graph(batch, context, k_heads, page):
    """Kernels that begin before the one in front is over: every layer's new keys, values and queries are what the one
    before has just written."""
    lengths = torch.randint(1, context - 1, (batch,), device="cuda").int()
    after = lengths + 1
    layers = []
    for _ in range(6):
        pages = -(-context // page) if page else 0
        shape = (batch * pages, page, k_heads, 128) if page else (batch, context, k_heads, 128)
        table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages) if page else None
        layers.append([*(torch.randn(shape, device="cuda").bfloat16() for _ in range(2)), table])
    first = torch.randn(batch, 1, 32, 128, device="cuda").bfloat16()

    def run(between=lambda: None):
        x = first
        for k, v, table in layers:
            mg.append_kv(k, v, x[:, :, :k_heads], x[:, :, -k_heads:], cache_seqlens=lengths, page_table=table)
            between()
            x = mg.attention_decode(x, k, v, cache_seqlens=after, page_table=table, scale=1.0)
            between()
        return x
    expected = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for i in range(50):
        for k, v, table in layers:
            mg.append_kv(k, v, *(torch.full_like(first[:, :, :k_heads], 3.0 + i) for _ in range(2)),
                         cache_seqlens=lengths, page_table=table)
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
    assert torch.equal(run(), expected)


# ---- arguments


def arguments(**change):
    q, k, v = (torch.randn(2, n, heads, 64).bfloat16() for n, heads in ((1, 4), (100, 2), (100, 2)))
    return dict(q=q, k_cache=k, v_cache=v, cache_seqlens=torch.tensor([5, 6], dtype=torch.int32)) | change


INT = dict(dtype=torch.int32)


@pytest.mark.parametrize("change, error, message", [
    (dict(q=torch.randn(2, 1, 4, 64)), TypeError,
     "attention_decode: k_cache has dtype bfloat16, expected float32 (same as q)"),
    (dict(q=torch.randn(2, 4, 64).bfloat16()), ValueError,
     "attention_decode: q has shape [2, 4, 64], expected 4 dimensions"),
    (dict(q=torch.randn(2, 1, 3, 64).bfloat16()), ValueError,
     "attention_decode: H = 3 (dimension 2 of q), HK = 2 (dimension 2 of k_cache), expected heads of q that are a "
     "multiple of those of k_cache"),
    (dict(q=torch.randn(2, 1, 4, 32).bfloat16()), ValueError,
     "attention_decode: k_cache has size 64 in dimension 3, expected 32 (K of q)"),
    (dict(v_cache=torch.randn(2, 99, 2, 64).bfloat16()), ValueError,
     "attention_decode: v_cache has size 99 in dimension 1, expected 100 (ROWS of k_cache)"),
    (dict(k_cache=torch.randn(1, 100, 2, 64).bfloat16(), v_cache=torch.randn(1, 100, 2, 64).bfloat16()), ValueError,
     "attention_decode: B = 2 (dimension 0 of q), CACHES = 1 (dimension 0 of k_cache), page_table is missing, "
     "cache_batch_idx is missing, expected k_cache with a cache for each sequence"),
    (dict(cache_seqlens=torch.tensor([5, 6])), TypeError,
     "attention_decode: cache_seqlens has dtype int64, expected int32"),
    (dict(cache_seqlens=torch.tensor([5], **INT)), ValueError,
     "attention_decode: cache_seqlens has size 1 in dimension 0, expected 2 (B of q)"),
    (dict(cache_seqlens=101), ValueError,
     "attention_decode: cache_seqlens is 101, expected 0 to 100 (what the cache holds)"),
    (dict(cache_seqlens=-1), ValueError, "attention_decode: cache_seqlens is -1, expected 0 to what the cache holds"),
    (dict(cache_seqlens=2.5), TypeError,
     "attention_decode: cache_seqlens is float, expected an int32 tensor or an int"),
    (dict(page_table=torch.zeros(2, 3, dtype=torch.int64)), TypeError,
     "attention_decode: page_table has dtype int64, expected int32"),
    (dict(page_table=torch.zeros(3, 3, **INT)), ValueError,
     "attention_decode: B = 2 (dimension 0 of q), TABLE = 3 (dimension 0 of page_table), expected a row of "
     "page_table for each sequence"),
    (dict(page_table=torch.zeros(2, 3, **INT), cache_seqlens=301), ValueError,
     "attention_decode: cache_seqlens is 301, expected 0 to 300 (what the cache holds)"),
    (dict(page_table=torch.zeros(2, 3, **INT), v_cache=torch.randn(2, 99, 2, 64).bfloat16()), ValueError,
     "attention_decode: v_cache has size 99 in dimension 1, expected 100 (ROWS of k_cache)"),
    (dict(page_table=torch.zeros(5, 3, **INT), cache_batch_idx=torch.zeros(3, **INT)), ValueError,
     "attention_decode: cache_batch_idx has size 3 in dimension 0, expected 2 (B of q)"),
    (dict(page_table=torch.zeros(5, 3, **INT), cache_batch_idx=torch.zeros(2)), TypeError,
     "attention_decode: cache_batch_idx has dtype float32, expected int32"),
    (dict(page_table=torch.zeros(2, **INT), k_cache=torch.randn(9, 16, 2, 64).bfloat16(),
          v_cache=torch.randn(9, 16, 2, 64).bfloat16()), ValueError,
     "attention_decode: page_table has 1 dimensions, expected 2"),
    (dict(sink=torch.zeros(3)), ValueError,
     "attention_decode: sink has size 3 in dimension 0, expected 4 (H of q)"),
    (dict(sink=torch.zeros(4, dtype=torch.int32)), TypeError,
     "attention_decode: sink is a tensor of dtype int32, expected a float32 tensor"),
    (dict(alibi_slopes=torch.zeros(3, 4)), ValueError,
     "attention_decode: B = 2 (dimension 0 of q), SLOPES = 3 (dimension 0 of alibi_slopes), expected alibi_slopes of "
     "shape [1, H] or [B, H]"),
    (dict(scale=-1.0), ValueError, "attention_decode: scale is -1, expected a positive finite number"),
    (dict(softcap=-1.0), ValueError, "attention_decode: softcap is -1, expected 0 (none) or a positive number"),
    (dict(softcap=math.nan), ValueError, "attention_decode: softcap is nan, expected 0 (none) or a positive number"),
    (dict(window=3), TypeError, "attention_decode: window is 3, expected a pair of integers"),
    (dict(num_splits=129), ValueError, "attention_decode: num_splits is 129, expected 0 (chosen) to 128"),
    (dict(q=torch.randn(2, 1, 4, 64).bfloat16().requires_grad_()), NotImplementedError,
     "attention_decode: an argument requires a gradient"),
    (dict(q=[1.0]), TypeError, "attention_decode: q is list, expected torch.Tensor or numpy.ndarray"),
])
def test_bad_decode(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        mg.attention_decode(**arguments(**change))


@pytest.mark.parametrize("change, error, message", [
    (dict(k=torch.zeros(2, 1, 3, 64).bfloat16()), ValueError,
     "append_kv: k has size 3 in dimension 2, expected 2 (HK of k_cache)"),
    (dict(v=torch.zeros(2, 2, 2, 64).bfloat16()), ValueError,
     "append_kv: v has size 2 in dimension 1, expected 1 (NEW of k)"),
    (dict(k=torch.zeros(2, 1, 2, 64)), TypeError,
     "append_kv: k has dtype float32, expected bfloat16 (same as k_cache)"),
    (dict(cache_seqlens=None), TypeError, "append_kv: cache_seqlens is None, expected an int32 tensor or an int"),
    (dict(cache_seqlens=torch.zeros(2)), TypeError, "append_kv: cache_seqlens has dtype float32, expected int32"),
    (dict(k_cache=torch.zeros(1, 10, 2, 64).bfloat16().expand(2, -1, -1, -1)), BufferError,
     "append_kv: k_cache is written, but"),
])
def test_bad_append(change, error, message):
    caches = [torch.zeros(2, 10, 2, 64).bfloat16() for _ in range(2)]
    new = [torch.zeros(2, 1, 2, 64).bfloat16() for _ in range(2)]
    call = dict(k_cache=caches[0], v_cache=caches[1], k=new[0], v=new[1], cache_seqlens=0) | change
    with pytest.raises(error, match=re.escape(message)):
        mg.append_kv(**call)


def test_raw_pages():
    """C takes the table's rows in order, and decodes from pages of a multiple of 16 keys."""
    pages = [torch.zeros(9, 16, 2, 64).bfloat16() for _ in range(2)]
    q, table, index = torch.zeros(2, 1, 4, 64).bfloat16(), torch.zeros(2, 3, **INT), torch.zeros(2, **INT)
    settings = 0.0, False, -1, -1, 0.0, -1, 1
    with pytest.raises(ValueError, match="attention_decode: page_table is given, cache_batch_idx is given, expected at "
                       "most one of them"):
        _C.attention_decode(q.clone(), None, q, *pages, None, table, index, None, None, None, *settings)
    with pytest.raises(NotImplementedError,
                       match=r"attention_decode: ROWS = 5 \(dimension 1 of k_cache\), .*, expected k_cache with "
                       r"pages of a "
                             "multiple of 16 keys"):
        _C.attention_decode(q.clone(), None, q, *(t[:, :5] for t in pages), None, table, None, None, None, None,
                            *settings)


# ---- other tensors, compilation


@pytest.mark.parametrize("page, indexed", ((16, False), (16, True), (5, False), (5, True)))
def test_numpy(page, indexed):
    inputs, options = tensors(DecodeCase(3, dtype=torch.float32, page=page, slopes=1, indexed=indexed))
    arrays = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    out, lse = mg.attention_decode(*(t.numpy() for t in inputs), **arrays, return_lse=True)
    assert isinstance(out, numpy.ndarray)
    expected, expected_lse = mg.attention_decode(*inputs, **options, return_lse=True)
    assert numpy.array_equal(out, expected.numpy()) and numpy.array_equal(lse, expected_lse.numpy())
    caches = [numpy.zeros((2, 10, 2, 64), numpy.float32) for _ in range(2)]
    mg.append_kv(*caches, *(numpy.ones((2, 1, 2, 64), numpy.float32) for _ in range(2)), cache_seqlens=3)
    assert all(cache[:, 3].all() and cache.sum() == 2 * 2 * 64 for cache in caches)
    caches, table = ([numpy.zeros((8, 3, 2, 64), numpy.float32) for _ in range(2)],
                     numpy.arange(8, dtype=numpy.int32).reshape(4, 2)[::-1].copy())
    index = numpy.array([3, 0], numpy.int32)
    mg.append_kv(*caches, *(numpy.ones((2, 2, 2, 64), numpy.float32) for _ in range(2)), cache_seqlens=2,
                 page_table=table, cache_batch_idx=index)
    assert all(cache[[0, 6], 2].all() and cache[[1, 7], 0].all() and cache.sum() == 2 * 2 * 2 * 64 for cache in caches)


@pytest.mark.parametrize("page, indexed", ((64, False), (4, True)))
def test_compiled(page, indexed):
    inputs, options = tensors(DecodeCase(4, causal=True, page=page, indexed=indexed))
    new = [torch.randn(2, 1, 2, 64).bfloat16() for _ in range(2)]

    def step(q, k, v):
        mg.append_kv(k, v, *new, cache_seqlens=options["cache_seqlens"] - 1, page_table=options["page_table"],
                     cache_batch_idx=options["cache_batch_idx"])
        return mg.attention_decode(q, k, v, **options)
    caches = [t.clone() for t in inputs[1:]]
    expected = step(inputs[0], *caches)
    compiled = [t.clone() for t in inputs[1:]]
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(inputs[0], *compiled), expected)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(caches, compiled))


def test_opcheck():
    inputs, options = tensors(DecodeCase(6, slopes=2, sink=True, lengths=(300, 300)))
    call = (*inputs, options["cache_seqlens"], None, None, options["sink"], options["alibi_slopes"], 0.0, True, -1, -1,
            0.0, -1, 2)
    torch.library.opcheck(torch.ops.margay.attention_decode.default, call)
    new = [torch.randn(2, 1, 2, 64).bfloat16() for _ in range(2)]
    torch.library.opcheck(torch.ops.margay.append_kv.default,
                          (*inputs[1:], *new, options["cache_seqlens"], None, None, 3))


def test_raw_needs_workspace():
    inputs, _ = tensors(DecodeCase(8))
    settings = 0.0, False, -1, -1, 0.0, -1, 3
    size = _C.attention_decode_workspace(*inputs, None, None, None, None, None, *settings)
    out = torch.empty_like(inputs[0])
    with pytest.raises(ValueError, match=f"attention_decode: workspace is missing, expected {size} bytes"):
        _C.attention_decode(out, None, *inputs, None, None, None, None, None, None, *settings)


# ---- explain


@pytest.mark.parametrize("rows, num_splits, paged",
                         ((40, 0, False), (4096, 0, False), (1024, 5, False), (512, 0, True), (1024, 128, True)))
def test_explain(rows, num_splits, paged):
    """The row that computes, the splits that are taken and the estimates they come from, the kernel that adds them up;
    nothing is read or computed."""
    q, k = torch.randn(2, 3, 8, 64), torch.randn(2, rows, 2, 64)
    options = {}
    if paged:
        k, options = k.view(-1, 16, 2, 64), dict(page_table=torch.full((2, rows // 16), -7, **INT))
    text = mg.explain(mg.attention_decode, q, k, k, cache_seqlens=torch.tensor([5, 6], **INT), num_splits=num_splits,
                      window=(5, 0), **options)
    assert ("attention_decode_fp32_d64 takes it" in text and f"planned for the {rows} keys" in text
            and ("page_table [2, " in text) == paged)
    splits = int(re.search(r"(\d+) splits?, " + ("as num_splits says" if num_splits else "chosen"), text).group(1))
    size = _C.attention_decode_workspace(q=q, k_cache=k, **options, left=5, right=0, num_splits=num_splits)
    parts = 2 * 2 * 12 * splits if splits > 1 else 0
    assert size == -(-parts * 64 * 4 // 256) * 256 + -(-parts * 4 // 256) * 256
    assert splits == (num_splits or splits) and ("attention_combine_fp32 takes it" in text) == (splits > 1)
    assert f"2 key heads, 1 block of 64 rows) for the {_C.num_threads()} threads" in text


def test_explain_pages():
    q, k = torch.randn(2, 3, 8, 64), torch.randn(40, 5, 2, 64)
    text = mg.explain(mg.attention_decode, q, k, k, page_table=torch.zeros(2, 20, **INT))
    assert ("k_cache and v_cache are copied first, each sequence's 100 rows in order: pages of 5 keys, and kernels "
            "read multiples of 16" in text)
    assert "attention_decode_fp32_d64 takes it" in text


def test_explain_gpu():
    """As many splits as fill a GPU that is not here: more for few sequences, one for many; the least of the estimates
    is taken."""
    problem = dict(dtype="bfloat16", gpu=True, d=128, heads_q=32, heads_k=8, nq=1, nk=16384, sms=132)
    few, many = (mg.explain("attention_decode", batch=batch, **problem) for batch in (1, 256))
    assert "1 split, chosen" in many and "attention_combine" not in many
    splits = int(re.search(r"(\d+) splits, chosen: 8 tasks each .* for the 264 resident blocks", few).group(1))
    times = {int(n): float(us) for n, us in re.findall(r"(\d+): ([\d.]+) us", few)}
    assert 8 < splits < 40 and times[splits] <= 1.02 * min(times.values()) < times[1]
    assert "attention_combine_bf16 takes it" in few
    # small pages want two blocks beside each other
    paged = [mg.explain("attention_decode", batch=8, page=page, **problem | dict(heads_k=4)) for page in (0, 16)]
    assert [int(re.search(r"(\d+) splits, chosen", text).group(1)) for text in paged] == [4, 8]
    assert "7 splits, as num_splits says" in mg.explain("attention_decode", batch=1, splits=7, **problem)
    with pytest.raises(ValueError, match="explain: splits is 129, expected 0"):
        mg.explain("attention_decode", batch=1, splits=129, **problem)
    with pytest.raises(ValueError, match="attention_decode: k_cache has shape .*, expected 4 dimensions"):
        mg.explain(mg.attention_decode, *(torch.zeros(2, 3, 4) if i else torch.zeros(2, 1, 4, 64) for i in range(3)))
    assert "no kernel" in mg.explain("attention_decode", d=300, batch=1, heads_q=2, heads_k=2, nq=1, nk=5, gpu=True)
