"""Rotary embedding of q and k, in both directions, against PyTorch and torch.compile (GPU).

Bound by memory: q and k are read and written once. `of copy` compares that rate with one of a copy of as many bytes,
timed in turn with the others. Layouts: `bthd` in the order of dimensions, `bhtd` as transformers has them.
"""
import functools

import torch

import margay
from margay.bench.harness import Case, GpuTimer, Problem, gradient, run_family

SHAPES = [(8, 4096, 32, 32, 128), (8, 4096, 32, 8, 128), (8, 4096, 64, 8, 64), (1, 32768, 32, 8, 128),
          (64, 1, 32, 8, 128)]       # batch, steps, heads of q and of k, head dim


def by_formula(x, cos, sin):
    """With cosines and sines in x's type, as transformers has it."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def by_torch(cos, sin, q, k):
    return by_formula(q, cos, sin), by_formula(k, cos, sin)


def build(b, t, h, hk, d, layout, direction, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)

    def make(heads):
        if layout == "bhtd":
            return torch.randn(b, heads, t, d, device=device, dtype=dtype).transpose(1, 2)
        return torch.randn(b, t, heads, d, device=device, dtype=dtype)
    q, k, dq, dk = make(h), make(hk), make(h), make(hk)
    angles = torch.arange(t, device=device)[:, None] * 10000 ** -(torch.arange(d // 2, device=device) / (d // 2))
    cos, sin = angles.cos(), angles.sin()
    wide = [torch.cat((x, x), -1)[:, None].to(dtype) for x in (cos, sin)]
    calls = {"margay": lambda q, k: margay.rotary(q, k, cos, sin), "torch": functools.partial(by_torch, *wide)}
    if device == "cuda":
        torch.compiler.reset()                               # it keeps code for few shapes
        calls["compiled"] = functools.partial(torch.compile(by_torch, dynamic=False), *wide)
    of_direction = {"forward": functools.partial, "backward": lambda call, *qk: gradient(call, qk, (dq, dk))}[direction]
    runners = {name: of_direction(call, q, k) for name, call in calls.items()}
    if direction == "forward":
        runners["margay"] = functools.partial(margay.rotary, q, k, cos, sin)
    size = q.nbytes + k.nbytes
    x, y = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return Problem(runners, 2e-2, 0, 2 * size, beside={"copy": (lambda: y.copy_(x), 2 * size)})


def cases(shapes=SHAPES, device="cuda", dtype=torch.bfloat16):
    for direction in ("forward", "backward"):
        for b, t, h, hk, d in shapes:
            for layout in ("bthd", "bhtd") if t > 1 and direction == "forward" else ("bthd",):
                fields = {"group": direction, "direction": direction, "b": b, "t": t, "h": h, "hk": hk, "d": d,
                          "layout": layout, "dtype": str(dtype).removeprefix("torch.")}
                yield Case(f"{direction} B={b} T={t} H={h} HK={hk} D={d} {layout}", fields,
                           functools.partial(build, b, t, h, hk, d, layout, direction, device, dtype))


def run(options, arguments):
    return run_family("rotary", cases(), GpuTimer(), options)
