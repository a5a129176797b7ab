"""Random problems of linear_attention against float64: all results and gradients, odd sizes, every argument."""
import dataclasses
import random

import numpy as np
import pytest
import torch

import margay as mg
from cases import check_error
from conftest import SEED
from linear_forms import by_chunks, recurrence, rounding, through_chunks

CPU, GPU = 200, 500
STEPS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 200, 257, 300)
GATES = {"none": None, "head": lambda x: -0.05 * x.abs(), "step": lambda x: torch.nn.functional.logsigmoid(x + 2),
         "strong": lambda x: -20 * x.abs(), "zero": lambda x: 0 * x,
         "some forget all": lambda x: torch.where(x > 1.5, -torch.inf, -0.01 * x.abs())}


@dataclasses.dataclass(frozen=True)
class Problem:
    seed: int
    batch: int
    steps: int
    heads: int
    dim: int
    dim_v: int
    dtype: torch.dtype
    gates: str
    wanted: bool                # the gradient of g
    state: bool
    last: bool                  # the last state has a gradient
    scale: float | None
    starts: tuple | None
    heads_first: bool

    def __str__(self):
        words = [f"seed{self.seed}", f"b{self.batch}-t{self.steps}-h{self.heads}-d{self.dim}x{self.dim_v}",
                 str(self.dtype)[6:], self.gates.replace(" ", "_") + "_dg" * self.wanted]
        return "-".join(words + ["state"] * self.state + ["last"] * self.last + ["packed"] * (self.starts is not None))


def random_problem(seed, gpu):
    r = random.Random(seed)
    steps = r.choice(STEPS + (700, 1500) * gpu)
    heads = r.choice((1, 2, 3, 5, 35, 70))
    dims = r.choice(((64, 64), (128, 128), (128, 64), (r.randrange(1, 129), r.randrange(1, 129)),
                     (r.randrange(1, 257), r.randrange(1, 300)), (r.randrange(1, 65), r.randrange(1, 65))))
    packed = r.random() < 0.3
    if r.random() < (0.15 if gpu else 0.02):       # a long sequence, cut into segments
        steps, heads, packed = r.choice((4096, 4097) + (9000, 20001) * gpu), r.choice((1, 2) + (8,) * gpu), False
    if not gpu:                                    # seconds
        dims = tuple(min(x, 256 if heads * steps < 700 else 33) for x in dims)
        dims = tuple(min(x, 12 if heads * steps > 6000 else 256) for x in dims)
    starts = (0, *sorted(r.randrange(steps + 1) for _ in range(r.randrange(4))), steps) if packed else None
    return Problem(seed, 1 if packed or heads > 5 else r.choice((1, 1, 2)), steps, heads, *dims,
                   r.choice((torch.bfloat16, torch.float16) + (torch.float32,) * (not gpu)), r.choice([*GATES]),
                   r.random() < 0.6, r.random() < 0.5, r.random() < 0.5, r.choice((None, 0.3, 1.0, 2.5)), starts,
                   r.random() < 0.3)


