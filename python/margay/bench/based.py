"""Based forward and backward, against the same by chunks in PyTorch (GPU).

FLOP, of a sequence of T steps and one head with K columns of q and k and V of v: chunks of C = 64 steps with the F =
1 + K + K (K + 1) / 2 features that differ take T (2 C (K + V) + 4 F V) forward, 2.5 times that backward.
"""
import functools

import torch

import margay
from margay.bench.harness import Case, GpuTimer, Problem, gradient, run_family

CHUNK = 64
SHAPES = [(16, 1024, 16), (16, 4096, 16), (16, 16384, 16), (1, 131072, 8)]     # batch, steps, heads


def by_chunks(q, k, v):
    """PyTorch's: all chunks at once, their states by a prefix sum; a column of ones makes the normaliser."""
    (b, t, h, d), dv = q.shape, v.shape[3]
    v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    q, k, v = (x.view(b, t // CHUNK, CHUNK, h, -1).transpose(2, 3) for x in (q, k, v))
    i, j = torch.triu_indices(d + 1, d + 1, device=q.device)
    weight = torch.where(j == 0, 1.0, torch.where(i == 0, d ** -0.5, torch.where(i == j, 0.5 / d, 1.0 / d)))
    one = torch.ones_like(q[..., :1])
    fq, fk = (torch.cat((one, x), -1) for x in (q, k))
    fq, fk = (fq[..., i] * fq[..., j] * weight).to(q.dtype), fk[..., i] * fk[..., j]
    states = (fk.transpose(-1, -2) @ v).float().cumsum(1).to(q.dtype)
    before = torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), 1)
    s = (q @ k.transpose(-1, -2)).float() * d ** -0.5
    out = (fq @ before + (1 + s + s * s / 2).tril().to(q.dtype) @ v).float()
    out = (out[..., :-1] / (out[..., -1:] + 1e-6)).to(q.dtype)
    return out.transpose(2, 3).reshape(b, t, h, dv)


def build(b, t, h, d, dv, backward, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    q, k = (torch.randn(b, t, h, d, dtype=dtype, device=device) for _ in range(2))
    v, dout = (torch.randn(b, t, h, dv, dtype=dtype, device=device) for _ in range(2))
    flops = b * h * t * (2 * CHUNK * (d + dv) + 4 * (1 + d + d * (d + 1) // 2) * dv)
    size = b * h * t * 2 * (2 * d + 2 * dv)
    calls = {"margay": margay.based, "torch": by_chunks}
    if b * t * h > 2 ** 20:                  # PyTorch's features alone would be tens of gigabytes
        del calls["torch"]
    if backward:
        runners = {name: gradient(call, (q, k, v), dout) for name, call in calls.items()}
        return Problem(runners, 3e-2, flops * 2.5, size * 3)
    return Problem({name: functools.partial(call, q, k, v) for name, call in calls.items()}, 2e-2, flops, size)


def cases(dims=((16, 64), (16, 112)), shapes=SHAPES, device="cuda", dtype=torch.bfloat16):
    for direction in ("forward", "backward"):
        for d, dv in dims:
            for b, t, h in shapes:
                fields = {"group": f"{direction} K={d} V={dv}", "direction": direction, "k": d, "v": dv, "b": b, "t": t,
                          "h": h}
                call = functools.partial(build, b, t, h, d, dv, direction == "backward", device, dtype)
                yield Case(f"{direction} K={d} V={dv} B={b} T={t} H={h}", fields, call)


def run(options, arguments):
    return run_family("based", cases(), GpuTimer(), options)
