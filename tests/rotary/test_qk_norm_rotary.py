"""qk_norm_rotary, its gradients and its caches against float64: layouts, tables, positions, pages, every face."""

import random

import numpy as np
import pytest
import torch

import margay as mg
from cases import DEVICES, check_error
from refusals import Wrapped, refused, run_python
from rotary_formula import dtypes_of, rows_of, turned

SIZES = ((128, 64), (64, 32), (64, 16), (80, 40), (96, 48), (256, 128), (128, 16), (192, 32), (7, 3), (2, 1), (33, 11),
         (65, 32), (40, 0), (256, 1), (112, 56))
WEIGHTS = ("q_weight", "k_weight")


def normed(x, weight, eps):
    """As models have it: the mean in float32 or better, the weight behind a rounding to x's type."""
    if weight is None:
        return x
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


class Problem:
    def __init__(self, seed, device, dtypes, size=None):
        r, g = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype, self.interleaved, self.eps = r.choice(dtypes), r.random() < 0.5, r.choice((1e-6, 1e-2))
        d, a = size or r.choice(SIZES)
        b, t = r.choice((1, 2, 3)), r.choice((1, 2, 5, 13, 31))
        heads, k_heads = r.choice((1, 2, 3, 7, 16, 33)), r.choice((1, 2, 5, 8))
        self.capacity, rows = r.choice((t, t + 3, 48)), 60
        memory = r.choice(("dense", "gaps", "fused", "heads first"))

        def make(*shape, dtype=self.dtype):
            return torch.randn(*shape, generator=g).to(device, dtype)

        def in_memory(heads):
            if memory == "gaps":
                return make(b, t, heads, d + 24)[..., 8:8 + d]
            return make(b, heads, t, d).transpose(1, 2) if memory == "heads first" else make(b, t, heads, d)
        if memory == "fused":
            self.q, self.k, self.v = make(b, t, heads + 2 * k_heads, d).split((heads, k_heads, k_heads), 2)
        else:
            self.q, self.k, self.v = map(in_memory, (heads, k_heads, k_heads))
        size = r.choice((1.0, 1.0, 1e-3, 300.0))
        self.q, self.k = self.q * size, self.k * size
        kinds = [r.choice((None, torch.float32, self.dtype)) for _ in WEIGHTS]
        self.q_weight, self.k_weight = (None if kind is None else make(d, dtype=kind) for kind in kinds)
        angles = make(*((b,) if r.random() < 0.3 else ()), rows, a, dtype=torch.float32)
        wide = r.choice((torch.float32, self.dtype))
        self.cos, self.sin = angles.cos().to(wide), angles.sin().to(wide)
        self.positions = self.offsets = None
        if r.random() < 0.4:
            shape = (t,) if r.random() < 0.5 else (b, t)
            self.positions = torch.randint(-2, rows + 3, shape, generator=g).to(device)
        if r.random() < 0.3:
            self.offsets = torch.randint(-1, 3, (b,), generator=g).to(device)
        elif r.random() < 0.3:
            self.offsets = r.randint(0, 8)
        self.grads = make(b, t, heads, d), make(b, t, k_heads, d)
        self.make_cache(r, g, device, b, k_heads, d, memory)
        self.label = (f"seed {seed}: {self.dtype} q {list(self.q.shape)} k heads {k_heads} angles {list(angles.shape)} "
                      f"{wide} {memory} x{size} weights {kinds} interleaved={self.interleaved} cache {self.kind} "
                      f"{list(self.caches[0].shape)} {self.seqlens} positions {self.positions is not None} offsets "
                      f"{self.offsets}")

    def make_cache(self, r, g, device, b, heads, d, memory):
        """Lengths beyond the cache, pages and caches that do not exist among them."""
        ints = lambda low, high, *shape: torch.randint(low, high, shape, generator=g)  # noqa: E731
        self.kind = r.choice(("caches", "index", "pages"))
        count, size = b + 2, self.capacity
        self.index = self.table = None
        if self.kind == "index":
            self.index = torch.randperm(count + 1, generator=g)[:b].int().to(device) - 1
        if self.kind == "pages":
            size = r.choice((1, 4, 16))
            each = -(-self.capacity // size)
            count = b * each + 2
            self.table = (torch.randperm(count + 2, generator=g)[:b * each].reshape(b, each).int() - 1).to(device)
        self.caches = [torch.randn(count, size, heads, d + 8, generator=g).to(device, self.dtype)[..., 8:]
                       for _ in "kv"]
        if memory == "heads first":
            self.caches = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in self.caches]
        self.seqlens = (r.randint(0, min(3, self.capacity)) if r.random() < 0.3
                        else ints(-1, self.capacity + 2, b).int().to(device))

    def options(self):
        return dict(interleaved=self.interleaved, positions=self.positions, offsets=self.offsets, eps=self.eps)

    def tensors(self, dtype=None):
        to = lambda x: x if dtype is None or x is None else x.to(dtype)  # noqa: E731
        return [to(x) for x in (self.q, self.k, self.q_weight, self.k_weight)]

    def formula(self, q, k, q_weight, k_weight, dtype=None, length=None):
        at = self.positions
        if length is not None and at is None:
            at = torch.arange(q.shape[1], device=q.device) + (length if isinstance(length, int) else length[:, None])
        cos, sin = (rows_of(x if dtype is None else x.to(dtype), *q.shape[:2], at, self.offsets)
                    for x in (self.cos, self.sin))
        return [turned(normed(x, w, self.eps), cos, sin, self.interleaved) for x, w in ((q, q_weight), (k, k_weight))]

    def differentiated(self, call, dtype=None):
        given = [None if x is None else x.detach().requires_grad_() for x in self.tensors(dtype)]
        out = call(*given)
        leaves = [x for x in given if x is not None]
        return [*(x.detach() for x in out), *torch.autograd.grad(out, leaves, [g.to(x.dtype) for g, x in
                                                                               zip(self.grads, out)])]

    def check(self):
        print(self.label)
        ours = self.differentiated(lambda *x: mg.qk_norm_rotary(*x, self.cos, self.sin, **self.options()))
        plain = self.differentiated(self.formula)
        exact = self.differentiated(lambda *x: self.formula(*x, dtype=torch.float64), torch.float64)
        for i, (found, p, e) in enumerate(zip(ours, plain, exact)):
            tiny = 16 * torch.finfo(torch.float32).eps * (1 + float(e.abs().max()) if e.numel() else 0)
            shape = (-1, e.shape[-1])
            check_error(f"{self.label}: {i}", found.reshape(shape), p.reshape(shape), e.reshape(shape),
                        2 if i < 2 else 3, (4e-6, tiny))
        with torch.no_grad():
            alone = mg.qk_norm_rotary(*self.tensors(), self.cos, self.sin, **self.options())
            assert all(map(torch.equal, alone, ours))

    def check_cache(self):
        print(self.label)
        before, caches = [x.clone() for x in self.caches], self.caches
        q = mg.qk_norm_rotary(*self.tensors(), self.cos, self.sin, **self.options(), v=self.v, k_cache=caches[0],
                              v_cache=caches[1], cache_seqlens=self.seqlens, page_table=self.table,
                              cache_batch_idx=self.index)
        plain = self.formula(*self.tensors(), length=self.seqlens)
        exact = self.formula(*self.tensors(torch.float64), dtype=torch.float64, length=self.seqlens)
        tiny = 16 * torch.finfo(torch.float32).eps * (1 + float(exact[0].abs().max()))
        check_error(f"{self.label}: q", q, plain[0], exact[0], 2, (4e-6, tiny))
        # k as the op without a cache has it, at the same places
        at = self.positions
        if at is None:
            t = torch.arange(self.q.shape[1], device=self.q.device)
            at = t + (self.seqlens if isinstance(self.seqlens, int) else self.seqlens[:, None])
        k = mg.qk_norm_rotary(*self.tensors(), self.cos, self.sin, **self.options() | dict(positions=at))[1]
        mg.append_kv(*before, k, self.v, cache_seqlens=self.seqlens, page_table=self.table, cache_batch_idx=self.index)
        assert torch.equal(caches[0], before[0]) and torch.equal(caches[1], before[1]), self.label