def check(x, device):
    r = torch.Generator().manual_seed(x.seed)

    def new(*shape, dtype=x.dtype, grad=True):
        t = torch.randn(shape, generator=r).to(device, dtype)
        if x.heads_first and len(shape) == 4:
            t = t.transpose(1, 2).contiguous().transpose(1, 2)
        return t.requires_grad_(grad)
    b, steps, h, d, dv = x.batch, x.steps, x.heads, x.dim, x.dim_v
    rows = b if x.starts is None else len(x.starts) - 1
    q, k, v, dout = new(b, steps, h, d), new(b, steps, h, d), new(b, steps, h, dv), new(b, steps, h, dv, grad=False)
    dlast = new(rows, h, d, dv, dtype=torch.float32, grad=False)
    state = new(rows, h, d, dv, dtype=torch.float32) if x.state else None
    g = GATES[x.gates] and GATES[x.gates](new(*((h,) if x.gates == "head" else (b, steps, h)), dtype=torch.float32))
    g = g if g is None else g.detach().requires_grad_(x.wanted)
    starts = None if x.starts is None else torch.tensor(x.starts, dtype=torch.int32, device=device)
    scale = x.scale or d ** -0.5
    tensors = [t for t in (q, k, v, state, g) if t is not None and t.requires_grad]
    names = ["dq", "dk", "dv"] + ["dinitial_state"] * x.state + ["dg"] * (g is not None and x.wanted)

    def run(results):
        nothing = sum(t[..., :0].sum() for t in tensors)     # results of no steps depend on nothing else
        out, last = (t + nothing.to(t.dtype) for t in results)
        both, given = (out, last), (dout.to(out.dtype), dlast.to(last.dtype))
        if not x.last:
            both, given = both[:1], given[:1]
        grads = torch.autograd.grad(both, tensors, given, allow_unused=True)
        return [out.detach(), last.detach(), *(torch.zeros_like(t) if y is None else y for y, t in zip(grads, tensors))]
    call = lambda: mg.linear_attention(q, k, v, g, scale=x.scale, initial_state=state, cu_seqlens=starts,  # noqa: E731
                                       output_final_state=True)
    ours = run(call())
    assert all(map(torch.equal, ours, run(call()))), "two calls differ"
    wide = [t if t is None else t.double() for t in (q, k, v, state, g)]
    exact = run(by_chunks(*wide[:3], scale, *wide[3:], x.starts))
    plain = run(by_chunks(q, k, v, scale, state, g, x.starts))
    products = max(float((t.detach() * d).abs().sum(3).max()) for t, d in zip((q, k), exact[2:])) if q.numel() else 0.0
    if x.gates == "head":
        # dg adds up all steps. Those of a chunk share the error of its <G, S>, chunks are independent
        products *= (max(1, steps) * min(max(1, steps), 64)) ** 0.5
    through = None
    if "dg" in names:
        through = through_chunks(q, k, v, scale, state, g, x.starts, dout, dlast if x.last else None)
    for name, *three in zip(["out", "final_state", *names], ours, plain, exact):
        relative, absolute = rounding(name, three[0], three[1] - three[2], x.dtype, scale, g, through, products)
        if three[0].numel() < 500:                 # the plain form's largest error is small by chance
            largest = float(three[2].abs().max()) if three[0].numel() else 0.0
            absolute = tuple(a + torch.finfo(x.dtype).eps * largest for a in absolute)
        check_error(name, *three, factor=3 if name[0] == "d" else 2, rounding=(relative, absolute))


@pytest.mark.parametrize("group", range(10))
def test_random(group):
    """With more threads than there are: only then the CPU cuts sequences."""
    threads = torch.get_num_threads()
    torch.set_num_threads(32)
    try:
        for i in range(group * CPU // 10, (group + 1) * CPU // 10):
            problem = random_problem(SEED * 1000 + i, False)
            try:
                check(problem, "cpu")
            except AssertionError as error:
                raise AssertionError(f"{problem}: {error}") from error
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.parametrize("group", range(10))
def test_random_on_the_gpu(group):
    for i in range(group * GPU // 10, (group + 1) * GPU // 10):
        problem = random_problem(SEED * 1000 + i, True)
        try:
            check(problem, "cuda")
        except AssertionError as error:
            raise AssertionError(f"{problem}: {error}") from error


@pytest.mark.parametrize("form", ("none", "head", "step"))
def test_the_exact_form(form):
    """By chunks in float64 is the recurrence."""
    r = np.random.default_rng(SEED)
    make = lambda *size: torch.from_numpy(r.standard_normal(size))  # noqa: E731
    q, k, v, state = make(2, 150, 2, 8), make(2, 150, 2, 8), make(2, 150, 2, 9), make(2, 2, 8, 9)
    g = {"none": None, "head": -make(2).abs(), "step": -make(2, 150, 2).abs()}[form]
    for x, y in zip(by_chunks(q, k, v, 0.3, state, g), recurrence(q, k, v, 0.3, state, g)):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
