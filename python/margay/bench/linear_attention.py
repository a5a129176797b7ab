"""Causal linear attention forward and backward, against PyTorch's products in chunks (GPU).

FLOP, of a sequence of T steps and one head: chunks of Q = 64 steps with K and V columns take T (2 Q K + 2 Q V + 4 K V)
forward, 2.5 times that backward.
"""
import functools

import torch

import margay
from margay.bench.harness import Case, GpuTimer, Problem, gradient, run_family

CHUNK = 64
SHAPES = [(8, 2048, 16), (4, 4096, 16), (1, 16384, 16)]     # batch, steps, heads


def by_chunks(q, k, v):
    """PyTorch's: all chunks at once, their states by a prefix sum."""
    (b, t, h, d), dv = q.shape, v.shape[3]
    q, k, v = (x.view(b, t // CHUNK, CHUNK, h, -1).transpose(2, 3) for x in (q, k, v))
    states = (k.transpose(-1, -2) @ v).float().cumsum(1).to(q.dtype)
    before = torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), 1)
    out = q @ before + (q @ k.transpose(-1, -2)).tril() @ v
    return (d ** -0.5 * out).transpose(2, 3).reshape(b, t, h, dv)


def build(b, t, h, d, backward, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(b, t, h, d, dtype=dtype, device=device) for _ in range(4))
    k = k / d ** 0.5
    flops = b * h * t * (4 * CHUNK * d + 4 * d * d)
    calls = {"margay": margay.linear_attention, "torch": by_chunks}
    if backward:
        runners = {name: gradient(call, (q, k, v), dout) for name, call in calls.items()}
    else:
        runners = {name: functools.partial(call, q, k, v) for name, call in calls.items()}
    return Problem(runners, 2e-2, flops * (2.5 if backward else 1), 0)


def cases(dims=(64, 128), shapes=SHAPES, device="cuda", dtype=torch.bfloat16):
    for direction in ("forward", "backward"):
        for d in dims:
            for b, t, h in shapes:
                fields = {"group": f"{direction} D={d}", "direction": direction, "d": d, "b": b, "t": t, "h": h}
                call = functools.partial(build, b, t, h, d, direction == "backward", device, dtype)
                yield Case(f"{direction} D={d} B={b} T={t} H={h}", fields, call)


def run(options, arguments):
    return run_family("linear_attention", cases(), GpuTimer(), options)