@pytest.mark.parametrize("device", DEVICES)
def test_random_problems(device):
    first = random.randrange(1 << 30)
    for seed in range(first, first + (500 if device == "cuda" else 200)):
        Problem(seed, device, dtypes_of(device)).check()


@pytest.mark.parametrize("device", DEVICES)
def test_bad_21_random_caches(device):
    first = random.randrange(1 << 30)
    for seed in range(first, first + (500 if device == "cuda" else 200)):
        Problem(seed, device, dtypes_of(device)).check_cache()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_sizes(device, size):
    for seed in range(4):
        problem = Problem(seed, device, dtypes_of(device), size)
        problem.check()
        problem.check_cache()


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_many_rows(device):
    """More tasks than blocks. They repeat bit by bit; those of rows do not depend on which others are wanted, the sums
    only in their order."""
    g = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=g).to(device, torch.bfloat16)  # noqa: E731
    for t, heads, k_heads, d, angles in ((900, 3, 1, 64, 32), (301, 2, 5, 40, 12), (1500, 1, 0, 128, 64)):
        q, k, weights = make(2, t, heads, d), make(2, t, k_heads, d), (make(d), make(d).float())
        douts, table = (make(2, t, heads, d), make(2, t, k_heads, d)), torch.randn(t, angles, generator=g).to(device)
        cos, sin = table.cos(), table.sin()

        def grads(*wanted, tensors=(q, k, *weights), f=mg.qk_norm_rotary):  # noqa: B008
            leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
            out = f(*leaves, cos, sin)
            return torch.autograd.grad(out, [leaves[i] for i in wanted], [d.to(o.dtype) for d, o in zip(douts, out)])

        def formula(q, k, q_weight, k_weight, cos, sin):
            of = [rows_of(x.to(q.dtype), *q.shape[:2], None, None) for x in (cos, sin)]
            return [turned(normed(x, w, 1e-6), *of, False) for x, w in ((q, q_weight), (k, k_weight))]
        ours = grads(0, 1, 2, 3)
        exact = grads(0, 1, 2, 3, tensors=[x.double() for x in (q, k, *weights)], f=formula)
        # rounded once, behind sums in float32 of numbers of about 1
        limits = [2.0**-8 * right.abs() + 2.0**-18 * (1 + right.abs().max() if right.numel() else 0) for right in exact]
        for wanted in ((0, 1, 2, 3), (0,), (1, 3), (2,), (3,), (0, 2)):
            found = grads(*wanted)
            assert all(map(torch.equal, found, grads(*wanted)))
            for i, mine in zip(wanted, found):
                assert mine.shape == exact[i].shape and ((mine.double() - exact[i]).abs() <= limits[i]).all()
                assert i > 1 or torch.equal(mine, ours[i])


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_zeros_and_of_large_rows(device):
    """Rows without a root mean square have a gradient of 0 where eps is 0; rows that there are not add nothing."""
    q = torch.zeros(1, 3, 3, 64, device=device, dtype=torch.bfloat16)
    q[0, 1] = 1e18
    q.requires_grad_()
    weight, cos = torch.ones(64, device=device, requires_grad=True), torch.ones(3, 32, device=device)
    out = mg.qk_norm_rotary(q, None, weight, None, cos, 0 * cos, eps=0.0)
    dq, dweight = torch.autograd.grad(out[0, 1].float().sum(), (q, weight))
    assert not dq[0, [0, 2]].any() and (dq[0, 1].abs() < 2.0**-60).all()     # of constant rows nothing remains
    assert torch.allclose(dweight, torch.full_like(dweight, 3.0), rtol=2.0**-7)


