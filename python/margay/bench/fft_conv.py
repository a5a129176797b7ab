"""Long convolution, forward, backward and with a filter that is used again, against torch.fft and torch.compile (GPU).

Bound by memory in one pass: u, the gates and out, each once, and the filter. `of copy` compares that rate with one of a
copy of as many bytes as u has, timed in turn with the others.
"""
import functools

import torch

import margay
from margay.bench.harness import Case, GpuTimer, Problem, gradient, run_family, step

# batch, heads, length, causal, gates
SHAPES = [(16, 1024, 4096, False, False), (16, 1024, 4096, True, False), (16, 1024, 4096, True, True),
          (16, 1024, 1024, True, True), (16, 1024, 16384, True, True), (16, 1024, 3000, True, False)]
HIDE_CYCLES = 2_000_000


def by_fft(u, k, pre=None, post=None, causal=True):
    n = 2 * u.shape[2] if causal else u.shape[2]
    x = u.float() if pre is None else u.float() * pre
    y = torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(k, n), n)[..., :u.shape[2]]
    return (y if post is None else y * post).to(u.dtype)


def ours(u, k, pre=None, post=None, causal=True):
    return margay.fft_conv(u, k, causal=causal, pregate=pre, postgate=post)


def build(b, h, n, causal, gates, direction, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    u, pre, post, dout = (torch.randn(b, h, n, dtype=dtype, device=device) for _ in range(4))
    k = torch.randn(h, n, device=device) / n**0.5
    inputs = (u, k, pre, post) if gates else (u, k)
    calls = {"margay": functools.partial(ours, causal=causal), "torch": functools.partial(by_fft, causal=causal)}
    if direction == "filter used again":
        made = margay.fft_conv_filter(u, k, causal=causal)
        calls["margay"] = lambda u, k, *rest: ours(u, made, *rest, causal=causal)
    if device == "cuda" and direction == "forward":
        torch.compiler.reset()
        calls["compiled"] = torch.compile(calls["torch"], dynamic=False)
    of_direction = {"backward": lambda call: gradient(call, inputs, dout),
                    "training step": lambda call: step(call, inputs, (dout,))}.get(
                        direction, lambda call: functools.partial(call, *inputs))
    tensors = {"backward": 3, "training step": 5}.get(direction, 2) + 2 * gates
    to = torch.empty_like(u)
    return Problem({name: of_direction(call) for name, call in calls.items()}, 3e-2, 0, tensors * u.nbytes,
                   beside={"copy": (lambda: to.copy_(u), 2 * u.nbytes)}, memory=direction != "backward")


def cases(shapes=SHAPES, device="cuda", dtype=torch.bfloat16):
    for direction in ("forward", "filter used again", "backward", "training step"):
        for b, h, n, causal, gates in shapes:
            kind = ("causal" if causal else "circular") + " gated" * gates
            fields = {"group": direction, "direction": direction, "b": b, "h": h, "n": n, "kind": kind,
                      "dtype": str(dtype).removeprefix("torch.")}
            yield Case(f"{direction} B={b} H={h} N={n} {kind}", fields,
                       functools.partial(build, b, h, n, causal, gates, direction, device, dtype))


def run(options, arguments):
    return run_family("fft_conv", cases(), GpuTimer(HIDE_CYCLES), options)
