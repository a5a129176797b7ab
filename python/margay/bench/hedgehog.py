"""Hedgehog's hybrid attention forward and backward, against the same in PyTorch, by chunks, compiled (GPU).

FLOP, of a step and one head of D columns with F columns of a map: features 4 D F, the window 4 x 96 D, the linear part
and the state 8 D F forward, 2.5 times that backward.
"""
import functools

import torch

import margay
from margay.bench.harness import Case, GpuTimer, Problem, gradient, run_family

CHUNK, FEATURES = 64, 64
SHAPES = [(16, 4096, 16), (16, 16384, 16), (1, 131072, 1), (1, 131072, 8), (1, 131072, 32)]   # batch, steps, heads


def features(x, weight):
    y = torch.einsum("bthd,hdf->bthf", x, weight).float()
    return torch.cat([torch.softmax(y, -1), torch.softmax(-y, -1)], -1).to(x.dtype)


def by_chunks(q, k, v, q_map, k_map, window_factor, linear_factor):
    """All chunks at once, their states by a prefix sum; blocks of 64 steps."""
    (b, t, h, d), n = q.shape, q.shape[1] // CHUNK
    chunks = lambda x: x.unflatten(1, (n, CHUNK)).transpose(2, 3)  # noqa: E731
    before = lambda x, by=1: torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 0, by, 0))[:, :n]  # noqa: E731
    f, g, q, k, v = (chunks(x) for x in (features(q, q_map), features(k, k_map), q, k, v))
    w, l = window_factor[:, None, None], linear_factor[:, None, None]
    scores = torch.cat([q @ before(k).transpose(-1, -2), q @ k.transpose(-1, -2)], -1).float() * d**-0.5
    i, j = torch.arange(CHUNK, device=q.device)[:, None] + CHUNK, torch.arange(2 * CHUNK, device=q.device)
    there = (torch.arange(n, device=q.device) > 0)[:, None, None, None] | (j >= CHUNK)
    scores = scores.masked_fill((j > i) | ~there, float("-inf"))
    weights = w * torch.exp(scores - scores.amax(-1, True))
    states = before((g.transpose(-1, -2) @ v).float().cumsum(1).to(q.dtype), 2)
    sums = before(g.float().sum(-2, keepdim=True).cumsum(1), 2)
    near = weights.to(q.dtype) @ torch.cat([before(v), v], -2)
    num = near.float() + l * (f @ states).float()
    den = weights.sum(-1, keepdim=True) + l * (f.float() * sums).sum(-1, keepdim=True)
    return (num / den).to(q.dtype).transpose(2, 3).flatten(1, 2)


def inputs(b, t, h, d, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(b, t, h, d, dtype=dtype, device=device) for _ in range(4))
    maps = [(torch.randn(h, d, FEATURES, device=device) / d**0.5).to(dtype) for _ in range(2)]
    factors = [torch.rand(h, device=device) * 0.5 + 0.25 for _ in range(2)]
    return (q, k, v, *maps, *factors), dout


def build(b, t, h, d, backward, device="cuda", dtype=torch.bfloat16):
    given, dout = inputs(b, t, h, d, device, dtype)
    flops = b * h * t * (12 * d * FEATURES + 4 * 96 * d)
    calls = {"margay": margay.hedgehog, "torch": torch.compile(by_chunks)}
    if backward:
        runners = {name: gradient(call, given, dout) for name, call in calls.items()}
    else:
        runners = {name: functools.partial(call, *given) for name, call in calls.items()}
    return Problem(runners, 3e-2, flops * (2.5 if backward else 1), 0)


def cases(dims=(64, 128), shapes=SHAPES, device="cuda", dtype=torch.bfloat16):
    for direction in ("forward", "backward"):
        for d in dims:
            for b, t, h in shapes:
                fields = {"group": f"{direction} D={d}", "direction": direction, "d": d, "b": b, "t": t, "h": h}
                call = functools.partial(build, b, t, h, d, direction == "backward", device, dtype)
                yield Case(f"{direction} D={d} B={b} T={t} H={h}", fields, call)


def run(options, arguments):
    return run_family("hedgehog", cases(), GpuTimer(), options)