@pytest.mark.parametrize("device", DEVICES)
def test_without_weights_it_is_rotary(device):
    """Bit by bit, with one tensor and with both."""
    q, k = (torch.randn(2, 9, h, 80, device=device).bfloat16() for h in (12, 5))
    cos, sin = torch.randn(2, 20, 40, device=device)
    both = mg.qk_norm_rotary(q, k, None, None, cos, sin, offsets=4)
    assert all(map(torch.equal, both, mg.rotary(q, k, cos, sin, offsets=4)))
    assert torch.equal(both[0], mg.qk_norm_rotary(q, None, None, None, cos, sin, offsets=4))


@pytest.mark.parametrize("device", DEVICES)
def test_bad_20_what_is_not_finite_stays_in_its_row(device):
    q, weight = torch.ones(1, 4, 3, 40, device=device).bfloat16(), torch.ones(40, device=device)
    q[0, 2, 1, 5], q[0, 1, 2, 36] = float("nan"), float("inf")
    cos = torch.ones(4, 16, device=device)
    out = mg.qk_norm_rotary(q, q, weight, None, cos, cos)
    assert sorted({tuple(i[:3]) for i in out[0].isnan().nonzero().tolist()}) == [(0, 1, 2), (0, 2, 1)]
    assert out[0][0, 2, 1].isnan().all() and out[0][0, 1, 2].isnan().sum() == 1      # inf / inf; the others are 0
    assert sorted(map(tuple, out[1].isnan().nonzero().tolist())) == [(0, 2, 1, 5), (0, 2, 1, 21)]
    zero = mg.qk_norm_rotary(q * 0, None, weight, None, cos, cos)
    assert zero[0, 0, 0].isfinite().all() and not zero[0, 0].any()


