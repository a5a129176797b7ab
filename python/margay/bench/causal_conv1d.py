"""Causal convolution forward and backward, against PyTorch's conv1d and torch.compile (GPU).

torch.compile fuses four shifted products. The package causal-conv1d has to be compiled, and is not here.

Bound by memory: x read and y written forward; x and dy read and dx written backward.
"""
import functools

import torch
import torch.nn.functional as F

import margay
from margay.bench.harness import Case, GpuTimer, Problem, run_family

WIDTH = 4
SHAPES = [(8, 8192, 8192), (8, 2048, 4352), (1, 2048, 4352), (1, 131072, 4352)]     # batch, steps, channels


def by_conv1d(x, weight, bias):
    out = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=WIDTH - 1, groups=x.shape[2])
    return F.silu(out[..., :x.shape[1]]).transpose(1, 2)


def by_shifts(x, weight, bias):
    shifted = (F.pad(x, (0, 0, WIDTH - 1 - k, 0))[:, :x.shape[1]] * weight[:, k] for k in range(WIDTH))
    return F.silu(sum(shifted) + bias)


def build(b, t, c, backward, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, dout = (torch.randn(b, t, c, dtype=dtype, device=device) for _ in range(2))
    weight, bias = torch.randn(c, WIDTH, device=device) / 2, torch.randn(c, device=device)
    ours = functools.partial(margay.causal_conv1d, activation="silu")
    calls = {"margay": (ours, weight, bias), "torch": (by_conv1d, weight.to(dtype), bias.to(dtype))}
    if device == "cuda":
        calls["compiled"] = (torch.compile(by_shifts, dynamic=False), weight.to(dtype), bias.to(dtype))
    runners = {}
    for name, (call, *weights) in calls.items():
        if backward:
            inputs = [tensor.detach().requires_grad_() for tensor in (x, *weights)]
            out = call(*inputs)
            runners[name] = lambda out=out, inputs=inputs: torch.autograd.grad(out, inputs, dout, retain_graph=True)[0]
        else:
            runners[name] = functools.partial(call, x, *weights)
    return Problem(runners, 2e-2, 0, (3 if backward else 2) * x.numel() * x.element_size())


def cases(shapes=SHAPES, device="cuda", dtype=torch.bfloat16):
    for direction in ("forward", "backward"):
        for b, t, c in shapes:
            fields = {"group": direction, "direction": direction, "b": b, "t": t, "c": c}
            yield Case(f"{direction} B={b} T={t} C={c}", fields,
                       functools.partial(build, b, t, c, direction == "backward", device, dtype))


def run(options, arguments):
    return run_family("causal_conv1d", cases(), GpuTimer(), options)
