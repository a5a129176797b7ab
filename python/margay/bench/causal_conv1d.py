"""Causal convolution, forward and backward, against PyTorch's conv1d, torch.compile, causal-conv1d and FLA (GPU).

torch.compile fuses four shifted products. causal-conv1d and FLA are peers where they can be imported.

Bound by memory: x read and y written forward; x and dout read and dx written backward. `of copy` compares that rate
with one of a copy of as many bytes as x has, timed in turn with the others.
"""
import functools

import torch
import torch.nn.functional as F

import margay
from margay.bench.harness import Case, GpuTimer, Problem, gradient, peer, run_family, step

WIDTH = 4
SHAPES = [(8, 8192, 8192), (8, 2048, 4352), (1, 2048, 4352), (1, 131072, 4352)]     # batch, steps, channels
FLA_CHANNELS = 8192                                          # FLA tunes for each number of channels
HIDE_CYCLES = 2_000_000


def by_conv1d(x, weight, bias):
    out = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=WIDTH - 1, groups=x.shape[2])
    return F.silu(out[..., :x.shape[1]]).transpose(1, 2)


def by_shifts(x, weight, bias):
    shifted = (F.pad(x, (0, 0, WIDTH - 1 - k, 0))[:, :x.shape[1]] * weight[:, k] for k in range(WIDTH))
    return F.silu(sum(shifted) + bias)


def by_package(call):
    """causal-conv1d's, of x in the same memory."""
    return lambda x, weight, bias: call(x.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)


def by_fla(call):
    return lambda x, weight, bias: call(x=x, weight=weight, bias=bias, activation="silu")[0]


def build(b, t, c, direction, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, dout = (torch.randn(b, t, c, dtype=dtype, device=device) for _ in range(2))
    weight, bias = torch.randn(c, WIDTH, device=device) / 2, torch.randn(c, device=device)
    ours, half = functools.partial(margay.causal_conv1d, activation="silu"), (weight.to(dtype), bias.to(dtype))
    calls = {"margay": (ours, weight, bias), "torch": (by_conv1d, *half)}
    if device == "cuda":
        if direction != "training step":
            torch.compiler.reset()                           # it keeps code for few shapes
            calls["compiled"] = (torch.compile(by_shifts, dynamic=False), *half)
        if call := peer("causal_conv1d", "causal_conv1d_fn"):
            calls["causal_conv1d"] = (by_package(call), *half)
        if c == FLA_CHANNELS and (call := peer("fla.modules.causal_conv1d", "causal_conv1d")):
            calls["fla"] = (by_fla(call), *half)
    of_direction = {"forward": functools.partial, "backward": lambda call, *inputs: gradient(call, inputs, dout),
                    "training step": lambda call, *inputs: step(call, inputs, (dout,))}[direction]
    runners = {name: of_direction(call, x, *weights) for name, (call, *weights) in calls.items()}
    tensors = {"forward": 2, "backward": 3, "training step": 5}[direction]
    to = torch.empty_like(x)
    return Problem(runners, 2e-2, 0, tensors * x.nbytes, beside={"copy": (lambda: to.copy_(x), 2 * x.nbytes)},
                   memory=direction != "backward")


def cases(shapes=SHAPES, device="cuda", dtype=torch.bfloat16):
    for direction in ("forward", "backward", "training step"):
        for b, t, c in shapes:
            fields = {"group": direction, "direction": direction, "b": b, "t": t, "c": c,
                      "dtype": str(dtype).removeprefix("torch.")}
            yield Case(f"{direction} B={b} T={t} C={c}", fields,
                       functools.partial(build, b, t, c, direction, device, dtype))


def run(options, arguments):
    return run_family("causal_conv1d", cases(), GpuTimer(HIDE_CYCLES), options)