@pytest.mark.parametrize("device", DEVICES)
def test_bad_10_empty(device):
    cos, weight = torch.ones(7, 4, device=device), torch.ones(8, device=device, requires_grad=True)
    for shape in ((0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)):
        q = torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        out = mg.qk_norm_rotary(q, q, weight, weight, cos, cos)
        assert out[0].shape == out[1].shape == shape
        grads = torch.autograd.grad(out[0].sum() + out[1].sum(), (q, weight))
        assert grads[0].shape == shape and not grads[1].any()
    caches = torch.zeros(2, 3, 9, 2, 8, device=device, dtype=torch.bfloat16)
    q = torch.ones(3, 0, 2, 8, device=device, dtype=torch.bfloat16)
    options = dict(v=q, k_cache=caches[0], v_cache=caches[1], cache_seqlens=1)
    with torch.no_grad():
        assert mg.qk_norm_rotary(q, q, weight, None, cos, cos, **options).shape == q.shape and not caches.any()


@pytest.mark.parametrize("device", DEVICES)
def test_bad_06_07_08_memory(device):
    """Columns of all strides, expanded samples, and addresses that are no multiples of 16 bytes. Of rotary too."""
    q = torch.randn(3, 7, 4, 33, device=device).bfloat16()[..., 1:]
    cos, weight = torch.randn(7, 16, device=device), torch.randn(65, device=device)[1::2]
    for call in (lambda q, w, c: mg.qk_norm_rotary(q, q, w, w, c, c)[0], lambda q, w, c: mg.rotary(q, None, c, c)):
        expected = call(q.contiguous(), weight.contiguous(), cos)
        assert torch.equal(call(q, weight, cos.t().contiguous().t()), expected)
        assert torch.equal(call(q.mT.contiguous().mT, weight, cos), expected)
        assert torch.equal(call(q[:1].expand(3, -1, -1, -1), weight, cos)[2], expected[0])


@pytest.mark.gpu
def test_bad_31_graph_capture():
    q = torch.randn(2, 5, 6, 64, device="cuda").bfloat16()
    cos, weight = torch.randn(40, 32, device="cuda"), torch.randn(64, device="cuda")
    caches, other = torch.zeros(2, 2, 2, 20, 2, 64, device="cuda").bfloat16()
    seqlens = torch.tensor([1, 3], device="cuda", dtype=torch.int32)

    def step(caches):
        return mg.qk_norm_rotary(mg.rotary(q, None, cos, cos), q[:, :, :2], weight, None, cos, cos, v=q[:, :, 2:4],
                                 k_cache=caches[0], v_cache=caches[1], cache_seqlens=seqlens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(caches)
    seqlens += 2
    graph.replay()
    assert torch.equal(captured, step(other)) and torch.equal(caches, other) and caches[:, 1, 5:].any()


def test_numpy():
    r = np.random.default_rng(0)
    q, k, angles = (r.standard_normal(s).astype(np.float32) for s in ((2, 7, 4, 24), (2, 7, 1, 24), (9, 10)))
    weight, (cos, sin) = r.standard_normal(24).astype(np.float32), (np.cos(angles), np.sin(angles))
    out = mg.qk_norm_rotary(q, k, weight, None, cos, sin, offsets=1)
    of_torch = mg.qk_norm_rotary(*map(torch.tensor, (q, k, weight)), None, *map(torch.tensor, (cos, sin)), offsets=1)
    assert all(isinstance(a, np.ndarray) and np.array_equal(a, b.numpy()) for a, b in zip(out, of_torch))
    caches = np.zeros((2, 2, 9, 1, 24), np.float32)
    found = mg.qk_norm_rotary(q, k, weight, None, cos, sin, v=k, k_cache=caches[0], v_cache=caches[1], cache_seqlens=1)
    assert np.array_equal(found, out[0]) and np.array_equal(caches[0][:, 1:8], out[1])
    assert np.array_equal(caches[1][:, 1:8], k) and not caches[:, :, [0, 8]].any()


def test_compiled_and_transformed():
    q, k, weight, angles = torch.randn(2, 6, 3, 16), torch.randn(2, 6, 1, 16), torch.randn(16), torch.randn(9, 8)
    cos, sin = angles.cos(), angles.sin()
    call = lambda q, k, w: mg.qk_norm_rotary(q, k, w, w, cos, sin)  # noqa: E731
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(q, k, weight), call(q, k, weight)))
    leaves = q.clone().requires_grad_(), weight.clone().requires_grad_()
    grads = [torch.autograd.grad(f(leaves[0], k, leaves[1])[0].square().sum(), leaves) for f in (call, compiled)]
    for mine, theirs in zip(*grads):           # a compiler may take sums in another order
        torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-5 * float(mine.abs().max()))

    def kept(q, k, *caches):
        return mg.qk_norm_rotary(q, k, weight, weight, cos, sin, v=k, k_cache=caches[0], v_cache=caches[1],
                                 cache_seqlens=torch.tensor([0, 2], dtype=torch.int32)) + 1
    first, second = torch.zeros(2, 2, 8, 1, 16), torch.zeros(2, 2, 8, 1, 16)
    found = torch.compile(kept, backend="aot_eager", fullgraph=True)(q, k, *first)
    assert torch.equal(found, kept(q, k, *second)) and torch.equal(first, second) and first.any()
    many = torch.vmap(lambda q: mg.qk_norm_rotary(q, None, weight, None, cos, sin))(torch.stack([q, q * 2]))
    assert torch.equal(many[1], mg.qk_norm_rotary(q * 2, None, weight, None, cos, sin))
    found = mg.qk_norm_rotary(q.as_subclass(Wrapped), k, weight, weight, cos, sin)
    assert torch.equal(found[0].as_subclass(torch.Tensor), call(q, k, weight)[0])
    torch.library.opcheck(torch.ops.margay.qk_norm_rotary.default,
                          (q.requires_grad_(), k, weight, None, cos[None], sin[None], None, None),
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    torch.library.opcheck(torch.ops.margay.qk_norm_rotary_append.default,
                          (q.detach(), k, k, *first, weight, None, cos[None], sin[None], *(None,) * 5, 1, 0, False,
                           1e-6),
                          test_utils=("test_schema", "test_faketensor"))


def test_bad_01_02_03_09_15_16_39_refusals():
    q, cos, weight = torch.zeros(2, 6, 3, 16, dtype=torch.bfloat16), torch.zeros(9, 8), torch.ones(16)
    caches = [torch.zeros(2, 9, 3, 16, dtype=torch.bfloat16) for _ in "kv"]
    ints = lambda *n: torch.zeros(*n, dtype=torch.int32)  # noqa: E731
    call = lambda q=q, k=q, w=weight, c=cos, s=cos, **o: mg.qk_norm_rotary(q, k, w, w, c, s, **o)  # noqa: E731
    append = lambda k=q, w=weight, **o: mg.qk_norm_rotary(  # noqa: E731
        q, k, w, w, cos, cos, **dict(v=q, k_cache=caches[0], v_cache=caches[1], cache_seqlens=0) | o)
    for broken, error, words in (
            (lambda: call(q.double()), TypeError, "qk_norm_rotary: q has dtype float64, expected bfloat16"),
            (lambda: call(k=q.half()), TypeError, "qk_norm_rotary: k has dtype float16, expected bfloat16 (same as q)"),
            (lambda: call(w=weight.half()), TypeError,
             "qk_norm_rotary: q_weight has dtype float16, expected float32 or bfloat16 (as q)"),
            (lambda: call(w=weight[:8]), ValueError,
             "qk_norm_rotary: q_weight has size 8 in dimension 0, expected 16 (K of q)"),
            (lambda: call(w=weight[None]), ValueError, "qk_norm_rotary: q_weight has 2 dimensions, expected 1"),
            (lambda: call(w=weight.to("meta")), ValueError, "q_weight is on meta, expected cpu"),
            (lambda: call(s=cos.bfloat16()), TypeError, "sin has dtype bfloat16, expected float32 (same as cos)"),
            (lambda: call(q[0]), ValueError, "qk_norm_rotary: q has shape [6, 3, 16], expected 4 dimensions"),
            (lambda: call(c=cos[:5], s=cos[:5]), ValueError, "expected a row of cos for each step"),
            (lambda: call(eps=-1e-6), ValueError, "qk_norm_rotary: eps is -1e-06, expected 0 or more"),
            (lambda: call(eps=float("nan")), ValueError, "qk_norm_rotary: eps is nan, expected 0 or more"),
            (lambda: call(eps="a"), TypeError, "qk_norm_rotary: eps is 'a'"),
            (lambda: call(v=q), TypeError, "qk_norm_rotary: k_cache is None, expected a tensor"),
            (lambda: call(page_table=ints(2, 1)), TypeError, "qk_norm_rotary: v is None, expected a tensor"),
            (lambda: append(k=None), TypeError, "qk_norm_rotary: k is None, expected a tensor"),
            (lambda: append(cache_seqlens=None), TypeError, "qk_norm_rotary: cache_seqlens is None"),
            (lambda: append(cache_seqlens=-1), ValueError, "qk_norm_rotary: cache_seqlens is -1, expected 0 to"),
            (lambda: append(cache_seqlens=10), ValueError,
             "cache_seqlens is 10, expected 0 to what the cache holds"),
            (lambda: append(cache_seqlens=4), ValueError, "expected a row of cos for each step"),
            (lambda: append(cache_seqlens=ints(3)), ValueError,
             "qk_norm_rotary: cache_seqlens has size 3 in dimension 0, expected 2 (BQ of q)"),
            (lambda: append(v=q[..., :8]), ValueError, "qk_norm_rotary: v has size 8 in dimension 3, expected 16"),
            (lambda: append(page_table=ints(3, 1)), ValueError, "expected a row of page_table for each sequence"),
            (lambda: append(page_table=ints(2, 1), cache_batch_idx=ints(2)), ValueError,
             "expected at most one of them"),
            (lambda: append(k_cache=caches[0][:1], v_cache=caches[1][:1]), ValueError,
             "expected k_cache with a cache for each sequence"),
            (lambda: append(k_cache=caches[0].half()), TypeError, "qk_norm_rotary: k_cache has dtype float16"),
            (lambda: append(k_cache=caches[0][:, :1].expand(2, 9, 3, 16)), BufferError, "qk_norm_rotary: k_cache"),
            (lambda: append(k_cache=q, v_cache=q.clone()), BufferError,
             "qk_norm_rotary: k_cache is written"),
            (lambda: append(w=weight.clone().requires_grad_()), NotImplementedError,
             "qk_norm_rotary: an argument requires a gradient"),
            (lambda: call(torch.zeros(1, 6, 1, 258), None, None), NotImplementedError,
             "expected a head dimension of at most 256"),
            (lambda: mg.qk_norm_rotary([1], None, None, None, cos, cos), TypeError,
             "qk_norm_rotary: q is list, expected torch.Tensor")):
        refused(error, words, broken)
    assert not any(cache.any() for cache in caches)


def test_bad_17_memory_that_may_not_be_written():
    result = run_python("""
import numpy, margay
q, cos = numpy.ones((1, 2, 1, 8), numpy.float32), numpy.ones((2, 4), numpy.float32)
cache = numpy.zeros((1, 2, 1, 8), numpy.float32)
cache.flags.writeable = False
try: margay.qk_norm_rotary(q, q, None, None, cos, cos, v=q, k_cache=cache, v_cache=q.copy(), cache_seqlens=0)
except BufferError as error: print(error)
assert not cache.any()
""")
    assert result.stdout.startswith("qk_norm_rotary: k_cache is written, but its memory is read-only"), result.stderr


def test_bad_35_a_write_into_a_cache_counts():
    q, cos = torch.randn(1, 2, 1, 8), torch.randn(2, 4)
    cache = torch.randn(1, 2, 1, 8, requires_grad=True) * 1
    squares = cache.square()
    with torch.no_grad():
        mg.qk_norm_rotary(q, q, None, None, cos, cos, v=q, k_cache=cache, v_cache=q.clone(), cache_seqlens=0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()
